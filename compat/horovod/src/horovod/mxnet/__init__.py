"""`import horovod.mxnet as hvd`: everything that scripts use, over ronde.mxnet."""

from __future__ import annotations

from horovod.common.util import check_extension, split_list
from horovod.mxnet.compression import Compression
from horovod.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters
from horovod.mxnet.mpi_ops import *  # noqa: F403  # the list is there, and once is enough
from horovod.mxnet.mpi_ops import __all__ as _collectives
from horovod.mxnet.trainer import DistributedOptimizer, DistributedTrainer

__all__ = [
    *_collectives,
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "check_extension",
    "split_list",
]
