"""What a rank reports to the coordinator by itself: trace events for the timeline, operations without a name that have
waited too long, and its activity. Used by the control thread.

Named operations are checked by the coordinator, which knows who has announced them. An operation without a name is
known to its members only: each that waits too long reports it once, and the coordinator asks the missing ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ronde.comm.channel import Channel
from ronde.comm.named_operations import OpenChannels
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
from ronde.observe.activity import CurrentOperation
from ronde.observe.recorder import Recorder
from ronde.observe.timeline import TraceStyle

MAX_EVENTS_PER_MESSAGE = 10_000
SEND_INTERVAL_S = 0.02
"""How often trace events are sent to the coordinator, which appends them to the file."""
CHECKS_PER_STALL_TIME = 4


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
    """Checks the channels now and then for operations that wait too long. It costs the operations nothing."""

    def __init__(self, stall_s: float) -> None:
        self._stall_ns = int(stall_s * 1e9)
        self._check_interval_ns = self._stall_ns // CHECKS_PER_STALL_TIME
        self._next_check_ns = 0
        self._reported: dict[int, int] = {}
        """By channel: when the last operation that was reported had started."""

    @property
    def is_enabled(self) -> bool:
        return self._stall_ns > 0

    def remaining_s(self, now_ns: int) -> float:
        """Return the time until the next check."""
        return max(0.0, (self._next_check_ns - now_ns) / 1e9) if self._stall_ns else math.inf

    def overdue(self, channels: Sequence[Channel], now_ns: int, offset_ns: int = 0) -> list[WaitingTooLong]:
        """Return the operations that became late since the last check. `offset_ns` leads to the coordinator's clock."""
        if not self._stall_ns or now_ns < self._next_check_ns:
            return []
        self._next_check_ns = now_ns + self._check_interval_ns
        self._reported = {
            key: since for key, since in self._reported.items() if any(id(channel) == key for channel in channels)
        }
        found = (self._check_channel(channel, now_ns, offset_ns) for channel in channels)
        return [waiting for waiting in found if waiting is not None]

    def _check_channel(self, channel: Channel, now_ns: int, offset_ns: int) -> WaitingTooLong | None:
        current = channel.current_call()
        if current is None or not current.missing or current.description == "join":
            return None  # who has joined waits for nothing that is late
        if now_ns - current.since_ns < self._stall_ns or self._reported.get(id(channel)) == current.since_ns:
            return None
        self._reported[id(channel)] = current.since_ns
        missing = tuple(channel.members[index] for index in current.missing)
        call = f"{channel.backend_channel.spec.id} {current.sequence}" if current.sequence >= 0 else ""
        return WaitingTooLong(current.description, channel.group, current.since_ns + offset_ns, missing, call)


class ActivityReporter:
    """Puts together what the recorder and the channels know about this rank."""

    def __init__(self, recorder: Recorder, open_channels: OpenChannels, waits: NegotiationWaits) -> None:
        self._recorder = recorder
        self._open_channels = open_channels
        self._waits = waits

    def make_report(self, now_ns: int, offset_ns: int) -> ActivityReport:
        """Return the totals so far and the arrivals since the last call, on the coordinator's clock."""
        current = self._longest_blocked()
        if current is not None:
            current = msgspec.structs.replace(current, since_ns=min(current.since_ns, now_ns) + offset_ns)
        activity = self._recorder.sample_activity(now_ns + offset_ns, current)
        arrivals = []
        for channel in self._open_channels.channels:
            samples = channel.arrival_sampler.take_samples(offset_ns)
            if samples:
                arrivals.append(ArrivalSamples(channel.backend_channel.spec.id, channel.group, samples))
        return ActivityReport(activity, tuple(arrivals))

    def _longest_blocked(self) -> CurrentOperation | None:
        """The operation in which a thread of the user has been blocked longest."""
        channels = self._open_channels.channels
        blocked = [self._waits.blocked_operation(), *(channel.blocked_operation() for channel in channels)]
        return min((each for each in blocked if each is not None), key=lambda each: each.since_ns, default=None)
