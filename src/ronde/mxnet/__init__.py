"""Distributed training with MXNet.

    import ronde
    import ronde.mxnet

    ronde.init()
    trainer = ronde.mxnet.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    trainer.broadcast_parameters()

The guide is docs/guides/mxnet.md.
"""

from __future__ import annotations

import ronde.mxnet.elastic_state  # noqa: F401 - registers the parts of an elastic State
from ronde.mxnet.async_trainer import AsyncTrainer
from ronde.mxnet.broadcast_state import allgather_object, average_metrics, broadcast_object, broadcast_parameters
from ronde.mxnet.collectives import allgather, allreduce, alltoall, barrier, broadcast, join, reduce_scatter
from ronde.mxnet.sharding import ShardedBatches
from ronde.mxnet.trainer import DistributedOptimizer, DistributedTrainer
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.graph_errors import find_error
from ronde.training.sample_sharding import SampleShard as ShardedSampler

__all__ = [
    "AsyncTrainer",
    "DistributedOptimizer",
    "DistributedTrainer",
    "GradientSettings",
    "ShardedBatches",
    "ShardedSampler",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "find_error",
    "join",
    "reduce_scatter",
]
