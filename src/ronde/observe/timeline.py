"""The timeline of all ranks as a Chrome trace (load it in Perfetto or chrome://tracing).

`Tracks` turns what one rank recorded into trace events, in the worker; `TimelineWriter` collects those of all ranks in
one file, in the coordinator. A rank is a process of the trace, a group is a thread in it; an operation is a slice that
holds two others, `wait` (for the members to come) and `move`. Named operations have been negotiated before: that is an
asynchronous slice, because many overlap.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import msgspec

from ronde.observe.events import COORDINATOR, Event
from ronde.text import escape_surrogates, format_ranks, shorten

__all__ = ["BatchMarker", "NegotiationSlice", "OperationSlice", "TraceStyle", "TimelineWriter", "TraceEncoder"]

logger = logging.getLogger("ronde.observe")

MAX_EVENT_BYTES = 16 * 1024
MAX_ARGUMENT_CHARS = 1000
TRACKS_PER_GROUP = 16
COORDINATOR_PROCESS = 1_000_000
"""The coordinator's process number in the trace, below all ranks."""

HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'


class OperationSlice(NamedTuple):
    """An operation that ran, as recorded: times of the local clock."""

    kind: str
    name: str
    group: int
    num_bytes: int
    start_ns: int
    ready_ns: int
    end_ns: int


class NegotiationSlice(NamedTuple):
    """A named operation between its announcement here and its departure."""

    kind: str
    name: str
    group: int
    start_ns: int
    end_ns: int


class BatchMarker(NamedTuple):
    """Named operations have taken off, one or several as one."""

    at_ns: int


class TraceStyle(NamedTuple):
    """How things are called in a trace, and what is in it."""

    horovod: bool = False
    """NEGOTIATE_ALLREDUCE, ALLREDUCE and so on, as in Horovod's timeline."""
    batch_markers: bool = False
    """Mark departures."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One element of traceEvents. The names are the format's own; times are microseconds."""

    name: str
    ph: Literal["X", "i", "M", "b", "e"]
    """A slice, an instant, a name for a process or thread, or the begin or end of an asynchronous slice."""
    ts: float
    pid: int
    tid: int
    dur: float | None = None
    cat: str = ""
    s: Literal["p"] | None = None
    """An instant's reach: the process."""
    id: str | None = None
    """What an asynchronous slice's begin and end have in common."""
    args: dict[str, Any] = {}


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[TraceEvent] = msgspec.json.Decoder(TraceEvent)


class TraceEncoder:
    """Turns what one rank recorded into trace events, as JSON. Used by one thread at a time."""

    def __init__(self, rank: int, label: str = "", style: TraceStyle | None = None) -> None:
        self._style = style or TraceStyle()
        self._num_negotiated = 0
        self._process = COORDINATOR_PROCESS if rank == COORDINATOR else rank
        self._label = label or ("coordinator" if rank == COORDINATOR else f"rank {rank}")
        self._busy_until: dict[int, list[int]] = {}

    def encode_names(self) -> list[bytes]:
        """What the rank is called: comes first."""
        return [
            self._metadata("process_name", 0, {"name": shorten(self._label)}),
            self._metadata("process_sort_index", 0, {"sort_index": self._process}),
            self._metadata("thread_name", 0, {"name": "events"}),
        ]

    def encode_operation(self, operation: OperationSlice, offset_ns: int) -> list[bytes]:
        """The operation's slice and the two inside it; before a track's first, the track's name."""
        start, end = operation.start_ns, max(operation.start_ns, operation.end_ns)
        ready = min(max(start, operation.ready_ns), end)
        lane, is_new = self._find_track(operation.group, start, end)
        track = 1 + operation.group * TRACKS_PER_GROUP + lane
        described = {"bytes": operation.num_bytes, "group": operation.group}
        shown, wait, move = self._slice_names(operation.kind, operation.name)
        slices = [
            self._slice(shorten(shown), operation.kind, track, start + offset_ns, end - start, described),
            self._slice(wait, "wait", track, start + offset_ns, ready - start, {}),
            self._slice(move, "move", track, ready + offset_ns, end - ready, {}),
        ]
        if is_new:
            beside = f" ({lane + 1})" if lane else ""
            slices.insert(0, self._metadata("thread_name", track, {"name": f"group {operation.group}{beside}"}))
        return slices

    def encode_negotiation(self, negotiation: NegotiationSlice, offset_ns: int) -> list[bytes]:
        """The begin and the end of its slice."""
        kind, name, group, start_ns, end_ns = negotiation
        self._num_negotiated += 1
        title = f"NEGOTIATE_{_horovod_name(kind)}" if self._style.horovod else f"negotiate {kind}"
        phases: list[tuple[Literal["b", "e"], int, dict[str, Any]]] = [
            ("b", start_ns, {"name": shorten(name), "group": group}),
            ("e", max(start_ns, end_ns), {}),
        ]
        return [
            _encoder.encode(
                TraceEvent(
                    name=title,
                    ph=phase,
                    ts=(at_ns + offset_ns) / 1000,
                    pid=self._process,
                    tid=0,
                    cat="negotiation",
                    id=f"{self._process}.{self._num_negotiated}",
                    args=said,
                )
            )
            for phase, at_ns, said in phases
        ]

    def encode_batch_marker(self, departure: BatchMarker, offset_ns: int) -> list[bytes]:
        """A mark, if they are wanted."""
        if not self._style.batch_markers:
            return []
        name = "CYCLE_START" if self._style.horovod else "departure"
        return [self._instant(name, departure.at_ns + offset_ns, {})]

    def encode_event(self, event: Event, offset_ns: int) -> bytes:
        """The event as an instant with all it says."""
        said = {
            field: _make_argument(getattr(event, field))
            for field in event.__struct_fields__
            if field not in ("at_ns", "rank")
        }
        return self._instant(type(event).__name__, event.at_ns + offset_ns, said)

    def _slice_names(self, kind: str, name: str) -> tuple[str, str, str]:
        """What the slices of an operation are called: the whole, its wait, its move."""
        if self._style.horovod:
            return name or _horovod_name(kind), "WAIT", _horovod_name(kind)
        return f"{kind} {name}" if name else kind, "wait", "move"

    def _instant(self, name: str, at_ns: int, args: dict[str, Any]) -> bytes:
        return _encoder.encode(
            TraceEvent(name=name, ph="i", ts=at_ns / 1000, pid=self._process, tid=0, cat="event", s="p", args=args)
        )

    def _find_track(self, group: int, start_ns: int, end_ns: int) -> tuple[int, bool]:
        """Operations of one group may run at the same time on different channels; slices of one thread of the trace
        must not cross. So those that would cross lie side by side, on the group's first free lane."""
        lanes = self._busy_until.setdefault(group, [])
        for lane, busy_until in enumerate(lanes):
            if start_ns >= busy_until or lane == TRACKS_PER_GROUP - 1:
                lanes[lane] = max(end_ns, busy_until)
                return lane, False
        lanes.append(end_ns)
        return len(lanes) - 1, True

    def _slice(self, name: str, category: str, track: int, at_ns: int, duration_ns: int, args: dict[str, Any]) -> bytes:
        return _encoder.encode(
            TraceEvent(
                name=name,
                ph="X",
                ts=at_ns / 1000,
                dur=duration_ns / 1000,
                pid=self._process,
                tid=track,
                cat=category,
                args=args,
            )
        )

    def _metadata(self, name: str, track: int, args: dict[str, Any]) -> bytes:
        return _encoder.encode(TraceEvent(name=name, ph="M", ts=0, pid=self._process, tid=track, args=args))


class TimelineWriter:
    """A trace file that is complete after every add(), so it can be loaded while the job runs or after it was killed.

    Each add() is one write, which begins where the closing brackets are and ends in new ones. The brackets and the
    counts between them have a fixed length: when the disk is full, they can be put back in the place they had.

    Known weakness: SIGKILL *during* a write lets the kernel end it at the border of a memory page; then the last
    batch is cut and the brackets are missing.
    """

    def __init__(self, path: str | os.PathLike[str], max_events: int) -> None:
        self._path = Path(path)
        self._max_events = max_events
        self._disk_full = False
        self.num_written = 0
        self.num_dropped = 0
        """Beyond the limit, malformed, lost before they came here, or not written because the disk was full."""
        self._start_us = (time.time_ns() - time.monotonic_ns()) // 1000
        """The wall clock at the trace's time 0."""
        self._file: int | None = _open_timeline_file(self._path)
        self._tail_offset = 0
        try:
            self._write(HEAD)
        except OSError as error:
            self.close()
            raise ValueError(f"timeline {self._path} cannot be written: {error.strerror}") from None

    def add(self, events: Sequence[bytes], dropped: int = 0) -> None:
        """Append trace events of any rank, and count those the rank had to drop. Malformed ones are dropped: a peer
        cannot spoil the file."""
        self._open_file()
        room = 0 if self._disk_full else self._max_events - self.num_written
        kept = [event for event in events if _is_trace_event(event)][:room] if room else []
        lost = dropped + len(events) - len(kept)
        if not kept and not lost:
            return
        self.num_dropped += lost
        self.num_written += len(kept)
        between = b",\n" if kept and self.num_written > len(kept) else b""
        try:
            self._write(between + b",\n".join(kept))
        except OSError as error:
            self.num_written -= len(kept)
            self.num_dropped += len(kept)
            self._stop_writing(error)

    def close(self) -> None:
        """Close the file; it was complete before."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> TimelineWriter:
        """The writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _write(self, body: bytes) -> None:
        """Put the body where the tail is, and the tail behind it."""
        file = self._open_file()
        data = memoryview(body + self._tail())
        done = 0
        while done < len(data):  # a second time only when the disk is nearly full
            done += os.pwrite(file, data[done:], self._tail_offset + done)
        self._tail_offset += len(body)

    def _stop_writing(self, error: OSError) -> None:
        """From now on only count. The tail's place is still ours."""
        if not self._disk_full:
            logger.warning("timeline %s ends here, later events are only counted: %s", self._path, error.strerror)
        self._disk_full = True
        try:
            os.pwrite(self._open_file(), self._tail(), self._tail_offset)
            os.ftruncate(self._open_file(), self._tail_offset + len(self._tail()))
        except OSError as again:
            logger.warning("timeline %s may be cut short: %s", self._path, again.strerror)

    def _tail(self) -> bytes:
        return (
            b'\n],"otherData":{"start_time_since_epoch_in_micros":%20d,"written_events":%16d,"dropped_events":%16d}}\n'
            % (self._start_us, self.num_written, self.num_dropped)
        )

    def _open_file(self) -> int:
        if self._file is None:
            raise ValueError(f"timeline {self._path} is closed")
        return self._file


def _horovod_name(kind: str) -> str:
    return kind.replace("_", "").upper()


def _open_timeline_file(path: Path) -> int:
    try:
        # Not blocking: a named pipe without a reader would hold us up for ever.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(
            f"timeline {path} cannot be written: {why}; name a file in a directory that exists and is yours to write"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"timeline {path} is not a regular file; it is rewritten in place, so it has to be one")
    return file


def _is_trace_event(data: bytes) -> bool:
    if len(data) > MAX_EVENT_BYTES:
        return False
    try:
        _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _make_argument(value: object) -> object:
    if isinstance(value, str):
        return escape_surrogates(value[:MAX_ARGUMENT_CHARS])
    if isinstance(value, tuple):
        return shorten(format_ranks(value), MAX_ARGUMENT_CHARS)
    return value
