"""Horovod's collectives on tensors of TensorFlow, over ronde.tensorflow, with init(), shutdown(), ranks and sizes.

Gradients are as Horovod defines them: that of an allgather or a broadcast is averaged over the ranks where ronde's is
summed, and that of a reducescatter is larger than ronde's by the number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import ronde.tensorflow
from horovod.common.basics import HorovodBasics
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    group_of,
    process_set_table,
    remove_process_set,
)
from horovod.common.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.errors import tensorflow_errors
from horovod.tensorflow.util import _executing_eagerly, tensorflow_variable, without_autograph
from ronde import Group
from ronde.tensorflow.tracing import unique_in_graph
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
    "alltoall",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "is_master",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
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

OPS = {Average: Op.MEAN, Sum: Op.SUM, Adasum: Op.ADASUM, Min: Op.MIN, Max: Op.MAX, Product: Op.PRODUCT}

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Horovod's Adasum needed that; ronde's does not."""
    return num_rank_is_power_2(num_rank)


# --- names ---------------------------------------------------------------------------------------------------------

_LIBRARIES = (
    *(f"{Path(sys.modules[name].__file__ or '').parent}/" for name in ("ronde", "tensorflow")),
    *(f"{Path(__file__).parents[1]}/", "/keras/src/", "/tf_keras/", "<"),
)


def call_site() -> str:
    """Where the script has called hvd, as file:line:function; empty if all callers are libraries.
    Of code that AutoGraph has converted, the file is not part of it: its name is another one in each process."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in _LIBRARIES):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
    if file.startswith("__autograph_generated_file"):
        file, function = "autograph", function.removeprefix("tf__")
    return f"{file}:{frame.f_lineno}:{function}"


def operation_name(kind: str, name: str | None) -> str | None:
    """The name by which an operation is matched: in a graph the given one or the place of the call, each of them once,
    and eagerly the given one; None: by the order of the calls."""
    if _executing_eagerly():
        return name
    return unique_in_graph(name or f"{kind} {call_site()}", is_given=bool(name))


# --- collectives ---------------------------------------------------------------------------------------------------


def _check_op(op: int) -> Op:
    if op not in OPS:
        raise ValueError(f"op must be one of hvd.Average, Sum, Adasum, Min, Max and Product, got {op!r}")
    return OPS[op]


def _round_scales(scales: tuple[float, float], tensors: Sequence[Any]) -> tuple[float, float]:
    """The factors as Horovod multiplies with them: in float32, but in float64 for whole numbers and float64."""
    dtypes = {tensor.dtype for tensor in tensors}
    if scales == (1.0, 1.0) or not all(dtype.is_floating and dtype != tf.float64 for dtype in dtypes):
        return scales
    return float(np.float32(scales[0])), float(np.float32(scales[1]))


def _scale_gradient(tensor: Any, group: Group, power: int) -> Any:
    """The tensor; its gradient is multiplied with the number of members to this power."""

    def scaled(x: Any) -> tuple[Any, Any]:
        def backward(grad: Any) -> Any:
            size = tf.cast(ronde.tensorflow.size_op(group=group), grad.dtype)
            return grad * size if power > 0 else grad / size

        return tf.identity(x), backward

    tensor = tf.convert_to_tensor(tensor)
    return tf.custom_gradient(scaled)(tensor) if tensor.dtype.is_floating else tensor


@without_autograph
def allreduce(
    tensor: Any,  # or IndexedSlices
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of a tensor, or the sum or average of IndexedSlices. Differentiable. The devices have no effect."""
    op = handle_average_backwards_compatibility(op, average)
    scales = (prescale_factor, postscale_factor)
    return _allreduce_list([tensor], op, compression, scales, operation_name("allreduce", name), process_set)[0]


@without_autograph
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """The reductions of several tensors, as one operation. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    if not tensors:
        return tensors
    scales = (prescale_factor, postscale_factor)
    full_name = operation_name("grouped_allreduce", name)
    return _allreduce_list(list(tensors), op, compression, scales, full_name, process_set)


def _allreduce_list(
    tensors: list[Any],
    op: int,
    compression: type[Compressor] | Compressor,
    scales: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    wanted = _check_op(op)
    contexts: list[Any] = [None] * len(tensors)
    sent = []
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            if op not in (Average, Sum):
                raise NotImplementedError(f"IndexedSlices can be summed and averaged, not reduced by {wanted.name}")
            if scales != (1.0, 1.0):
                raise NotImplementedError("prescale_factor and postscale_factor do not work with IndexedSlices")
            values = tf.convert_to_tensor(tensor.values)
            if op == Average and values.dtype.is_integer:  # Horovod's averages of them have fractions
                values = tf.truediv(values, tf.ones([], values.dtype))
            sent.append(tf.IndexedSlices(values, tensor.indices, tensor.dense_shape))
        else:
            small, contexts[index] = compression.compress(tf.convert_to_tensor(tensor))
            sent.append(small)
    group = group_of(process_set)
    scales = _round_scales(scales, sent)
    with tensorflow_errors():
        reduced = ronde.tensorflow.allreduce(
            sent, op=wanted, group=group, name=name, prescale=scales[0], postscale=scales[1]
        )
    return [
        each if isinstance(each, tf.IndexedSlices) else compression.decompress(each, context)
        for each, context in zip(reduced, contexts, strict=True)
    ]


@without_autograph
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """All ranks' rows, concatenated. Differentiable."""
    return _allgather_list([tensor], operation_name("allgather", name), process_set)[0]


@without_autograph
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """All ranks' rows of several tensors. Differentiable."""
    if not tensors:
        return []
    return _allgather_list(list(tensors), operation_name("grouped_allgather", name), process_set)


def _allgather_list(tensors: list[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    group = group_of(process_set)
    scaled = [_scale_gradient(tensor, group, -1) for tensor in tensors]
    with tensorflow_errors():
        gathered: list[Any] = ronde.tensorflow.allgather(scaled, group=group, name=name)
    return gathered


@without_autograph
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's tensor. root_rank is a rank of the world. Differentiable."""
    group = group_of(process_set)
    scaled = _scale_gradient(tensor, group, -1)
    with tensorflow_errors():
        return ronde.tensorflow.broadcast(scaled, root=root_rank, group=group, name=operation_name("broadcast", name))


@without_autograph
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Give the root's values to the variables, and return them."""
    variables = list(variables)
    if not variables:
        return []
    inner = [tensorflow_variable(variable) for variable in variables]
    if len({is_resource_variable(variable) for variable in inner}) > 1:
        raise ValueError("broadcast_ takes resource variables or ref variables, not both in one call")
    group = group_of(process_set)
    full_name = operation_name("broadcast_", name)
    with tensorflow_errors():
        values = ronde.tensorflow.broadcast(
            [tf.convert_to_tensor(variable) for variable in inner], root=root_rank, group=group, name=full_name
        )
    assigned = [variable.assign(value) for variable, value in zip(inner, values, strict=True)]
    with tf.control_dependencies([] if _executing_eagerly() else assigned):
        return [tf.identity(variable) for variable in inner]


def is_resource_variable(variable: Any) -> bool:
    return bool(getattr(variable, "dtype", None) is not None and not getattr(variable.dtype, "_is_ref_dtype", False))


@without_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The received rows; with splits also how many came from each rank. Differentiable."""
    group = group_of(process_set)
    with tensorflow_errors():
        rows, received = ronde.tensorflow.alltoall(
            tensor, splits=splits, group=group, name=operation_name("alltoall", name)
        )
    return rows if splits is None else (rows, tf.cast(received, tf.int32))


@without_autograph
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """This rank's rows of the reduction. Differentiable."""
    scales = (prescale_factor, postscale_factor)
    return _reducescatter_list([tensor], op, compression, scales, operation_name("reducescatter", name), process_set)[0]


@without_autograph
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """This rank's rows of the reductions of several tensors. Differentiable."""
    if not tensors:
        return []
    scales = (prescale_factor, postscale_factor)
    full_name = operation_name("grouped_reducescatter", None)
    return _reducescatter_list(list(tensors), op, compression, scales, full_name, process_set)


def _reducescatter_list(
    tensors: list[Any],
    op: int,
    compression: type[Compressor] | Compressor,
    scales: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    if op not in (Average, Sum):
        raise NotImplementedError("reducescatter sums or averages: op is hvd.Sum or hvd.Average")
    group = group_of(process_set)
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    sent = [_scale_gradient(small, group, 1) for small, _ in pairs]
    scales = _round_scales(scales, sent)
    with tensorflow_errors():
        rows = ronde.tensorflow.reduce_scatter(
            sent, op=OPS[op], group=group, name=name, prescale=scales[0], postscale=scales[1]
        )
    return [compression.decompress(each, context) for each, (_, context) in zip(rows, pairs, strict=True)]


@without_autograph
def join() -> Any:
    """Contribute zeros to the allreduces of the others until all have joined. Returns the rank that joined last."""
    with tensorflow_errors():
        return ronde.tensorflow.join()


# --- ranks and sizes when a graph runs -------------------------------------------------------------------------------


@without_autograph
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """The number of ranks when it runs, as a tensor of int32."""
    return ronde.tensorflow.size_op(group=process_set_table.group(process_set_id))


@without_autograph
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """1 if this rank is a member of the process set, else 0."""
    return tf.constant(int(process_set_table.group(process_set_id).included), tf.int32)


@without_autograph
def local_size_op(name: str | None = None) -> Any:
    """The number of ranks on this host when it runs."""
    with tensorflow_errors():
        return ronde.tensorflow.local_size_op()


@without_autograph
def rank_op(name: str | None = None) -> Any:
    """The rank when it runs."""
    with tensorflow_errors():
        return ronde.tensorflow.rank_op()


@without_autograph
def local_rank_op(name: str | None = None) -> Any:
    """The number of this rank among those of its host when it runs."""
    with tensorflow_errors():
        return ronde.tensorflow.local_rank_op()


# --- beginning, end and places -------------------------------------------------------------------------------------

init = _basics.init
shutdown = _basics.shutdown
rejoin = _basics.rejoin
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
