"""Distributed deep-learning training that says which rank, where and why.

    import ronde

    ronde.init()
    mean = ronde.allreduce(gradient, op="mean")

Start it with `ronde run -np 4 python train.py`; a plain `python train.py` is a job of one rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ronde import errors
from ronde.version import __version__

if TYPE_CHECKING:
    from ronde.comm import objects
    from ronde.comm.buffers import Bfloat16View
    from ronde.comm.call import Memory
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
        gather,
        groups,
        join,
        local_rank,
        local_size,
        mark_step,
        metrics,
        plan,
        rank,
        receive,
        reduce,
        reduce_scatter,
        remove_group,
        scatter,
        send,
        size,
        start_timeline,
        stop_timeline,
        world,
    )
    from ronde.comm.group import Group
    from ronde.comm.mailbox import Mailbox, MailboxMessage, MailboxReply
    from ronde.comm.plan import Bucket, Plan
    from ronde.comm.work import Work
    from ronde.comm.world import init, is_initialized, shutdown
    from ronde.errors import (
        JobFailed,
        Mismatch,
        NotInitialized,
        OperationTimeout,
        PeerLost,
        ProtocolError,
        RondeError,
        RoundEnded,
        StartFailed,
    )
    from ronde.launch.function import run
    from ronde.launch.job import SshOptions
    from ronde.launch.placement import Host

__all__ = [
    "Bfloat16View",
    "Bucket",
    "Group",
    "Host",
    "JobFailed",
    "Mailbox",
    "MailboxMessage",
    "MailboxReply",
    "Memory",
    "Mismatch",
    "NotInitialized",
    "OperationTimeout",
    "PeerLost",
    "Plan",
    "ProtocolError",
    "RondeError",
    "RoundEnded",
    "SshOptions",
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
    "gather",
    "groups",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mark_step",
    "metrics",
    "objects",
    "plan",
    "rank",
    "receive",
    "reduce",
    "reduce_scatter",
    "remove_group",
    "run",
    "scatter",
    "send",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
]


def __getattr__(name: str) -> object:
    """Load everything when the first name is used. Who needs only a part of the package, such as an agent that a driver
    waits for, does not wait for NumPy."""
    if name in ("elastic", "ps", "search"):  # packages above this one, of which users say ronde.elastic and ronde.ps
        return importlib.import_module(f"ronde.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("Host", "SshOptions", "run"):  # apart: ranks do not start ranks
        from ronde.launch import function

        return getattr(function, name)
    from ronde.comm import buffers, collectives, group, mailbox, objects, plan, work
    from ronde.comm import world as world_module

    found: dict[str, object] = {"objects": objects}
    for home in (errors, buffers, collectives, world_module, group, mailbox, plan, work):
        found |= {each: getattr(home, each) for each in __all__ if hasattr(home, each)}
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    """For completion at a prompt."""
    return sorted({*globals(), *__all__})
