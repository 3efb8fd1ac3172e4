"""A rank's part in the timeline: sends what was recorded, and begins and ends it when told. For the engine's thread.

Which operations in program order have waited too long here. Asked by the engine on every turn of its loop.

Named operations are watched by the coordinator, which knows who has announced them. Of an operation without a name
only its members know; each that waits too long says so once, and the coordinator asks the missing ones where they are.

How this rank is, as the coordinator is told about once per second. Asked by the engine when a launcher watches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ronde.comm.channel import Channel
from ronde.comm.named_operations import OpenChannels
from ronde.comm.work import NegotiationWaits
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

__all__ = ["ActivityReporter", "ChannelStallInspector", "TraceSender"]

MAX_EVENTS_PER_MESSAGE = 10_000
"""Trace events in one message."""
SEND_INTERVAL_NS = 20_000_000
"""Whoever looks at the file sees what happened a moment ago."""


class TraceSender:
    """Between the recorder and the coordinator."""

    def __init__(self, recorder: Recorder, send: Callable[[WorkerMessage], None]) -> None:
        self._recorder = recorder
        self._send = send
        self._next_ns = 0

    def remaining_s(self, now_ns: int) -> float:
        """How long until there may be something to send."""
        return max(0.0, (self._next_ns - now_ns) / 1e9) if self._recorder.tracing else float("inf")

    def send_due(self, now_ns: int) -> None:
        """Send what was recorded, from time to time."""
        if self._recorder.tracing and now_ns >= self._next_ns:
            self._next_ns = now_ns + SEND_INTERVAL_NS
            self.send()

    def send(self) -> None:
        """Send all that was recorded."""
        while self._recorder.tracing:
            events, dropped = self._recorder.drain_trace(MAX_EVENTS_PER_MESSAGE)
            if events or dropped:
                self._send(TraceBatch(tuple(events), dropped))
            if len(events) < MAX_EVENTS_PER_MESSAGE:
                return

    def handle(self, trace: SetTracing) -> None:
        """The coordinator begins a timeline, or ends it."""
        if trace.enabled:
            self._recorder.set_tracing(True, style=TraceStyle(trace.horovod, trace.batch_markers))
            self._next_ns = 0
        else:
            self.send()
            self._recorder.set_tracing(False)
            self._send(TraceFlushed())


CHECKS_PER_STALL_TIME = 4


class ChannelStallInspector:
    """Looks at the lanes now and then: that costs little, and the operations themselves pay nothing."""

    def __init__(self, stall_s: float) -> None:
        self._stall_ns = int(stall_s * 1e9)
        self._check_interval_ns = self._stall_ns // CHECKS_PER_STALL_TIME
        self._next_check_ns = 0
        self._reported: dict[int, int] = {}
        """By lane: when the last operation that was reported began."""

    def remaining_s(self, now_ns: int) -> float:
        """Until the next look."""
        return max(0.0, (self._next_check_ns - now_ns) / 1e9) if self._stall_ns else math.inf

    def overdue(self, channels: Sequence[Channel], now_ns: int, offset_ns: int = 0) -> list[WaitingTooLong]:
        """What became late since the last look. The offset leads to the coordinator's clock; a limit of 0 turns the
        watch off."""
        if not self._stall_ns or now_ns < self._next_check_ns:
            return []
        self._next_check_ns = now_ns + self._check_interval_ns
        self._reported = {
            key: since for key, since in self._reported.items() if any(id(lane) == key for lane in channels)
        }
        found = (self._check_channel(lane, now_ns, offset_ns) for lane in channels)
        return [waiting for waiting in found if waiting is not None]

    def _check_channel(self, channel: Channel, now_ns: int, offset_ns: int) -> WaitingTooLong | None:
        looking = channel.current_call()
        if looking is None or not looking.missing or looking.description == "join":
            return None  # who has joined waits for nothing that is late
        if now_ns - looking.since_ns < self._stall_ns or self._reported.get(id(channel)) == looking.since_ns:
            return None
        self._reported[id(channel)] = looking.since_ns
        missing = tuple(channel.members[index] for index in looking.missing)
        call = f"{channel.backend_channel.spec.id} {looking.sequence}" if looking.sequence >= 0 else ""
        return WaitingTooLong(looking.description, channel.group, looking.since_ns + offset_ns, missing, call)


class ActivityReporter:
    """Reads what others have written down. For the engine's thread."""

    def __init__(self, recorder: Recorder, open_channels: OpenChannels, waits: NegotiationWaits) -> None:
        self._recorder = recorder
        self._open_channels = open_channels
        self._waits = waits

    def make_report(self, now_ns: int, offset_ns: int) -> ActivityReport:
        """The sums so far, and the notes since the last call. The offset leads to the coordinator's clock."""
        doing = self._longest_blocked()
        if doing is not None:
            doing = msgspec.structs.replace(doing, since_ns=min(doing.since_ns, now_ns) + offset_ns)
        reading = self._recorder.sample_activity(now_ns + offset_ns, doing)
        taken = ((lane, lane.arrival_sampler.take_samples(offset_ns)) for lane in self._open_channels.channels)
        return ActivityReport(
            reading,
            tuple(ArrivalSamples(lane.backend_channel.spec.id, lane.group, notes) for lane, notes in taken if notes),
        )

    def _longest_blocked(self) -> CurrentOperation | None:
        """The operation in which a caller has been blocked longest."""
        found = [self._waits.blocked_operation(), *(lane.blocked_operation() for lane in self._open_channels.channels)]
        return min((doing for doing in found if doing is not None), key=lambda doing: doing.since_ns, default=None)
