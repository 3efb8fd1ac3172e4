"""The timeline of all ranks as a Chrome trace (load it in Perfetto or chrome://tracing).

In each rank, a TraceEncoder turns what the rank recorded into trace events; in the coordinator, a TimelineWriter writes
those of all ranks to one file. A rank is a process of the trace, a group is a thread in it; an operation is a slice
that holds two others, `wait` (until all members have come) and `move`. Named operations are negotiated before: that is
an asynchronous slice, because many overlap.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from ronde.observe.events import Event
from ronde.text import escape_surrogates, format_ranks, shorten

logger = logging.getLogger("ronde.observe")

MAX_EVENT_BYTES = 16 * 1024
MAX_ARGUMENT_CHARS = 1000
TRACKS_PER_GROUP = 16
HEAD = b'{"displayTimeUnit":"ms","traceEvents":[\n'


OperationSlice: TypeAlias = tuple[str, str, int, int, int, int, int]
"""An operation that ran: kind, name, group, bytes, and when it started, was ready and ended, on the local clock."""


class NegotiationSlice(NamedTuple):
    """A named operation between its announcement on this rank and its start."""

    kind: str
    name: str
    group: int
    start_ns: int
    end_ns: int


class TraceStyle(NamedTuple):
    """The names in a trace, and what is in it."""

    horovod: bool = False
    """NEGOTIATE_ALLREDUCE, ALLREDUCE and so on, as in Horovod's timeline."""
    batch_markers: bool = False
    """Whether every start of a named operation, or of several that were fused, is marked."""


TraceRecord: TypeAlias = OperationSlice | NegotiationSlice | Event | int
"""What a rank records for the trace; a number is the time at which named operations started together."""

Phase: TypeAlias = Literal["X", "i", "M", "b", "e"]
"""A slice, an instant, a name for a process or thread, or the begin or end of an asynchronous slice."""


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One element of traceEvents. The field names are those of the format; times are microseconds."""

    name: str
    ph: Phase
    ts: float
    pid: int
    tid: int
    dur: float | None = None
    cat: str = ""
    s: Literal["p"] | None = None
    """The scope of an instant: the process."""
    id: str | None = None
    """Equal for begin and end of an asynchronous slice."""
    args: dict[str, Any] = {}


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[TraceEvent] = msgspec.json.Decoder(TraceEvent)


class TraceEncoder:
    """Turns what one rank recorded into trace events, as JSON. One thread at a time uses it."""

    def __init__(self, rank: int, label: str = "", style: TraceStyle | None = None) -> None:
        self._style = style or TraceStyle()
        self._num_negotiated = 0
        self._rank = rank
        self._label = label or f"rank {rank}"
        self._busy_until: dict[int, list[int]] = {}

    def encode_names(self) -> list[bytes]:
        """Return the names of the process. They come first in the trace."""
        return [
            self._encode("process_name", "M", 0, args={"name": shorten(self._label)}),
            self._encode("process_sort_index", "M", 0, args={"sort_index": self._rank}),
            self._encode("thread_name", "M", 0, args={"name": "events"}),
        ]

    def encode(self, record: TraceRecord, offset_ns: int) -> list[bytes]:
        """Return the trace events of a record, whose times are moved by the offset."""
        if isinstance(record, Event):
            fields = [field for field in record.__struct_fields__ if field not in ("at_ns", "rank")]
            args = {field: _make_argument(getattr(record, field)) for field in fields}
            return [self._encode(type(record).__name__, "i", record.at_ns + offset_ns, cat="event", s="p", args=args)]
        if isinstance(record, int):
            name = "CYCLE_START" if self._style.horovod else "departure"
            marker = self._encode(name, "i", record + offset_ns, cat="event", s="p")
            return [marker] if self._style.batch_markers else []
        if isinstance(record, NegotiationSlice):
            return self._encode_negotiation(record, offset_ns)
        return self._encode_operation(record, offset_ns)

    def _encode_operation(self, operation: OperationSlice, offset_ns: int) -> list[bytes]:
        """Return the slice of the operation and the two inside it. Before the first of a track comes its name."""
        kind, name, group, num_bytes, start, ready, end = operation
        end = max(start, end)
        ready = min(max(start, ready), end)
        index, is_new = self._find_track(group, start, end)
        track = 1 + group * TRACKS_PER_GROUP + index
        title, wait, move = f"{kind} {name}" if name else kind, "wait", "move"
        if self._style.horovod:
            title, wait, move = name or _horovod_name(kind), "WAIT", _horovod_name(kind)
        slices = []
        if is_new:
            number = f" ({index + 1})" if index else ""
            slices.append(self._encode("thread_name", "M", 0, tid=track, args={"name": f"group {group}{number}"}))
        for shown, category, begin, finish, args in (
            (shorten(title), kind, start, end, {"bytes": num_bytes, "group": group}),
            (wait, "wait", start, ready, {}),
            (move, "move", ready, end, {}),
        ):
            dur = (finish - begin) / 1000
            slices.append(self._encode(shown, "X", begin + offset_ns, tid=track, dur=dur, cat=category, args=args))
        return slices

    def _encode_negotiation(self, negotiation: NegotiationSlice, offset_ns: int) -> list[bytes]:
        """Return the begin and the end of an asynchronous slice."""
        kind, name, group, start, end = negotiation
        self._num_negotiated += 1
        title = f"NEGOTIATE_{_horovod_name(kind)}" if self._style.horovod else f"negotiate {kind}"
        same: dict[str, Any] = {"cat": "negotiation", "id": f"{self._rank}.{self._num_negotiated}"}
        args = {"name": shorten(name), "group": group}
        return [
            self._encode(title, "b", start + offset_ns, args=args, **same),
            self._encode(title, "e", max(start, end) + offset_ns, **same),
        ]

    def _find_track(self, group: int, start_ns: int, end_ns: int) -> tuple[int, bool]:
        """Return the index of the group's first free track, and whether it is new. Operations of one group may run at
        the same time on different channels, and slices of one track must not cross."""
        tracks = self._busy_until.setdefault(group, [])
        for index, busy_until in enumerate(tracks):
            if start_ns >= busy_until or index == TRACKS_PER_GROUP - 1:
                tracks[index] = max(end_ns, busy_until)
                return index, False
        tracks.append(end_ns)
        return len(tracks) - 1, True

    def _encode(self, name: str, ph: Phase, at_ns: int, *, tid: int = 0, **fields: Any) -> bytes:
        return _encoder.encode(TraceEvent(name=name, ph=ph, ts=at_ns / 1000, pid=self._rank, tid=tid, **fields))


class TimelineWriter:
    """Writes a trace file that is complete after every add(), so it can be loaded while the job runs or after a kill.

    Each add() is one write, which overwrites the closing brackets and ends with new ones (the tail). The tail has a
    fixed length: when the disk is full, it can be written again where it was.

    Known weakness: after SIGKILL *during* a write the kernel may end it at the border of a memory page; then the last
    events are cut and the tail is missing.
    """

    def __init__(self, path: str | os.PathLike[str], max_events: int) -> None:
        self._path = Path(path)
        self._max_events = max_events
        self._disk_full = False
        self.num_written = 0
        self.num_dropped = 0
        """Beyond the limit, malformed, dropped by the rank, or not written because the disk was full."""
        self._start_us = (time.time_ns() - time.monotonic_ns()) // 1000
        """The wall clock at time 0 of the trace."""
        self._file = _open_timeline_file(self._path)
        """-1 when it is closed."""
        self._tail_offset = 0
        try:
            self._write(HEAD)
        except OSError as error:
            self.close()
            raise ValueError(f"timeline {self._path} cannot be written: {error.strerror}") from None

    def add(self, events: Sequence[bytes], dropped: int = 0) -> None:
        """Append trace events of any rank, and count those that the rank dropped. Malformed ones are dropped: a rank
        cannot spoil the file."""
        limit = 0 if self._disk_full else self._max_events - self.num_written
        kept = [event for event in events if _is_trace_event(event)][:limit] if limit else []
        dropped += len(events) - len(kept)
        if not kept and not dropped:
            return
        self.num_dropped += dropped
        self.num_written += len(kept)
        between = b",\n" if kept and self.num_written > len(kept) else b""
        try:
            self._write(between + b",\n".join(kept))
        except OSError as error:
            self.num_written -= len(kept)
            self.num_dropped += len(kept)
            if not self._disk_full:
                logger.warning("timeline %s ends here, later events are only counted: %s", self._path, error.strerror)
            self._disk_full = True
            try:  # the tail again, where it was
                os.pwrite(self._file, self._tail(), self._tail_offset)
                os.ftruncate(self._file, self._tail_offset + len(self._tail()))
            except OSError as again:
                logger.warning("timeline %s may be cut short: %s", self._path, again.strerror)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, body: bytes) -> None:
        """Write the body where the tail is, and the tail after it."""
        data = memoryview(body + self._tail())
        done = 0
        while done < len(data):  # a second time only when the disk is nearly full
            done += os.pwrite(self._file, data[done:], self._tail_offset + done)
        self._tail_offset += len(body)

    def _tail(self) -> bytes:
        return (
            b'\n],"otherData":{"start_time_since_epoch_in_micros":%20d,"written_events":%16d,"dropped_events":%16d}}\n'
            % (self._start_us, self.num_written, self.num_dropped)
        )


def _horovod_name(kind: str) -> str:
    return kind.replace("_", "").upper()


def _open_timeline_file(path: Path) -> int:
    try:
        # Not blocking: opening a named pipe without a reader would wait for ever.
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
