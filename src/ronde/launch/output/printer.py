"""What the driver tells the part that shows the job to its user. Implemented by launch.output.printer.Printer.

What stands before each line: whose it is, in colour on a terminal, and when it came. Used by the Printer.

How the output of ranks is shown. Made by the command line, used by the Printer.

The Screen of `ronde run`: what ranks print, with their numbers, on the user's terminal, and in files.

output → files, tail
tick   → Rows (lines and bars of each stream) → Fold (equal lines of many ranks) → Console (terminal, pipe or file)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import BinaryIO, NamedTuple, Protocol, TypeAlias

from ronde.launch.output.files import RankOutputFiles
from ronde.launch.output.folding import FoldedLines, LineFolder
from ronde.launch.output.progress import LiveRows, StreamText
from ronde.launch.output.tail import OutputTail
from ronde.launch.output.terminal import OutputClosed, StandardStreams, TerminalInfo, TerminalWriter
from ronde.launch.protocol import StdStream
from ronde.text import format_rank_ranges

__all__ = [
    "DRIVER",
    "OutputOptions",
    "OutputSink",
    "Printer",
    "horovod_prefix",
    "horovod_timestamp_prefix",
    "line_prefix",
    "prefix_width",
    "standard_output_options",
    "timestamp_prefix",
]


class OutputSink(Protocol):
    """Takes what ranks print. The driver calls it from one thread, and `tick` once per turn of its loop: after
    whatever it handed over in that turn, and again at the time that `tick` answered."""

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        """Bytes of a rank, as they came: any chunks, any bytes."""

    def rank_exited(self, rank: int) -> None:
        """Nothing more comes from this rank."""

    def print_message(self, text: str) -> None:
        """One or more lines of the driver itself, shown as `[ronde] text` on the error stream, after all that was
        handed over before."""

    def refresh(self, now_s: float) -> float | None:
        """Do what is due. Answers when to call again at the latest (same clock), None while nothing waits."""

    def tail(self, rank: int, exit_code: int) -> str:
        """The last words of a rank that ended with this code (a signal counts below 0): the traceback that says why, or
        the last lines of both streams."""

    def closed(self) -> OutputClosed | None:
        """Why nothing can be shown any more; None while all is well."""

    def is_backlogged(self) -> bool:
        """Whether the reader of a pipe or terminal is far behind: better not to read more from ranks until `tick` has
        changed that. Who goes on all the same is made to wait in `tick`, sooner or later."""

    def close(self, *, timeout_s: float | None = None) -> None:
        """Show all that still waits, leave the terminal tidy, close the files. A reader that takes nothing for
        give_up_s gets no more; without, it is waited for. Idempotent."""


_RANK_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Readable on dark and on light; red is left to errors."""

DRIVER: tuple[int, ...] = ()
"""Stands for the driver itself, where ranks are meant."""


@lru_cache(maxsize=1024)
def line_prefix(ranks: tuple[int, ...], *, color: bool) -> bytes:
    """`[0,2-3] `, with a space behind."""
    name = f"[{format_rank_ranges(ranks)}]" if ranks else "[ronde]"
    if color:
        style = str(_RANK_COLORS[ranks[0] % len(_RANK_COLORS)]) if len(ranks) == 1 else "1"
        name = f"\x1b[{style}m{name}\x1b[0m"
    return name.encode() + b" "


@lru_cache(maxsize=1024)
def horovod_prefix(ranks: tuple[int, ...], stream: StdStream) -> bytes:
    """As Horovod writes a label: `[3]<stdout>:`."""
    return f"[{format_rank_ranges(ranks)}]<std{stream}>:".encode() if ranks else line_prefix(ranks, color=False)


@lru_cache(maxsize=64)
def timestamp_prefix(wall_ms: int) -> bytes:
    """A moment in local time, with a space behind."""
    moment = datetime.fromtimestamp(wall_ms / 1000)
    return moment.isoformat(sep=" ", timespec="milliseconds").encode() + b" "


@lru_cache(maxsize=64)
def horovod_timestamp_prefix(wall_s: int) -> bytes:
    """A moment as Horovod writes it: `Mon Jan  5 14:03:22 2026`."""
    return datetime.fromtimestamp(wall_s).ctime().encode()


def prefix_width(num_ranks: int, *, timestamps: bool = False) -> int:
    """Columns that the label of one rank takes at most: a rank's own terminal is narrower by these."""
    return len(line_prefix((num_ranks - 1,), color=False)) + (len(timestamp_prefix(0)) if timestamps else 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Everything about the output that the user decides, and where it goes."""

    fold: bool = True
    """Show a line that several ranks print once, as `[0-7] line`."""
    timestamps: bool = False
    """Begin each line with the time at which it arrived."""
    color: bool = False
    """A colour per rank. (For the command line to decide: a terminal, and NO_COLOR is not set.)"""
    output_dir: str = ""
    """Write what each rank prints to files in here, byte for byte; empty for none. Files of an earlier run are
    overwritten, as with `>`, or removed where this one has fewer ranks; other files are left alone."""
    horovod_format: bool = False
    """Labels, times and files as those have them who read Horovod's by program: `[1]<stdout>:line`, the time before
    the label, and files `rank.1/stdout`."""
    terminal_info: TerminalInfo = field(default_factory=TerminalInfo)
    """What the target is: `Place.of(target)`."""
    debug_rank: int | None = None
    """This rank has the terminal (`--debug`), which is in raw mode: its bytes go through as they are, everything
    else is shown around them."""


_REDRAW_INTERVAL_S = 0.05
"""Bars are drawn again no faster than this."""
_RETRY_INTERVAL_S = 0.02
"""A reader that was behind is tried again after so long."""
_MAX_PENDING_BYTES = 4 * 1024 * 1024
"""When more than this was handed over without a tick, it is printed at once."""

_RankStream: TypeAlias = tuple[int, StdStream]


class _Chunk(NamedTuple):
    rank: int
    stream: StdStream
    data: bytes


class _RankExited(NamedTuple):
    rank: int


class _Message(NamedTuple):
    text: str


class Printer:
    """Implements Screen. The target stays open; `wall` tells the time for timestamps."""

    def __init__(
        self,
        streams: StandardStreams,
        *,
        num_ranks: int,
        options: OutputOptions,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a job has at least one rank, got {num_ranks}")
        self._options = options
        self._wall_clock = wall_clock
        self._writers = _make_writers(streams, options)
        self._live_rows: dict[_RankStream, LiveRows] = {}
        self._open_streams: set[_RankStream] = set()  # streams with open rows
        self._line_folder = LineFolder(num_ranks) if options.fold and num_ranks > 1 else None
        self._tails = [OutputTail() for _ in range(num_ranks)]
        self._pending: list[_Chunk | _RankExited | _Message] = []
        self._pending_bytes = 0
        self._now_s = 0.0
        self._wall_offset_s = 0.0
        self._last_draw_s = 0.0
        self._closed = False
        self._files: RankOutputFiles | None = None
        if options.output_dir:
            self._files = RankOutputFiles(
                options.output_dir,
                num_ranks=num_ranks,
                print_message=self.print_message,
                horovod_layout=options.horovod_format,
            )
        if self._line_folder is not None and options.debug_rank is not None:
            self._line_folder.rank_exited(options.debug_rank)  # nobody waits for it

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        """See Screen."""
        if self._closed:
            return
        if self._files is not None:
            self._files.write(rank, stream, data)
        self._tails[rank].add(stream, data)
        self._pending.append(_Chunk(rank, stream, data))
        self._pending_bytes += len(data)
        if self._pending_bytes > _MAX_PENDING_BYTES:
            self.refresh(self._now_s)

    def rank_exited(self, rank: int) -> None:
        """See Screen."""
        self._pending.append(_RankExited(rank))

    def print_message(self, text: str) -> None:
        """See Screen."""
        self._pending.append(_Message(text))

    def tail(self, rank: int, exit_code: int) -> str:
        """See Screen."""
        return self._tails[rank].text(exit_code)

    def closed(self) -> OutputClosed | None:
        """See Screen."""
        return next((console.closed for console in self._writers.values() if console.closed), None)

    def is_backlogged(self) -> bool:
        """See Screen."""
        return any(console.is_backlogged for console in self._writers.values())

    def refresh(self, now_s: float) -> float | None:
        """See Screen."""
        self._now_s = max(now_s, self._now_s)
        self._wall_offset_s = self._wall_clock() - self._now_s
        self._process_pending()
        for key in tuple(self._open_streams):
            self._handle_final(key, self._live_rows[key].take_idle(self._now_s))
        if self._line_folder is not None:
            self._print_all(self._line_folder.take_ready(self._now_s))
        redraw_s = self._draw_live_regions()
        for console in self._distinct_writers():
            console.flush()
        return self._next_refresh_s(redraw_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """See Screen."""
        if self._closed:
            return
        self._process_pending()
        self._closed = True
        for rank in range(len(self._tails)):
            self._finish_rank(rank)
        self._flush_line_folder()
        if self._files is not None:
            self._files.close()
        self._process_pending()  # what the files had to say
        for console in self._distinct_writers():
            console.close(timeout_s)

    # --- from the inbox to the consoles ------------------------------------------------------------------------

    def _process_pending(self) -> None:
        inbox, self._pending, self._pending_bytes = self._pending, [], 0
        for event in inbox:
            if isinstance(event, _Chunk):
                self._process_chunk(event)
            elif isinstance(event, _RankExited):
                self._finish_rank(event.rank)
            else:
                self._flush_line_folder()
                text = StreamText(event.text.rstrip("\n").encode(errors="replace") + b"\n")
                self._print(FoldedLines(DRIVER, "err", text, self._now_s))

    def _process_chunk(self, chunk: _Chunk) -> None:
        console = self._writers[chunk.stream]
        if chunk.rank == self._options.debug_rank:
            console.pass_through(chunk.stream, chunk.data)
            return
        key = (chunk.rank, chunk.stream)
        rows = self._live_rows.get(key)
        if rows is None:
            rows = self._live_rows[key] = LiveRows(on_terminal=self._has_live_region(console))
        self._handle_final(key, rows.feed(chunk.data, self._now_s))
        if rows.is_empty():
            self._open_streams.discard(key)
        else:
            self._open_streams.add(key)

    def _finish_rank(self, rank: int) -> None:
        streams: tuple[StdStream, ...] = ("out", "err")
        for stream in streams:
            rows = self._live_rows.pop((rank, stream), None)
            if rows is not None:
                self._handle_final((rank, stream), rows.finish())
                self._open_streams.discard((rank, stream))
        if self._line_folder is not None:
            self._line_folder.rank_exited(rank)

    def _handle_final(self, key: _RankStream, texts: list[StreamText]) -> None:
        for text in texts:
            if self._line_folder is not None:
                self._line_folder.add(*key, text, self._now_s)
            else:
                self._print(FoldedLines(key[:1], key[1], text, self._now_s))

    def _flush_line_folder(self) -> None:
        if self._line_folder is not None:
            self._print_all(self._line_folder.take_ready(self._now_s, flush=True))

    def _print_all(self, items: list[FoldedLines]) -> None:
        for item in items:
            self._print(item)

    def _print(self, item: FoldedLines) -> None:
        console = self._writers[item.stream]
        prefix = self._line_prefix(item.ranks, item.stream, color=console.is_terminal)
        if self._options.timestamps:
            wall_s = item.received_s + self._wall_offset_s
            prefix = (
                horovod_timestamp_prefix(int(wall_s)) + prefix
                if self._options.horovod_format
                else prefix + timestamp_prefix(round(wall_s * 1000))
            )
        console.print((item.ranks, item.stream), prefix, item.text)

    def _line_prefix(self, ranks: tuple[int, ...], stream: StdStream, *, color: bool) -> bytes:
        if self._options.horovod_format:
            return horovod_prefix(ranks, stream)
        return line_prefix(ranks, color=color and self._options.color)

    # --- the live region -------------------------------------------------------------------------------------

    def _has_live_region(self, writer: TerminalWriter) -> bool:
        return writer.is_terminal and self._options.debug_rank is None

    def _draw_live_regions(self) -> float | None:
        """Draw the regions, where they changed. Answers when it has to be done again."""
        again_s = None
        for console in self._distinct_writers():
            if not self._has_live_region(console) or console.has_open_line:
                continue
            rows = self._make_live_region(console)
            hide = any(self._live_rows[key].cursor_hidden for key in self._open_streams)
            if rows == console.live_region and hide == console.cursor_hidden:
                continue
            if console.live_region and self._now_s < self._last_draw_s + _REDRAW_INTERVAL_S:
                again_s = self._last_draw_s + _REDRAW_INTERVAL_S
                continue
            console.draw_live_region(rows, hide_cursor=hide)
            self._last_draw_s = self._now_s
        return again_s

    def _make_live_region(self, writer: TerminalWriter) -> tuple[bytes, ...]:
        """The open rows of all ranks, equal ones folded, as many as there is room for."""
        groups: dict[tuple[StdStream, tuple[bytes, ...]], list[int]] = {}
        for rank, stream in sorted(self._open_streams):
            rows = self._live_rows[rank, stream].visible_rows(self._now_s) if stream in writer.streams else ()
            if rows:
                groups.setdefault((stream, rows), []).append(rank)
        limit = max(1, self._options.terminal_info.height * 2 // 3)
        drawn = []
        for (stream, rows), ranks in groups.items():
            for owners in [tuple(ranks)] if self._options.fold else [(rank,) for rank in ranks]:
                prefix = self._line_prefix(owners, stream, color=True)
                drawn += [prefix + row for row in rows[-limit:]]
        if len(drawn) > limit:
            drawn[limit - 1 :] = [b"... and %d more" % (len(drawn) - limit + 1)]
        return tuple(drawn)

    # --- time --------------------------------------------------------------------------------------------------

    def _next_refresh_s(self, redraw_s: float | None) -> float | None:
        waits = any(console.has_pending for console in self._writers.values())
        times = [redraw_s, self._now_s + _RETRY_INTERVAL_S if waits else None]
        times += [self._line_folder.next_due_s(self._now_s) if self._line_folder is not None else None]
        for key in tuple(self._open_streams):
            times += self._live_rows[key].change_times_s(self._now_s)
        return min((moment for moment in times if moment is not None), default=None)

    def _distinct_writers(self) -> Iterator[TerminalWriter]:
        yield from dict.fromkeys(self._writers.values())


def _make_writers(streams: StandardStreams, options: OutputOptions) -> dict[StdStream, TerminalWriter]:
    """One for both streams when they lead to the same place, otherwise one each."""
    place, raw = options.terminal_info, options.debug_rank is not None
    if place.same_file:
        terminal = place.out_is_terminal or place.err_is_terminal
        both = TerminalWriter({"out": streams.out, "err": streams.err}, is_terminal=terminal, raw_mode=raw and terminal)
        return {"out": both, "err": both}
    return {
        "out": TerminalWriter(
            {"out": streams.out}, is_terminal=place.out_is_terminal, raw_mode=raw and place.out_is_terminal
        ),
        "err": TerminalWriter(
            {"err": streams.err}, is_terminal=place.err_is_terminal, raw_mode=raw and place.err_is_terminal
        ),
    }


def standard_output_options(streams: StandardStreams, environ: Mapping[str, str]) -> OutputOptions:
    """How to print to them."""
    if not all(_has_descriptor(each) for each in streams):
        return OutputOptions(terminal_info=TerminalInfo(same_file=True))
    place = TerminalInfo.detect(streams)
    color = (
        (place.out_is_terminal or place.err_is_terminal)
        and not environ.get("NO_COLOR")
        and environ.get("TERM") != "dumb"
    )
    return OutputOptions(terminal_info=place, color=color)


def _has_descriptor(file: BinaryIO) -> bool:
    try:
        return file.fileno() >= 0
    except (OSError, ValueError):
        return False
