"""What one process remembers of its run: recent events, sums, and the trace until it is fetched. One per process.

emit() and operation() may be called from any thread and take no lock: appending to a deque is one step for all other
threads, and the sums are per thread (metrics.Tally).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ronde.observe.activity import ActivitySample, CurrentOperation
from ronde.observe.events import Event
from ronde.observe.metrics import Metrics, OperationCounters
from ronde.observe.timeline import BatchMarker, NegotiationSlice, OperationSlice, TraceEncoder, TraceStyle

__all__ = ["Recorder"]

OperationTuple: TypeAlias = tuple[str, str, int, int, int, int, int]
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
        self._counters = OperationCounters()
        self._count_operation = self._counters.add
        self._overlap_counters = OperationCounters()
        """What the sums contain, but in which no caller was blocked."""
        self._waits_ns: dict[int, float] = {}
        self.steps = 0
        """Steps of the training, as marked."""
        self._tracing = False
        self._trace: deque[OperationTuple | NegotiationSlice | BatchMarker | Event] = deque()
        self._trace_capacity = trace_capacity
        self._lock = threading.Lock()
        """Guards _dropped and _blame, which are rarely touched."""
        self._dropped = 0
        self._offset_ns = 0
        self._label = ""
        self._trace_encoder = TraceEncoder(rank)
        self._encoded_trace: deque[bytes] = deque()

    def record_event(self, event: Event) -> None:
        """Take down an event; the oldest makes room."""
        self._events.append(event)
        if self._tracing:
            self._add_to_trace(event)

    def record_operation(
        self, kind: str, name: str, group: int, num_bytes: int, start_ns: int, ready_ns: int, end_ns: int
    ) -> None:
        """Take down an operation that ran. On the path of every operation: well below a microsecond."""
        self._count_operation(group, kind, num_bytes, ready_ns - start_ns, end_ns - ready_ns)
        if self._tracing:
            self._add_to_trace((kind, name, group, num_bytes, start_ns, ready_ns, end_ns))

    def record_batch_start(self, at_ns: int, negotiated: Iterable[NegotiationSlice]) -> None:
        """Take down that named operations have taken off together. Only for the trace: ask `tracing` before."""
        for each in negotiated:
            self._add_to_trace(each)
        self._add_to_trace(BatchMarker(at_ns))

    def mark_step(self) -> None:
        """One step of the training is done."""
        self.steps += 1

    def record_overlap(self, wait_ns: int, move_ns: int) -> None:
        """So much of what operation() was told passed while no caller was blocked; below 0 if more was blocked."""
        self._overlap_counters.add(0, "", 0, wait_ns, move_ns)

    def record_waits(self, waits_ns: Mapping[int, float]) -> None:
        """A caller has waited for these ranks so long, in nanoseconds."""
        with self._lock:
            for rank, waited_ns in waits_ns.items():
                self._waits_ns[rank] = self._waits_ns.get(rank, 0.0) + waited_ns

    def sample_activity(self, at_ns: int, current_operation: CurrentOperation | None) -> ActivitySample:
        """The sums so far, for the coordinator. What is under way counts as far as it has come."""
        total, unblocked = self._counters.snapshot(self.rank).total, self._overlap_counters.snapshot(self.rank).total
        waiting_s, moving_s = total.wait_s - unblocked.wait_s, total.move_s - unblocked.move_s
        if current_operation is not None and current_operation.is_waiting:
            waiting_s += (at_ns - current_operation.since_ns) / 1e9
        elif current_operation is not None:
            moving_s += (at_ns - current_operation.since_ns) / 1e9
        with self._lock:
            waited_for = tuple([(rank, int(waited_ns)) for rank, waited_ns in self._waits_ns.items()])
        return ActivitySample(
            at_ns=at_ns,
            steps=self.steps,
            operations=total.operations,
            bytes=total.bytes,
            waiting_ns=round(waiting_s * 1e9),
            moving_ns=round(moving_s * 1e9),
            waited_for=waited_for,
            current_operation=current_operation,
        )

    def events(self) -> list[Event]:
        """The most recent events, oldest first."""
        return list(self._events.copy())  # the copy is one step for other threads; walking through it is not

    def metrics(self) -> Metrics:
        """The sums of all operations so far."""
        return self._counters.snapshot(self.rank)

    def set_clock_offset(self, offset_ns: int) -> None:
        """What to add to our clock in the trace. Counts for all that has not been drained yet."""
        self._offset_ns = offset_ns

    @property
    def tracing(self) -> bool:
        """Whether operations and events are kept for the trace."""
        return self._tracing

    def set_tracing(self, enabled: bool, label: str = "", style: TraceStyle | None = None) -> None:
        """Keep operations and events for a trace from now on, or stop. The label names this process in it, also in
        later ones. By the thread that drains."""
        self._label = label or self._label
        if enabled:  # a new one, also when another is being written
            self._trace.clear()
            self._encoded_trace.clear()
            self._trace_encoder = TraceEncoder(self.rank, self._label, style)
            self._encoded_trace.extend(self._trace_encoder.encode_names())
        self._tracing = enabled

    def drain_trace(self, limit: int) -> tuple[list[bytes], int]:
        """At most `limit` trace events (JSON objects) in the order they were kept, and how many records were dropped
        since the last call. For one thread at a time."""
        while self._trace and len(self._encoded_trace) < limit:
            self._encoded_trace.extend(self._encode_record(self._trace.popleft()))
        events = [self._encoded_trace.popleft() for _ in range(min(limit, len(self._encoded_trace)))]
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return events, dropped

    def _encode_record(self, record: OperationTuple | NegotiationSlice | BatchMarker | Event) -> list[bytes]:
        if isinstance(record, Event):
            return [self._trace_encoder.encode_event(record, self._offset_ns)]
        if isinstance(record, NegotiationSlice):
            return self._trace_encoder.encode_negotiation(record, self._offset_ns)
        if isinstance(record, BatchMarker):
            return self._trace_encoder.encode_batch_marker(record, self._offset_ns)
        return self._trace_encoder.encode_operation(OperationSlice(*record), self._offset_ns)

    def _add_to_trace(self, record: OperationTuple | NegotiationSlice | BatchMarker | Event) -> None:
        if len(self._trace) < self._trace_capacity:
            self._trace.append(record)
        else:
            with self._lock:
                self._dropped += 1
