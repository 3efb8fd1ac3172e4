"""`import horovod.tensorflow.keras as hvd`: everything that scripts with Keras use, over ronde.keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod._keras import create_distributed_optimizer
from horovod._keras.keras2 import evaluate
from horovod._keras.saved_models import load_model as _load_model
from horovod.common.exceptions import translate_errors
from horovod.tensorflow import (
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_initialized,
    is_master,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.tensorflow.compression import Compressor
from horovod.tensorflow.gradients import check_groups
from horovod.tensorflow.keras import callbacks, elastic

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "is_master",
    "load_model",
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


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # an optimizer of a class made for it
    """The Keras optimizer, made to average gradients over the ranks before it uses them. The devices have no effect.

    The gradients of backward_passes_per_step passes are added up, or averaged, before they are reduced.
    """
    return create_distributed_optimizer(
        keras=keras,
        optimizer=optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=check_groups(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def broadcast_global_variables(root_rank: int) -> Any:
    """Give the root's values to all global variables of the graph; see hvd.callbacks for models."""
    return evaluate(hvd.broadcast_global_variables(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
) -> Any:
    """The reduction of a value, such as a number or an array, over all ranks, as a tensor. In a graph, an array."""
    return evaluate(
        hvd.allreduce(
            tf.constant(value),
            average=average,
            compression=compression,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """The rows of all ranks' values."""
    return evaluate(hvd.allgather(tf.constant(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's value."""
    return evaluate(hvd.broadcast(tf.constant(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """This rank's rows of the reduction of a value."""
    return evaluate(hvd.reducescatter(tf.constant(value), op=op, name=name))


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: type[Compressor] | Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that model.save() has written, with its optimizer made distributed. legacy_opts has no effect."""

    def wrap_optimizer(optimizer: Any) -> Any:
        return DistributedOptimizer(optimizer, compression=compression)

    with translate_errors():
        return _load_model(tf.keras, wrap_optimizer, filepath, custom_optimizers, custom_objects)
