"""The Recorder of a process keeps recent events, sums of operations, and the trace until it is sent.

record_event() and record_operation() may be called from any thread and take no lock: appending to a deque is atomic,
and each thread has sums of its own (metrics.OperationCounters).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ronde.observe.activity import ActivitySample, CurrentOperation
from ronde.observe.events import Event
from ronde.observe.metrics import Counts, Metrics, OperationCounters
from ronde.observe.timeline import NegotiationSlice, TraceEncoder, TraceRecord, TraceStyle

TRACE_CAPACITY = 65_536
"""Operations and events kept until drain_trace(); more are dropped and counted."""


class Recorder:
    def __init__(self, rank: int, capacity: int = 4096, *, trace_capacity: int = TRACE_CAPACITY) -> None:
        self.rank = rank
        self._events: deque[Event] = deque(maxlen=capacity)
        self._counters = OperationCounters()
        self._count_operation = self._counters.add
        self._overlap_counters = OperationCounters()
        """The part of _counters in which no caller was blocked."""
        self._waits_ns: dict[int, float] = {}
        self.steps = 0
        """Training steps, as ronde.mark_step() counts them."""
        self.pushes = (0, 0, 0)
        """To a parameter server: how many, the sum of their staleness, and the largest. Replaced as a whole."""
        self.tracing = False
        """Whether operations and events are kept for a trace. Changed by set_tracing()."""
        self.clock_offset_ns = 0
        """What is added to the local clock in the trace. It applies to all that is not drained yet."""
        self._trace: deque[TraceRecord] = deque()
        self._trace_capacity = trace_capacity
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its owner
        """Guards _dropped and _waits_ns, which are rarely used."""
        self._dropped = 0
        self._label = ""
        self._trace_encoder = TraceEncoder(rank)
        self._encoded_trace: deque[bytes] = deque()

    def record_event(self, event: Event) -> None:
        """Keep an event; when there are too many, the oldest is dropped."""
        self._events.append(event)
        if self.tracing:
            self._add_to_trace(event)

    def record_operation(
        self, kind: str, name: str, group: int, num_bytes: int, start_ns: int, ready_ns: int, end_ns: int
    ) -> None:
        """Count an operation that ran. Called for every operation, so it takes well below a microsecond."""
        self._count_operation(group, kind, num_bytes, ready_ns - start_ns, end_ns - ready_ns)
        if self.tracing:
            self._add_to_trace((kind, name, group, num_bytes, start_ns, ready_ns, end_ns))

    def add_counts(self, group: int, kind: str, counts: Callable[[], Counts]) -> None:
        """Include operations that are counted elsewhere: `counts` returns their sums so far."""
        self._counters.add_source(group, kind, counts)

    def remove_counts(self, group: int, kind: str, counts: Callable[[], Counts]) -> None:
        """Keep the sums of add_counts() as they are now. Called when `counts` counts nothing any more."""
        self._counters.remove_source(group, kind, counts)

    def record_batch_start(self, at_ns: int | None, negotiated: Iterable[NegotiationSlice]) -> None:
        """Keep for the trace that named operations start together; None if others of the batch have told when. Only
        called when `tracing`."""
        for each in negotiated:
            self._add_to_trace(each)
        if at_ns is not None:
            self._add_to_trace(at_ns)

    def record_overlap(self, wait_ns: int, move_ns: int) -> None:
        """Count how much of the time given to record_operation() passed while no caller was blocked; below 0 if callers
        were blocked for longer."""
        self._overlap_counters.add(0, "", 0, wait_ns, move_ns)

    def record_waits(self, waits_ns: Mapping[int, float]) -> None:
        """Count how many nanoseconds a caller has waited for each of these ranks."""
        with self._lock:
            for rank, waited_ns in waits_ns.items():
                self._waits_ns[rank] = self._waits_ns.get(rank, 0.0) + waited_ns

    def record_push(self, staleness: int) -> None:
        """Count a push to a parameter server. The staleness is how many updates of others came between its read and its
        commit. Called by one thread at a time."""
        number, total, largest = self.pushes
        self.pushes = (number + 1, total + staleness, max(largest, staleness))

    def sample_activity(self, at_ns: int, current_operation: CurrentOperation | None) -> ActivitySample:
        """Return the sums so far, for the coordinator. They include the current operation up to now."""
        total, overlap = self._counters.snapshot(self.rank).total, self._overlap_counters.snapshot(self.rank).total
        waiting_s, moving_s = total.wait_s - overlap.wait_s, total.move_s - overlap.move_s
        if current_operation is not None and current_operation.is_waiting:
            waiting_s += (at_ns - current_operation.since_ns) / 1e9
        elif current_operation is not None:
            moving_s += (at_ns - current_operation.since_ns) / 1e9
        with self._lock:
            waited_for = tuple([(rank, int(waited_ns)) for rank, waited_ns in self._waits_ns.copy().items()])
        pushes = self.pushes
        return ActivitySample(
            at_ns=at_ns,
            steps=max(self.steps, pushes[0]),
            operations=total.operations,
            bytes=total.bytes,
            waiting_ns=round(waiting_s * 1e9),
            moving_ns=round(moving_s * 1e9),
            waited_for=waited_for,
            current_operation=current_operation,
            pushes=pushes,
        )

    def events(self) -> list[Event]:
        """Return the most recent events, oldest first."""
        return list(self._events.copy())  # the copy is atomic; iterating over the deque is not

    def metrics(self) -> Metrics:
        return self._counters.snapshot(self.rank)

    def renew_locks(self) -> None:
        """Called in a forked child: threads of the parent may have held them."""
        self._lock = threading.RLock()
        self._counters.renew_lock()
        self._overlap_counters.renew_lock()

    def set_tracing(self, enabled: bool, label: str = "", style: TraceStyle | None = None) -> None:
        """Keep operations and events for a trace from now on, or stop. The label names this process in this trace and
        in later ones. Called by the thread that calls drain_trace()."""
        self._label = label or self._label
        if enabled:  # a new trace, also when another is being written
            self._trace.clear()
            self._encoded_trace.clear()
            self._trace_encoder = TraceEncoder(self.rank, self._label, style)
            self._encoded_trace.extend(self._trace_encoder.encode_names())
        self.tracing = enabled

    def drain_trace(self, limit: int) -> tuple[list[bytes], int]:
        """Return at most `limit` trace events (JSON objects) in the order they were kept, and how many records were
        dropped since the last call. Called by one thread at a time."""
        while self._trace and len(self._encoded_trace) < limit:
            self._encoded_trace.extend(self._trace_encoder.encode(self._trace.popleft(), self.clock_offset_ns))
        events = [self._encoded_trace.popleft() for _ in range(min(limit, len(self._encoded_trace)))]
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        return events, dropped

    def _add_to_trace(self, record: TraceRecord) -> None:
        if len(self._trace) < self._trace_capacity:
            self._trace.append(record)
        else:
            with self._lock:
                self._dropped += 1
