"""The timeline of all ranks on the coordinator's side: one file at a time, begun and ended by any rank, or written from
the start because a setting says so. For the coordinator's thread.

One that a rank has begun ends with its round at the latest. To end it, everybody is asked for what was recorded; the
file is closed, and whoever wanted that is told, when all have sent it or are gone.
"""

from __future__ import annotations

from collections.abc import Collection

from ronde.comm.coordination.negotiator import Send
from ronde.net.messages import Trace, TraceBatch, TraceChanged, TraceOver, TraceWanted
from ronde.observe.timeline import TimelineWriter

__all__ = ["Tracing"]


class Tracing:
    """The file, if there is one, and who still has to send something for it."""

    def __init__(self, path: str, limit_events: int) -> None:
        self._limit_events = limit_events
        self._lasting = bool(path)
        """Whether it goes on over rounds."""
        self._writer = TimelineWriter(path, limit_events) if path else None
        self._owing: set[int] = set()
        """Ranks whose last events are still to come."""
        self._wanted_by: set[int] = set()
        """Ranks that want to hear when it has ended."""

    def hear(self, rank: int, message: TraceBatch | TraceWanted | TraceOver, present: Collection[int]) -> list[Send]:
        """A rank says something about it; what to tell whom."""
        if isinstance(message, TraceBatch):
            if self._writer is not None:
                self._writer.add(message.events, message.dropped)
            return []
        if isinstance(message, TraceOver):
            self._owing.discard(rank)
            return self.settle(present)
        return self._begin(rank, message, present) if message.path else self._end(rank, present)

    def settle(self, present: Collection[int]) -> list[Send]:
        """Close a file that is to be closed, when nobody who is there owes anything for it."""
        self._owing.intersection_update(present)
        return [] if self._owing or not self._wanted_by else self._close_file()

    def end_round(self) -> None:
        """Nobody is there any more."""
        if not self._lasting:
            self._close_file()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close_file()

    def _begin(self, rank: int, wanted: TraceWanted, present: Collection[int]) -> list[Send]:
        try:
            writer = TimelineWriter(wanted.path, self._limit_events)
        except ValueError as error:
            return [Send((rank,), TraceChanged(str(error)))]
        sends = self._close_file()
        self._writer, self._lasting = writer, False
        sends.append(Send(tuple(present), Trace(True, wanted.horovod, wanted.departures)))
        sends.append(Send((rank,), TraceChanged()))
        return sends

    def _end(self, rank: int, present: Collection[int]) -> list[Send]:
        if self._writer is None:
            return [Send((rank,), TraceChanged())]
        self._wanted_by.add(rank)
        if self._owing:
            return []
        self._owing = set(present)
        return [Send(tuple(present), Trace(False))]

    def _close_file(self) -> list[Send]:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        told = [Send(tuple(sorted(self._wanted_by)), TraceChanged())] if self._wanted_by else []
        self._wanted_by.clear()
        self._owing.clear()
        return told
