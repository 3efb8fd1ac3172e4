"""Calls in order, one at a time. For channels whose backend has no thread of its own; the native ones do.

A call runs in the thread of its caller when nothing is before it. Only calls that were submitted, or that found the
executor busy, go through a thread, which is started when the first of them comes.

One channel of the mpi backend: a communicator of its own, calls in order, deadlines, aborts. Made by mpi/backend.

A collective call is a *round*: the members exchange headers, compare them, and move the data. A call that they agreed
on before goes without headers. Sends and receives wait for nothing but their other side.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ronde.comm.backends.base import BackendRunningCall, CallTiming, ChannelSpec, CurrentCall
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
from ronde.comm.buffers import address_of
from ronde.comm.call import Call
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.types import Deadline, OperationKind

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CallQueue", "MpiChannel", "MpiRunningCall"]

ExecuteCall = Callable[[Call, Deadline], CallTiming]
DescribeWait = Callable[[Call], str]
"""What a call waits for, as the end of a sentence that says that it takes too long."""


class MpiRunningCall:
    """A call in the queue or under way: the Ticket of those who submitted it."""

    def __init__(self, call: Call, deadline: Deadline, describe_wait: DescribeWait) -> None:
        self.call = call
        self.deadline = deadline
        self._describe_wait = describe_wait
        self._done_event = threading.Event()
        self._timing: CallTiming | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._done_event.is_set()

    def wait(self, deadline: Deadline, grace_s: float = 0.0) -> CallTiming:
        """Wait for the call; raises what it ended in. OperationTimeout here leaves the call under way. `grace_s` is
        added to the deadline, for a call that ends at the same deadline by itself, with more to tell; and once more
        when nothing explains the wait: what is before the call may just be ending."""
        for limit_s in (deadline.remaining_s + grace_s, grace_s):
            if self._done_event.wait(limit_s):
                break
            if why := self._describe_wait(self.call):
                raise self._timeout(deadline, why)
        else:
            raise self._timeout(deadline, "")
        if self._error is not None:
            raise self._error
        assert self._timing is not None
        return self._timing

    def _timeout(self, deadline: Deadline, why: str) -> OperationTimeout:
        return OperationTimeout(
            f"{self.call.description} is still under way after a wait of {deadline.timeout_s:.1f} s{why}"
        )

    def execute(self, execute: ExecuteCall) -> None:
        """Carry it out and keep the result or the error for wait()."""
        try:
            self._timing = execute(self.call, self.deadline)
        except BaseException as error:  # the edge of the thread: whoever waits raises it
            self._error = error
        self._done_event.set()


class CallQueue:
    """Runs calls one after the other, in the order in which they came. `execute` carries one out and ends by itself
    when its owner aborts; calls behind it are then executed, too, so that each ends in its own error. `execute` may
    take up to `grace_s` longer than the deadline says. `explain` is called from any thread."""

    def __init__(
        self, name: str, execute: ExecuteCall, *, describe_wait: DescribeWait = lambda _: "", grace_s: float = 0.0
    ) -> None:
        self.name = name
        self._execute = execute
        self._describe_wait = describe_wait
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
            return queued.wait(deadline, self._grace_s)
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
        """Take no more calls, let those under way end (their owner has aborted them), end the thread. Whether all of
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
            # Owned by this executor. Touches only the queue and what execute() touches; results leave by QueuedCall.
            self._thread = threading.Thread(target=self._loop, name=f"ronde-{self.name}", daemon=True)
            self._thread.start()
        queued = MpiRunningCall(call, deadline, self._describe_wait)
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
                self._current = (queued.call, time.monotonic_ns())
            queued.execute(self._execute)
            self._finish_current()
            del queued  # it keeps memory alive; this thread may now wait for long


TAG_SENDER = 2
TAG_RECEIVER = 3

MAX_BYTES_WITHOUT_BARRIER = 64 * 1024
"""A trusted call up to this size goes without asking whether everybody is there: the question would take as long."""

CLOSE_TIMEOUT_S = 5.0
ALIGNMENT = 64


class MpiChannel:
    """One total order of collective calls, over a communicator with the members in their order. `retire` takes the
    communicator when the channel was closed in good order."""

    def __init__(self, spec: ChannelSpec, comm: MPI.Intracomm, on_closed: Callable[[NoticeExchange], None]) -> None:
        self.spec = spec
        self._comm = comm
        self._failure_detector = FailureDetector(spec, NoticeExchange(comm))
        self._bucket = _aligned_zeros(spec.bucket_bytes)
        self._lock = threading.Lock()
        self._queues: dict[QueueKey, CallQueue] = {}
        self._waits: dict[QueueKey, MpiWait] = {}
        self._on_closed = on_closed
        self._closed = False

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        """Execute the call and wait for it."""
        try:
            return self._queue_for(call).run(call, deadline)
        except OperationTimeout as error:  # perhaps of a call that was still in the queue
            self._abort_after_error(error)
            raise

    def submit(self, call: Call, deadline: Deadline) -> BackendRunningCall:
        """Queue the call behind those before it."""
        return self._queue_for(call).submit(call, deadline)

    def bucket(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """My bucket memory."""
        return self._bucket

    def current_call(self) -> CurrentCall | None:
        """The oldest call under way, or None when idle."""
        oldest: CurrentCall | None = None
        for lane, executor in list(self._queues.items()):
            current, wait = executor.current_call(), self._waits.get(lane)
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
        executors = list(self._queues.values())
        why = f"rank {self._failure_detector.rank} has closed channel {self.spec.id}"
        if any(executor.is_busy() for executor in executors):
            self._failure_detector.abort(-1, why)
        elif self._failure_detector.aborted is None:
            self._failure_detector.send_notice(NoticeKind.CLOSED, why=why)
        deadline = Deadline(CLOSE_TIMEOUT_S)
        idle = all([executor.close(deadline) for executor in executors])
        # A communicator with calls that never complete cannot be freed; it stays with them until the process ends.
        if idle and not self._failure_detector.broken and self._failure_detector.aborted is None:
            self._on_closed(self._failure_detector.notices)

    def _queue_for(self, call: Call) -> CallQueue:
        """The executor of the call's lane; refuses calls that make no sense before anything is sent."""
        check_call(call, len(self.spec.members), self.spec.member_index)
        lane = queue_key(call)
        with self._lock:
            if self._closed:
                raise RoundEnded(f"{call.description}: channel {self.spec.id} is closed")
            if lane not in self._queues:
                self._queues[lane] = CallQueue(
                    f"mpi-{self.spec.id}",
                    self._execute,
                    describe_wait=self._describe_wait,
                    grace_s=2 * MIN_WAIT_TO_NAME_S,
                )
            return self._queues[lane]

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

    def _describe_wait(self, call: Call) -> str:
        """Behind which call this one is, if it has not begun, and for whom both wait."""
        wait = self._waits.get(queue_key(call))
        if wait is None:
            return ""
        return f"{'' if wait.call is call else f', behind {wait.call.description}'}{wait.describe_missing()}"

    def _abort_after_error(self, error: BaseException) -> None:
        """Something is left half done: nobody can use this channel any more."""
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

    # --- rounds -------------------------------------------------------------------------------------------------

    def _run_collectives(self, wait: MpiWait) -> None:
        """Do the call: one round, or for a member that has joined as many as the others want."""
        call, lane = wait.call, queue_key(wait.call)
        moves = MpiCollectives(self._comm, wait.until)
        while True:
            try:
                header = self._match(wait)
            except Mismatch:  # the same for all members: the round is over, the channel goes on
                self._failure_detector.num_finished[lane] += 1
                raise
            if call.kind is not OperationKind.JOIN:
                moves.run(call)
            elif header is not None:
                moves.allreduce_zeros(header.to_call(), header.count)
            self._failure_detector.num_finished[lane] += 1
            if call.kind is not OperationKind.JOIN or header is None:
                return
            wait.next_collective()

    def _match(self, wait: MpiWait) -> CallHeader | None:
        """Wait for everybody and compare what they want. What that is; None when it is known, or all have joined.

        Members agree on a call by name without those that joined; but those keep to a plan, so planned calls must ask.
        """
        call, found = wait.call, None
        if call.kind in (OperationKind.SEND, OperationKind.RECEIVE):
            if not call.pre_agreed:
                self._match_pair(wait)
        elif call.kind is OperationKind.JOIN or not call.pre_agreed or self.spec.bucket_bytes:
            mine = CallHeader.from_call(call).encode()
            everybody = bytearray(len(mine) * len(self.spec.members))
            wait.until([self._comm.Iallgather(mine, everybody)])
            wait.mark_ready()
            found = match_collective(bytes(everybody), self.spec.members)
        elif not self._is_small(call):
            wait.until([self._comm.Ibarrier()])
            wait.mark_ready()
        return found

    def _match_pair(self, wait: MpiWait) -> None:
        call = wait.call
        mine, theirs = CallHeader.from_call(call), bytearray(HEADER_BYTES)
        sending = call.kind is OperationKind.SEND
        my_tag, their_tag = (TAG_SENDER, TAG_RECEIVER) if sending else (TAG_RECEIVER, TAG_SENDER)
        out = self._comm.Isend(mine.encode(), call.peer, my_tag)
        wait.until([out, self._comm.Irecv(theirs, call.peer, their_tag)])
        wait.mark_ready()
        me, peer = (self._failure_detector.rank, mine), (self.spec.members[call.peer], CallHeader.decode(bytes(theirs)))
        match_pair(*((me, peer) if sending else (peer, me)))

    def _is_small(self, call: Call) -> bool:
        """Equal on all members, so never by what one of them alone gives or gets."""
        if call.kind in (OperationKind.BARRIER, OperationKind.ALLTOALL):
            return False
        count = sum(call.counts) if call.counts is not None else sum(part.count for part in call.spans)
        return count * call.dtype.num_bytes <= MAX_BYTES_WITHOUT_BARRIER


def _aligned_zeros(num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    room = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -address_of(room) % ALIGNMENT
    return room[start : start + num_bytes]
