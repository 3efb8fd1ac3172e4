"""One channel of the mpi backend: a communicator of its own, calls in order, deadlines, aborts. Made by MpiBackend.

For a collective the members exchange headers, compare them, and move the data; a call that they agreed on before goes
without headers. Sends and receives wait only for the other side.

Calls that must keep an order share a CallQueue. A call runs in the thread of its caller when nothing is before it. Only
calls that were submitted, or that find the queue busy, run in a thread of the queue, which starts with the first one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.backends.mpi.collectives import MpiCollectives, check_call
from ronde.comm.backends.mpi.failure_detection import (
    MIN_WAIT_TO_NAME_S,
    FailureDetector,
    MpiWait,
    NoticeExchange,
    NoticeKind,
    QueueKey,
    queue_key,
)
from ronde.comm.backends.mpi.matching import HEADER_BYTES, CallHeader, match_collective, match_pair
from ronde.comm.buffers import aligned_zeros
from ronde.comm.call import Call
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.text import format_ranks
from ronde.types import Deadline, OperationKind

if TYPE_CHECKING:
    from mpi4py import MPI

ExecuteCall = Callable[[Call, Deadline], CallTiming]


class WaitReason(NamedTuple):
    """What a call waits for."""

    behind: str = ""
    """Description of the call before it that is under way; empty when it has begun itself."""
    missing: tuple[int, ...] = ()
    """Ranks that have not come, as far as that is known."""


class MpiRunningCall(RunningCall):
    """A call in a queue or under way."""

    __slots__ = ("_deadline", "_done_event", "_explain", "_outcome")

    def __init__(self, call: Call, deadline: Deadline, explain: Callable[[Call], WaitReason]) -> None:
        super().__init__(call)
        self._deadline = deadline
        self._explain = explain
        self._done_event = threading.Event()
        self._outcome: CallTiming | BaseException | None = None

    def execute(self, execute: ExecuteCall) -> None:
        """Carry the call out, in the queue's thread, and keep the timing or the error for those who wait."""
        assert self.call is not None
        try:
            self._outcome = execute(self.call, self._deadline)
        except BaseException as error:  # raised again in the thread that waits
            self._outcome = error
        self._done_event.set()

    def has_ended(self) -> bool:
        return self._done_event.is_set()

    def wait_for_end(self, deadline: Deadline, grace_s: float = 0.0) -> CallTiming | None:
        """`grace_s` is added to the deadline, for a call that ends at the same deadline by itself with a better error;
        and once more when nothing explains the wait: the call before it may be about to end."""
        if not self._done_event.wait(deadline.remaining_s + grace_s) and (
            self._wait_reason() != WaitReason() or not self._done_event.wait(grace_s)
        ):
            return None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def make_timeout(self, deadline: Deadline) -> OperationTimeout:
        reason = self._wait_reason()
        description = self.call.description if self.call is not None else "the operation"
        behind = f", behind {reason.behind}" if reason.behind else ""
        waiting = f", waiting for {format_ranks(reason.missing)}" if reason.missing else ""
        error = OperationTimeout(
            f"{description} is still under way after a wait of {deadline.timeout_s:.1f} s{behind}{waiting}"
        )
        error.missing = reason.missing
        return error

    def _wait_reason(self) -> WaitReason:
        return WaitReason() if self.call is None else self._explain(self.call)


class CallQueue:
    """Runs calls one after the other, in the order in which they came. `execute` carries one out and ends by itself
    when the channel is aborted; calls behind it are then executed, too, so that each ends in its own error. `execute`
    may take up to `grace_s` longer than the deadline says. `explain` is called from any thread."""

    def __init__(
        self,
        name: str,
        execute: ExecuteCall,
        *,
        explain: Callable[[Call], WaitReason] = lambda _: WaitReason(),
        grace_s: float = 0.0,
    ) -> None:
        self.name = name
        self._execute = execute
        self._explain = explain
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._queue: deque[MpiRunningCall] = deque()
        self._current: tuple[Call, int] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def current_call(self) -> tuple[Call, int] | None:
        """The call under way and when it began (time.monotonic_ns())."""
        return self._current

    def is_busy(self) -> bool:
        """Whether a call is under way or waits for its turn."""
        with self._changed:
            return self._current is not None or bool(self._queue)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        """Execute the call, here when nothing is before it, and wait for it."""
        with self._changed:
            self._refuse_when_closed()
            if self._current is not None or self._queue:
                queued = self._enqueue(call, deadline)
            else:
                queued = None
                self._current = (call, time.monotonic_ns())
        if queued is not None:
            timing = queued.wait_for_end(deadline, self._grace_s)
            if timing is None:
                raise queued.make_timeout(deadline)
            return timing
        try:
            return self._execute(call, deadline)
        finally:
            self._finish_current()

    def submit(self, call: Call, deadline: Deadline) -> MpiRunningCall:
        """Queue the call behind those before it."""
        with self._changed:
            self._refuse_when_closed()
            return self._enqueue(call, deadline)

    def close(self, deadline: Deadline) -> bool:
        """Take no more calls, let those under way end (the channel has aborted them), end the thread. Whether all of
        that was done before the deadline. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            idle = self._changed.wait_for(lambda: self._current is None and not self._queue, deadline.remaining_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.remaining_s)
            idle = idle and not self._thread.is_alive()
        return idle

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RoundEnded(f"{self.name} is closed")

    def _enqueue(self, call: Call, deadline: Deadline) -> MpiRunningCall:
        if self._thread is None:
            # Owned by this queue. Touches only the queue and what execute() touches; results go into MpiRunningCall.
            self._thread = threading.Thread(target=self._loop, name=f"ronde-{self.name}", daemon=True)
            self._thread.start()
        queued = MpiRunningCall(call, deadline, self._explain)
        self._queue.append(queued)
        self._changed.notify_all()
        return queued

    def _finish_current(self) -> None:
        with self._changed:
            self._current = None
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._current is None and (self._queue or self._closed))
                if not self._queue:
                    return
                queued = self._queue.popleft()
                assert queued.call is not None
                self._current = (queued.call, time.monotonic_ns())
            queued.execute(self._execute)
            self._finish_current()
            del queued  # it keeps memory alive; this thread may now wait for long


TAG_SENDER = 2
TAG_RECEIVER = 3

MAX_BYTES_WITHOUT_BARRIER = 64 * 1024
"""A pre-agreed call up to this size goes without a barrier before it: that would take as long as the call."""

CLOSE_TIMEOUT_S = 5.0


class MpiChannel:
    """One total order of collective calls, over a communicator with the members in their order. `on_closed` is called
    with the communicator's notices when the channel was closed in good order."""

    def __init__(self, spec: ChannelSpec, comm: MPI.Intracomm, on_closed: Callable[[NoticeExchange], None]) -> None:
        self.spec = spec
        self._comm = comm
        self._failure_detector = FailureDetector(spec, NoticeExchange(comm))
        self._bucket = aligned_zeros(spec.bucket_bytes)
        self._lock = threading.Lock()
        self._queues: dict[QueueKey, CallQueue] = {}
        self._waits: dict[QueueKey, MpiWait] = {}
        self._on_closed = on_closed
        self._closed = False

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        try:
            return self._queue_for(call).run(call, deadline)
        except OperationTimeout as error:  # perhaps of a call that was still in the queue
            self._abort_after_error(error)
            raise

    def submit(self, call: Call, deadline: Deadline) -> MpiRunningCall:
        return self._queue_for(call).submit(call, deadline)

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        return self._bucket

    def current_call(self) -> CurrentCall | None:
        """The oldest call under way, or None when idle."""
        oldest: CurrentCall | None = None
        for key, queue in list(self._queues.items()):
            current, wait = queue.current_call(), self._waits.get(key)
            if current is not None and (oldest is None or current[1] < oldest.since_ns):
                oldest = CurrentCall(current[0].description, current[1], wait.missing() if wait is not None else ())
        return oldest

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        """End all waits at once, here and at the other members. The first abort wins; safe from any thread."""
        if not self._closed:
            self._failure_detector.abort(lost_rank, why)

    def close(self) -> None:
        """Abort what is under way and free everything. Idempotent."""
        from mpi4py import MPI

        with self._lock:
            if self._closed:
                return
            self._closed = True
        if MPI.Is_finalized():
            return
        queues = list(self._queues.values())
        why = f"rank {self._failure_detector.rank} has closed channel {self.spec.id}"
        if any(queue.is_busy() for queue in queues):
            self._failure_detector.abort(-1, why)
        elif self._failure_detector.aborted is None:
            self._failure_detector.send_notice(NoticeKind.CLOSED, why=why)
        deadline = Deadline(CLOSE_TIMEOUT_S)
        idle = all([queue.close(deadline) for queue in queues])
        # A communicator with calls that never complete cannot be freed; it stays with them until the process ends.
        if idle and not self._failure_detector.broken and self._failure_detector.aborted is None:
            self._on_closed(self._failure_detector.notices)

    def _queue_for(self, call: Call) -> CallQueue:
        """The queue of the call; refuses calls that make no sense before anything is sent."""
        check_call(call, len(self.spec.members), self.spec.member_index)
        key = queue_key(call)
        with self._lock:
            if self._closed:
                raise RoundEnded(f"{call.description}: channel {self.spec.id} is closed")
            if key not in self._queues:
                self._queues[key] = CallQueue(
                    f"mpi-{self.spec.id}", self._execute, explain=self._explain, grace_s=2 * MIN_WAIT_TO_NAME_S
                )
            return self._queues[key]

    def _execute(self, call: Call, deadline: Deadline) -> CallTiming:
        from mpi4py import MPI

        start_ns = time.monotonic_ns()
        wait = self._waits[queue_key(call)] = MpiWait(self._failure_detector, call, deadline)
        try:
            wait.check()
            self._run_collectives(wait)
        except MPI.Exception as error:
            self._failure_detector.broken = True
            failure = self._error_from_mpi(error, call)
            self._abort_after_error(failure)
            raise failure from error
        except BaseException as error:
            if self._failure_detector.broken or isinstance(error, OperationTimeout):
                self._abort_after_error(error)
            raise
        finally:
            del self._waits[queue_key(call)]
        end_ns = time.monotonic_ns()
        return CallTiming(start_ns, wait.ready_ns or end_ns, end_ns, "mpi")

    def _explain(self, call: Call) -> WaitReason:
        wait = self._waits.get(queue_key(call))
        if wait is None:
            return WaitReason()
        return WaitReason("" if wait.call is call else wait.call.description, wait.missing_ranks())

    def _abort_after_error(self, error: BaseException) -> None:
        """A call is left half done: nobody can use this channel any more."""
        if isinstance(error, PeerLost):
            self._failure_detector.abort(error.peer, error.why)
        else:
            self._failure_detector.abort(-1, f"rank {self._failure_detector.rank} gave up: {error}")

    def _error_from_mpi(self, error: MPI.Exception, call: Call) -> RondeError:
        from mpi4py import MPI

        if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):
            failed = self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group())
            peer = self.spec.members[failed[0]] if failed else -1
            return PeerLost(
                rank=self._failure_detector.rank, peer=peer, op=call.description, why="its process failed, says MPI"
            )
        return RondeError(f"MPI failed during {call.description}: {error.Get_error_string()}")

    # --- execution ----------------------------------------------------------------------------------------------

    def _run_collectives(self, wait: MpiWait) -> None:
        """Do the call: one collective, or for a member that has joined as many as the others want."""
        call, key = wait.call, queue_key(wait.call)
        collectives = MpiCollectives(self._comm, wait.until)
        while True:
            try:
                header = self._match(wait)
            except Mismatch:  # on all members alike: the call has ended, the channel goes on
                self._failure_detector.num_finished[key] += 1
                raise
            if call.kind is not OperationKind.JOIN:
                collectives.run(call)
            elif header is not None:
                collectives.allreduce_zeros(header.to_call(), header.count)
            self._failure_detector.num_finished[key] += 1
            if call.kind is not OperationKind.JOIN or header is None:
                return
            wait.next_collective()

    def _match(self, wait: MpiWait) -> CallHeader | None:
        """Wait for all members and compare what they ask for. The header that they share; None when it is known, or
        all have joined.

        Members that have joined contribute to named calls without this, but in a plan they need the header.
        """
        call, found = wait.call, None
        if call.kind in (OperationKind.SEND, OperationKind.RECEIVE):
            if not call.pre_agreed:
                self._match_pair(wait)
        elif call.kind is OperationKind.JOIN or not call.pre_agreed or self.spec.bucket_bytes:
            own = CallHeader.from_call(call).encode()
            headers = bytearray(len(own) * len(self.spec.members))
            wait.until([self._comm.Iallgather(own, headers)])
            wait.mark_ready()
            found = match_collective(bytes(headers), self.spec.members)
        elif not self._is_small(call):
            wait.until([self._comm.Ibarrier()])
            wait.mark_ready()
        return found

    def _match_pair(self, wait: MpiWait) -> None:
        call = wait.call
        own, received = CallHeader.from_call(call), bytearray(HEADER_BYTES)
        sending = call.kind is OperationKind.SEND
        own_tag, peer_tag = (TAG_SENDER, TAG_RECEIVER) if sending else (TAG_RECEIVER, TAG_SENDER)
        out = self._comm.Isend(own.encode(), call.peer, own_tag)
        wait.until([out, self._comm.Irecv(received, call.peer, peer_tag)])
        wait.mark_ready()
        this_side = (self._failure_detector.rank, own)
        other_side = (self.spec.members[call.peer], CallHeader.decode(bytes(received)))
        match_pair(*((this_side, other_side) if sending else (other_side, this_side)))

    def _is_small(self, call: Call) -> bool:
        """Whether the call goes without a barrier. Computed only from what is equal on all members."""
        if call.kind in (OperationKind.BARRIER, OperationKind.ALLTOALL):
            return False
        count = sum(call.counts) if call.counts is not None else sum(span.count for span in call.spans)
        return count * call.dtype.num_bytes <= MAX_BYTES_WITHOUT_BARRIER
