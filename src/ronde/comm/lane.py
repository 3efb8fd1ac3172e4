"""A channel together with what is under way on it and the records of what ran. Used by groups, plans and the engine.

A *flight* is one submitted call; several works may be on board. The lane keeps every flight until it is over, so that
memory stays alive when a caller forgets its work, and notes each in the recorder, whoever waited for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ronde.comm.backend import Call, Channel, Looking, Outcome, Ticket
from ronde.errors import OperationTimeout, RondeError
from ronde.observe.events import OperationFailed
from ronde.observe.recorder import Recorder
from ronde.types import Deadline

__all__ = ["Entry", "Flight", "Lane"]


class Entry(NamedTuple):
    """How a call, or one of several that travel as one, is recorded."""

    label: str
    name: str
    num_bytes: int


class Lane:
    """One channel of one group."""

    def __init__(self, channel: Channel, group: int, recorder: Recorder, limit_s: float) -> None:
        self.channel = channel
        self.group = group
        self.members = channel.spec.members
        self._run = channel.run
        self._record = recorder.operation
        self._recorder = recorder
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._flights: deque[Flight] = deque()
        self._closed = False

    def run(self, call: Call, label: str, num_bytes: int) -> None:
        """Execute a call and wait for it. The shortest way: it is on the path of every blocking operation."""
        try:
            outcome = self._run(call, Deadline(self._limit_s))
        except (RondeError, ValueError, TypeError) as error:
            self.note_failure(call.text, error)
            raise
        self._record(label, "", self.group, num_bytes, outcome.start_ns, outcome.ready_ns, outcome.end_ns)

    def submit(
        self,
        call: Call,
        entries: tuple[Entry, ...],
        *,
        limit_s: float | None = None,
        over: Callable[[], None] | None = None,
    ) -> Flight:
        """Queue a call. `over` is called once when it has ended, in whichever thread sees that first."""
        self._sweep()
        ticket = self.channel.submit(call, Deadline(self._limit_s if limit_s is None else limit_s))
        flight = Flight(self, ticket, call, entries, over)
        self._flights.append(flight)
        return flight

    def look(self) -> Looking | None:
        """What the channel is doing, for the stall watch."""
        return None if self._closed else self.channel.look()

    def abort(self, *, lost: int = -1, why: str) -> None:
        """End all waits at once."""
        if not self._closed:
            self.channel.abort(lost=lost, why=why)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.channel.close()
        self._flights.clear()

    def note_failure(self, op: str, error: BaseException) -> None:
        """Take down that an operation failed."""
        rank = self._recorder.rank
        event = OperationFailed(at_ns=time.monotonic_ns(), rank=rank, op=op, group=self.group, why=str(error))
        self._recorder.emit(event)

    def note_success(self, entries: tuple[Entry, ...], start_ns: int, ready_ns: int, end_ns: int) -> None:
        """Take down what has run."""
        for label, name, num_bytes in entries:
            self._record(label, name, self.group, num_bytes, start_ns, ready_ns, end_ns)

    def _sweep(self) -> None:
        """Let go of flights that are over. A channel runs in order, so only the first need be looked at."""
        flights = self._flights
        while flights:
            with self._lock:
                if not flights or not flights[0].done():
                    return
                flight = flights.popleft()
            flight.settle()


class Flight:
    """One submitted call. Any number of threads may wait for it."""

    __slots__ = ("_call", "_entries", "_error", "_lane", "_lock", "_over", "_ticket", "_when_over", "landed")

    def __init__(
        self, lane: Lane, ticket: Ticket, call: Call, entries: tuple[Entry, ...], over: Callable[[], None] | None
    ) -> None:
        self._lane = lane
        self._ticket = ticket
        self._call: Call | None = call  # keeps the memory alive
        self._entries = entries
        self._when_over = over
        self._lock = threading.Lock()
        self._over = False
        self._error: Exception | None = None
        self.landed = False
        """Whether it is over, and well."""

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._over or self._ticket.done()

    def wait(self, deadline: Deadline) -> None:
        """Wait for the call; raises what it ended in. OperationTimeout may leave it under way."""
        if not self._over:
            # A channel's ticket is for one waiter at a time.
            if not self._lock.acquire(timeout=deadline.left_s):
                raise OperationTimeout(f"{self._text()} is not over after {deadline.seconds:g} s")
            try:
                if not self._over:
                    self._end(deadline)
            finally:
                self._lock.release()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Take down the end of a call that is over, for works that nobody waits for."""
        try:
            self.wait(Deadline(0.0))
        except (RondeError, ValueError, TypeError):
            pass  # noted, and kept for whoever asks

    def _end(self, deadline: Deadline) -> None:
        lane = self._lane
        try:
            outcome = self._outcome(deadline)
            lane.note_success(self._entries, outcome.start_ns, outcome.ready_ns, outcome.end_ns)
            self.landed = True
        except (RondeError, ValueError, TypeError) as error:
            if isinstance(error, OperationTimeout) and not self._ticket.done():
                raise  # only this wait is over, not the call
            self._error = error
            lane.note_failure(self._text(), error)
        self._over = True
        self._call = None
        if self._when_over is not None:
            self._when_over()
            self._when_over = None

    def _outcome(self, deadline: Deadline) -> Outcome:
        try:
            return self._ticket.wait(deadline)
        except OperationTimeout:
            if not self._ticket.done():
                raise
        return self._ticket.wait(Deadline(0.0))  # it ended in this moment, or has a deadline of its own to tell of

    def _text(self) -> str:
        return self._call.text if self._call is not None else "the operation"
