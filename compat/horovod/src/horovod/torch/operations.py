"""Horovod's collectives that return a handle at once, on PyTorch tensors, over ronde.torch; poll() and synchronize().

Every operation has a name, given or counted, so ranks may start them in any order.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import NOT_INITIALIZED, HorovodInternalError, translate_errors
from horovod.common.process_sets import ProcessSet, global_process_set, group_of
from horovod.common.util import get_average_backwards_compatibility_fun
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
    "HandleManager",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather_async",
    "allreduce_async",
    "allreduce_async_",
    "alltoall_async",
    "barrier",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "join",
    "poll",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


class _HandleWork(NamedTuple):
    """An operation under way, and what converts its result into Horovod's."""

    work: TensorWork
    finish: Callable[[Any], Any]


class HandleManager:
    """The operations under way by handle. Handles are counted from 1; hvd.shutdown() resets the counter."""

    def __init__(self) -> None:
        self._works: dict[int, _HandleWork] = {}
        self._lock = threading.Lock()
        self._handle_counter = itertools.count(1)
        self._name_counters: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def make_name(self, what: str, group: int) -> str:
        """A name for an operation without one. It is counted per kind of operation and group, so members need to have
        the same order among those only."""
        with self._lock:
            return f"{what}.noname.{next(self._name_counters[what, group])}"

    def add(self, work: TensorWork, finish: Callable[[Any], Any]) -> int:
        with self._lock:
            handle = next(self._handle_counter)
            self._works[handle] = _HandleWork(work, finish)
        return handle

    def poll(self, handle: int) -> bool:
        """Whether synchronize() would return at once."""
        running = self._works.get(handle)
        if running is None:
            raise ValueError(f"handle {handle} was not created, or was synchronized before")
        return running.work.done()

    def synchronize(self, handle: int) -> Any:  # a tensor, a list of them, or a pair
        """Wait for the result. An unknown handle gives None, as in Horovod."""
        running = self._works.pop(handle, None)
        if running is None:
            return None
        with translate_errors():
            return running.finish(running.work.wait())

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
        with self._lock:
            self._works.clear()
            self._name_counters.clear()
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


def running_group(process_set: ProcessSet = global_process_set) -> Group:
    """The group of a process set. Raises HorovodInternalError before hvd.init(), as Horovod's collectives do."""
    if not _basics.is_initialized():
        raise HorovodInternalError(NOT_INITIALIZED)
    return group_of(process_set)


def _reduce_options(
    op: int, prescale_factor: float, postscale_factor: float, tensors: Sequence[Tensor]
) -> ReduceOptions:
    if op not in OPS:
        raise ValueError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max and Product, got {op!r}")
    if prescale_factor == postscale_factor == 1.0 or not tensors:  # as nearly always
        return ReduceOptions(OPS[op])
    dtype = tensors[0].dtype
    return ReduceOptions(OPS[op], _round_factor(dtype, prescale_factor), _round_factor(dtype, postscale_factor))


def _round_factor(dtype: torch.dtype, factor: float) -> float:
    """The factor in the precision in which Horovod multiplies: float32 for floats up to float32, else float64."""
    narrow = dtype.is_floating_point and dtype is not torch.float64
    return torch.tensor(factor, dtype=torch.float32).item() if narrow else factor


def _first(results: list[Tensor]) -> Tensor:
    return results[0]


def _unchanged(result: Any) -> Any:  # a tensor, or a list of them
    return result


def _start(
    what: str,
    name: str | None,
    process_set: ProcessSet,
    start: Callable[[Group, str], TensorWork],
    finish: Callable[[Any], Any] = _unchanged,
) -> int:
    """Start an operation and return its handle."""
    group = running_group(process_set)
    full_name = f"{what}.{name}" if name is not None else _handles.make_name(what, group.id)
    try:
        with translate_errors():
            work = start(group, full_name)
    except TypeError as error:  # a dtype that cannot be exchanged
        raise ValueError(str(error)) from error
    return _handles.add(work, finish)


def _start_allreduce(
    tensor: Tensor, out: Tensor | None, name: str | None, options: ReduceOptions, process_set: ProcessSet
) -> int:
    return _start(
        "allreduce",
        name,
        process_set,
        lambda group, name: allreduce_tensor(group, tensor, out, options, name=name, wait=False),
    )


def _start_grouped_allreduce(
    tensors: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    name: str | None,
    options: ReduceOptions,
    process_set: ProcessSet,
) -> int:
    return _start(
        "grouped_allreduce",
        name,
        process_set,
        lambda group, name: allreduce_tensors(group, tensors, outs, options, name=name, wait=False),
    )


# --- allreduce -----------------------------------------------------------------------------------------------------


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
    return _start_allreduce(tensor, None, name, options, process_set)


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
    return _start_allreduce(tensor, tensor, name, options, process_set)


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
    return _start_grouped_allreduce(tensors, [None] * len(tensors), name, options, process_set)


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
    return _start_grouped_allreduce(tensors, tensors, name, options, process_set)


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


# --- the others ----------------------------------------------------------------------------------------------------


def _check_rows(what: str, tensors: Sequence[Tensor]) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise HorovodInternalError(f"{what} works on rows: it needs tensors of at least 1 dimension")


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to gather all ranks' rows."""
    _check_rows("allgather", [tensor])
    return _start(
        "allgather",
        name,
        process_set,
        lambda group, name: allgather_tensors(group, [tensor], name=name, wait=False),
        _first,
    )


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather all ranks' rows of several tensors."""
    _check_rows("grouped_allgather", tensors)
    return _start(
        "grouped_allgather",
        name,
        process_set,
        lambda group, name: allgather_tensors(group, tensors, name=name, wait=False),
        tuple,
    )


def _broadcast(tensor: Tensor, out: Tensor | None, root_rank: int, name: str | None, process_set: ProcessSet) -> int:
    return _start(
        "broadcast",
        name,
        process_set,
        lambda group, name: broadcast_tensors(group, [tensor], [out], root_rank, name=name, wait=False),
        _first,
    )


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to broadcast the root's tensor into a new one. root_rank is a rank of the job."""
    return _broadcast(tensor, None, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """As broadcast_async, in place."""
    return _broadcast(tensor, tensor, root_rank, name, process_set)


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to exchange rows. synchronize() returns the received rows, and how many came from each rank."""
    given = _splits(splits)

    def finish(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, received = pair
        device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
        return rows, received.to(device=device, dtype=torch.int32)

    return _start(
        "alltoall",
        name,
        process_set,
        lambda group, name: alltoall_tensor(group, tensor, given, name=name, wait=False),
        finish,
    )


def _splits(splits: Sequence[int] | Tensor | None) -> list[int] | None:
    if isinstance(splits, Tensor):
        if splits.dtype != torch.int32:
            raise ValueError(f"splits must be a tensor of int32, got {splits.dtype}")
        splits = splits.tolist()
    return list(splits) if splits is not None and len(splits) else None


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
    return _start(
        "reducescatter",
        name,
        process_set,
        lambda group, name: reduce_scatter_tensors(group, [tensor], options, name=name, wait=False),
        _first,
    )


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
    return _start(
        "grouped_reducescatter",
        name,
        process_set,
        lambda group, name: reduce_scatter_tensors(group, tensors, options, name=name, wait=False),
        list,
    )


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
