"""Distributed training with TensorFlow.

    import ronde
    import ronde.tensorflow

    ronde.init()
    tape = ronde.tensorflow.DistributedGradientTape(tape)

The guide is docs/guides/tensorflow.md.
"""

from __future__ import annotations

import ronde.tensorflow.elastic_state  # noqa: F401 - registers the parts of an elastic State
from ronde.tensorflow.async_optimizer import AsyncVariableOptimizer as AsyncOptimizer
from ronde.tensorflow.broadcast_state import allgather_object, broadcast_object, broadcast_variables
from ronde.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    join,
    local_rank_op,
    local_size_op,
    rank_op,
    reduce_scatter,
    size_op,
)
from ronde.tensorflow.gradients import reduce_gradients
from ronde.tensorflow.optimizer import DistributedGradientTape, DistributedOptimizer
from ronde.tensorflow.sharding import ShardedDataset, shard
from ronde.tensorflow.stream_dataset import stream_dataset
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.graph_errors import find_error
from ronde.training.metrics import average_metrics

__all__ = [
    "AsyncOptimizer",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GradientSettings",
    "ShardedDataset",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "find_error",
    "join",
    "local_rank_op",
    "local_size_op",
    "rank_op",
    "reduce_gradients",
    "reduce_scatter",
    "shard",
    "size_op",
    "stream_dataset",
]
