"""The seam between collectives and what moves the bytes: native (C++), mpi, and single_rank for groups of one.

A channel is one total order of calls, agreed by all its members; channels never wait for each other. To add a backend,
write a Backend, a BackendChannel and a RunningCall in a module of their own, allow its name in `settings.py` (backend),
and create it in `make_backend()` (`comm/joining.py`).

A call names memory by addresses, and the device on which it is. The contract of a backend for other devices than the
CPU, such as one over NCCL, is in docs/internals/devices.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ronde.comm.call import AnnouncedOperation, Call, Memory
from ronde.errors import OperationTimeout, RondeError
from ronde.net.messages import LEAVE_GRACE_S, ChannelAborted
from ronde.types import Deadline, OperationKind

if TYPE_CHECKING:
    from ronde.comm.backends.hot_calls import AllreduceCache

LOSS_REASON_S = LEAVE_GRACE_S + 0.5
"""How long a call that failed waits for the coordinator's reason: it knows how a member ended."""


class Received(NamedTuple):
    """What a receive got whose source or size was open."""

    source: int
    """The member (index) that sent it."""
    header: bytes = b""
    data: Memory | None = None
    """The bytes of the array, in new memory, if any size was wanted."""


class CallTiming(msgspec.Struct, frozen=True, gc=False):
    """When and how a call ran. Times are time.monotonic_ns()."""

    start_ns: int
    ready_ns: int
    """When every member had arrived: the call waited for others until here, and moved data from here on."""
    end_ns: int
    algorithm: str = ""
    sequence: int = -1
    """Which collective of the channel it was, equal on all members; -1 when that is not known, and for all but one of
    the announced calls that were fused."""
    arrived_ns: int = 0
    """When this member had come to it. Of announced calls: when all that were fused were announced here, and those
    before them over."""
    received: Received | None = None
    """Of a receive from any member, or of any size."""


MAX_LATE = 1000
"""Announced calls that are reported at once as too late."""


class CallWithdrawn(Exception):
    """An announced call was taken back, because its id was revoked: it did not run."""


class IdNotAgreed(Exception):
    """The id does not stand for this call (any more): it was not announced."""


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The call that a channel executes right now, for ChannelStallInspector."""

    kind: OperationKind
    description: str
    since_ns: int
    missing: tuple[int, ...]
    """Members (indices) that have not arrived."""
    sequence: int = -1
    """Which collective of the channel it is, equal on all members; -1 when that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelSpec:
    """Which channel to open. All but member_index is equal on all members."""

    id: str
    """Unique in the round, such as "0.ordered" or "3.plan.2"."""
    members: tuple[int, ...]
    """Ranks of the world."""
    member_index: int
    """The index of this rank in members."""
    bucket_bytes: int = 0
    """Size of each of a member's two bucket areas."""
    point_to_point: bool = False
    """Whether it is for send and receive, and for nothing else."""
    overlapped: bool = False
    """Whether members compute while its calls run, so that it matters how often they wait for each other."""


class RunningCall:
    """A submitted call, until its end and after. Any number of threads may wait for it.

    Each backend has a subclass with has_ended() and wait_for_end(). The call, which owns the memory it works on, is
    kept until a wait has seen its end; the thread that waited reports the end to `on_end`, once.
    """

    __slots__ = ("_lock", "call", "error", "on_end", "on_wait", "timing", "waiting_since_ns")

    def __init__(self, call: Call | None) -> None:
        self.call = call
        self.timing: CallTiming | None = None
        self.error: Exception | None = None
        """One of these is set when the call has ended and a thread has waited for it."""
        self.waiting_since_ns = 0
        """Since when a thread waits for it; 0 when none does."""
        self.on_wait: Callable[[int, int], object] | None = None
        """Called after every wait, with its begin and end."""
        self.on_end: Callable[[CallTiming | Exception], None] | None = None
        """Called once, with the timing or the error in which the call ended."""
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self.timing is not None or self.error is not None or self.has_ended()

    def wait(self, deadline: Deadline) -> CallTiming:
        """Wait for the call; return its timing or raise its error. After an OperationTimeout that is not `error` the
        call goes on, or has ended meanwhile."""
        if self.timing is None and self.error is None:
            if not self._lock.acquire(timeout=deadline.remaining_s):
                raise self.make_timeout(deadline)
            try:
                if self.timing is None and self.error is None:
                    self._complete(deadline)
            finally:
                self._lock.release()
        if self.error is not None:
            raise self.error
        assert self.timing is not None
        return self.timing

    def _complete(self, deadline: Deadline) -> None:
        began_ns = self.waiting_since_ns = time.monotonic_ns()
        outcome: CallTiming | Exception | None
        try:
            outcome = self.wait_for_end(deadline)
        except (RondeError, ValueError, TypeError) as error:
            if not self.has_ended():
                raise  # the wait has failed, and not the call
            outcome = error
        finally:
            self.waiting_since_ns = 0
            if self.on_wait is not None:
                self.on_wait(began_ns, time.monotonic_ns())
        if outcome is None:
            raise self.make_timeout(deadline)
        if self.on_end is not None:
            self.on_end(outcome)
        if isinstance(outcome, CallTiming):
            self.timing = outcome
        else:
            self.error = outcome
        self.call = self.on_end = self.on_wait = None

    def fail_in_child(self, error: RondeError) -> None:
        """This process is a forked child: waits for a call that was under way raise the error."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        if not self.done():
            self.error = error

    def withdrawn(self) -> None:
        """It was announced and taken back: it will not run, and nobody waits for its end. Called once."""

    def wait_on_stream(self, stream: int, deadline: Deadline) -> None:
        """Let what is put on this stream of the device from now on wait until the call has ended, well or not. Raises
        the error of a call that is known to have failed. Only a call on another device than the CPU has streams: its
        class has this method, which does not let the host wait. Here it does."""
        self.wait(deadline)

    def notify_at_end(self, callback: Callable[[], None]) -> bool:
        """Call back once, from any thread, when the call has ended. Returns False if that is not possible, also because
        the call has ended: then nothing is called, and done() tells."""
        return False

    def make_timeout(self, deadline: Deadline) -> OperationTimeout:
        description = self.call.description if self.call is not None else "the operation"
        return OperationTimeout(f"{description} is still under way after {deadline.timeout_s:g} s")

    def has_ended(self) -> bool:
        raise NotImplementedError

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        """Return the timing of the call, or raise its error; None if it is still under way at the deadline. Called by
        one thread at a time."""
        raise NotImplementedError


class AnnouncedCall(RunningCall):
    """One of the calls that were announced together. If its id is revoked, waits raise CallWithdrawn."""

    __slots__ = ("operation",)

    def __init__(self, operation: AnnouncedOperation) -> None:
        super().__init__(None)  # who announces it keeps its memory
        self.operation = operation

    def make_timeout(self, deadline: Deadline) -> OperationTimeout:
        return OperationTimeout(f"{self.operation.description} is still under way after {deadline.timeout_s:g} s")


class AnnouncedBatch(Protocol):
    """Calls that were announced together."""

    @property
    def calls(self) -> Sequence[AnnouncedCall | None]:
        """None for those whose id does not stand for them (any more). Empty when all have been reported."""

    def poll(self) -> bool:
        """Report those that have succeeded and for which nobody waits. Returns whether all have been reported."""


class BackendChannel(Protocol):
    """One total order of calls; or with point_to_point, messages, which are ordered for each source and tag. run(),
    submit() or the wait for a submitted call raise ValueError, TypeError or Mismatch for the caller's mistakes, and
    PeerLost, RoundEnded or OperationTimeout when the others are the reason."""

    spec: ChannelSpec

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        """Execute the call, after those before it, and wait for it."""

    def make_allreduce_cache(
        self, timeout_s: float, record_failure: Callable[[str, Exception], None], **more: Any
    ) -> AllreduceCache | None:
        """What runs allreduces again that were made before, faster than run(); None if the backend has no such thing.
        `more` are further parameters of AllreduceCache."""

    def submit(self, call: Call, deadline: Deadline) -> RunningCall: ...

    def bucket(self) -> Memory:
        """This member's bucket memory, bytes of the CPU: two areas of spec.bucket_bytes, one behind the other. A call
        may work in place in either, whichever the other members use for it. A member that has joined leaves the first
        as it is."""

    def current_call(self) -> CurrentCall | None:
        """None when idle."""

    def rank_lost(self, rank: int, why: str) -> None:
        """A member is gone, a rank of the world. Messages to and from it end with PeerLost, and other messages go on;
        of a collective every member is needed, so everything ends, as after abort(). Safe from any thread."""

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        """End all waits at once: with PeerLost when a rank of the world is lost, else with RoundEnded. The first abort
        counts; safe from any thread. A rank that cannot go on itself is the lost one: the other members on its host
        learn of it here."""

    def close(self, why: str = "") -> None:
        """End what is under way with RoundEnded, for this reason, and free everything. It may be called inside of an
        operation, by a signal handler: that operation ends when the handler has returned. Idempotent."""


class AnnouncedBackendChannel(BackendChannel, Protocol):
    """A channel whose calls are announced under ids, in any order on any member: each runs when all have announced it.
    Collectives are announced here, and neither run nor submitted."""

    def agree(self, id: int, name: str, call: Call) -> None:
        """From now on the id stands for a call of this name with the same hash; the members have agreed on that. The
        memory of the call is not used."""

    def revoke(self, id: int) -> bool:
        """The id stands for nothing any more. Returns whether that took back a call that was announced here; one that
        all members have announced runs nevertheless."""

    def announce_many(
        self,
        operations: Sequence[AnnouncedOperation],
        timeout_s: float,
        *,
        will_wait: bool,
        on_wait: Callable[[int, int], object],
        on_ended: Callable[[Sequence[AnnouncedCall]], None],
    ) -> AnnouncedBatch:
        """Announce operations together, each of which may take timeout_s when it runs. Their memory is alive until
        they have ended. With will_wait the caller promises to wait for one of them at once. The next call without
        it, also one without operations, sees to it that they are executed if it does not. on_ended() gets the calls
        that have succeeded, each once, in the thread that sees it."""

    def run_announced(
        self, id: int, call: Call, deadline: Deadline, on_unfinished: Callable[[RunningCall], None]
    ) -> CallTiming | None:
        """Announce the call and wait for it. If the wait ends and not the call, because the time is over or a signal
        handler raises an exception, on_unfinished() gets it; None is returned when the time is over."""

    def announced_until(self, until_ns: int) -> list[tuple[int, int]]:
        """What was announced here until then and does not run yet, MAX_LATE of them at most: its id, and when."""

    def not_announced(self, id: int) -> tuple[int, ...]:
        """The members (indices) that have not announced the id."""


class Backend(Protocol):
    name: str
    devices: tuple[str, ...]
    """The kinds of devices whose memory it takes; always also that of the CPU."""

    def open_channel(self, spec: ChannelSpec, deadline: Deadline) -> BackendChannel:
        """Collective among spec.members: all of them open the same channel."""

    def open_announced_channel(self, spec: ChannelSpec, deadline: Deadline) -> AnnouncedBackendChannel | None:
        """As open_channel, for a channel with MAX_SHARED_IDS ids. None, on all members, if these ranks cannot announce
        calls among themselves."""

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone: waits inside open_channel that need it must end with PeerLost."""

    def channel_aborted(self, abort: ChannelAborted) -> None:
        """Another rank has aborted a channel, and the coordinator says so: end all waits on it."""

    def flush(self, deadline: Deadline) -> None:
        """Wait until what this rank has sent is with its receivers. Called before it leaves in good order; nothing can
        be sent afterwards."""

    def close(self) -> None:
        """Idempotent; channels were closed before."""
