"""A channel together with what is under way on it and the records of what ran. Used by groups, plans and the engine.

A *flight* is one submitted call; several works may be on board. The lane keeps every flight until it is over, so that
memory stays alive when a caller forgets its work, and notes each in the recorder, whoever waited for it.

Collectives are numbered, equally on all members, as they come in one order: so the coordinator can put together when
each member came to one of them (observe/sampling). Messages between two members stand outside of that order.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ronde.comm.backends.base import BackendChannel, BackendRunningCall, CallTiming, CurrentCall
from ronde.comm.call import Call
from ronde.errors import OperationTimeout, RondeError
from ronde.observe.activity import CurrentOperation
from ronde.observe.events import OperationFailed
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import ArrivalSampler, BlockedIntervals
from ronde.types import Deadline, OperationKind

__all__ = ["CallRecord", "Channel", "RunningCall"]

POINT_TO_POINT = (OperationKind.SEND, OperationKind.RECEIVE)
NO_SEQUENCE = -1
SEQUENCE_EPOCH = 1 << 32
"""Numbers begin anew at a multiple of this after a join: while some members stand by, only the others count."""


class CallRecord(NamedTuple):
    """How a call, or one of several that travel as one, is recorded."""

    label: str
    name: str
    num_bytes: int


class Channel:
    """One channel of one group."""

    def __init__(
        self,
        backend_channel: BackendChannel,
        group: int,
        recorder: Recorder,
        operation_timeout_s: float,
        *,
        sample_arrivals: bool = False,
    ) -> None:
        self.backend_channel = backend_channel
        self.group = group
        self.members = backend_channel.spec.members
        self.arrival_sampler = ArrivalSampler(len(self.members) if sample_arrivals else 0)
        """When this rank came to operations, for the coordinator; stays empty unless the job is watched."""
        self._run = backend_channel.run
        self._record = recorder.record_operation
        self._recorder = recorder
        self._operation_timeout_s = operation_timeout_s
        self._lock = threading.Lock()
        self._running_calls: deque[RunningCall] = deque()
        self._closed = False
        self._sequence_epoch = 0
        self._next_sequence = itertools.count().__next__
        self._blocked_intervals = BlockedIntervals()
        self._wait_starts_ns: deque[int] = deque()
        """Since when callers wait for flights."""

    def run(self, call: Call, label: str, num_bytes: int) -> None:
        """Execute a collective and wait for it. The shortest way: it is on the path of every blocking operation."""
        number = self._next_sequence()
        behind_ns = time.monotonic_ns() if self._running_calls else 0
        try:
            outcome = self._run(call, Deadline(self._operation_timeout_s))
        except (RondeError, ValueError, TypeError) as error:
            self.record_failure(call.description, error)
            raise
        start_ns, ready_ns = outcome.start_ns, outcome.ready_ns
        self._record(label, "", self.group, num_bytes, start_ns, ready_ns, outcome.end_ns)
        notebook = self.arrival_sampler
        if number >= notebook.next_sequence or ready_ns - start_ns >= notebook.long_wait_ns:
            notebook.add(number, start_ns, ready_ns - start_ns, ready_ns - start_ns)
        if behind_ns:  # it may have waited for flights before it
            self._blocked_intervals.add(behind_ns, start_ns)

    def send_or_receive(self, call: Call, label: str, num_bytes: int) -> None:
        """Execute a send or receive and wait for it."""
        try:
            outcome = self._run(call, Deadline(self._operation_timeout_s))
        except (RondeError, ValueError, TypeError) as error:
            self.record_failure(call.description, error)
            raise
        self._record(label, "", self.group, num_bytes, outcome.start_ns, outcome.ready_ns, outcome.end_ns)
        self._recorder.record_waits({self.members[call.peer]: outcome.ready_ns - outcome.start_ns})

    def submit(
        self,
        call: Call,
        records: tuple[CallRecord, ...],
        *,
        timeout_s: float | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> RunningCall:
        """Queue a call. `over` is called once when it has ended, in whichever thread sees that first."""
        self._reap_completed()
        number = self._assign_sequence(call)
        ticket = self.backend_channel.submit(
            call, Deadline(self._operation_timeout_s if timeout_s is None else timeout_s)
        )
        flight = RunningCall(self, ticket, call, records, number, on_done)
        self._running_calls.append(flight)
        return flight

    def _assign_sequence(self, call: Call) -> int:
        if call.kind in POINT_TO_POINT:
            return NO_SEQUENCE
        if call.kind is not OperationKind.JOIN:
            return self._next_sequence()
        self._sequence_epoch += SEQUENCE_EPOCH
        self._next_sequence = itertools.count(self._sequence_epoch).__next__
        self.arrival_sampler.skip_to(self._sequence_epoch)
        return NO_SEQUENCE

    def current_call(self) -> CurrentCall | None:
        """What the channel is doing, for the stall watch."""
        return None if self._closed else self.backend_channel.current_call()

    def blocked_operation(self) -> CurrentOperation | None:
        """What a caller is blocked in right now, if one is."""
        looking = self.current_call()
        if looking is None:
            return None
        since_ns = looking.since_ns
        if self._running_calls and not self._running_calls[-1].done():
            waiting = self._wait_starts_ns.copy()
            if not waiting:
                return None  # the caller computes meanwhile
            since_ns = max(since_ns, min(waiting))
        missing = tuple(self.members[index] for index in looking.missing)
        return CurrentOperation(
            looking.description, since_ns, () if looking.description == "join" else missing, bool(missing)
        )

    def abort(self, *, lost_rank: int = -1, why: str) -> None:
        """End all waits at once."""
        if not self._closed:
            self.backend_channel.abort(lost_rank=lost_rank, why=why)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.backend_channel.close()
        self._running_calls.clear()

    def record_failure(self, op: str, error: BaseException) -> None:
        """Take down that an operation failed."""
        rank = self._recorder.rank
        event = OperationFailed(at_ns=time.monotonic_ns(), rank=rank, op=op, group=self.group, why=str(error))
        self._recorder.record_event(event)

    def record_completion(self, running_call: RunningCall, call: Call, timing: CallTiming) -> None:
        """Take down what has run in the background, and how much of it somebody was blocked for."""
        start_ns, ready_ns, end_ns = timing.start_ns, timing.ready_ns, timing.end_ns
        for label, name, num_bytes in running_call.records:
            self._record(label, name, self.group, num_bytes, start_ns, ready_ns, end_ns)
        if call.kind is OperationKind.JOIN:
            ready_ns = end_ns  # it only waits
        waited_ns, moved_ns = (
            self._blocked_intervals.blocked_ns_between(start_ns, ready_ns),
            self._blocked_intervals.blocked_ns_between(ready_ns, end_ns),
        )
        # Each on board was recorded with all of the time.
        num = len(running_call.records)
        counted_wait_ns, counted_move_ns = num * (timing.ready_ns - start_ns), num * (end_ns - timing.ready_ns)
        self._recorder.record_overlap(counted_wait_ns - waited_ns, counted_move_ns - moved_ns)
        if call.kind in POINT_TO_POINT:
            self._recorder.record_waits({self.members[call.peer]: waited_ns})
        elif running_call.sequence != NO_SEQUENCE:
            self.arrival_sampler.add(running_call.sequence, start_ns, ready_ns - start_ns, waited_ns)

    def wait_for(self, backend_call: BackendRunningCall, deadline: Deadline) -> CallTiming:
        """Wait for a call in the background, and take down since when a caller does."""
        began_ns = time.monotonic_ns()
        self._wait_starts_ns.append(began_ns)
        try:
            return backend_call.wait(deadline)
        finally:
            self._wait_starts_ns.remove(began_ns)
            self._blocked_intervals.add(began_ns, time.monotonic_ns())

    def _reap_completed(self) -> None:
        """Let go of flights that are over. A channel runs in order, so only the first need be looked at."""
        flights = self._running_calls
        while flights:
            with self._lock:
                if not flights or not flights[0].done():
                    return
                flight = flights.popleft()
            flight.reap()


class RunningCall:
    """One submitted call. Any number of threads may wait for it."""

    __slots__ = (
        "_backend_call",
        "_call",
        "_channel",
        "_done",
        "_error",
        "_lock",
        "_on_done",
        "records",
        "sequence",
        "succeeded",
    )

    def __init__(
        self,
        channel: Channel,
        backend_call: BackendRunningCall,
        call: Call,
        records: tuple[CallRecord, ...],
        sequence: int,
        on_done: Callable[[], None] | None,
    ) -> None:
        self._channel = channel
        self._backend_call = backend_call
        self._call: Call | None = call  # keeps the memory alive
        self.records = records
        """How those on board are recorded."""
        self.sequence = sequence
        """Which collective of the lane it is."""
        self._on_done = on_done
        self._lock = threading.Lock()
        self._done = False
        self._error: Exception | None = None
        self.succeeded = False
        """Whether it is over, and well."""

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._done or self._backend_call.done()

    def wait(self, deadline: Deadline) -> None:
        """Wait for the call; raises what it ended in. OperationTimeout may leave it under way."""
        if not self._done:
            # A channel's ticket is for one waiter at a time.
            if not self._lock.acquire(timeout=deadline.remaining_s):
                raise OperationTimeout(f"{self._description()} is not over after {deadline.timeout_s:g} s")
            try:
                if not self._done:
                    self._finish(deadline)
            finally:
                self._lock.release()
        if self._error is not None:
            raise self._error

    def reap(self) -> None:
        """Take down the end of a call that is over, for works that nobody waits for."""
        try:
            self.wait(Deadline(0.0))
        except (RondeError, ValueError, TypeError):
            pass  # noted, and kept for whoever asks

    def _finish(self, deadline: Deadline) -> None:
        lane = self._channel
        try:
            outcome = self._wait_for_timing(deadline)
            assert self._call is not None
            lane.record_completion(self, self._call, outcome)
            self.succeeded = True
        except (RondeError, ValueError, TypeError) as error:
            if isinstance(error, OperationTimeout) and not self._backend_call.done():
                raise  # only this wait is over, not the call
            self._error = error
            lane.record_failure(self._description(), error)
        self._done = True
        self._call = None
        if self._on_done is not None:
            self._on_done()
            self._on_done = None

    def _wait_for_timing(self, deadline: Deadline) -> CallTiming:
        try:
            return self._channel.wait_for(self._backend_call, deadline)
        except OperationTimeout:
            if not self._backend_call.done():
                raise
        return self._backend_call.wait(
            Deadline(0.0)
        )  # it ended in this moment, or has a deadline of its own to tell of

    def _description(self) -> str:
        return self._call.description if self._call is not None else "the operation"
