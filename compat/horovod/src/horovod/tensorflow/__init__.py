"""`import horovod.tensorflow as hvd`: everything that scripts use, over ronde.tensorflow and ronde.keras."""

from __future__ import annotations

from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import check_extension, gpu_available, split_list
from horovod.tensorflow import elastic as elastic  # hvd.elastic
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper as LocalGradientAggregationHelper
from horovod.tensorflow.mpi_ops import *  # noqa: F403  # the list is there, and once is enough
from horovod.tensorflow.mpi_ops import __all__ as _collectives
from horovod.tensorflow.optimizer import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    _DistributedAdasumOptimizer,
    _DistributedOptimizer,
)
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph, refs_to_vars, vars_to_refs

__all__ = [
    *[name for name in _collectives if not name.startswith(("handle_", "check_num"))],
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_extension",
    "gpu_available",
    "refs_to_vars",
    "split_list",
    "vars_to_refs",
]

# Names with an underscore that scripts use.
_PRIVATE = (_DistributedAdasumOptimizer, _DistributedOptimizer, _cache, _executing_eagerly, _make_subgraph)
