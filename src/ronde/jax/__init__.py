"""Distributed training with JAX.

    import ronde
    import ronde.jax

    ronde.init()
    optimizer = optax.chain(ronde.jax.average_gradients(), optax.adam(1e-3))
    params = ronde.jax.broadcast_parameters(params)

The guide is docs/guides/jax.md.
"""

from __future__ import annotations

import ronde.jax.cluster
import ronde.jax.elastic_state  # noqa: F401 - registers trees of an elastic State, as the line before the cluster
from ronde.jax.async_optimizer import AsyncTreeOptimizer as AsyncOptimizer
from ronde.jax.broadcast_state import (
    allgather_object,
    average_metrics,
    broadcast_object,
    broadcast_parameters,
    check_in_sync,
)
from ronde.jax.checkpoints import TreeCheckpoints as Checkpoints
from ronde.jax.collectives import allgather, allreduce, alltoall, barrier, broadcast, reduce_scatter
from ronde.jax.gradients import average_gradients, value_and_grad
from ronde.jax.sharding import ShardedTree, shard
from ronde.training.graph_errors import find_error

__all__ = [
    "AsyncOptimizer",
    "Checkpoints",
    "ShardedTree",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_gradients",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "check_in_sync",
    "find_error",
    "reduce_scatter",
    "shard",
    "value_and_grad",
]
