"""Horovod's collectives on arrays of MXNet, over ronde.mxnet, with init(), shutdown(), ranks and sizes.

What ends in _ works in place. Every operation has a name, given or counted, so ranks may start them in any order.
allreduce and broadcast return before they have run, in MXNet's engine; the others wait, because only then is the shape
of the result known. Errors are MXNet's.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mxnet as mx
import numpy as np

import ronde.mxnet
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import NOT_INITIALIZED, HorovodInternalError
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    group_of,
    remove_process_set,
)
from horovod.common.util import get_average_backwards_compatibility_fun
from ronde import Group
from ronde.errors import RondeError
from ronde.types import Op

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_basics = HorovodBasics(__file__, "mpi_lib")

Average = _basics.Average
Sum = _basics.Sum
Adasum = _basics.Adasum
Min = _basics.Min
Max = _basics.Max
Product = _basics.Product

OPS = {Average: Op.MEAN, Sum: Op.SUM, Min: Op.MIN, Max: Op.MAX, Product: Op.PRODUCT}

_find_op = get_average_backwards_compatibility_fun(_basics)


class CollectiveError(HorovodInternalError, mx.MXNetError):  # type: ignore[misc]  # MXNet has no types
    """An operation that could not be done: Horovod's error and MXNet's at once."""


@contextmanager
def mxnet_errors() -> Iterator[None]:
    """Raise ronde's errors as those that Horovod's operations raise."""
    try:
        yield
    except (RondeError, ValueError, TypeError) as error:
        raise CollectiveError(str(error)) from error


class NameCounters:
    """Names for operations without one. They are counted per kind of operation and group, so members need to have the
    same order among those only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)

    def make_name(self, what: str, name: str | None, group: Group) -> str:
        if name is not None:
            return f"{what}.{name}"
        with self._lock:
            return f"{what}.noname.{next(self._counters[what, group.id])}"

    def reset(self) -> None:
        with self._lock:
            self._counters.clear()


_names = NameCounters()


def running_group(process_set: ProcessSet = global_process_set) -> Group:
    """The group of a process set. Raises HorovodInternalError before hvd.init(), as Horovod's collectives do."""
    if not _basics.is_initialized():
        raise CollectiveError(NOT_INITIALIZED)
    return group_of(process_set)


def _choose_op(op: int | None, average: bool | None) -> Op:
    found = _find_op(op, average)
    assert found != Adasum, "MXNet does not support Adasum"
    assert found in OPS, f"op must be one of Average, Sum, Min, Max and Product, got {op!r}"
    return OPS[found]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """The mean of the ranks' arrays, or what op says, in a new array."""
    reduce_op, scales = _choose_op(op, average), (prescale_factor, postscale_factor)
    return _allreduce([tensor], None, name, priority, scales, process_set, reduce_op)[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """As allreduce(), in place."""
    reduce_op, scales = _choose_op(op, average), (prescale_factor, postscale_factor)
    return _allreduce([tensor], [tensor], name, priority, scales, process_set, reduce_op)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """allreduce() of arrays that travel together."""
    if not tensors:
        return tensors
    reduce_op, scales = _choose_op(op, average), (prescale_factor, postscale_factor)
    return _allreduce(list(tensors), None, name, priority, scales, process_set, reduce_op)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """As grouped_allreduce(), in place."""
    if not tensors:
        return tensors
    reduce_op, scales = _choose_op(op, average), (prescale_factor, postscale_factor)
    _allreduce(list(tensors), list(tensors), name, priority, scales, process_set, reduce_op)
    return tensors


def _allreduce(
    tensors: list[Any],
    outs: list[Any] | None,
    name: str | None,
    priority: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    op: Op,
) -> list[Any]:
    group = running_group(process_set)
    options: dict[str, Any] = {"prescale": scales[0], "postscale": scales[1], "priority": priority}
    with mxnet_errors():
        found: list[Any] = ronde.mxnet.allreduce(
            tensors,
            op=op,
            out=outs,
            group=group,
            name=_names.make_name("allreduce", name, group),
            wait=False,
            **options,
        )
    return found


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """The arrays of all ranks, concatenated along the first dimension, in which they may differ."""
    return grouped_allgather([tensor], name, priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """allgather() of arrays that travel together."""
    if not tensors:
        return tensors
    group = running_group(process_set)
    with mxnet_errors():
        return ronde.mxnet.allgather(list(tensors), group=group, name=_names.make_name("allgather", name, group))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The array of the root, in a new array."""
    return _broadcast(tensor, None, root_rank, name, priority, process_set)


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As broadcast(), in place."""
    return _broadcast(tensor, tensor, root_rank, name, priority, process_set)


def _broadcast(tensor: Any, out: Any, root_rank: int, name: str | None, priority: int, process_set: ProcessSet) -> Any:
    group = running_group(process_set)
    name = _names.make_name("broadcast", name, group)
    with mxnet_errors():
        return ronde.mxnet.broadcast(
            tensor, root=root_rank, out=out, group=group, name=name, priority=priority, wait=False
        )


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send splits[i] rows to rank i. The received rows; with splits given also how many came from each rank."""
    group = running_group(process_set)
    counts = splits
    if splits is not None and not isinstance(splits, mx.nd.NDArray):
        counts = mx.nd.array(splits, dtype="int32")
    if counts is not None and np.dtype(counts.dtype) != np.int32:
        raise ValueError(f"alltoall: splits must be whole numbers of 32 bits, got {counts.dtype}")
    with mxnet_errors():
        rows, received = ronde.mxnet.alltoall(
            tensor, splits=counts, group=group, name=_names.make_name("alltoall", name, group)
        )
    return rows if splits is None else (rows, received.astype("int32"))


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduced array."""
    factors = (prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], op, name, priority, process_set, *factors)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """reducescatter() of several arrays."""
    assert op in (Average, Sum), "op must be Average or Sum"
    if not tensors:
        return tensors
    if any(not tensor.shape for tensor in tensors):
        raise ValueError("reducescatter: a scalar has no rows to share out")
    group = running_group(process_set)
    options: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    with mxnet_errors():
        return ronde.mxnet.reduce_scatter(
            list(tensors), op=OPS[op], group=group, name=_names.make_name("reducescatter", name, group), **options
        )


def shutdown() -> None:
    """Leave the job."""
    _basics.shutdown()
    _names.reset()


init = _basics.init
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
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
