"""The parts of an elastic State that are objects of PyTorch: models, optimizers, schedulers, scalers, samplers, and the
random numbers. Importing ronde.torch registers them.

A forward pass changes buffers and draws random numbers, and a backward pass adds to gradients. All of that returns to
the end of the last finished step when a rank is lost. Parameters and the state of optimizers change only when an
optimizer steps, so only commit() copies them.
"""

from __future__ import annotations

import _random
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.cuda.amp import GradScaler  # where it is in every version, for the CPU, too
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.world import current_world
from ronde.elastic.state import (
    State,
    StatefulPart,
    StatePart,
    register_check,
    register_common_part,
    register_part,
)
from ronde.torch.broadcast_state import (
    Skeleton,
    fill_skeleton,
    make_skeleton,
    set_state,
    sync_optimizer_state,
    sync_parameters,
)
from ronde.torch.optimizer import Distributed, OptimizerReducers, find_open_reducers
from ronde.torch.samplers import ElasticBatchSampler
from ronde.training.sample_sharding import SamplePosition

# end_step() is called in every step, so it is written without loops and calls in Python where that is possible.

_BufferPlace: TypeAlias = tuple[dict[str, Any], str]
"""Where a module keeps a buffer: the dictionary and the name. A forward pass may put another tensor there."""


class ModulePart(StatePart):
    """A model: its parameters and buffers. Parameters that an optimizer of the State has change when it steps, which
    cannot be undone. Others, such as those of a momentum encoder or of an average of weights, change in any other way,
    so they are kept at a step end."""

    def __init__(self, module: nn.Module, state: State) -> None:
        self._module = module
        self._state = state
        self._unoptimized: _UnoptimizedParameters | None = None
        """Found out at the first step end, when the State is complete."""
        self._kept_buffers = _copy_buffers(module)
        self._keep_new_buffers()

    def commit(self) -> _ModuleCopy:
        parameters: list[Tensor] = list(self._module.parameters())
        shared = {} if self._unoptimized is None else self._unoptimized.share_copies()
        values = [shared[id(each)] if id(each) in shared else _copy(each) for each in parameters]
        return _ModuleCopy(parameters, values, _copy_buffers(self._module))

    def restore(self, committed: _ModuleCopy) -> None:
        _copy_tensors(committed.parameters, committed.values)
        _put_back_buffers(committed.buffers)

    def end_step(self) -> None:
        if self._unoptimized is None:
            self._unoptimized = _UnoptimizedParameters(self._find_unoptimized())
        elif self._unoptimized.parameters:
            self._unoptimized.keep()
        num_places = sum(map(len, self._kept_buffers.homes))
        if num_places == self._num_places and all(
            map(is_, map(dict.get, self._buffer_homes, self._buffer_names), self._buffers)
        ):
            if self._buffer_tensors:
                _copy_tensors(self._kept_buffer_tensors, self._buffer_tensors)
        else:
            self._kept_buffers = _copy_buffers(self._module)
            self._keep_new_buffers()

    def undo_step(self) -> None:
        if self._unoptimized is not None:
            self._unoptimized.undo()
        _put_back_buffers(self._kept_buffers)

    def sync(self, givers: Sequence[int]) -> None:
        described = objects.broadcast(_describe_buffers(self._module), givers[0])
        if current_world().rank not in givers:
            _fit_buffers(self._module, described)
        sync_parameters(self._module, givers, current_world().group)
        if self._unoptimized is not None:
            self._unoptimized.expect_change()

    def _find_unoptimized(self) -> list[Tensor]:
        optimizers = (each for each in self._state._objects.values() if isinstance(each, Optimizer))
        optimized = {
            id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]
        }
        # Tensors of inference mode, and classes of tensors such as quantized ones, are not written to.
        return [
            each
            for each in self._module.parameters()
            if id(each) not in optimized and type(each.data) is Tensor and not each.is_inference()
        ]

    def _keep_new_buffers(self) -> None:
        """Prepare what end_step() compares and copies, from _kept_buffers."""
        places, copies = self._kept_buffers.places, self._kept_buffers.copies
        self._num_places = sum(map(len, self._kept_buffers.homes))
        self._buffer_homes: Sequence[dict[str, Any]] = [home for home, _ in places]
        self._buffer_names: Sequence[str] = [name for _, name in places]
        # What was there at the last step end. Kept alive, so that no other tensor gets the identity of one of them.
        self._buffers: list[Tensor | None] = [home[name] for home, name in places]
        self._buffer_tensors = [each for each in self._buffers if each is not None]
        self._kept_buffer_tensors = [each for each in copies if each is not None]


class _UnoptimizedParameters:
    """The parameters of a model that no optimizer of the State has, with copies of the last step end. They may be
    frozen, and large, so they are copied again only if they have changed.

    A change is seen by the version that PyTorch counts, by another address of the numbers, as `p.data = …` gives it, or
    by the first number of a parameter, for `p.data.mul_(…)`, which neither of them tells.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self._copies = list(map(_copy, parameters))
        self._is_shared = False  # with a commit, which must not change
        self._versions: list[int] = []
        self._watch()

    def keep(self) -> None:
        """Copy the parameters if they have changed since they were copied."""
        if not self._have_changed():
            return
        if self._is_shared:
            self._copies, self._is_shared = list(map(_copy, self.parameters)), False
        else:
            _copy_tensors(self._copies, self.parameters)
        self._watch()

    def undo(self) -> None:
        _copy_tensors(self.parameters, self._copies)
        self._watch()

    def share_copies(self) -> dict[int, Tensor]:
        """The copies by the identity of parameters, for a commit; none if the parameters have changed."""
        if self._have_changed():
            return {}
        self._is_shared = True
        return {id(parameter): copied for parameter, copied in zip(self.parameters, self._copies, strict=True)}

    def expect_change(self) -> None:
        """Others have written to the memory of the parameters."""
        self._versions = []

    def _watch(self) -> None:
        # Kept alive, so that no other memory gets the address.
        self._memory = [each.detach() for each in self.parameters]
        self._versions = list(map(_get_version, self.parameters))
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        # To ask a GPU for a number would wait for it.
        self._first_numbers = [
            each.as_strided((1,), (1,), each.storage_offset()).view(torch.uint8)
            for each in self._memory
            if each.device.type == "cpu" and each.layout is torch.strided and each.numel()
        ]
        self._first_values = torch.cat(self._first_numbers) if self._first_numbers else None

    def _have_changed(self) -> bool:
        return (
            list(map(_get_version, self.parameters)) != self._versions
            or list(map(Tensor.data_ptr, self.parameters)) != self._addresses
            or (self._first_values is not None and not torch.equal(torch.cat(self._first_numbers), self._first_values))
        )


_get_version = attrgetter("_version")


class _BufferCopies(NamedTuple):
    """The buffers of a model at one time. A forward pass may put another tensor in a place, or make a new place."""

    homes: list[dict[str, Any]]
    """Of all modules."""
    names: list[tuple[str, ...]]
    """By home, those of all its places."""
    places: list[_BufferPlace]
    """Where different buffers are, also those that are None."""
    copies: list[Tensor | None]


def _copy_buffers(module: nn.Module) -> _BufferCopies:
    homes = [each._buffers for each in module.modules()]
    found: dict[object, _BufferPlace] = {}
    for home in homes:
        for name, buffer in home.items():
            found.setdefault((id(home), name) if buffer is None else id(buffer), (home, name))
    places = list(found.values())
    buffers = (home[name] for home, name in places)
    copies = [None if buffer is None else _copy(buffer) for buffer in buffers]
    return _BufferCopies(homes, [tuple(home) for home in homes], places, copies)


def _put_back_buffers(kept: _BufferCopies) -> None:
    """Let buffers have these values again, also where a forward pass has put another tensor, made one or removed
    one."""
    for home, names in zip(kept.homes, kept.names, strict=True):
        for name in home.keys() - set(names):
            del home[name]
    for (home, name), copied in zip(kept.places, kept.copies, strict=True):
        buffer = home.get(name)
        if copied is None:
            home[name] = None
        elif buffer is not None and buffer.shape == copied.shape and buffer.dtype is copied.dtype:
            _copy_tensors([buffer], [copied])
        else:
            home[name] = copied.clone()


def _name_buffers(module: nn.Module) -> Iterator[tuple[str, _BufferPlace]]:
    for prefix, each in module.named_modules():
        for name in each._buffers:
            yield f"{prefix}.{name}", (each._buffers, name)


def _describe_buffers(module: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    """Shape and dtype of the buffers by name; None for those that a forward pass has not made yet."""
    buffers = ((name, home[key]) for name, (home, key) in _name_buffers(module))
    return {name: None if buffer is None else (buffer.shape, buffer.dtype) for name, buffer in buffers}


def _fit_buffers(module: nn.Module, described: dict[str, tuple[torch.Size, torch.dtype] | None]) -> None:
    """Let buffers be None, or have the shape and dtype, as on a rank that has come farther."""
    own = _describe_buffers(module)
    device = next((each.device for each in module.parameters()), torch.device("cpu"))
    for name, (home, key) in _name_buffers(module):
        given = described.get(name, own[name])
        if given != own[name]:
            here = device if home[key] is None else home[key].device
            home[key] = None if given is None else torch.empty(given[0], dtype=given[1], device=here)


class _ModuleCopy(NamedTuple):
    parameters: list[Tensor]
    values: list[Tensor]
    buffers: _BufferCopies


class _OptimizerCopy(NamedTuple):
    skeleton: Skeleton
    tensors: list[Tensor]


class OptimizerPart(StatePart):
    """An optimizer: its state and its options. Gradients belong to a step, so they are cleared when one is undone."""

    def __init__(self, optimizer: Optimizer, state: State) -> None:
        self._optimizer = optimizer
        self._counter: OptimizerReducers | _StepCounter
        """Whose num_steps counts the optimizer's steps."""
        if isinstance(optimizer, Distributed) and optimizer._reducers is not None:
            self._counter = optimizer._reducers
            # What makes parameters equal on all ranks, for the error that is raised if they are not.
            optimizer._reducers.broadcast_call = "ronde.elastic.State(model=model, …) with the whole model"
        else:
            self._counter = _StepCounter()
            optimizer.register_step_post_hook(self._counter.after_step)
        self._num_steps_kept = 0
        self._kept_options: list[dict[str, Any]] = []
        self._has_tensor_options = False
        self.end_step()

    def commit(self) -> _OptimizerCopy:
        tensors: list[Tensor] = []
        skeleton = make_skeleton(self._optimizer, tensors)
        return _OptimizerCopy(skeleton, list(map(_copy, tensors)))

    def restore(self, committed: _OptimizerCopy) -> None:
        tensors: list[Tensor] = []
        state, options = fill_skeleton(committed.skeleton, self._optimizer, tensors)
        _copy_tensors(tensors, committed.tensors)
        set_state(self._optimizer, state, options)

    def end_step(self) -> None:
        self._num_steps_kept = self._counter.num_steps
        try:
            # A scheduler may step between two steps. Equal lists of parameters are the same list, as a rule.
            if not self._has_tensor_options and self._kept_options == self._optimizer.param_groups:
                return
        except RuntimeError:  # a tensor is not true or false
            pass
        self._keep_options()

    def undo_step(self) -> None:
        for group, kept in zip(self._optimizer.param_groups, self._kept_options, strict=False):
            group.update((key, _copy_option(value)) for key, value in kept.items() if key != "params")
        self._clear_gradients()

    def has_stepped(self) -> bool:
        return self._counter.num_steps != self._num_steps_kept

    def reset(self) -> None:
        if isinstance(self._optimizer, Distributed):
            self._optimizer.reset()
        self._clear_gradients()

    def sync(self, givers: Sequence[int]) -> None:
        sync_optimizer_state(self._optimizer, givers, current_world().group)

    def _keep_options(self) -> None:
        self._kept_options = [dict(group) for group in self._optimizer.param_groups]
        # A learning rate may be a tensor, which is changed in place.
        tensors = [(kept, key) for kept in self._kept_options for key in kept if isinstance(kept[key], Tensor)]
        self._has_tensor_options = len(tensors) > 0
        for kept, key in tensors:
            kept[key] = _copy(kept[key])

    def _clear_gradients(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class _StepCounter:
    """Counts the steps of an optimizer that is not distributed."""

    def __init__(self) -> None:
        self.num_steps = 0

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.num_steps += 1


class ScalerPart(StatePart):
    """A GradScaler. It decides that a step is skipped; such a step is finished without a step of an optimizer.

    At a step end its scale is copied where it is: to ask for the number, as state_dict() does, would wait for a GPU.
    """

    def __init__(self, scaler: Any, state: State) -> None:  # torch.amp.GradScaler, which older versions do not have
        self._scaler = scaler
        self._is_enabled = bool(scaler.is_enabled())
        self._kept: dict[str, Any] = {}
        self._kept_version = 0
        self.end_step()

    def commit(self) -> dict[str, Any]:
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def restore(self, committed: dict[str, Any]) -> None:
        if self._is_enabled:
            self._scaler.load_state_dict(committed)
        self.reset()

    def end_step(self) -> None:
        if self._is_enabled:
            kept = self._kept = dict(vars(self._scaler))
            scale, tracker = kept["_scale"], kept["_growth_tracker"]
            if scale is not None:  # else no loss was scaled yet
                self._kept_version = scale._version
                kept["_scale"], kept["_growth_tracker"] = scale.clone(), tracker.clone()

    def undo_step(self) -> None:
        if not self._is_enabled:
            return
        kept = self._kept
        self.restore(
            {
                "scale": kept["_init_scale"] if kept["_scale"] is None else float(kept["_scale"]),
                "growth_factor": kept["_growth_factor"],
                "backoff_factor": kept["_backoff_factor"],
                "growth_interval": kept["_growth_interval"],
                "_growth_tracker": (
                    kept["_init_growth_tracker"] if kept["_scale"] is None else int(kept["_growth_tracker"])
                ),
            }
        )
        scale = self._scaler._scale
        self._kept_version = 0 if scale is None else scale._version

    def has_stepped(self) -> bool:
        # update() writes to the scale, also when it stays the same. Before the first loss is scaled there is none.
        scale = self._scaler._scale if self._is_enabled else None
        return scale is not None and scale._version != self._kept_version

    def reset(self) -> None:
        if self._is_enabled:
            # What it knows of the optimizers in the interrupted step: which of them it has unscaled or stepped.
            self._scaler._per_optimizer_states.clear()

    def sync(self, givers: Sequence[int]) -> None:
        given = objects.broadcast(self.commit(), givers[0])
        if current_world().rank not in givers:
            self.restore(given)


class SamplerPart(StatePart):
    """The position in the data."""

    def __init__(self, sampler: ElasticBatchSampler, state: State) -> None:
        self._sampler = sampler
        sampler.join_state(state)
        self._state = state
        self._num_steps = state.steps
        self._kept = sampler.position

    def commit(self) -> SamplePosition:
        return self._sampler.position

    def restore(self, committed: SamplePosition) -> None:
        self._sampler.go_to(committed)

    def end_step(self) -> None:
        steps = self._state.steps
        if steps == self._num_steps:  # a commit or a new round
            self._kept = self._sampler.position
        else:
            self._num_steps = steps
            self._kept = self._sampler.end_step()

    def undo_step(self) -> None:
        self._sampler.go_to(self._kept)

    def is_in_step(self) -> bool:
        return self._sampler.is_in_step

    def describe(self) -> str:
        return self._sampler.describe()

    def sync(self, givers: Sequence[int]) -> None:
        self._sampler.go_to(SamplePosition(*objects.broadcast(tuple(self._sampler.position), givers[0])))


class RandomNumbersPart(StatePart):
    """The random numbers of PyTorch, NumPy and Python. Every rank has its own."""

    def __init__(self, state: State) -> None:
        self._numpy = _NumpyRandomNumbers()
        self._python = _PythonRandomNumbers()
        self._kept: tuple[Any, ...] = ()
        self.end_step()

    def commit(self) -> tuple[Any, ...]:
        return torch.default_generator.get_state(), _get_device_states(), self._numpy.get_state(), random.getstate()

    def restore(self, committed: tuple[Any, ...]) -> None:
        on_cpu, on_devices, of_numpy, of_python = committed
        torch.set_rng_state(on_cpu)
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    def end_step(self) -> None:
        self._kept = (
            torch.default_generator.get_state(),
            _get_device_states() if _MAY_HAVE_DEVICES else (),
            self._numpy.get_state(),
            self._python.keep(),
        )

    def undo_step(self) -> None:
        *others, of_python = self._kept
        self.restore((*others, self._python.state_of(of_python)))

    def sync(self, givers: Sequence[int]) -> None:
        pass  # every rank goes on with its own


_MAY_HAVE_DEVICES = torch.backends.cuda.is_built()


def _get_device_states() -> Sequence[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()


# The generators of Python and NumPy are Mersenne Twisters, whose states take long to read. Whether numbers were drawn
# is seen where the states lie: a draw changes the position, and after 624 draws, when it may be the same again, all
# words are new. So it is enough to look at the position and the words beside it.
NUM_WORDS = 625
"""Of a Mersenne Twister: 624 and the position among them."""
NUM_WATCHED = 16
"""So many words are compared."""


class _PythonRandomNumbers:
    """Python's own random numbers. random.getstate() makes 625 numbers, which takes too long for every step."""

    def __init__(self) -> None:
        self._generator: random.Random = random.getstate.__self__  # type: ignore[attr-defined] # a bound method
        self._words = words = _find_python_words(self._generator)
        self._watched = None if words is None else words[:NUM_WATCHED]  # the position is the first
        self._kept_watched = b""
        self._kept_words = b""

    def keep(self) -> tuple[Any, ...]:
        """What state_of() makes the present state of."""
        if self._watched is None or self._words is None:
            return random.getstate()
        watched = self._watched.tobytes()
        if watched != self._kept_watched:
            self._kept_watched, self._kept_words = watched, self._words.tobytes()
        return self._kept_words, self._generator.gauss_next  # type: ignore[attr-defined] # of random.Random

    def state_of(self, kept: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state as random.getstate() returned it when keep() was called."""
        if self._words is None:
            return kept
        data, gauss_next = kept
        return _python_state(np.frombuffer(data, np.uint32), gauss_next)


def _python_state(words: Array, gauss_next: float | None) -> tuple[Any, ...]:
    position, *numbers = words.tolist()
    return random.Random.VERSION, (*numbers, position), gauss_next


def _find_python_words(generator: random.Random) -> Array | None:
    """The state of Python's generator where it lies: the position and 624 words. None if this Python has it elsewhere;
    then random.getstate() has to be asked."""
    if sys.implementation.name != "cpython" or _random.Random.__basicsize__ < object.__basicsize__ + 4 * NUM_WORDS:
        return None
    words = _view_words(id(generator) + object.__basicsize__)
    return words if _python_state(words, None)[1] == generator.getstate()[1] else None


class _NumpyRandomNumbers:
    """NumPy's own random numbers. Their state takes NumPy 0.1 ms to return, so it is asked for only if numbers were
    drawn."""

    def __init__(self) -> None:
        self._generator: object = None
        self._watched: Array | None = None
        self._kept_watched = b""
        self._state: Any = None

    def get_state(self) -> Any:
        """As np.random.get_state()."""
        generator = _get_bit_generator()
        if generator is not self._generator:
            self._generator, self._state = generator, None
            is_known = type(generator) is np.random.MT19937
            # The position is the last.
            self._watched = _view_words(generator.ctypes.state_address)[-NUM_WATCHED:] if is_known else None
        if self._watched is None:
            return np.random.get_state()
        watched = self._watched.tobytes()
        # If it has a second number of a normal distribution in store, that may have been drawn, and no word tells.
        if self._state is None or watched != self._kept_watched or self._state[HAS_GAUSS]:
            self._state, self._kept_watched = np.random.get_state(), watched
        return self._state


HAS_GAUSS = 3
"""Index in np.random.get_state()."""

_get_bit_generator: Callable[[], Any] = getattr(
    np.random, "get_bit_generator", lambda: np.random.mtrand._rand._bit_generator
)
"""The generator of np.random.rand() and its like; NumPy has a function for it from 1.24 on."""


class _MemoryWords:
    def __init__(self, address: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (NUM_WORDS,), "typestr": "=u4", "version": 3}


def _view_words(address: int) -> Array:
    """The state of a Mersenne Twister where it lies, read-only."""
    return np.asarray(_MemoryWords(address))


def _copy_tensors(targets: list[Tensor], sources: list[Tensor]) -> None:
    if not targets:
        return
    # As in torch.no_grad(), which calls eight functions in Python.
    was_enabled = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        torch._foreach_copy_(targets, sources)
    finally:
        torch._C._set_grad_enabled(was_enabled)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _copy_option(value: Any) -> Any:  # of an optimizer; a learning rate may be a tensor
    return _copy(value) if isinstance(value, Tensor) else value


def _check_optimizers(state: State) -> None:
    """Raise ValueError if a distributed optimizer over all ranks is not in the State: it could not go on in the next
    round."""
    held = [each._reducers for each in state._objects.values() if isinstance(each, Distributed)]
    for attempt in range(2):
        forgotten = [each for each in find_open_reducers(current_world().group) if each not in held]
        if not forgotten:
            return
        if not attempt:
            gc.collect()  # an optimizer that nobody uses may still exist
    name = min(forgotten[0].names, default="")
    raise ValueError(
        f"ronde.elastic.run(): the DistributedOptimizer of parameter {name!r} is not in the State, and could not go on "
        "after a loss; give it to State(optimizer=optimizer, …), or close() it if it is not used any more"
    )


_PARTS: dict[type, Callable[[Any, State], Any]] = {
    nn.Module: ModulePart,
    Optimizer: OptimizerPart,
    LRScheduler: StatefulPart,  # the rates themselves are options of its optimizer
    ReduceLROnPlateau: StatefulPart,  # in older versions it is no LRScheduler
    GradScaler.__mro__[-2]: ScalerPart,  # its base is torch.amp.GradScaler, in versions that have it
    ElasticBatchSampler: SamplerPart,
}
for kind, make in _PARTS.items():
    register_part(kind, make)
register_common_part("random numbers", RandomNumbersPart)
register_check(_check_optimizers)
