"""Horovod's DistributedOptimizer: its arguments, methods and warnings, over ronde.torch's.

Gradients are averaged when backward() ends and not only in synchronize(), so code that looks at them before step() is
right in any case. With op=hvd.Adasum the steps are combined and not the gradients: every process takes its own step,
and Adasum of all processes' changes is added to the parameters.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

import ronde.torch
from horovod.common.exceptions import translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set, group_of
from horovod.common.util import split_list
from horovod.torch.compression import Compression, Compressor, CompressorCodec, FP16Compressor, NoneCompressor
from horovod.torch.mpi_ops import OPS, Adasum, Average, Sum, _basics, allreduce_async_, synchronize
from ronde.comm.world import current_world
from ronde.torch import Distributed
from ronde.training.gradients.adapter import BackwardPass
from ronde.training.gradients.compression import Codec

H = TypeVar("H", bound=Hashable)

_distributed_optimizers: list[weakref.ref[Optimizer]] = []
"""Those of this process that average gradients, in the order in which they were made, which is the same on all."""


class WrappedOptimizer(Optimizer):
    """An optimizer with the attributes that DistributedOptimizer adds. A copy has the class that it had before."""

    op: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _parameter_names: dict[Tensor, str]
    _plain: type[Optimizer]  # the class it had before

    @property
    def _requires_update(self) -> set[Tensor]:
        """The parameters that train. Some scripts look at them."""
        return {param for group in self.param_groups for param in group["params"] if param.requires_grad}

    @staticmethod
    def find_duplicates(lst: Iterable[H]) -> set[H]:
        return {each for each, count in Counter(lst).items() if count > 1}

    def __reduce_ex__(self, protocol: Any) -> Any:  # as object's
        return _new_instance, (self._plain,), self.__getstate__()


def _new_instance(plain: type[Optimizer]) -> Optimizer:
    return plain.__new__(plain)


@cache
def _optimizer_class(base: type, plain: type) -> type:
    """A subclass of both, with the name of the optimizer's class, in the module where Horovod has it."""
    attributes = {"__module__": "horovod.torch.optimizer", "__doc__": plain.__doc__, "_plain": plain}
    return type(plain.__name__, (base, plain), attributes)


class AdasumOptimizer(WrappedOptimizer):
    """What DistributedOptimizer(op=hvd.Adasum) adds to an optimizer's class."""

    _compression: type[Compressor] | Compressor
    backward_passes_per_step = 1

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Without effect: gradients add up until step() in any case."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Without effect: the processes exchange nothing before step()."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # as the closure returns
        """Take this process's step, then combine the changes of all processes by Adasum."""
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        for param in params:
            if param.grad is None:  # a process that did not use it takes part with no change
                param.grad = torch.zeros_like(param)
        result = super().step(closure) if closure is not None else super().step()
        with torch.no_grad():
            started = []
            for index, (param, start) in enumerate(zip(params, starts, strict=True)):
                small, context = self._compression.compress(param.detach() - start)
                started.append((allreduce_async_(small, name=f"adasum.delta.{index}", op=Adasum), context))
            for param, start, (handle, context) in zip(params, starts, started, strict=True):
                param.copy_(start + self._compression.decompress(synchronize(handle), context))
        return result

    step.hooked = True  # type: ignore[attr-defined]  # super().step() calls the hooks


CODECS: dict[type[Compressor], str | None] = {NoneCompressor: None, FP16Compressor: "float16"}


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | Compressor | None = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:  # an optimizer of a class made for it
    """The optimizer, made to average gradients over the processes while backward() runs.

    The gradients of backward_passes_per_step passes are added up before they are averaged. gradient_predivide_factor
    divides before the sum, and the rest of the division follows it. `groups` are parameters that are reduced together:
    a number of groups, or lists of parameters. compression=None means Compression.none.
    """
    compression = Compression.none if compression is None else compression
    if isinstance(optimizer, WrappedOptimizer | Distributed):
        raise ValueError("the optimizer is distributed already; wrap it once")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op of an optimizer is hvd.Average, hvd.Sum or hvd.Adasum, got {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    named = _named_parameters(optimizer, named_parameters)
    together = _parameter_groups(named, groups)
    attributes = {
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
        "_parameter_names": {param: name for name, param in named},
    }
    plain: Any = type(optimizer)
    may_have_peers = _basics.size() > 1 or current_world().settings.elastic
    if op == Adasum:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum works with all processes, not with a process set")
        if may_have_peers:
            optimizer.__class__ = _optimizer_class(AdasumOptimizer, plain)
            vars(optimizer).update(
                attributes, _compression=compression, backward_passes_per_step=backward_passes_per_step
            )
            return optimizer
    with translate_errors():
        result: Any = ronde.torch.DistributedOptimizer(
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
    result.__class__ = _optimizer_class(HorovodOptimizer, plain)
    vars(result).update(attributes)
    result._reducers.broadcast_call = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
    takes_part = bool(process_set.included()) and may_have_peers
    result._makes_zero_gradients = takes_part and not isinstance(optimizer, torch.optim.SparseAdam)
    result.register_step_pre_hook(_after_synchronize)
    training_step = result._reducers.training_step
    training_step.backward_pass = _TranslatingBackwardPass(training_step.backward_pass)
    if sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam):
        result.register_step_pre_hook(_make_sparse)
    _distributed_optimizers.append(weakref.ref(result, _distributed_optimizers.remove))
    return result


def reset_optimizers() -> None:
    """Let all optimizers of this process go on in a new round. ValueError if the process set of one is gone."""
    for reference in tuple(_distributed_optimizers):
        optimizer: Any = reference()
        if optimizer is not None:
            optimizer.reset()


def _after_synchronize(optimizer: HorovodOptimizer, args: object, kwargs: object) -> None:
    """Called by step() behind the hook that averages gradients."""
    if optimizer._should_synchronize:
        optimizer._make_zero_gradients()


def _make_sparse(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """SparseAdam takes only sparse gradients, also when they were reduced as dense ones."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is not None and not param.grad.is_sparse:
            param.grad = param.grad.to_sparse()


class HorovodOptimizer(WrappedOptimizer, Distributed):
    """What Horovod adds to an optimizer's class."""

    _synchronized = False
    _should_synchronize = True
    _makes_zero_gradients = False

    @property
    def backward_passes_per_step(self) -> int:
        return self.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.passes = passes

    def synchronize(self) -> None:
        """Average the gradients, if backward() has not done so. Collective."""
        with translate_errors():
            super().synchronize()
        self._make_zero_gradients()
        self._synchronized = True

    def _make_zero_gradients(self) -> None:
        """Give zeros to parameters that no process has used, as Horovod does: weight decay and momentum change them."""
        if not self._makes_zero_gradients:
            return
        params = [param for group in self.param_groups for param in group["params"]]
        if any(map(is_, map(attrgetter("grad"), params), repeat(None))):
            for param in params:
                if param.requires_grad and param.grad is None:
                    param.grad = torch.zeros_like(param)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around step() after a call of synchronize()."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # as the closure returns
        if self._should_synchronize and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(); "
                "write `with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=2,
            )
        self._synchronized = False
        with translate_errors():
            return super().step(closure) if closure is not None else super().step()

    step.hooked = True  # type: ignore[attr-defined]  # super().step() calls the hooks


# Horovod's names of the classes.
_DistributedOptimizer = HorovodOptimizer
_DistributedAdasumOptimizer = AdasumOptimizer


class _TranslatingBackwardPass:
    """A backward pass that raises what Horovod raises."""

    def __init__(self, backward: BackwardPass) -> None:
        self._backward = backward

    def on_end(self, callback: Callable[[], None]) -> None:
        def call() -> None:
            with translate_errors():
                callback()

        self._backward.on_end(call)

    def is_nested(self, on_resume: Callable[[], None]) -> bool:
        return self._backward.is_nested(on_resume)


def _codec_for(compression: type[Compressor] | Compressor) -> str | Codec | None:
    if isinstance(compression, type) and compression in CODECS:
        return CODECS[compression]
    if not callable(getattr(compression, "compress", None)) or not callable(getattr(compression, "decompress", None)):
        raise ValueError(
            f"compression must be hvd.Compression.none, hvd.Compression.fp16, or have compress() and decompress(), "
            f"got {compression!r}"
        )
    return CompressorCodec(compression)


def _named_parameters(optimizer: Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> list[tuple[str, Tensor]]:
    """The parameters of the optimizer with their names."""
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
    # One name for each, the same in whatever order the processes give them.
    chosen = {id(param): name for name, param in sorted(named, key=itemgetter(0)) if id(param) in mine}
    return [(name, param) for name, param in named if chosen.get(id(param)) == name]


def _parameter_groups(
    named: list[tuple[str, Tensor]], groups: int | Sequence[Sequence[Tensor]] | None
) -> tuple[tuple[str, ...], ...]:
    """The names of the parameters that are reduced together."""
    if groups is None:
        return ()
    if isinstance(groups, bool) or not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise ValueError(f"groups must be a number above 0, or a list of lists of parameters, got {groups!r}")
    if isinstance(groups, int):
        trained = [name for name, param in named if param.requires_grad]
        return tuple(tuple(part) for part in split_list(trained, min(groups, max(1, len(trained)))))
    names = {id(param): name for name, param in named}
    seen: set[int] = set()
    for param in (param for part in groups for param in part):
        if not isinstance(param, torch.Tensor):
            raise ValueError(f"groups must be made of parameters, got {type(param).__name__}")
        if id(param) in seen:
            raise ValueError("a parameter can be in one of the groups only")
        seen.add(id(param))
    return tuple(tuple(names[id(param)] for param in part if id(param) in names) for part in groups)
