"""Distributed training with MXNet."""

from __future__ import annotations

from ronde.mxnet.collectives import allgather, allreduce, alltoall, barrier, broadcast, join, reduce_scatter
from ronde.training.carried_errors import find_error

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "find_error",
    "join",
    "reduce_scatter",
]
