"""Waiting for MPI with a deadline and an abort, and knowing for whom: notices between the members of an mpi channel.

A blocking MPI call can be neither timed out nor aborted, and it uses a whole core while it waits. So all requests are
nonblocking and polled. MPI only says that a call is not complete, never because of whom: a member that waits for long
sends a notice to the others, and those that sent none are the missing ones. A member that aborts or closes its channel
sends how many calls it has finished, so that the others know which of theirs will still complete:

    my call                     its notice            my wait
    collective number i         finished up to > i    goes on: its part is done, the data is on the way
    collective number i         finished up to <= i   ends: it will never come
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from ronde.comm.backends.base import LOSS_REASON_S, ChannelSpec
from ronde.comm.call import Call
from ronde.errors import OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.text import format_ranks
from ronde.types import Deadline

if TYPE_CHECKING:
    from mpi4py import MPI

NUM_SPINS = 50
YIELD_TIME_S = 0.0005
"""How long to yield the core only, which gives it to other processes if they want it."""
MAX_IDLE_SLEEP_S = 0.001
"""Longest sleep while waiting for members to come."""
MAX_ACTIVE_SLEEP_S = 0.0001
"""Longest sleep while data moves: MPI moves it only while it is polled."""

_abandoned: list[tuple[Sequence[MPI.Request], object]] = []
"""Requests that will never complete, with all they may still write to. An MPI collective cannot be cancelled: the
library could write into memory that was freed. Bounded: a round has few channels, and each fails once."""


def wait_all(
    requests: Sequence[MPI.Request],
    check: Callable[[], None],
    max_sleep_s: float = MAX_IDLE_SLEEP_S,
    owners: object = None,
) -> None:
    """Wait until all requests are complete. `check` is called repeatedly and ends the wait by raising; the requests and
    the owners of their memory are then kept for good."""
    from mpi4py import MPI

    test = MPI.Request.Testall
    for _ in range(NUM_SPINS):
        if test(requests):
            return
    began = time.monotonic()
    try:
        while not test(requests):
            check()
            waited_s = time.monotonic() - began
            if waited_s < YIELD_TIME_S:
                os.sched_yield()
            else:
                time.sleep(min(max_sleep_s, waited_s / 8))
    except BaseException:
        abandon(requests, owners)
        raise


def abandon(requests: Sequence[MPI.Request], owners: object) -> None:
    """Keep requests that will never complete, and the owners of their memory, for good."""
    _abandoned.append((requests, owners))


# --- the members of a channel ----------------------------------------------------------------------------------------

TAG_NOTICE = 1
MAX_REASON_CHARS = 1024


class NoticeKind(enum.IntEnum):
    WAITING = 0
    CLOSED = 1
    ABORTED = 2


class PeerNotice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One member's message to another."""

    kind: NoticeKind
    num_collectives: int
    """Collectives that the sender has finished."""
    lost_rank: int = -1
    why: str = ""


class FailureDetector:
    """Sends and collects the notices of one channel, and knows from them which calls can end. Safe from any thread."""

    def __init__(self, spec: ChannelSpec, comm: MPI.Intracomm) -> None:
        self.spec = spec
        self.rank = spec.members[spec.member_index]
        self.num_finished = 0
        """Collectives that this member has finished."""
        self.aborted: tuple[int, str] | None = None
        self.broken = False
        """Whether MPI was left with requests that never complete."""
        self.waiting_at: dict[int, int] = {}
        """Per member: the collective, counted from 0, in which it sent that it waits."""
        self.final_notices: dict[int, PeerNotice] = {}
        """Members that closed or aborted the channel."""
        self._comm = comm
        self._others = [member for member in range(len(spec.members)) if member != spec.member_index]
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._sent: list[MPI.Request] = []
        self._freed = False
        self._first_final_notice_at: float | None = None

    def abort(self, lost_rank: int, why: str) -> None:
        """End all waits, here and at the other members. The first abort wins."""
        with self._lock:
            if self.aborted is not None:
                return
            self.aborted = (lost_rank, why)
        self.send_notice(NoticeKind.ABORTED, lost_rank, why)

    def send_notice(self, kind: NoticeKind, lost_rank: int = -1, why: str = "") -> None:
        """Send a notice to all other members."""
        notice = PeerNotice(kind, self.num_finished, lost_rank, why[:MAX_REASON_CHARS])
        data = msgspec.msgpack.encode(notice)
        with self._lock:
            for member in [] if self._freed else self._others:
                self._sent.append(self._comm.Isend(data, member, TAG_NOTICE))
            self._sent = [sent for sent in self._sent if not sent.Test()]

    def receive_notices(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        # Probed and received as one, so that another thread cannot take the message in between.
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, TAG_NOTICE, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            try:
                notice = msgspec.msgpack.decode(data, type=PeerNotice)
            except msgspec.DecodeError:  # sent by a program that uses this communicator
                continue
            if notice.kind is NoticeKind.WAITING:
                self.waiting_at[status.Get_source()] = notice.num_collectives
            else:
                self.final_notices.setdefault(status.Get_source(), notice)

    def free(self) -> bool:
        """Free the communicator when the CLOSED of every member, its last message, was received; False until then.
        Open MPI hands a message that comes too late to the next communicator with the same number, and then loses one
        of its own. After an abort it is never freed."""
        self.receive_notices()
        with self._lock:
            self._sent = [sent for sent in self._sent if not sent.Test()]
            if any(notice.kind is NoticeKind.ABORTED for notice in list(self.final_notices.values())):
                return True
            if self._sent or len(self.final_notices) < len(self._others):
                return False
            self._freed = True
            self._comm.Free()
        return True

    def check(self, call: Call) -> None:
        """Raises when this call, the next one of the channel, can never complete."""
        if self.aborted is not None:
            raise self._make_error(call, *self.aborted)
        self.receive_notices()
        for notice in self.final_notices.values():
            if notice.num_collectives <= self.num_finished and (
                notice.kind is NoticeKind.ABORTED or self._waited_for_reason()
            ):
                raise self._make_error(call, notice.lost_rank, notice.why)

    def find_abort_notice(self) -> PeerNotice | None:
        """What the first member that has aborted gave as its reason."""
        return next((notice for notice in self.final_notices.values() if notice.kind is NoticeKind.ABORTED), None)

    def missing(self) -> tuple[int, ...]:
        """Members that did not send that they wait in the same collective as this one."""
        return tuple(member for member in self._others if self.waiting_at.get(member, -1) < self.num_finished)

    def _waited_for_reason(self) -> bool:
        now = time.monotonic()
        self._first_final_notice_at = self._first_final_notice_at or now
        return now - self._first_final_notice_at >= LOSS_REASON_S

    def _make_error(self, call: Call, lost_rank: int, why: str) -> RondeError:
        if lost_rank == self.rank:  # it cannot go on itself
            return RondeError(f"{call.description} failed on rank {self.rank}: {why}")
        if lost_rank >= 0:
            return PeerLost(rank=self.rank, peer=lost_rank, op=call.description, why=why)
        return RoundEnded(f"{call.description} cannot finish: {why}")


# --- one call --------------------------------------------------------------------------------------------------------

NOTICE_DELAY_S = 0.1
"""After this long a wait is sent to the others; after twice as long, members that sent nothing are missing."""

MIN_WAIT_TO_NAME_S = 5 * NOTICE_DELAY_S
"""A collective call is not given up before it has waited this long, whatever is left of its time limit: the others need
that long to send that they wait, on a busy machine too, and a timeout has to name those that do not."""


class MpiWait:
    """The waits of one call, since it has begun."""

    def __init__(self, failure_detector: FailureDetector, call: Call, deadline: Deadline) -> None:
        self.call = call
        self.start_ns = time.monotonic_ns()
        self.ready_ns = 0
        """When every member had arrived."""
        self._failure_detector = failure_detector
        self._begin(deadline)

    def _begin(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._since = time.monotonic()
        self._notice_sent = False

    def until(self, requests: Sequence[MPI.Request]) -> None:
        """Wait for requests; raises why when they never will complete."""
        try:
            wait_all(requests, self.check, MAX_ACTIVE_SLEEP_S if self.ready_ns else MAX_IDLE_SLEEP_S, self.call)
        except BaseException:
            self._failure_detector.broken = True
            raise

    def next_collective(self) -> None:
        """For a member that has joined: wait for the next collective of the others. Each has a deadline of its own: how
        long the others go on does not matter."""
        self.ready_ns = 0
        self._begin(Deadline(self._deadline.timeout_s))

    def check(self) -> None:
        """Raises when the call cannot complete or took too long; sends a notice to the others when it takes long."""
        self._failure_detector.check(self.call)
        is_late, waited_s = self._deadline.expired, time.monotonic() - self._since
        if is_late and (self.ready_ns or waited_s > MIN_WAIT_TO_NAME_S):
            missing = self.missing_ranks()
            waiting = f", waiting for {format_ranks(missing)}" if missing else ""
            error = OperationTimeout(f"{self.call.description} took over {self._deadline.timeout_s:g} s{waiting}")
            error.missing = missing
            raise error
        if not self._notice_sent and (is_late or waited_s > NOTICE_DELAY_S):
            self._notice_sent = True
            self._failure_detector.send_notice(NoticeKind.WAITING)

    def missing(self) -> tuple[int, ...]:
        """The members (indices) that have not arrived; none as long as that is not known."""
        if self.ready_ns:
            return ()
        return self._failure_detector.missing() if time.monotonic() - self._since > 2 * NOTICE_DELAY_S else ()

    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(self._failure_detector.spec.members[index] for index in self.missing())
