"""The seam between collectives and what moves the bytes: native (C++), threads (tests), mpi, and one day nccl.

A backend opens *channels*. A channel is one total order of calls among its members, agreed by all of them;
channels never wait for each other. To add an engine, write these two classes in a module of its own and give it a
name in `comm/world.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from ronde.comm.call import Call
from ronde.net.messages import LEAVE_GRACE_S
from ronde.types import Deadline

__all__ = [
    "Backend",
    "BackendChannel",
    "BackendRunningCall",
    "CallTiming",
    "ChannelSpec",
    "CurrentCall",
    "LOSS_REASON_S",
]

LOSS_REASON_S = LEAVE_GRACE_S + 0.5
"""How long a call that failed waits for the words of the coordinator, which knows how a member ended."""


class CallTiming(msgspec.Struct, frozen=True, gc=False):
    """When and how a call ran. Times are time.monotonic_ns()."""

    start_ns: int
    ready_ns: int
    """Every member had arrived: until here it waited for others, from here it moved data."""
    end_ns: int
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """What a channel is doing right now, for the stall watch."""

    description: str
    since_ns: int
    missing: tuple[int, ...]
    """Members (indices) that have not arrived."""
    sequence: int = -1
    """Which collective of the channel it is, equal on all members; -1 when that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSpec:
    """Which channel to open. Equal on all members but for nothing: `members` are ranks of the world."""

    id: str
    """Unique in the round, such as "0.ordered" or "3.plan.2"."""
    members: tuple[int, ...]
    member_index: int
    """My index in members."""
    bucket_bytes: int = 0
    point_to_point: bool = False
    """Whether send and receive are needed."""


class BackendRunningCall(Protocol):
    """A call under way on a channel."""

    def done(self) -> bool:
        """Whether wait() would return at once."""

    def wait(self, deadline: Deadline) -> CallTiming:
        """Wait for the call; raises what it ended in. OperationTimeout here leaves the call under way."""


class BackendChannel(Protocol):
    """One total order of calls. run() and submit() raise, or the ticket's wait() does: ValueError, TypeError, Mismatch
    for the caller's mistakes; PeerLost, RoundEnded, OperationTimeout for the world's."""

    spec: ChannelSpec

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        """Execute the call and wait for it."""

    def submit(self, call: Call, deadline: Deadline) -> BackendRunningCall:
        """Queue the call behind those before it."""

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory, spec.bucket_bytes long."""

    def current_call(self) -> CurrentCall | None:
        """The call under way, or None when idle."""

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        """End all waits at once: PeerLost(lost, why), or RoundEnded(why) when nobody is lost. lost is a rank of the
        world. The first abort wins; safe from any thread."""

    def close(self) -> None:
        """Abort what is under way and free everything. Idempotent."""


class Backend(Protocol):
    """Opens channels among the members of a round."""

    name: str

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> BackendChannel:
        """Collective among spec.members: all of them open the same channel."""

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone: waits inside open_channel that need it must end with PeerLost."""

    def close(self) -> None:
        """Free everything. Idempotent; channels were closed before."""
