"""A rank's part in the timeline: sends what was recorded, and begins and ends it when told. For the engine's thread."""

from __future__ import annotations

from collections.abc import Callable

from ronde.net.messages import FromWorker, Trace, TraceBatch, TraceOver
from ronde.observe.recorder import Recorder
from ronde.observe.timeline import Style

__all__ = ["Tracer"]

LIMIT = 10_000
"""Trace events in one message."""
EVERY_NS = 20_000_000
"""Whoever looks at the file sees what happened a moment ago."""


class Tracer:
    """Between the recorder and the coordinator."""

    def __init__(self, recorder: Recorder, send: Callable[[FromWorker], None]) -> None:
        self._recorder = recorder
        self._send = send
        self._next_ns = 0

    def left_s(self, now_ns: int) -> float:
        """How long until there may be something to send."""
        return max(0.0, (self._next_ns - now_ns) / 1e9) if self._recorder.tracing else float("inf")

    def send_due(self, now_ns: int) -> None:
        """Send what was recorded, from time to time."""
        if self._recorder.tracing and now_ns >= self._next_ns:
            self._next_ns = now_ns + EVERY_NS
            self.send()

    def send(self) -> None:
        """Send all that was recorded."""
        while self._recorder.tracing:
            events, dropped = self._recorder.drain_trace(LIMIT)
            if events or dropped:
                self._send(TraceBatch(tuple(events), dropped))
            if len(events) < LIMIT:
                return

    def hear(self, trace: Trace) -> None:
        """The coordinator begins a timeline, or ends it."""
        if trace.on:
            self._recorder.set_tracing(True, style=Style(trace.horovod, trace.departures))
            self._next_ns = 0
        else:
            self.send()
            self._recorder.set_tracing(False)
            self._send(TraceOver())
