"""The handle of an operation under way, the only future there is. Made by groups, plans and named operations; used by
callers that do not wait at once.

An operation in program order has its running calls from the beginning. One with a name gets them when every member has
announced it; until then its waiters are known to NegotiationWaits, which the control thread shares with all works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ronde.comm.backends.base import RunningCall
from ronde.comm.operations import Operation
from ronde.errors import OperationTimeout, RondeError
from ronde.net.messages import MissingRanksQuery
from ronde.observe.activity import CurrentOperation
from ronde.observe.recorder import Recorder
from ronde.observe.stragglers import attribute_waits
from ronde.observe.timeline import NegotiationSlice
from ronde.text import format_ranks
from ronde.types import Deadline

__all__ = ["BatchStart", "NegotiationWaits", "Work"]

QUERY_MISSING_BEFORE_S = 0.5
"""A wait for the start of a named operation asks for the missing ranks when so much of its time is left, or half of it.
Asking when the time is over would make the wait longer than was promised."""

MIN_QUERY_TIME_S = 0.05
"""A wait with less time than this does not ask: some callers wait for a moment a thousand times per second."""


class BatchStart(NamedTuple):
    """When named operations started together, and the ranks that announced them last."""

    at_ns: int
    stragglers: tuple[tuple[int, int], ...]
    """(rank, nanoseconds before the last one), as in RunOperations."""


class Work:
    """One operation under way. It keeps the memory it works on alive.

    wait() may be called any number of times and from any thread; it gives the same result or error each time.
    """

    __slots__ = (
        "_batch_start",
        "_done",
        "_error",
        "_operation",
        "_result",
        "_running_calls",
        "_timeout_s",
        "_waits",
        "announced_ns",
        "group",
        "label",
        "missing",
        "name",
    )

    # Thousands of these are made per step, so __init__ does no more than it must.
    def __init__(
        self,
        operation: Operation,
        timeout_s: float,
        running_calls: tuple[RunningCall, ...] | None,
        group: int = 0,
        waits: NegotiationWaits | None = None,
    ) -> None:
        self.name = operation.name
        """The name it was given; empty for an operation matched by program order."""
        self.label = operation.signature.label
        self._operation: Operation | None = operation
        self._timeout_s = timeout_s
        self._running_calls = running_calls
        self._done = False
        self._error: Exception | None = None
        self._result: Any = None
        # Only of an operation with a name:
        self.group = group
        self.announced_ns = 0
        """When it was announced, if a timeline is being written."""
        self.missing: tuple[int, ...] = ()
        """The ranks that have not announced it, if a wait has asked."""
        self._waits = waits
        self._batch_start: BatchStart | None = None

    def wait(self, timeout_s: float | None = None) -> Any:  # arrays, lists of them, or None
        """Wait for the operation and return its result, or raise its error. OperationTimeout is raised after timeout_s;
        the operation then continues.

        Without timeout_s it waits as long as an operation may take (the setting operation_s).
        """
        if not self._done:
            calls, operation = self._running_calls, self._operation
            if calls is not None and operation is not None and all([call.timing is not None for call in calls]):
                self._result = operation.result()  # a wait for another work of the same call has seen its end
                self._end(None)
            else:
                self._complete(Deadline(self._timeout_s if timeout_s is None else timeout_s))
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        """Whether wait() would return at once."""
        calls = self._running_calls
        return self._done or (calls is not None and all(call.done() for call in calls))

    def result(self) -> Any:  # as wait()
        """The result of an operation that is over, without waiting."""
        if not self.done():
            raise ValueError(f"{self.name or 'the operation'} is still under way; wait() for it")
        return self.wait()

    def __repr__(self) -> str:
        return f"<Work {self.name or 'unnamed'}: {'over' if self.done() else 'under way'}>"

    # --- for named operations, in the control thread, which holds the condition of NegotiationWaits ------------------

    @property
    def operation(self) -> Operation:
        # Called only while the work cannot end.
        assert self._operation is not None
        return self._operation

    @property
    def is_started(self) -> bool:
        return self._running_calls is not None

    def started_on(self, running_calls: tuple[RunningCall, ...], batch_start: BatchStart) -> None:
        self._batch_start = batch_start
        self._running_calls = running_calls

    def fail(self, error: Exception) -> None:
        # The operation will not start.
        if not self._done:
            self._end(error)

    def describe(self) -> str:
        return f"{self.label} {self.name!r} of group {self.group}"

    # --- the wait ----------------------------------------------------------------------------------------------------

    def _complete(self, deadline: Deadline) -> None:
        try:
            for running_call in self._wait_for_start(deadline):
                running_call.wait(deadline)
        except OperationTimeout as error:
            # Only the wait took too long, unless a call ended in this error. The call may have ended meanwhile, or
            # another thread may have seen its result, so done() does not tell.
            if all(call.error is not error for call in self._running_calls or ()):
                raise
            self._end(error)
        except (RondeError, ValueError, TypeError) as error:
            self._end(error)
        else:
            operation = self._operation
            if operation is not None:  # None when another thread was faster
                self._result = operation.result()
                self._end(None)

    def _wait_for_start(self, deadline: Deadline) -> tuple[RunningCall, ...]:
        if self._running_calls is None and not self._done:
            assert self._waits is not None
            self._wait_in_negotiation(self._waits, deadline)
        if self._error is not None:
            raise self._error
        assert self._running_calls is not None
        return self._running_calls

    def _wait_in_negotiation(self, waits: NegotiationWaits, deadline: Deadline) -> None:
        began_ns = time.monotonic_ns()
        condition, query_s = waits.condition, min(QUERY_MISSING_BEFORE_S, deadline.timeout_s / 2)
        with condition:
            waits.begin(self, began_ns)
            try:
                if condition.wait_for(self._is_started_or_done, max(0.0, deadline.remaining_s - query_s)):
                    return
                self.missing = ()
                if query_s >= MIN_QUERY_TIME_S:
                    waits.enqueue(MissingRanksQuery(self.group, self.name))
                if not condition.wait_for(self._is_started_or_done, deadline.remaining_s):
                    waited_for = f"; it waits for {format_ranks(self.missing)}" if self.missing else ""
                    what = f"{self.describe()} did not start within {deadline.timeout_s:g} s"
                    error = OperationTimeout(f"{what}{waited_for}")
                    error.missing = self.missing
                    raise error
            finally:
                waits.end(began_ns, self._batch_start)

    def _is_started_or_done(self) -> bool:
        return self._running_calls is not None or self._done

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._done = True
        self._operation = None


class NegotiationWaits:
    """The threads that wait for the start of named operations; one object per rank, made by the control thread."""

    def __init__(self, recorder: Recorder, enqueue: Callable[[Work | MissingRanksQuery], None]) -> None:
        self.condition = threading.Condition()
        """Guards the start of works, and is notified of it."""
        self.enqueue = enqueue
        """Hands an announcement or a question to the control thread."""
        self._recorder = recorder
        self._waiting: dict[int, tuple[int, Work]] = {}
        """By thread: since when it waits, and for which work."""

    @property
    def tracing(self) -> bool:
        """Whether a timeline is being written."""
        return self._recorder.tracing

    def record_batch_start(self, works: Iterable[Work], at_ns: int) -> None:
        """Record for the timeline that these works start together."""
        slices = [
            NegotiationSlice(work.label, work.name, work.group, work.announced_ns or at_ns, at_ns) for work in works
        ]
        self._recorder.record_batch_start(at_ns, slices)

    def begin(self, work: Work, began_ns: int) -> None:
        """The calling thread, which holds the condition, begins to wait."""
        self._waiting[threading.get_ident()] = (began_ns, work)

    def end(self, began_ns: int, batch_start: BatchStart | None) -> None:
        """The calling thread has waited. Records how long, and for which ranks; batch_start is None after a failure."""
        self._waiting.pop(threading.get_ident(), None)
        end_ns = time.monotonic_ns() if batch_start is None else batch_start.at_ns
        self._recorder.record_overlap(-max(0, end_ns - began_ns), 0)
        if batch_start is not None and batch_start.stragglers:
            own = self._recorder.rank  # this rank was there, whenever the coordinator received its announcement
            arrivals = {rank: end_ns - before_ns for rank, before_ns in batch_start.stragglers if rank != own}
            self._recorder.record_waits(attribute_waits(arrivals, [(began_ns, end_ns)]))

    def blocked_operation(self) -> CurrentOperation | None:
        """The operation that a caller has waited for longest, if one does."""
        with self.condition:
            if not self._waiting:
                return None
            began_ns, work = min(self._waiting.values(), key=lambda item: item[0])
            return CurrentOperation(work.describe(), began_ns, named_operation=(work.group, work.name))
