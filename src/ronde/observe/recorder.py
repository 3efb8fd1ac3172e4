"""What one process remembers of its run: recent events, sums, and the trace until it is fetched. One per process.

emit() and operation() may be called from any thread and take no lock: appending to a deque is one step for all other
threads, and the sums are per thread (metrics.Tally).
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeAlias

from ronde.observe.events import Event
from ronde.observe.metrics import Metrics, Tally
from ronde.observe.timeline import Operation, Tracks

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
        self._tracing = False
        self._trace: deque[Record | Event] = deque()
        self._trace_capacity = trace_capacity
        self._lock = threading.Lock()
        """Guards _dropped, which is rarely touched."""
        self._dropped = 0
        self._offset_ns = 0
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

    def set_tracing(self, on: bool, label: str = "") -> None:
        """Keep operations and events for the trace from now on, or stop. The label names this process in it."""
        if on and not self._tracing:
            self._tracks = Tracks(self.rank, label)
            self._shaped.extend(self._tracks.names())
        self._tracing = on

    def drain_trace(self, limit: int) -> tuple[list[bytes], int]:
        """At most `limit` trace events (JSON objects) in the order they were kept, and how many records were dropped
        since the last call. For one thread at a time."""
        while self._trace and len(self._shaped) < limit:
            record = self._trace.popleft()
            if isinstance(record, Event):
                self._shaped.append(self._tracks.event(record, self._offset_ns))
            else:
                self._shaped.extend(self._tracks.operation(Operation(*record), self._offset_ns))
        events = [self._shaped.popleft() for _ in range(min(limit, len(self._shaped)))]
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return events, dropped

    def _keep(self, record: Record | Event) -> None:
        if len(self._trace) < self._trace_capacity:
            self._trace.append(record)
        else:
            with self._lock:
                self._dropped += 1
