"""What one process remembers of its run: recent events, sums, and the trace until it is fetched. One per process.

emit() and operation() may be called from any thread and take no lock: appending to a deque is one step for all other
threads, and the sums are per thread (metrics.Tally).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ronde.observe.events import Event
from ronde.observe.metrics import Metrics, Tally
from ronde.observe.timeline import Departure, Negotiation, Operation, Style, Tracks
from ronde.observe.vitals import Doing, Reading

__all__ = ["Recorder"]

Record: TypeAlias = tuple[str, str, int, int, int, int, int]
"""An Operation's fields. It becomes one when it is drained: making a plain tuple is quicker."""

TRACE_CAPACITY = 65_536
"""Operations and events kept for the trace until they are fetched; more are counted and dropped."""


class Recorder:
    """Takes down what happens, cheaply; others read it when they like."""

    def __init__(self, rank: int, capacity: int = 4096, *, trace_capacity: int = TRACE_CAPACITY) -> None:
        if capacity < 1 or trace_capacity < 1:
            raise ValueError(f"capacities must be at least 1, got {capacity} and {trace_capacity}")
        self.rank = rank
        self._events: deque[Event] = deque(maxlen=capacity)
        self._tally = Tally()
        self._add = self._tally.add
        self._unblocked = Tally()
        """What the sums contain, but in which no caller was blocked."""
        self._blame: dict[int, float] = {}
        self.steps = 0
        """Steps of the training, as marked."""
        self._tracing = False
        self._trace: deque[Record | Negotiation | Departure | Event] = deque()
        self._trace_capacity = trace_capacity
        self._lock = threading.Lock()
        """Guards _dropped and _blame, which are rarely touched."""
        self._dropped = 0
        self._offset_ns = 0
        self._label = ""
        self._tracks = Tracks(rank)
        self._shaped: deque[bytes] = deque()

    def emit(self, event: Event) -> None:
        """Take down an event; the oldest makes room."""
        self._events.append(event)
        if self._tracing:
            self._keep(event)

    def operation(
        self, kind: str, name: str, group: int, num_bytes: int, start_ns: int, ready_ns: int, end_ns: int
    ) -> None:
        """Take down an operation that ran. On the path of every operation: well below a microsecond."""
        self._add(group, kind, num_bytes, ready_ns - start_ns, end_ns - ready_ns)
        if self._tracing:
            self._keep((kind, name, group, num_bytes, start_ns, ready_ns, end_ns))

    def departed(self, at_ns: int, negotiated: Iterable[Negotiation]) -> None:
        """Take down that named operations have taken off together. Only for the trace: ask `tracing` before."""
        for each in negotiated:
            self._keep(each)
        self._keep(Departure(at_ns))

    def mark_step(self) -> None:
        """One step of the training is done."""
        self.steps += 1

    def unblocked(self, wait_ns: int, move_ns: int) -> None:
        """So much of what operation() was told passed while no caller was blocked; below 0 if more was blocked."""
        self._unblocked.add(0, "", 0, wait_ns, move_ns)

    def waited_for(self, blamed: Mapping[int, float]) -> None:
        """A caller has waited for these ranks so long, in nanoseconds."""
        with self._lock:
            for rank, waited_ns in blamed.items():
                self._blame[rank] = self._blame.get(rank, 0.0) + waited_ns

    def reading(self, at_ns: int, doing: Doing | None) -> Reading:
        """The sums so far, for the coordinator. What is under way counts as far as it has come."""
        total, unblocked = self._tally.snapshot(self.rank).total, self._unblocked.snapshot(self.rank).total
        waiting_s, moving_s = total.wait_s - unblocked.wait_s, total.move_s - unblocked.move_s
        if doing is not None and doing.waits:
            waiting_s += (at_ns - doing.since_ns) / 1e9
        elif doing is not None:
            moving_s += (at_ns - doing.since_ns) / 1e9
        with self._lock:
            waited_for = tuple([(rank, int(waited_ns)) for rank, waited_ns in self._blame.items()])
        return Reading(
            at_ns=at_ns,
            steps=self.steps,
            operations=total.operations,
            bytes=total.bytes,
            waiting_ns=round(waiting_s * 1e9),
            moving_ns=round(moving_s * 1e9),
            waited_for=waited_for,
            doing=doing,
        )

    def events(self) -> list[Event]:
        """The most recent events, oldest first."""
        return list(self._events.copy())  # the copy is one step for other threads; walking through it is not

    def metrics(self) -> Metrics:
        """The sums of all operations so far."""
        return self._tally.snapshot(self.rank)

    def set_clock_offset(self, offset_ns: int) -> None:
        """What to add to our clock in the trace. Counts for all that has not been drained yet."""
        self._offset_ns = offset_ns

    @property
    def tracing(self) -> bool:
        """Whether operations and events are kept for the trace."""
        return self._tracing

    def set_tracing(self, on: bool, label: str = "", style: Style | None = None) -> None:
        """Keep operations and events for a trace from now on, or stop. The label names this process in it, also in
        later ones. By the thread that drains."""
        self._label = label or self._label
        if on:  # a new one, also when another is being written
            self._trace.clear()
            self._shaped.clear()
            self._tracks = Tracks(self.rank, self._label, style)
            self._shaped.extend(self._tracks.names())
        self._tracing = on

    def drain_trace(self, limit: int) -> tuple[list[bytes], int]:
        """At most `limit` trace events (JSON objects) in the order they were kept, and how many records were dropped
        since the last call. For one thread at a time."""
        while self._trace and len(self._shaped) < limit:
            self._shaped.extend(self._shape(self._trace.popleft()))
        events = [self._shaped.popleft() for _ in range(min(limit, len(self._shaped)))]
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return events, dropped

    def _shape(self, record: Record | Negotiation | Departure | Event) -> list[bytes]:
        if isinstance(record, Event):
            return [self._tracks.event(record, self._offset_ns)]
        if isinstance(record, Negotiation):
            return self._tracks.negotiation(record, self._offset_ns)
        if isinstance(record, Departure):
            return self._tracks.departure(record, self._offset_ns)
        return self._tracks.operation(Operation(*record), self._offset_ns)

    def _keep(self, record: Record | Negotiation | Departure | Event) -> None:
        if len(self._trace) < self._trace_capacity:
            self._trace.append(record)
        else:
            with self._lock:
                self._dropped += 1
