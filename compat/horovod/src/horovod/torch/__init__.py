"""`import horovod.torch as hvd`: everything that scripts use, over ronde.torch."""

from __future__ import annotations

from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import check_extension
from horovod.torch import elastic as elastic  # hvd.elastic
from horovod.torch.compression import Compression
from horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import *  # noqa: F403  # the list is there, and once is enough
from horovod.torch.mpi_ops import __all__ as _collectives
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *[name for name in _collectives if not name.startswith(("Horovod", "handle_", "is_homogeneous"))],
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_extension",
]
