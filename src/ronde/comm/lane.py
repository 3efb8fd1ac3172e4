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

from ronde.comm.backend import Call, Channel, Looking, Outcome, Ticket
from ronde.errors import OperationTimeout, RondeError
from ronde.observe.blocking import Blocks
from ronde.observe.events import OperationFailed
from ronde.observe.recorder import Recorder
from ronde.observe.sampling import Notebook
from ronde.observe.vitals import Doing
from ronde.types import Deadline, Kind

__all__ = ["Entry", "Flight", "Lane"]

DIRECT = (Kind.SEND, Kind.RECEIVE)
NO_NUMBER = -1
AGE = 1 << 32
"""Numbers begin anew at a multiple of this after a join: while some members stand by, only the others count."""


class Entry(NamedTuple):
    """How a call, or one of several that travel as one, is recorded."""

    label: str
    name: str
    num_bytes: int


class Lane:
    """One channel of one group."""

    def __init__(
        self, channel: Channel, group: int, recorder: Recorder, limit_s: float, *, watched: bool = False
    ) -> None:
        self.channel = channel
        self.group = group
        self.members = channel.spec.members
        self.notebook = Notebook(len(self.members) if watched else 0)
        """When this rank came to operations, for the coordinator; stays empty unless the job is watched."""
        self._run = channel.run
        self._record = recorder.operation
        self._recorder = recorder
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._flights: deque[Flight] = deque()
        self._closed = False
        self._age = 0
        self._count = itertools.count().__next__
        self._blocks = Blocks()
        self._waiting: deque[int] = deque()
        """Since when callers wait for flights."""

    def run(self, call: Call, label: str, num_bytes: int) -> None:
        """Execute a collective and wait for it. The shortest way: it is on the path of every blocking operation."""
        number = self._count()
        behind_ns = time.monotonic_ns() if self._flights else 0
        try:
            outcome = self._run(call, Deadline(self._limit_s))
        except (RondeError, ValueError, TypeError) as error:
            self.note_failure(call.text, error)
            raise
        start_ns, ready_ns = outcome.start_ns, outcome.ready_ns
        self._record(label, "", self.group, num_bytes, start_ns, ready_ns, outcome.end_ns)
        notebook = self.notebook
        if number >= notebook.next or ready_ns - start_ns >= notebook.long_ns:
            notebook.add(number, start_ns, ready_ns - start_ns, ready_ns - start_ns)
        if behind_ns:  # it may have waited for flights before it
            self._blocks.add(behind_ns, start_ns)

    def move(self, call: Call, label: str, num_bytes: int) -> None:
        """Execute a send or receive and wait for it."""
        try:
            outcome = self._run(call, Deadline(self._limit_s))
        except (RondeError, ValueError, TypeError) as error:
            self.note_failure(call.text, error)
            raise
        self._record(label, "", self.group, num_bytes, outcome.start_ns, outcome.ready_ns, outcome.end_ns)
        self._recorder.waited_for({self.members[call.peer]: outcome.ready_ns - outcome.start_ns})

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
        number = self._number_of(call)
        ticket = self.channel.submit(call, Deadline(self._limit_s if limit_s is None else limit_s))
        flight = Flight(self, ticket, call, entries, number, over)
        self._flights.append(flight)
        return flight

    def _number_of(self, call: Call) -> int:
        if call.kind in DIRECT:
            return NO_NUMBER
        if call.kind is not Kind.JOIN:
            return self._count()
        self._age += AGE
        self._count = itertools.count(self._age).__next__
        self.notebook.skip_to(self._age)
        return NO_NUMBER

    def look(self) -> Looking | None:
        """What the channel is doing, for the stall watch."""
        return None if self._closed else self.channel.look()

    def doing(self) -> Doing | None:
        """What a caller is blocked in right now, if one is."""
        looking = self.look()
        if looking is None:
            return None
        since_ns = looking.since_ns
        if self._flights and not self._flights[-1].done():
            waiting = self._waiting.copy()
            if not waiting:
                return None  # the caller computes meanwhile
            since_ns = max(since_ns, min(waiting))
        missing = tuple(self.members[index] for index in looking.missing)
        return Doing(looking.text, since_ns, () if looking.text == "join" else missing, bool(missing))

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

    def note_landing(self, flight: Flight, call: Call, outcome: Outcome) -> None:
        """Take down what has run in the background, and how much of it somebody was blocked for."""
        start_ns, ready_ns, end_ns = outcome.start_ns, outcome.ready_ns, outcome.end_ns
        for label, name, num_bytes in flight.entries:
            self._record(label, name, self.group, num_bytes, start_ns, ready_ns, end_ns)
        if call.kind is Kind.JOIN:
            ready_ns = end_ns  # it only waits
        waited_ns, moved_ns = self._blocks.within(start_ns, ready_ns), self._blocks.within(ready_ns, end_ns)
        # Each on board was recorded with all of the time.
        num = len(flight.entries)
        counted_wait_ns, counted_move_ns = num * (outcome.ready_ns - start_ns), num * (end_ns - outcome.ready_ns)
        self._recorder.unblocked(counted_wait_ns - waited_ns, counted_move_ns - moved_ns)
        if call.kind in DIRECT:
            self._recorder.waited_for({self.members[call.peer]: waited_ns})
        elif flight.number != NO_NUMBER:
            self.notebook.add(flight.number, start_ns, ready_ns - start_ns, waited_ns)

    def wait_for(self, ticket: Ticket, deadline: Deadline) -> Outcome:
        """Wait for a call in the background, and take down since when a caller does."""
        began_ns = time.monotonic_ns()
        self._waiting.append(began_ns)
        try:
            return ticket.wait(deadline)
        finally:
            self._waiting.remove(began_ns)
            self._blocks.add(began_ns, time.monotonic_ns())

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

    __slots__ = ("_call", "_error", "_lane", "_lock", "_over", "_ticket", "_when_over", "entries", "landed", "number")

    def __init__(
        self,
        lane: Lane,
        ticket: Ticket,
        call: Call,
        entries: tuple[Entry, ...],
        number: int,
        over: Callable[[], None] | None,
    ) -> None:
        self._lane = lane
        self._ticket = ticket
        self._call: Call | None = call  # keeps the memory alive
        self.entries = entries
        """How those on board are recorded."""
        self.number = number
        """Which collective of the lane it is."""
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
            assert self._call is not None
            lane.note_landing(self, self._call, outcome)
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
            return self._lane.wait_for(self._ticket, deadline)
        except OperationTimeout:
            if not self._ticket.done():
                raise
        return self._ticket.wait(Deadline(0.0))  # it ended in this moment, or has a deadline of its own to tell of

    def _text(self) -> str:
        return self._call.text if self._call is not None else "the operation"
