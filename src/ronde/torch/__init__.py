"""Distributed training with PyTorch.

    import ronde
    import ronde.torch

    ronde.init()
    optimizer = ronde.torch.DistributedOptimizer(optimizer)

The guide is docs/guides/pytorch.md.
"""

from __future__ import annotations

import ronde.torch.elastic_state  # noqa: F401 - registers the parts of an elastic State
from ronde.errors import CheckpointError, OutOfSync
from ronde.torch.async_optimizer import AsyncOptimizer
from ronde.torch.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from ronde.torch.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ronde.torch.checkpoints import Checkpoints, Restored
from ronde.torch.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from ronde.torch.learning_rate import cosine, milestones, scale_lr, warmup
from ronde.torch.local_sgd import LocalSGD
from ronde.torch.optimizer import Distributed, DistributedOptimizer
from ronde.torch.samplers import ElasticBatchSampler, ShardedSampler
from ronde.torch.sharded_embedding import ShardedEmbedding
from ronde.torch.stream_dataset import StreamDataset
from ronde.torch.sync_check import SyncCheck, check_in_sync
from ronde.torch.tensors import TensorWork
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.metrics import average_metrics

__all__ = [
    "AsyncOptimizer",
    "CheckpointError",
    "Checkpoints",
    "Distributed",
    "DistributedOptimizer",
    "ElasticBatchSampler",
    "GradientSettings",
    "LocalSGD",
    "OutOfSync",
    "Restored",
    "ShardedEmbedding",
    "ShardedSampler",
    "StreamDataset",
    "SyncBatchNorm",
    "SyncCheck",
    "TensorWork",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_in_sync",
    "convert_sync_batchnorm",
    "cosine",
    "gather",
    "milestones",
    "reduce",
    "reduce_scatter",
    "scale_lr",
    "scatter",
    "warmup",
]
