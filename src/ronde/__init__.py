"""Distributed deep-learning training that says which rank, where and why.

    import ronde

    ronde.init()
    mean = ronde.allreduce(gradient, op="mean")

Start it with `ronde run -np 4 python train.py`; a plain `python train.py` is a job of one rank.
"""

from __future__ import annotations

from ronde import errors
from ronde.comm import objects
from ronde.comm.buffers import Bfloat16View
from ronde.comm.collectives import (
    add_group,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    cross_rank,
    cross_size,
    events,
    groups,
    join,
    local_rank,
    local_size,
    metrics,
    plan,
    rank,
    receive,
    reduce_scatter,
    remove_group,
    send,
    size,
    world,
)
from ronde.comm.current import init, is_initialized, shutdown
from ronde.comm.group import Group
from ronde.comm.plan import Bucket, Plan
from ronde.comm.work import Work
from ronde.errors import (
    Mismatch,
    NotInitialized,
    OperationTimeout,
    PeerLost,
    ProtocolError,
    RondeError,
    RoundEnded,
    StartFailed,
)

__all__ = [
    "Bfloat16View",
    "Bucket",
    "Group",
    "Mismatch",
    "NotInitialized",
    "OperationTimeout",
    "PeerLost",
    "Plan",
    "ProtocolError",
    "RondeError",
    "RoundEnded",
    "StartFailed",
    "Work",
    "__version__",
    "add_group",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "cross_rank",
    "cross_size",
    "errors",
    "events",
    "groups",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "metrics",
    "objects",
    "plan",
    "rank",
    "receive",
    "reduce_scatter",
    "remove_group",
    "send",
    "shutdown",
    "size",
    "world",
]

__version__ = "0.1.0"
