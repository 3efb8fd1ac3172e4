"""What an optimizer has after DistributedOptimizer, for gradients and for Adasum alike.

The optimizer for op=hvd.Adasum: not gradients are combined but what a step makes of the parameters.

Every process takes its own step; the changes are added up by Adasum, and all begin the next step at the same place.

Horovod's DistributedOptimizer: its arguments, its methods and its warnings, over ronde.torch's.

Gradients are combined when backward() ends and not only in synchronize(): code that looks at them before step() is
right in any case.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import ronde.torch
from horovod.common.exceptions import translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set, group_of
from horovod.common.util import split_list
from horovod.torch.compression import Compression, Compressor, CompressorCodec, FP16Compressor, NoneCompressor
from horovod.torch.operations import OPS, Adasum, Average, Sum, _basics, allreduce_async_, synchronize
from ronde.torch import Distributed
from ronde.training.adapter import BackwardPass
from ronde.training.compression import Codec

__all__ = ["AdasumOptimizer", "DistributedOptimizer", "WrappedOptimizer", "make_optimizer_class"]

H = TypeVar("H", bound=Hashable)


class WrappedOptimizer(Optimizer):
    """It knows what DistributedOptimizer was called with, and its copies are optimizers of the class it had before."""

    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _parameter_names: dict[Tensor, str]
    _plain: type[Optimizer]
    """The class it had before."""

    @property
    def _requires_update(self) -> set[Tensor]:
        """Parameters that learn; some scripts look at them."""
        return {param for group in self.param_groups for param in group["params"] if param.requires_grad}

    @staticmethod
    def find_duplicates(lst: Iterable[H]) -> set[H]:
        """What is in it more than once."""
        return {each for each, count in Counter(lst).items() if count > 1}

    def __reduce_ex__(self, protocol: Any) -> Any:  # as object's
        """For copies and files."""
        return _new_instance, (self._plain,), self.__getstate__()


def _new_instance(plain: type[Optimizer]) -> Optimizer:
    """An optimizer that is about to get its state."""
    return plain.__new__(plain)


def make_optimizer_class(base: Any, plain: Any) -> Any:  # classes
    """A class of this kind over that of an optimizer, with its name, and where Horovod has such classes."""
    return _cached_optimizer_class(base, plain)


@cache
def _cached_optimizer_class(kind: Any, plain: Any) -> Any:
    names = {"__module__": "horovod.torch.optimizer", "__doc__": plain.__doc__, "_plain": plain}
    return type(plain.__name__, (kind, plain), names)


class AdasumOptimizer(WrappedOptimizer):
    """What it adds to an optimizer's class."""

    _compression: type[Compressor]
    backward_passes_per_step = 1

    @classmethod
    def wrap(
        cls, optimizer: Optimizer, compression: type[Compressor], passes: int, attributes: Mapping[str, Any]
    ) -> Optimizer:
        """The same optimizer, of a class that combines its steps. `told` are the attributes of a Wrapped."""
        optimizer.__class__ = make_optimizer_class(cls, type(optimizer))
        assert isinstance(optimizer, AdasumOptimizer)
        vars(optimizer).update(attributes)
        optimizer._compression = compression
        optimizer.backward_passes_per_step = passes
        return optimizer

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Taken for the sake of old scripts: gradients add up until step() in any case."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing to do before step()."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not for this optimizer: its step() is where the processes meet."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # as the closure returns
        """One's own step, then Adasum of all processes' steps."""
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        for param in params:
            if param.grad is None:  # a process that did not use it takes part with no change
                param.grad = torch.zeros_like(param)
        result = super().step(closure) if closure is not None else super().step()
        with torch.no_grad():
            flights = [
                self._start_adasum(index, param, start)
                for index, (param, start) in enumerate(zip(params, starts, strict=True))
            ]
            for param, start, (handle, context) in zip(params, starts, flights, strict=True):
                param.copy_(start + self._compression.decompress(synchronize(handle), context))
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: the one below calls the hooks

    def _start_adasum(self, index: int, param: Tensor, start: Tensor) -> tuple[int, Any]:
        small, context = self._compression.compress(param.detach() - start)
        return allreduce_async_(small, name=f"adasum.delta.{index}", op=Adasum), context


COMPRESSION_CODECS: dict[type[Compressor], str | None] = {NoneCompressor: None, FP16Compressor: "float16"}


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # an optimizer of a class made for it
    """The optimizer, made to average gradients over the processes while backward() runs.

    backward_passes_per_step passes are added up before they travel. gradient_predivide_factor splits the averaging
    before and behind the sum. `groups` are parameters that travel together: a number of groups, or lists of them.
    """
    _check_arguments(optimizer, op, backward_passes_per_step, gradient_predivide_factor)
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    named = _named_parameters(optimizer, named_parameters)
    together = _parameter_groups(named, groups)
    told = {
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
        "_parameter_names": {param: name for name, param in named},
    }
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum works with all processes, not with a process set")
        if _basics.size() > 1:
            return AdasumOptimizer.wrap(optimizer, compression, backward_passes_per_step, told)
    plain = type(optimizer)
    with translate_errors():
        wrapped = ronde.torch.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            op=OPS[Average if op == Adasum else op],
            passes=backward_passes_per_step,
            codec=_codec_for(compression),
            group=group_of(process_set),
            average_passes=False,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            together=together,
            idle_steps=True,
        )
    made: Any = wrapped
    made.__class__ = make_optimizer_class(HorovodOptimizer, plain)
    vars(made).update(told)
    passes = made._reducers.training_step
    passes.backward_pass = _TranslatingBackwardPass(passes.backward_pass)
    if sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam):
        made.register_step_pre_hook(_make_sparse)
    return made


def _check_arguments(optimizer: Optimizer, op: int, passes: int, predivide: float) -> None:
    if isinstance(optimizer, WrappedOptimizer | Distributed):
        raise ValueError("the optimizer is distributed already; wrap it once")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op of an optimizer is hvd.Average, hvd.Sum or hvd.Adasum, got {op!r}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")


def _make_sparse(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """SparseAdam takes no others, however they have travelled."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is not None and not param.grad.is_sparse:
            param.grad = param.grad.to_sparse()


class HorovodOptimizer(WrappedOptimizer, Distributed):
    """What Horovod adds to an optimizer's class."""

    _synchronized = False
    _should_synchronize = True

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes make a step."""
        return self.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, so many backward passes make one."""
        self.passes = passes

    def synchronize(self) -> None:
        """Combine gradients now."""
        with translate_errors():
            super().synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """For step() after a synchronize() of one's own."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # as the closure returns
        """As ever, on combined gradients."""
        if self._should_synchronize and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(); "
                "write `with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        self._synchronized = False
        with translate_errors():
            return super().step(closure) if closure is not None else super().step()

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: the one below calls the hooks


# As those scripts know them that ask for the class of an optimizer.
_DistributedOptimizer = HorovodOptimizer
_DistributedAdasumOptimizer = AdasumOptimizer


class _TranslatingBackwardPass:
    """A backward pass that raises what Horovod raises."""

    def __init__(self, backward: BackwardPass) -> None:
        self._backward = backward

    def on_end(self, callback: Callable[[], None]) -> None:
        """See Backward."""

        def call() -> None:
            with translate_errors():
                callback()

        self._backward.on_end(call)

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        """See Backward."""
        return self._backward.is_nested(on_resume)


def _codec_for(compression: type[Compressor]) -> str | Codec | None:
    if compression in COMPRESSION_CODECS:
        return COMPRESSION_CODECS[compression]
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        raise ValueError(
            f"compression must be hvd.Compression.none, hvd.Compression.fp16, or have compress() and decompress(), "
            f"got {compression!r}"
        )
    return CompressorCodec(compression)


def _named_parameters(optimizer: Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]]:
    """The names of all parameters of the optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if given is None:
        return [
            (f"allreduce.noname.{i}.{j}", param)
            for i, group in enumerate(optimizer.param_groups)
            for j, param in enumerate(group["params"])
        ]
    named = list(given)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters must be (name, parameter) tuples, as model.named_parameters() gives them")
    names = [name for name, _ in named]
    twice = sorted(WrappedOptimizer.find_duplicates(names))
    if twice:
        raise ValueError(f"parameter names must be unique; found twice: {', '.join(twice)}")
    unnamed = len({id(param) for param in params} - {id(param) for _, param in named})
    if unnamed:
        raise ValueError(f"named_parameters does not name {unnamed} of the optimizer's parameters")
    mine = {id(param) for param in params}
    return [(name, param) for name, param in named if id(param) in mine]


def _parameter_groups(
    named: list[tuple[str, Tensor]], groups: int | Sequence[Sequence[Tensor]] | None
) -> tuple[tuple[str, ...], ...]:
    """Names of the parameters that travel together."""
    if groups is None:
        return ()
    if isinstance(groups, bool) or not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError(f"groups must be a number above 0, or a list of lists of parameters, got {groups!r}")
    if isinstance(groups, int):
        learning = [name for name, param in named if param.requires_grad]
        return tuple(tuple(part) for part in split_list(learning, min(groups, max(1, len(learning)))))
    names = {id(param): name for name, param in named}
    seen: set[int] = set()
    for param in (param for part in groups for param in part):
        if not isinstance(param, torch.Tensor):
            raise ValueError(f"groups must be made of parameters, got {type(param).__name__}")
        if id(param) in seen:
            raise ValueError("a parameter can be in one of the groups only")
        seen.add(id(param))
    return tuple(tuple(names[id(param)] for param in part if id(param) in names) for part in groups)
