"""Horovod's collectives on PyTorch tensors, over ronde.torch, with init(), shutdown(), ranks and sizes.

What ends in _async returns a handle for poll() and synchronize(); what ends in _ works in place. Every operation has a
name, given or counted, so ranks may start them in any order. The others are differentiable, and not as those of
ronde.torch: the gradient of an allgather or a broadcast is averaged over the ranks.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import NOT_INITIALIZED, HorovodInternalError, translate_errors
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    group_of,
    remove_process_set,
)
from horovod.common.util import get_average_backwards_compatibility_fun
from horovod.torch.compression import Compression, Compressor
from ronde import Group
from ronde.torch.tensors import (
    ReduceOptions,
    TensorWork,
    allgather_tensors,
    allreduce_tensor,
    allreduce_tensors,
    alltoall_tensor,
    broadcast_tensors,
    reduce_scatter_tensors,
)
from ronde.types import Op

__all__ = [
    "Adasum",
    "Average",
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodInternalError",
    "HorovodReducescatter",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_master",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


class HandleManager:
    """The operations under way by handle. Handles are counted from 1; hvd.shutdown() resets the counter."""

    def __init__(self) -> None:
        self._works: dict[int, tuple[TensorWork, Callable[[Any], Any] | None]] = {}
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._handle_counter = itertools.count(1)
        self._name_counters: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def make_name(self, what: str, group: int) -> str:
        """A name for an operation without one. It is counted per kind of operation and group, so members need to have
        the same order among those only."""
        with self._lock:
            return f"{what}.noname.{next(self._name_counters[what, group])}"

    def add(self, work: TensorWork, finish: Callable[[Any], Any] | None = None) -> int:
        """Return the handle of an operation. finish() converts its result into Horovod's."""
        with self._lock:
            handle = next(self._handle_counter)
            self._works[handle] = work, finish
        return handle

    def poll(self, handle: int) -> bool:
        running = self._works.get(handle)
        if running is None:
            raise ValueError(f"handle {handle} was not created, or was synchronized before")
        return running[0].done()

    def synchronize(self, handle: int) -> Any:  # a tensor, a list of them, or a pair
        """Wait for the result. An unknown handle gives None, as in Horovod."""
        running = self._works.pop(handle, None)
        if running is None:
            return None
        work, finish = running
        with translate_errors():
            return finish(work.wait()) if finish else work.wait()

    def reset_names(self) -> None:
        """Count names from 0 again. Called when all processes have joined: some may have started operations that others
        did not, so their counters differ."""
        with self._lock:
            self._name_counters.clear()

    def clear(self) -> None:
        """Called by hvd.init(): operations of an older round have no result any more."""
        self._works.clear()

    def reset(self) -> None:
        """Called by hvd.shutdown()."""
        self.clear()
        self.reset_names()
        with self._lock:
            self._handle_counter = itertools.count(1)


_basics = HorovodBasics(__file__, "mpi_lib_v2")
_handles = HandleManager()

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product

OPS = {Average: Op.MEAN, Sum: Op.SUM, Adasum: Op.ADASUM, Min: Op.MIN, Max: Op.MAX, Product: Op.PRODUCT}

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
_first = operator.itemgetter(0)


def running_group(process_set: ProcessSet = global_process_set) -> Group:
    """The group of a process set. Raises HorovodInternalError before hvd.init(), as Horovod's collectives do."""
    if not _basics.is_initialized():
        raise HorovodInternalError(NOT_INITIALIZED)
    return group_of(process_set)


def _start(
    what: str,
    name: str | None,
    process_set: ProcessSet,
    function: Callable[..., Any],  # of ronde.torch.tensors
    *args: object,
    finish: Callable[[Any], Any] | None = None,
) -> int:
    """Start an operation and return its handle."""
    return _handles.add(_call(what, name, process_set, function, *args, wait=False), finish)


def _call(
    what: str,
    name: str | None,
    process_set: ProcessSet,
    function: Callable[..., Any],  # of ronde.torch.tensors
    *args: object,
    wait: bool,
) -> Any:  # the result, or a TensorWork
    group = running_group(process_set)
    full_name = f"{what}.{name}" if name is not None else _handles.make_name(what, group.id)
    try:
        with translate_errors():
            return function(group, *args, name=full_name, wait=wait)
    except TypeError as error:  # a dtype that cannot be exchanged
        raise ValueError(str(error)) from error


def _reduce_options(
    op: int, prescale_factor: float, postscale_factor: float, tensors: Sequence[Tensor]
) -> ReduceOptions:
    if op not in OPS:
        raise ValueError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max and Product, got {op!r}")
    if prescale_factor == postscale_factor == 1.0 or not tensors:  # as nearly always
        return ReduceOptions(OPS[op])
    dtype, factors = tensors[0].dtype, [prescale_factor, postscale_factor]
    if dtype.is_floating_point and dtype is not torch.float64:  # Horovod multiplies in float32
        factors = torch.tensor(factors, dtype=torch.float32).tolist()
    return ReduceOptions(OPS[op], *factors)


def _check_rows(what: str, tensors: Sequence[Tensor]) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError(f"{what} works on rows: it needs tensors of at least 1 dimension")


# --- those that return a handle ------------------------------------------------------------------------------------


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce into a new tensor. Returns a handle for poll() and synchronize()."""
    op = handle_average_backwards_compatibility(op, average)
    options = _reduce_options(op, prescale_factor, postscale_factor, [tensor])
    return _start("allreduce", name, process_set, allreduce_tensor, tensor, None, options)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As allreduce_async, in place."""
    op = handle_average_backwards_compatibility(op, average)
    options = _reduce_options(op, prescale_factor, postscale_factor, [tensor])
    return _start("allreduce", name, process_set, allreduce_tensor, tensor, tensor, options)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors as one operation."""
    op = handle_average_backwards_compatibility(op, average)
    options = _reduce_options(op, prescale_factor, postscale_factor, tensors)
    outs = [None] * len(tensors)
    return _start("grouped_allreduce", name, process_set, allreduce_tensors, tensors, outs, options)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """As grouped_allreduce_async, in place."""
    op = handle_average_backwards_compatibility(op, average)
    options = _reduce_options(op, prescale_factor, postscale_factor, tensors)
    return _start("grouped_allreduce", name, process_set, allreduce_tensors, tensors, tensors, options)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start a sum (or average) of sparse tensors. Returns a function that waits for the result."""
    group = running_group(process_set)
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if op == Average:
            all_values = all_values / group.size
        return torch.sparse_coo_tensor(all_indices.transpose(0, 1), all_values, tensor.shape, check_invariants=False)

    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to gather all ranks' rows."""
    _check_rows("allgather", [tensor])
    return _start("allgather", name, process_set, allgather_tensors, [tensor], finish=_first)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather all ranks' rows of several tensors."""
    _check_rows("grouped_allgather", tensors)
    return _start("grouped_allgather", name, process_set, allgather_tensors, tensors, finish=tuple)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to broadcast the root's tensor into a new one. root_rank is a rank of the world."""
    return _start("broadcast", name, process_set, broadcast_tensors, [tensor], [None], root_rank, finish=_first)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_async, in place."""
    return _start("broadcast", name, process_set, broadcast_tensors, [tensor], [tensor], root_rank, finish=_first)


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to exchange rows. synchronize() returns the received rows, and how many came from each rank."""
    device = torch.device("cpu")
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(f"splits must be a tensor of int32, got {splits.dtype}")
        device, splits = splits.device, splits.tolist()
    counts = list(splits) if splits is not None and len(splits) else None

    def finish(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], pair[1].to(device=device, dtype=torch.int32)

    return _start("alltoall", name, process_set, alltoall_tensor, tensor, counts, finish=finish)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce, and to scatter the rows."""
    options = _reducescatter_options(op, prescale_factor, postscale_factor, [tensor])
    return _start("reducescatter", name, process_set, reduce_scatter_tensors, [tensor], options, finish=_first)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """As reducescatter_async, for several tensors."""
    options = _reducescatter_options(op, prescale_factor, postscale_factor, tensors)
    return _start("grouped_reducescatter", name, process_set, reduce_scatter_tensors, tensors, options)


def _reducescatter_options(
    op: int, prescale_factor: float, postscale_factor: float, tensors: Sequence[Tensor]
) -> ReduceOptions:
    if op not in (Average, Sum):
        raise HorovodInternalError("reducescatter knows hvd.Average and hvd.Sum")
    _check_rows("reducescatter", tensors)
    return _reduce_options(op, prescale_factor, postscale_factor, tensors)


def poll(handle: int) -> bool:
    """Whether synchronize() would return at once."""
    return _handles.poll(handle)


def synchronize(handle: int) -> Any:  # a tensor, a list of them, or a pair
    """Wait for an operation and return its result; HorovodInternalError when it failed."""
    return _handles.synchronize(handle)


def join(device: int = -1) -> int:
    """Give zeros to the allreduces of others until all have joined. Returns the rank that joined last."""
    with translate_errors():
        last = running_group().join()
    _handles.reset_names()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every process of the set has called it."""
    with translate_errors():
        running_group(process_set).barrier(name="barrier.noname")


# --- gradients -----------------------------------------------------------------------------------------------------

_Run: TypeAlias = Callable[[Sequence[Tensor], "str | None"], "tuple[Tensor, ...]"]
"""Runs an operation of this name on some tensors."""


def _apply(function: type[Function], *args: Any) -> Any:  # as the function's forward()
    return function.apply(*args)


class HorovodAllreduce(Function):
    """Backward: the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        return run(tensors, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_apply(HorovodAllreduce, ctx.run, None, *grads))


class HorovodAllgather(Function):
    """Backward: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        gathered = run(tensors, name)
        ctx.num_rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        me = ctx.process_set.rank()
        rows = []
        for grad, num_rows in zip(grads, ctx.num_rows, strict=True):
            averaged = allreduce(grad, op=Average, process_set=ctx.process_set)
            counts = allgather(torch.tensor([num_rows]), process_set=ctx.process_set)
            start = int(counts[:me].sum())
            rows.append(averaged[start : start + num_rows])
        return (None, None, None, *rows)


class HorovodBroadcast(Function):
    """Backward: the average of the gradients for the root, zeros for the others."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        received: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        return averaged if _basics.rank() == ctx.root_rank else averaged * 0, None, None, None


class HorovodAlltoall(Function):
    """Backward: the gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        rows, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.num_rows, ctx.process_set = received.to(device="cpu"), tensor.shape[0], process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = _apply(HorovodAlltoall, grads[0], ctx.received, None, ctx.process_set)
        missing = ctx.num_rows - back.shape[0]
        if missing:
            back = torch.cat([back, back.new_zeros((missing, *back.shape[1:]))])
        return back, None, None, None


class HorovodReducescatter(Function):
    """Backward: all ranks' rows of the gradients, times `factor` and, of a sum, the number of ranks."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, name: str | None, op: int, factor: float, process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.op, ctx.factor, ctx.process_set = op, factor, process_set
        return run(tensors, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = ctx.factor * (ctx.process_set.size() if ctx.op == Sum else 1)
        rows = grouped_allgather([grad * factor for grad in grads], process_set=ctx.process_set)
        return (None, None, None, None, None, *rows)


# One class is for a tensor and for several.
HorovodGroupedAllreduce = HorovodAllreduce
HorovodGroupedAllgather = HorovodAllgather
HorovodGroupedReducescatter = HorovodReducescatter


# --- those that wait -----------------------------------------------------------------------------------------------


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction over all processes of the set, as a new tensor. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)

    def run(tensors: Sequence[Tensor], name: str | None) -> tuple[Tensor, ...]:
        options = _reduce_options(op, prescale_factor, postscale_factor, tensors)
        return (_call("allreduce", name, process_set, allreduce_tensor, tensors[0], None, options, wait=True),)

    small, context = compression.compress(tensor)
    return compression.decompress(_apply(HorovodAllreduce, run, name, small)[0], context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction in place."""
    op = handle_average_backwards_compatibility(op, average)
    options = _reduce_options(op, prescale_factor, postscale_factor, [tensor])
    reduced: Tensor = _call("allreduce", name, process_set, allreduce_tensor, tensor, tensor, options, wait=True)
    return reduced


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The reductions of several tensors, as one operation. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)

    def run(tensors: Sequence[Tensor], name: str | None) -> tuple[Tensor, ...]:
        handle = grouped_allreduce_async(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
        return tuple(synchronize(handle))

    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _apply(HorovodAllreduce, run, name, *[small for small, _ in pairs])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """The reductions of several tensors in place."""
    op = handle_average_backwards_compatibility(op, average)
    handle = grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    return tuple(synchronize(handle))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' rows, concatenated. Differentiable."""

    def run(tensors: Sequence[Tensor], name: str | None) -> tuple[Tensor, ...]:
        return (synchronize(allgather_async(tensors[0], name, process_set)),)

    gathered: Tensor = _apply(HorovodAllgather, run, name, process_set, tensor)[0]
    return gathered


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """All ranks' rows of several tensors. Differentiable."""

    def run(tensors: Sequence[Tensor], name: str | None) -> tuple[Tensor, ...]:
        return tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))

    return tuple(_apply(HorovodAllgather, run, name, process_set, *tensors))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, as a new one. Differentiable."""
    received: Tensor = _apply(HorovodBroadcast, tensor, root_rank, name, process_set)
    return received


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, in place."""
    received: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return received


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """The received rows; with splits also how many came from each rank. Differentiable."""
    rows, received = _apply(HorovodAlltoall, tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction. Differentiable."""

    def run(tensors: Sequence[Tensor], name: str | None) -> tuple[Tensor, ...]:
        return (synchronize(reducescatter_async(tensors[0], name, op, process_set, prescale_factor, postscale_factor)),)

    small, context = compression.compress(tensor)
    factor = prescale_factor * postscale_factor
    return compression.decompress(_apply(HorovodReducescatter, run, name, op, factor, process_set, small)[0], context)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of the reductions of several tensors. Differentiable."""

    def run(tensors: Sequence[Tensor], name: str | None) -> tuple[Tensor, ...]:
        handle = grouped_reducescatter_async(tensors, name, op, process_set, prescale_factor, postscale_factor)
        return tuple(synchronize(handle))

    pairs = [compression.compress(tensor) for tensor in tensors]
    factor = prescale_factor * postscale_factor
    rows = _apply(HorovodReducescatter, run, name, op, factor, process_set, *[small for small, _ in pairs])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(rows, pairs, strict=True)]


# --- beginning, end and places -------------------------------------------------------------------------------------


def init(*args: object, **kwargs: object) -> None:
    """Join the job; see HorovodBasics.init."""
    _handles.clear()
    _basics.init(*args, **kwargs)  # type: ignore[arg-type]  # the same arguments, whatever they are


def shutdown() -> None:
    """Leave the job. Does nothing before init(), which may be called again."""
    _basics.shutdown()
    _handles.reset()


def rejoin() -> None:
    """Join the next round of an elastic job; see HorovodBasics.rejoin."""
    _basics.rejoin()
    _handles.reset()


is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
is_master = _basics.is_master
is_homogeneous = _basics.is_homogeneous
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built
