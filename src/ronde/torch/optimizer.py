"""DistributedOptimizer: any optimizer of PyTorch, with gradients averaged over ranks.

OptimizerReducers holds one Reducer per group of ranks and the TrainingStep that commands them.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.cuda.amp import GradScaler  # where it is in every version, for the CPU, too
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ronde.comm.buffers import Array
from ronde.comm.collectives import mark_step
from ronde.comm.group import Group
from ronde.comm.world import current_world, is_initialized
from ronde.torch.broadcast_state import broadcast_parameters
from ronde.torch.gradient_buckets import TorchAdapter, TorchBackwardPass, disable_dynamo, find_frame
from ronde.torch.tensors import tensor_view
from ronde.training.gradients.compression import CastCodec, Codec, find_codec
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.ready_counter import ReadyCounter
from ronde.training.gradients.reducer import Reducer
from ronde.training.gradients.steps import PassCallback, TrainingStep
from ronde.types import Op, parse_op


def _read_names(named: Iterable[tuple[str, Tensor]], rank: int) -> dict[int, tuple[str, Tensor]]:
    """The caller's names by the identity of parameters, which are kept alive: no other object gets their identity."""
    found: dict[int, tuple[str, Tensor]] = {}
    names: set[str] = set()
    for pair in named if isinstance(named, Iterable) else (named,):
        if not isinstance(pair, tuple) or [isinstance(each, str | Tensor) for each in pair] != [True, True]:
            raise TypeError(
                f"rank {rank}: named_parameters must be pairs of a name and a parameter, such as "
                f"model.named_parameters() gives, got {pair if isinstance(pair, str) else type(pair).__name__}"
            )
        name, parameter = pair
        if name in names:
            raise ValueError(f"rank {rank}: named_parameters has two parameters named {name!r}; names must differ")
        if id(parameter) in found:
            raise ValueError(f"rank {rank}: named_parameters has {found[id(parameter)][0]!r} again, as {name!r}")
        names.add(name)
        found[id(parameter)] = (name, parameter)
    return found


_open_reducers: WeakSet[OptimizerReducers] = WeakSet()
"""The OptimizerReducers of this process that are not closed. No parameter may be in two of them."""


def count_steps_of(group: Group) -> int | None:
    """How many steps the distributed optimizers over this group have made; None if there are none."""
    counts = [reducers.num_steps for reducers in find_open_reducers(group)]
    return sum(counts) if counts else None


def find_open_reducers(group: Group) -> list[OptimizerReducers]:
    """Those of the distributed optimizers over this group that are not closed."""
    return [reducers for reducers in list(_open_reducers) if group in reducers.groups]


NamedParameters = Sequence[tuple[str, Tensor]]


class OptimizerReducers:
    """The parameters of one optimizer, with one reducer for each group of ranks, and the optimizer's step."""

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        group: Group | None,
        settings: GradientSettings,
        codec: Codec | None,
        num_passes: int,
    ) -> None:
        """A parameter has the caller's name, else the optimizer's own, else one made of group and index."""
        self._rank = current_world("DistributedOptimizer").rank
        self._given_names = None if named_parameters is None else _read_names(named_parameters, self._rank)
        self.names: set[str] = set()
        self._group = _check_group(group)
        if settings.compare_at_step is None:
            settings = replace(settings, compare_at_step=current_world().settings.compare_at_step)
        self._settings = settings
        self.broadcast_call = "ronde.torch.broadcast_parameters(model)"
        """What a script calls to broadcast parameters, for errors; horovod.torch has another."""
        self._codec = codec
        self._params: list[list[Tensor]] = []  # by the optimizer's group of parameters
        self.groups: list[Group] = []
        """By the optimizer's group of parameters, the ranks over which its gradients are averaged."""
        self._reducers: dict[Group, tuple[TorchAdapter, Reducer]] = {}
        self.num_steps = 0
        """How often the optimizer may have changed parameters: its steps so far."""
        self._num_closure_calls = 0  # in the present step
        self._num_broadcast = 0  # of the optimizer's groups, by broadcast_parameters()
        self._single_rank_params: list[tuple[Group, NamedParameters]] = []  # of groups with nothing to reduce
        self._named_by_id: dict[int, tuple[str, Tensor]] = {}  # the parameters of the reducers
        self.training_step = TrainingStep(
            TorchBackwardPass(), num_passes, gradient_version=partial(_gradient_version, self._named_by_id)
        )
        _open_reducers.add(self)

    def add_param_group(self, param_group: Mapping[str, Any], *, added_later: bool = False) -> None:
        """Average the gradients of one of the optimizer's groups, over the ranks of its `group` if it has one.
        `added_later`: the caller, who named the others, need not have named these."""
        group = _check_group(param_group.get("group")) or self._group or current_world("DistributedOptimizer").group
        named = self._named_parameters(param_group, added_later)
        if group.included:
            self._add_to_reducer(group, named)
        self.names.update(name for name, _ in named)
        self._params.append([parameter for _, parameter in named])
        self.groups.append(group)

    def _named_parameters(self, param_group: Mapping[str, Any], added_later: bool) -> NamedParameters:
        group_index, known = len(self._params), param_group.get("param_names", ())
        found: dict[str, Tensor] = {}
        for index, parameter in enumerate(param_group["params"]):
            name = known[index] if known else f"group{group_index}.param{index}"
            if self._given_names is not None:
                name = self._given_names.get(id(parameter), (name if added_later else "", parameter))[0]
            if is_lazy(parameter):
                raise ValueError(
                    f"rank {self._rank}: parameter {name or index!r} of a lazy module has no shape yet; let the model "
                    "compute something before DistributedOptimizer is called"
                )
            if not name:
                raise ValueError(
                    f"rank {self._rank}: named_parameters lacks parameter {index} of the optimizer's group "
                    f"{group_index} ({parameter.dtype}{list(parameter.shape)}); pass model.named_parameters() of the "
                    "model that the optimizer was built for, and build it after the model was moved or copied"
                )
            if name in self.names or name in found:
                raise ValueError(f"rank {self._rank}: two parameters of the optimizer are named {name!r}")
            found[name] = parameter
        return list(found.items())

    def broadcast_parameters(self) -> None:
        """Copy the parameters that were added since the last call to all of their ranks, from the first one. Every rank
        calls it."""
        first, self._num_broadcast = self._num_broadcast, len(self._params)
        for group, params in zip(self.groups[first:], self._params[first:], strict=True):
            if group.included and group.size > 1:
                named = [self._named_by_id[id(parameter)] for parameter in params]
                broadcast_parameters(named, group.ranks[0], group=group)

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before the optimizer's step(): average the gradients, or return other arguments for step() if it was
        given a closure that makes them."""
        self._check_param_groups(optimizer.param_groups)
        self._num_closure_calls = 0
        if len(args) > 1 and args[1] is not None:
            return (args[0], partial(self._run_closure, args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": partial(self._run_closure, kwargs["closure"])}
        self.training_step.synchronize()
        return None

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called after the optimizer's step()."""
        self.num_steps += 1
        self.training_step.step_done()
        if is_initialized():
            mark_step()

    def set_num_passes(self, num_passes: int) -> None:
        """Let so many backward passes make a step. With several, even a single rank has to average them."""
        self.training_step.num_passes = num_passes
        self._add_single_rank_params({})

    def reset(self) -> None:
        """Agree anew at the next step: parameters were converted, or a new round has begun. Every rank calls it."""
        world = current_world("reset()")
        groups = self.groups if self._group is None else [*self.groups, self._group]
        now = {group: group if group.id else world.group for group in groups}
        for group in now.values():
            if group not in world.groups:
                raise ValueError(f"{group} no longer exists; close() this optimizer, and build one for today's groups")
        self.groups = [now[group] for group in self.groups]
        self._group = None if self._group is None else now[self._group]
        self._reducers = {now[group]: part for group, part in self._reducers.items()}
        for group, (_, reducer) in self._reducers.items():
            reducer.reset(group, None if group.id else world)
        self.training_step.gradients_cleared()  # a pass may have been interrupted by the end of the round
        self._add_single_rank_params(now)

    def close(self) -> None:
        """Average gradients no more. Idempotent."""
        _open_reducers.discard(self)
        self.training_step.close()
        self._reducers.clear()
        self._named_by_id.clear()
        self._single_rank_params.clear()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        """Call a closure of step(), average its gradients, and return its loss averaged over ranks: an optimizer that
        looks at it must decide alike on all."""
        self._num_closure_calls += 1
        if self._num_closure_calls == 2:  # between two calls an optimizer changes parameters
            self.num_steps += 1
        loss = closure()
        self.training_step.synchronize()
        group = self._group or current_world().group
        if loss is None or not group.included or group.size == 1:
            return loss
        op = "sum" if parse_op(self._settings.op) is Op.SUM else "mean"
        if not isinstance(loss, torch.Tensor):
            return float(group.allreduce(np.array(float(loss)), op=op))
        return torch.full_like(loss.detach(), float(group.allreduce(np.array(loss.item()), op=op)))

    def _check_param_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if the optimizer has other parameters than it was given."""
        try:
            # Lists of the same objects are equal without a look at the tensors. Others may be taken for equal while
            # they have one number each and it is the same: until the next step.
            if not self._reducers or [group["params"] for group in param_groups] == self._params:
                return
        except RuntimeError:  # a tensor is not true or false
            pass
        what = "the optimizer has other groups of parameters than it was given"
        for number, (group, known) in enumerate(zip(param_groups, self._params, strict=False)):
            changed = [index for index, (one, two) in enumerate(zip_longest(group["params"], known)) if one is not two]
            if changed:
                was = self._named_by_id.get(id(known[changed[0]])) if changed[0] < len(known) else None
                name = f", which was {was[0]!r}," if was else ""
                what = f"parameter {changed[0]} of the optimizer's group {number}{name} is not the one it was given"
                break
        raise ValueError(
            f"rank {current_world().rank}: {what}: gradients of others are not combined. Replace parameters before "
            "DistributedOptimizer is called (or close() it and build another), and add some by add_param_group()"
        )

    def _add_single_rank_params(self, groups: Mapping[Group, Group]) -> None:
        """Look again at the parameters that had nothing to reduce. `groups` has new groups by old ones."""
        waiting, self._single_rank_params = self._single_rank_params, []
        for group, named in waiting:
            self._add_to_reducer(groups.get(group, group), named)

    def _add_to_reducer(self, group: Group, named: NamedParameters) -> None:
        """Give these parameters to the reducer of the group, unless there is nothing to reduce."""
        settings = self._settings
        if group.size == 1 and self.training_step.num_passes == 1 and self._codec is None and not settings.check_finite:
            self._single_rank_params.append((group, named))
            return
        self._check_not_shared(named)
        if group in self._reducers:
            adapter, reducer = self._reducers[group]
            adapter.add_parameters(named)
            reducer.parameters_added()
        else:
            adapter = TorchAdapter(current_world().rank, sparse_as_dense=settings.sparse_as_dense)
            adapter.add_parameters(named)
            reducer = Reducer(
                adapter,
                group,
                settings,
                on_pass_started=self.training_step.pass_started,
                broadcast_call=lambda: self.broadcast_call,
                codec=self._codec,
                overlap=_should_overlap(group) if settings.overlap is None else settings.overlap,
                world=None if group.id else current_world(),
            )
            self._reducers[group] = (adapter, reducer)
            self.training_step.add_reducer(reducer)
        self._named_by_id.update((id(parameter), (name, parameter)) for name, parameter in named)

    def _check_not_shared(self, named: NamedParameters) -> None:
        """Raise ValueError if another optimizer has one of these parameters."""
        for attempt in range(2):
            others = {key for each in _open_reducers if each is not self for key in each._named_by_id}
            shared = [name for name, parameter in named if id(parameter) in others]
            if not shared:
                return
            if not attempt:
                gc.collect()  # an optimizer that nobody uses may still exist
        raise ValueError(
            f"rank {current_world().rank}: parameter {shared[0]!r} is in another distributed optimizer already, and "
            "both would combine its gradients; call close() of that one before you build this one"
        )


# Called by hooks of parameters, at the end of a pass, and around a step.
disable_dynamo(
    ReadyCounter._mark_ready,
    Reducer.on_first_gradient,
    Reducer.on_second_gradient,
    Reducer.on_bucket_full,
    TorchAdapter._on_large_gradient,
    PassCallback.__call__,
    PassCallback.__del__,
    TrainingStep.pass_started,
    TrainingStep._on_pass_end,
    TrainingStep._finish_reducing,
    TrainingStep.synchronize,
    TrainingStep.step_done,
    TrainingStep.gradients_cleared,
    OptimizerReducers.before_step,
    OptimizerReducers.after_step,
)


def _check_group(group: object) -> Group | None:
    if group is not None and not isinstance(group, Group):
        raise TypeError(
            f"group must be a ronde.Group, got {type(group).__name__}; ronde.add_group(ranks) makes one, on all ranks"
        )
    return group


def _gradient_version(named_by_id: dict[int, tuple[str, Tensor]]) -> tuple[object, ...]:
    """A value that changes when gradients are changed: one gradient and its version counter, as clipping writes to all
    of them, and whether a GradScaler makes the step, as it has unscaled gradients without counting."""
    grads = (parameter.grad for _, parameter in reversed(named_by_id.values()))  # frozen ones are mostly the first
    grad = next((grad for grad in grads if grad is not None), None)
    num_writes = 0 if grad is None else grad._version
    return id(grad), num_writes, find_frame(GradScaler.step) is None


def _should_overlap(group: Group) -> bool:
    """Whether buckets should be reduced while the backward pass runs.

    A network works by itself. Inside a host the same cores reduce and compute: then reducing at the end costs less, as
    no thread has to be woken and none is interrupted.
    """
    topology = current_world().topology
    num_busy_threads = topology.local_size * torch.get_num_threads()
    has_idle_cores = num_busy_threads < len(os.sched_getaffinity(0))
    return has_idle_cores or len({topology.host_indices[rank] for rank in group.ranks}) > 1


def _convert_array(source: Array, source_dtype: str, target: Array, target_dtype: str) -> None:
    tensor_view(target, target_dtype).copy_(tensor_view(source, source_dtype))


CODECS: dict[str, Codec] = {name: CastCodec(name, _convert_array) for name in ("float16", "bfloat16")}
"""The codecs of training/compression, with PyTorch's conversions, which are several times as fast as NumPy's."""


def DistributedOptimizer(
    optimizer: Optimizer,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    op: str | Op = "mean",
    passes: int = 1,
    codec: str | Codec | None = None,
    bucket_mb: float | None = None,
    group: Group | None = None,
    broadcast_parameters: bool = False,
    **settings: Any,  # see GradientSettings
) -> Distributed:
    """The same optimizer, made to average gradients over all ranks (or over `group`) in every backward().

    When backward() returns, p.grad is the average: clip it, unscale it, call step(). `passes` backward passes make a
    step: their gradients are averaged, as if their batches were one, and are exchanged after the last. `codec`
    compresses gradients on the wire: "float16", "bfloat16", or a Codec of your own. A group of parameters may have a
    `group` of its own: `SGD([{"params": head, "group": some_ranks}])`. Further settings are those of GradientSettings.

    All ranks must start with the same parameters, or the first step raises OutOfSync. `broadcast_parameters=True`
    copies those of the optimizer from the first rank here, and later those of add_param_group(); the function
    broadcast_parameters() copies the buffers of the model, too.

    The class `Distributed` has what it adds to the optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"DistributedOptimizer takes an optimizer of PyTorch, got {type(optimizer).__name__}")
    if isinstance(optimizer, Distributed):
        raise ValueError("the optimizer is distributed already; wrap it once")
    current_world("DistributedOptimizer")  # without one, that is the error to show
    wanted = GradientSettings(op=op, bucket_mb=bucket_mb, **settings)
    reducers = OptimizerReducers(named_parameters, group, wanted, find_codec(codec, CODECS), passes)
    try:
        for param_group in optimizer.param_groups:
            reducers.add_param_group(param_group)
        wanted.check_names(reducers.names)
        if broadcast_parameters:
            reducers.broadcast_parameters()
    except BaseException:
        reducers.close()
        raise
    plain: Any = type(optimizer)
    distributed: Any = optimizer
    distributed.__class__ = _distributed_class(plain)
    distributed._reducers = reducers
    distributed._broadcasts_parameters = broadcast_parameters
    optimizer.register_step_pre_hook(reducers.before_step)
    optimizer.register_step_post_hook(reducers.after_step)
    for param_group in optimizer.param_groups:
        param_group.pop("group", None)  # it does not belong into state_dict()
    # The hooks of parameters would live as long as the model.
    weakref.finalize(optimizer, reducers.close).atexit = False
    result: Distributed = distributed
    return result


class Distributed(Optimizer):
    """What DistributedOptimizer adds to an optimizer's class."""

    _reducers: OptimizerReducers | None = None
    """None in a copy, which is an ordinary optimizer."""
    _broadcasts_parameters = False

    def synchronize(self) -> None:
        """Average the gradients if backward() has not done so. Collective.

        backward() and step() call it. It is needed only on a rank that had no backward pass, or fewer than `passes`,
        and looks at gradients, clips or unscales them before step().
        """
        if self._reducers is not None:
            self._reducers.training_step.synchronize()

    @property
    def passes(self) -> int:
        """The number of backward passes per step. It can be set between steps."""
        return 1 if self._reducers is None else self._reducers.training_step.num_passes

    @passes.setter
    def passes(self, passes: int) -> None:
        if self._reducers is not None:
            self._reducers.set_num_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in PyTorch. It begins a step: passes before it do not count."""
        if self._reducers is not None:
            self._reducers.training_step.gradients_cleared()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in PyTorch; it may have a ronde.Group as `group`. Every rank adds it before the same step."""
        super().add_param_group(param_group)
        if self._reducers is None:
            return
        try:
            self._reducers.add_param_group(self.param_groups[-1], added_later=True)
        except BaseException:
            del self.param_groups[-1]  # it would train with gradients that are not averaged
            raise
        self.param_groups[-1].pop("group", None)
        if self._broadcasts_parameters:
            self._reducers.broadcast_parameters()

    def reset(self) -> None:
        """Go on in a new round, after shutdown() and init(), or with a converted model. Every rank calls it."""
        if self._reducers is not None:
            self._reducers.reset()

    def close(self) -> None:
        """Average gradients no more, and free memory and hooks. Idempotent."""
        if self._reducers is not None:
            self._reducers.close()

    def __reduce_ex__(self, protocol: Any) -> Any:  # as object's
        """A copy has the class that the optimizer had before."""
        return _new_instance, (type(self).__mro__[2],), self.__getstate__()


def _new_instance(plain: type[Optimizer]) -> Optimizer:
    return plain.__new__(plain)


@cache
def _distributed_class(plain: Any) -> type[Optimizer]:  # a class
    return type(plain.__name__, (Distributed, plain), {"__module__": plain.__module__, "__doc__": plain.__doc__})
