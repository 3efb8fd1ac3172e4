"""The handle of an operation under way. Made by groups, plans and the engine; used by everybody who does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ronde.comm.lane import Flight
from ronde.comm.operations import Operation
from ronde.comm.wording import ranks_text
from ronde.errors import OperationTimeout, RondeError
from ronde.net.messages import MissingWanted
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import blame
from ronde.observe.timeline import Negotiation
from ronde.observe.vitals import Doing
from ronde.types import Deadline

__all__ = ["Board", "Departure", "NamedWork", "Work"]

ASK_S = 0.5
"""Who waits for a named operation asks whom it waits for when only so much of its time is left, or half of it. Asking
when it is over would make the wait longer than was promised."""
SHORT_S = 0.05
"""Who has less time than this does not ask: it may look in a thousand times per second."""


class Work:
    """One operation under way. It keeps the memory it works on alive.

    wait() may be called any number of times and from any thread; it gives the same result or error each time.
    """

    __slots__ = ("_error", "_finish", "_flights", "_limit_s", "_over", "_result", "name")

    def __init__(
        self, flights: tuple[Flight, ...] | None, finish: Callable[[], Any], limit_s: float, name: str = ""
    ) -> None:
        self.name = name
        """The name it was given; empty for an operation matched by program order."""
        self._flights = flights
        self._finish: Callable[[], Any] | None = finish
        self._limit_s = limit_s
        self._over = False
        self._error: Exception | None = None
        self._result: Any = None

    def wait(self, timeout_s: float | None = None) -> Any:  # arrays, lists of them, or None
        """The result, or the error it ended in. OperationTimeout when timeout_s is over; the work goes on then.

        Without timeout_s it waits as long as an operation may take (the setting operation_s).
        """
        if not self._over:
            flights, finish = self._flights, self._finish
            if flights is not None and finish is not None and all([flight.landed for flight in flights]):
                self._result = finish()  # somebody else on board has waited already: the most frequent case
                self._end(None)
            else:
                self._complete(Deadline(self._limit_s if timeout_s is None else timeout_s))
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether wait() would return at once."""
        flights = self._flights
        return self._over or (flights is not None and all(flight.done() for flight in flights))

    def result(self) -> Any:  # as wait()
        """The result of an operation that is over, without waiting."""
        if not self.done():
            raise ValueError(f"{self.name or 'the operation'} is still under way; wait() for it")
        return self.wait()

    def _complete(self, deadline: Deadline) -> None:
        try:
            for flight in self._take_off(deadline):
                flight.wait(deadline)
        except OperationTimeout as error:
            if not self.done():
                raise
            self._end(error)
        except (RondeError, ValueError, TypeError) as error:
            self._end(error)
        else:
            finish = self._finish
            if finish is not None:  # None when another thread was faster
                self._result = finish()
                self._end(None)

    def _take_off(self, deadline: Deadline) -> tuple[Flight, ...]:
        """The flights this work is on."""
        assert self._flights is not None
        return self._flights

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._over = True
        self._finish = None

    def __repr__(self) -> str:
        """For debugging."""
        return f"<Work {self.name or 'unnamed'}: {'over' if self.done() else 'under way'}>"


class Departure(NamedTuple):
    """When named works took off, and who was late: (rank, nanoseconds before the last), as in Run.late."""

    at_ns: int
    late: tuple[tuple[int, int], ...]


class Board:
    """Where the engine announces departures: named works wait here until their flight is known."""

    def __init__(self, recorder: Recorder, ask: Callable[[MissingWanted], None]) -> None:
        self.changed = threading.Condition()
        self._recorder = recorder
        self._ask = ask
        self._waiting: dict[int, tuple[int, NamedWork]] = {}
        """Who waits for a departure, by thread: since when, and of what."""

    @property
    def tracing(self) -> bool:
        """Whether a timeline is being written."""
        return self._recorder.tracing

    def note_departure(self, works: Iterable[NamedWork], at_ns: int) -> None:
        """For the timeline: these take off together."""
        negotiated = [
            Negotiation(work.operation.form.label, work.name, work.group, work.announced_ns or at_ns, at_ns)
            for work in works
        ]
        self._recorder.departed(at_ns, negotiated)

    def begin_wait(self, work: NamedWork, began_ns: int) -> None:
        """The calling thread waits for a departure from now on. It holds the lock."""
        self._waiting[threading.get_ident()] = (began_ns, work)

    def end_wait(self, began_ns: int, departure: Departure | None) -> None:
        """The wait is over, by a departure or without. Takes down how long it was, and who is to blame for it."""
        self._waiting.pop(threading.get_ident(), None)
        end_ns = time.monotonic_ns() if departure is None else departure.at_ns
        self._recorder.unblocked(-max(0, end_ns - began_ns), 0)
        if departure is not None and departure.late:
            me = self._recorder.rank  # has come, whenever the coordinator heard of it
            arrivals = {rank: end_ns - before_ns for rank, before_ns in departure.late if rank != me}
            self._recorder.waited_for(blame(arrivals, [(began_ns, end_ns)]))

    def doing(self) -> Doing | None:
        """What a caller has waited for longest, if one does."""
        with self.changed:
            began_ns, work = min(self._waiting.values(), key=lambda item: item[0], default=(0, None))
            return None if work is None else Doing(work.title, began_ns, named=(work.group, work.name))

    def ask_missing(self, work: NamedWork) -> None:
        """Ask the coordinator whom it waits for. The answer comes to the work."""
        self._ask(MissingWanted(work.group, work.name))


class NamedWork(Work):
    """An operation with a name: it takes off when every member has announced it."""

    __slots__ = ("_board", "_departure", "announced_ns", "group", "missing", "operation")

    def __init__(self, operation: Operation, group: int, name: str, board: Board, limit_s: float) -> None:
        # Written out, not left to Work.__init__: thousands of these are made per step.
        self.name = name
        self._flights = None
        self._finish = operation.result
        self._limit_s = limit_s
        self._over = False
        self._error = None
        self._result = None
        self.operation = operation
        self.group = group
        self._board = board
        self._departure: Departure | None = None
        self.announced_ns = 0
        """When it was, as far as somebody wants to know."""
        self.missing: tuple[int, ...] = ()
        """Whom it waits for, as far as a wait has asked."""

    @property
    def departed(self) -> bool:
        """Whether it has taken off."""
        return self._flights is not None

    def depart(self, flights: tuple[Flight, ...], departure: Departure) -> None:
        """It is under way on these. The engine holds the board's lock."""
        self._departure = departure
        self._flights = flights

    def fail(self, error: Exception) -> None:
        """It will not take off. The engine holds the board's lock."""
        if not self._over:
            self._end(error)

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.operation.form.label} {self.name!r} of group {self.group}"

    def _take_off(self, deadline: Deadline) -> tuple[Flight, ...]:
        if self._flights is None:
            self._wait_for_departure(self._board, deadline)
        if self._error is not None:
            raise self._error
        assert self._flights is not None
        return self._flights

    def _wait_for_departure(self, board: Board, deadline: Deadline) -> None:
        began_ns = time.monotonic_ns()
        changed, ask_s = board.changed, min(ASK_S, deadline.seconds / 2)
        with changed:
            board.begin_wait(self, began_ns)
            try:
                if changed.wait_for(self._is_settled, max(0.0, deadline.left_s - ask_s)):
                    return
                self.missing = ()
                if ask_s >= SHORT_S:
                    board.ask_missing(self)
                if not changed.wait_for(self._is_settled, deadline.left_s):
                    waits = f"; it waits for {ranks_text(self.missing)}" if self.missing else ""
                    error = OperationTimeout(f"{self.title} did not start within {deadline.seconds:g} s{waits}")
                    error.missing = self.missing
                    raise error
            finally:
                board.end_wait(began_ns, self._departure)

    def _is_settled(self) -> bool:
        return self._flights is not None or self._over
