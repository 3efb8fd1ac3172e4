"""One channel of the mpi backend: a communicator of its own, calls in order, deadlines, aborts. Made by MpiBackend.

For a collective the members exchange headers, compare them, and move the data: members that ask for different things
get an error, never a wrong number. A call that they agreed on before goes without headers.

Calls run in the order of a CallQueue. A call runs in the thread of its caller when nothing is before it. Only calls
that were submitted, or that find the queue busy, run in a thread of the queue, which starts with the first one.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ronde.comm.backends.base import CallTiming, ChannelSpec, CurrentCall, RunningCall
from ronde.comm.backends.mpi.collectives import MpiCollectives, check_call, num_elements
from ronde.comm.backends.mpi.failure_detection import (
    MIN_WAIT_TO_NAME_S,
    FailureDetector,
    MpiWait,
    NoticeKind,
)
from ronde.comm.buffers import aligned_zeros, as_memory
from ronde.comm.call import Call, Memory, mismatch_error
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net.event_loop import start_thread
from ronde.text import format_ranks
from ronde.types import ROOTED_KINDS, VARIABLE_ROW_KINDS, Deadline, DType, Op, OperationKind, can_be_joined

if TYPE_CHECKING:
    from mpi4py import MPI

# --- headers ---------------------------------------------------------------------------------------------------------

DESCRIPTION_BYTES = 128
HEADER = struct.Struct(f"<Q4iQdd{DESCRIPTION_BYTES}s")


class CallHeader(NamedTuple):
    """What one member asks for. All but the description must be equal on all members."""

    signature_hash: int
    kind: int
    dtype: int
    op: int
    root: int
    elements: int
    """Their number, if all members must have the same."""
    prescale: float
    postscale: float
    description: bytes

    @classmethod
    def from_call(cls, call: Call) -> CallHeader:
        root = call.peer if call.kind in ROOTED_KINDS else -1
        count = 0 if call.kind in VARIABLE_ROW_KINDS else num_elements(call)
        rest = (root, count, call.prescale, call.postscale, call.description.encode()[:127])
        return cls(call.signature_hash, call.kind, call.dtype, call.op, *rest)

    def text(self) -> str:
        return self.description.rstrip(b"\0").decode(errors="replace")


def match_collective(data: bytes | bytearray, members: Sequence[int]) -> CallHeader | None:
    """The header that all members share which have not joined, from the headers of all; None when all have joined.
    Raises Mismatch when they ask for different things, or for something that joined members cannot take part in."""
    compared = HEADER.size - DESCRIPTION_BYTES
    if all(data[at : at + compared] == data[:compared] for at in range(HEADER.size, len(data), HEADER.size)):
        first = CallHeader._make(HEADER.unpack_from(data))  # as nearly always: one header for all
        return None if first.kind == OperationKind.JOIN else first
    headers = [CallHeader._make(fields) for fields in HEADER.iter_unpack(data)]
    asking = [header for header in headers if header.kind != OperationKind.JOIN]
    if not asking:
        return None
    first = asking[0]
    alike = all(header[:-1] == first[:-1] for header in asking)
    joinable = first.kind == OperationKind.ALLREDUCE and can_be_joined(DType(first.dtype), Op(first.op))
    if not alike or (len(asking) < len(headers) and not joinable):
        asked = dict(zip(members, headers, strict=True))
        joined = tuple(rank for rank, header in asked.items() if header.kind == OperationKind.JOIN)
        raise mismatch_error({rank: header.text() for rank, header in asked.items()}, joined)
    return first


# --- the order of calls ----------------------------------------------------------------------------------------------

CLOSE_TIMEOUT_S = 5.0
QUEUE_GRACE_S = 2 * MIN_WAIT_TO_NAME_S
"""A call may take so much longer than its deadline says, to name who is missing; a call behind it waits for that."""


class MpiRunningCall(RunningCall):
    """A call in a queue. `grace_s` is added to the deadline of a wait, for a call that ends at the same deadline by
    itself with a better error; and once more when nothing explains the wait: the call before it may be about to end."""

    __slots__ = ("_done_event", "_grace_s", "_outcome", "_queue", "deadline")

    def __init__(self, call: Call, deadline: Deadline, queue: CallQueue, grace_s: float = 0.0) -> None:
        super().__init__(call)
        self.deadline = deadline
        self._queue = queue
        self._grace_s = grace_s
        self._done_event = threading.Event()
        self._outcome: CallTiming | BaseException | None = None

    def execute(self, execute: Callable[[], CallTiming]) -> None:
        try:
            self._outcome = execute()
        except BaseException as error:  # raised again in the thread that waits
            self._outcome = error
        self._done_event.set()

    def has_ended(self) -> bool:
        return self._done_event.is_set()

    def wait_for_end(self, deadline: Deadline) -> CallTiming | None:
        if not self._done_event.wait(deadline.remaining_s + self._grace_s) and (
            self._wait_reason() != ("", ()) or not self._done_event.wait(self._grace_s)
        ):
            return None
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def make_timeout(self, deadline: Deadline) -> OperationTimeout:
        behind, missing = self._wait_reason()
        description = self.call.description if self.call is not None else "the operation"
        waiting = f", behind {behind}" if behind else ""
        waiting += f", waiting for {format_ranks(missing)}" if missing else ""
        waited = f"a wait of {deadline.timeout_s:.1f} s"
        error = OperationTimeout(f"{description} is still under way after {waited}{waiting}")
        error.missing = missing
        return error

    def _wait_reason(self) -> tuple[str, tuple[int, ...]]:
        """The description of the call before it that is under way, empty when it has begun itself; and the ranks that
        have not come, as far as that is known."""
        current = self._queue.current
        if current is None or self.call is None:
            return "", ()
        return "" if current.call is self.call else current.call.description, current.missing_ranks()


class CallQueue:
    """Runs calls one after the other, in the order in which they came. `execute` carries one out and ends by itself
    when the channel is aborted; calls behind it are then executed, too, so that each ends in its own error."""

    def __init__(self, name: str, failure_detector: FailureDetector, execute: Callable[[MpiWait], CallTiming]) -> None:
        self.name = name
        self.current: MpiWait | None = None
        """The call under way. Read from any thread."""
        self._failure_detector = failure_detector
        self._execute = execute
        self._current_thread = 0
        """The thread that executes it."""
        self._changed = threading.Condition()
        self._queue: deque[MpiRunningCall] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def is_busy(self) -> bool:
        with self._changed:
            return self.current is not None or bool(self._queue)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        """Execute the call, here when nothing is before it, and wait for it."""
        with self._changed:
            self._refuse_when_closed()
            queued = self._enqueue(call, deadline, QUEUE_GRACE_S) if self.current or self._queue else None
            if queued is None:
                self.current = MpiWait(self._failure_detector, call, deadline)
        if queued is None:
            return self._execute_current()
        try:
            return queued.wait(deadline)
        except BaseException as error:
            if not queued.has_ended():  # the caller's memory must not be used any more; others may be in this very call
                self._failure_detector.abort(-1, f"rank {self._failure_detector.rank} gave up: {error!r}")
                with contextlib.suppress(RondeError):
                    queued.wait_for_end(Deadline(CLOSE_TIMEOUT_S))
            raise

    def submit(self, call: Call, deadline: Deadline) -> MpiRunningCall:
        with self._changed:
            return self._enqueue(call, deadline)

    def close(self, deadline: Deadline) -> bool:
        """Take no more calls, let those under way end (the channel has aborted them), end the thread. Whether all of
        that was done before the deadline. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._current_thread == threading.get_ident():  # a signal handler has interrupted that very call
                return False
            idle = self._changed.wait_for(lambda: self.current is None and not self._queue, deadline.remaining_s)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(deadline.remaining_s)
            idle = idle and not self._thread.is_alive()
        return idle

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RoundEnded(f"{self.name} is closed")

    def _enqueue(self, call: Call, deadline: Deadline, grace_s: float = 0.0) -> MpiRunningCall:
        self._refuse_when_closed()
        if self._thread is None:
            # Owned by this queue. Touches only the queue and what execute() touches; results go into MpiRunningCall.
            thread = threading.Thread(target=self._loop, name=f"ronde-{self.name}", daemon=True)
            start_thread(thread)
            self._thread = thread
        queued = MpiRunningCall(call, deadline, self, grace_s)
        self._queue.append(queued)
        self._changed.notify_all()
        return queued

    def _execute_current(self) -> CallTiming:
        assert self.current is not None
        try:
            self._current_thread = threading.get_ident()
            return self._execute(self.current)
        finally:
            with self._changed:
                self._current_thread = 0
                self.current = None
                self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.current is None and (self._queue or self._closed))
                if not self._queue:
                    return
                queued = self._queue.popleft()
                assert queued.call is not None
                self.current = MpiWait(self._failure_detector, queued.call, queued.deadline)
            queued.execute(self._execute_current)
            del queued  # it keeps memory alive; this thread may now wait for long


# --- the channel -----------------------------------------------------------------------------------------------------

MAX_BYTES_WITHOUT_BARRIER = 64 * 1024
"""A pre-agreed call up to this size goes without a barrier before it: that would take as long as the call."""


class MpiChannel:
    """One total order of collective calls, over a communicator with the members in their order. `on_closed` is called
    with the failure detector, which then frees the communicator, when the channel was closed in good order."""

    def __init__(self, spec: ChannelSpec, comm: MPI.Intracomm, on_closed: Callable[[FailureDetector], None]) -> None:
        self.spec = spec
        self._comm = comm
        self._failure_detector = FailureDetector(spec, comm)
        self._bucket = aligned_zeros(2 * spec.bucket_bytes)
        self._lock = threading.RLock()  # reentrant: a signal handler that calls shutdown() may interrupt its owner
        self._queue = CallQueue(f"mpi-{spec.id}", self._failure_detector, self._execute)
        self._on_closed = on_closed
        self._closed = False

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        try:
            return self._checked_queue(call).run(call, deadline)
        except OperationTimeout as error:  # perhaps of a call that was still in the queue
            self._abort_after_error(error)
            raise

    def make_allreduce_cache(self, timeout_s: float, record_failure: object, **more: object) -> None:
        return None

    def submit(self, call: Call, deadline: Deadline) -> MpiRunningCall:
        return self._checked_queue(call).submit(call, deadline)

    def bucket(self) -> Memory:
        return as_memory(self._bucket)

    def current_call(self) -> CurrentCall | None:
        current = self._queue.current
        if current is None:
            return None
        return CurrentCall(current.call.kind, current.call.description, current.start_ns, current.missing())

    def rank_lost(self, rank: int, why: str) -> None:
        self.abort(lost_rank=rank, why=why)

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        if not self._closed:
            self._failure_detector.abort(lost_rank, why)

    def close(self, why: str = "") -> None:
        from mpi4py import MPI

        with self._lock:
            if self._closed:
                return
            self._closed = True
        if MPI.Is_finalized():
            return
        detector = self._failure_detector
        closed = f"rank {detector.rank} has closed channel {self.spec.id}"
        why = f"{closed}: {why}" if why else closed
        if self._queue.is_busy():
            detector.abort(-1, why)
        elif detector.aborted is None:
            detector.send_notice(NoticeKind.CLOSED, why=why)
        idle = self._queue.close(Deadline(CLOSE_TIMEOUT_S))
        # A communicator with calls that never complete cannot be freed; it stays with them until the process ends.
        if idle and not detector.broken and detector.aborted is None:
            self._on_closed(detector)

    def _checked_queue(self, call: Call) -> CallQueue:
        """The queue; refuses calls that make no sense before anything is sent."""
        check_call(call, len(self.spec.members), self.spec.member_index)
        if self._closed:
            raise RoundEnded(f"{call.description}: channel {self.spec.id} is closed")
        return self._queue

    def _execute(self, wait: MpiWait) -> CallTiming:
        from mpi4py import MPI

        try:
            wait.check()
            self._run_collectives(wait)
        except MPI.Exception as error:
            self._failure_detector.broken = True
            failure = RondeError(f"MPI failed during {wait.call.description}: {error.Get_error_string()}")
            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING):  # a fault-tolerant MPI
                failed = self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group())
                peer = self.spec.members[failed[0]] if failed else -1
                rank, why = self._failure_detector.rank, "its process failed, says MPI"
                failure = PeerLost(rank=rank, peer=peer, op=wait.call.description, why=why)
            self._abort_after_error(failure)
            raise failure from error
        except BaseException as error:
            if self._failure_detector.broken or isinstance(error, OperationTimeout):
                self._abort_after_error(error)
            raise
        end_ns = time.monotonic_ns()
        return CallTiming(wait.start_ns, wait.ready_ns or end_ns, end_ns, "mpi")

    def _abort_after_error(self, error: BaseException) -> None:
        """A call is left half done: nobody can use this channel any more. The others get the reason that another member
        gave to this one, if there is one: whose notice comes first does not matter then."""
        detector = self._failure_detector
        told = detector.find_abort_notice()
        if isinstance(error, PeerLost):
            detector.abort(error.peer, error.why)
        elif told is not None:
            detector.abort(told.lost_rank, told.why)
        else:
            detector.abort(-1, f"rank {detector.rank} gave up: {error}")

    def _run_collectives(self, wait: MpiWait) -> None:
        """Do the call: one collective, or for a member that has joined as many as the others want."""
        call = wait.call
        collectives = MpiCollectives(self._comm, wait.until)
        while True:
            try:
                header = self._match(wait)
            except Mismatch:  # on all members alike: the call has ended, the channel goes on
                self._failure_detector.num_finished += 1
                if call.kind is not OperationKind.JOIN:
                    raise
                wait.next_collective()  # the mistake is that of the others; who has joined stays
                continue
            if call.kind is not OperationKind.JOIN:
                collectives.run(call)
            elif header is not None:
                dtype, op = DType(header.dtype), Op(header.op)
                others = Call(OperationKind.ALLREDUCE, dtype, op, prescale=header.prescale, postscale=header.postscale)
                collectives.allreduce(others, np.zeros(header.elements, dtype.numpy))
            self._failure_detector.num_finished += 1
            if call.kind is not OperationKind.JOIN or header is None:
                return
            wait.next_collective()

    def _match(self, wait: MpiWait) -> CallHeader | None:
        """Wait for all members and compare what they ask for. The header that they share; None when it is known, or
        all have joined.

        Members that have joined contribute to named calls without this, but in a plan they need the header.
        """
        call, header = wait.call, None
        if call.kind is OperationKind.JOIN or not call.pre_agreed or self.spec.bucket_bytes:
            headers = bytearray(HEADER.size * len(self.spec.members))
            wait.until([self._comm.Iallgather(HEADER.pack(*CallHeader.from_call(call)), headers)])
            wait.ready_ns = time.monotonic_ns()
            header = match_collective(headers, self.spec.members)
        elif not _is_small(call):
            wait.until([self._comm.Ibarrier()])
            wait.ready_ns = time.monotonic_ns()
        return header


def _is_small(call: Call) -> bool:
    """Whether the call goes without a barrier. Computed only from what is equal on all members."""
    if call.kind in (OperationKind.BARRIER, OperationKind.ALLTOALL):
        return False
    count = sum(call.counts) if call.counts is not None else num_elements(call)
    return count * call.dtype.num_bytes <= MAX_BYTES_WITHOUT_BARRIER
