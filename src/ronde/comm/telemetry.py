"""What a rank reports to the coordinator by itself: trace events for the timeline, operations that have waited too long
and that the coordinator does not know, and its activity. Used by the control thread.

The coordinator checks what was announced to it. An operation without a name, or one that was announced in shared
memory, is known to its members only: each that waits too long reports it once, and the coordinator asks the missing
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from ronde.comm.channel import Channel
from ronde.comm.named_operations import NamedOperations
from ronde.comm.work import NegotiationWaits
from ronde.net.event_loop import EventLoop, Timer
from ronde.net.messages import (
    ActivityReport,
    ArrivalSamples,
    SetTracing,
    TraceBatch,
    TraceFlushed,
    WaitingTooLong,
    WorkerMessage,
)
from ronde.observe.recorder import Recorder
from ronde.observe.timeline import TraceStyle
from ronde.types import OperationKind

MAX_EVENTS_PER_MESSAGE = 10_000
SEND_INTERVAL_S = 0.02
"""How often trace events are sent to the coordinator, which appends them to the file."""


class TraceSender:
    """Sends what the recorder has traced for the timeline, while there is one."""

    def __init__(self, loop: EventLoop, recorder: Recorder, send: Callable[[WorkerMessage], None]) -> None:
        self._loop = loop
        self._recorder = recorder
        self._send = send
        self._timer: Timer | None = None

    def send_due(self) -> None:
        """Send one message, and go on every SEND_INTERVAL_S, or in the next turn of the loop if there is more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._recorder.tracing:
            has_more = self._send_batch()
            self._timer = self._loop.call_later(0.0 if has_more else SEND_INTERVAL_S, self.send_due)

    def send_all(self) -> None:
        while self._recorder.tracing and self._send_batch():
            pass

    def handle(self, message: SetTracing) -> None:
        """The coordinator starts a timeline, or ends it."""
        if message.enabled:
            self._recorder.set_tracing(True, style=TraceStyle(message.horovod, message.batch_markers))
            self.send_due()
        else:
            self.send_all()
            self._recorder.set_tracing(False)
            self._send(TraceFlushed())

    def _send_batch(self) -> bool:
        events, dropped = self._recorder.drain_trace(MAX_EVENTS_PER_MESSAGE)
        if events or dropped:
            self._send(TraceBatch(tuple(events), dropped))
        return len(events) == MAX_EVENTS_PER_MESSAGE


class ChannelStallInspector:
    """Finds operations that have waited too long in their channel, or for ranks that have not announced them in shared
    memory. It costs the operations nothing."""

    def __init__(self, stall_s: float) -> None:
        self._stall_ns = int(stall_s * 1e9)
        self._reported: dict[tuple[int, str], int] = {}
        """By channel, or by group and named operation: when the last one that was reported had started."""

    def overdue(
        self,
        channels: Sequence[Channel],
        now_ns: int,
        offset_ns: int = 0,
        named_operations: Sequence[NamedOperations] = (),
    ) -> list[WaitingTooLong]:
        """Return the operations that became late since the last check. `offset_ns` leads to the coordinator's clock."""
        found, before, self._reported = [], self._reported, {}
        for channel in channels:
            current = channel.current_call()
            if current is None or not current.missing or current.kind is OperationKind.JOIN:
                continue  # who has joined waits for nothing that is late
            if now_ns - current.since_ns < self._stall_ns:
                continue
            key = (id(channel), "")
            self._reported[key] = current.since_ns
            if before.get(key) != current.since_ns:
                missing = tuple(channel.members[index] for index in current.missing)
                call = f"{channel.backend_channel.spec.id} {current.sequence}" if current.sequence >= 0 else ""
                since_ns = current.since_ns + offset_ns
                found.append(WaitingTooLong(current.description, channel.group, since_ns, missing, call))
        for named in named_operations:
            for op, since_ns, missing in named.late_operations(now_ns - self._stall_ns):
                key = (id(named), op)
                self._reported[key] = since_ns
                if before.get(key) != since_ns:
                    present = tuple([rank for rank in named.channel.members if rank not in missing])
                    found.append(WaitingTooLong(op, named.group, since_ns + offset_ns, missing, present=present))
        return found


def make_activity_report(
    recorder: Recorder,
    channels: Sequence[Channel],
    waits: Sequence[NegotiationWaits | NamedOperations],
    offset_ns: int,
) -> ActivityReport:
    """Return the rank's totals so far, the operation in which a thread of the user has been blocked longest, and the
    arrivals since the last call. `offset_ns` leads to the coordinator's clock."""
    now_ns = time.monotonic_ns()
    blocked = [each.blocked_operation() for each in (*waits, *channels)]
    current = min((each for each in blocked if each is not None), key=lambda each: each.since_ns, default=None)
    if current is not None:
        current = msgspec.structs.replace(current, since_ns=min(current.since_ns, now_ns) + offset_ns)
    activity = recorder.sample_activity(now_ns + offset_ns, current)
    arrivals = []
    for channel in channels:
        samples = channel.arrival_sampler.take_samples(offset_ns)
        if samples:
            arrivals.append(ArrivalSamples(channel.backend_channel.spec.id, channel.group, samples))
    return ActivityReport(activity, tuple(arrivals))
