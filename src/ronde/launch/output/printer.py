"""Prints what the ranks print: with their numbers, to the user's terminal, pipe or files, and to files per rank.

write()    → RankOutputFiles, OutputTail                      at once
refresh()  → LiveRows  → LineFolder → TerminalWriter          lines and progress bars of each stream; equal lines of
                                                              many ranks folded; terminal, pipe or file
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial

from ronde.launch.output.files import RankOutputFiles, RankStream
from ronde.launch.output.folding import FoldedLines, LineFolder
from ronde.launch.output.progress import LiveRows, StreamText
from ronde.launch.output.tail import OutputTail
from ronde.launch.output.terminal import (
    HIGH_WATER_BYTES,
    OutputClosed,
    StandardStreams,
    TerminalInfo,
    TerminalWriter,
    open_standard_streams,
)
from ronde.launch.protocol import StdStream
from ronde.text import format_rank_ranges

_RANK_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Readable on a dark and on a light background; red is left to errors."""

_REDRAW_INTERVAL_S = 0.05
"""Live regions are drawn again no faster than this."""
_RETRY_INTERVAL_S = 0.02
"""A reader that was behind is tried again after so long."""
_MAX_PENDING_BYTES = 4 * 1024 * 1024
"""When more than this was written without a refresh, it is printed at once."""


@lru_cache(maxsize=1024)
def line_prefix(ranks: tuple[int, ...], stream: StdStream, *, color: bool = False, horovod: bool = False) -> bytes:
    """Return `[0,2-3] `, or what Horovod prints: `[3]<stdout>:`. Without ranks it is the driver's."""
    if ranks and horovod:
        return f"[{format_rank_ranges(ranks)}]<std{stream}>:".encode()
    name = f"[{format_rank_ranges(ranks)}]" if ranks else "[ronde]"
    if color:
        style = str(_RANK_COLORS[ranks[0] % len(_RANK_COLORS)]) if len(ranks) == 1 else "1"
        name = f"\x1b[{style}m{name}\x1b[0m"
    return name.encode() + b" "


@lru_cache(maxsize=64)
def timestamp_prefix(wall_ms: int, *, horovod: bool = False) -> bytes:
    """Return local time with milliseconds and a space, or what Horovod prints: `Mon Jan  5 14:03:22 2026`."""
    moment = datetime.fromtimestamp(wall_ms / 1000)
    return (moment.ctime() if horovod else moment.isoformat(sep=" ", timespec="milliseconds") + " ").encode()


def prefix_width(num_ranks: int) -> int:
    """Return how many columns the prefix of one rank takes at most: a rank's pseudo-terminal is so much narrower."""
    return len(line_prefix((num_ranks - 1,), "out"))


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """How output is shown, as the user chose it, and where it goes."""

    fold: bool = True
    """Show a line that several ranks print once, as `[0-7] line`."""
    timestamps: bool = False
    """Begin each line with the time at which it arrived."""
    color: bool = False
    """A colour per rank, where there is a terminal."""
    output_dir: str = ""
    """Directory for RankOutputFiles; empty for none."""
    horovod_format: bool = False
    """Print as Horovod does, for programs that read it: `[1]<stdout>:line`, the time before that, and files
    `rank.1/stdout`."""
    terminal_info: TerminalInfo = field(default_factory=TerminalInfo)
    names: Mapping[int, str] = field(default_factory=dict)
    """Of processes that are no ranks, by number."""
    debug_rank: int | None = None
    """The rank that has the terminal (`--debug`), which is in raw mode: its bytes pass unchanged, everything else is
    printed around them."""


class Printer:
    """The driver calls it from one thread, and refresh() once per turn of its loop: after the writes of that turn, and
    again at the time that refresh() returned. `wall_clock` gives the time for timestamps."""

    def __init__(
        self,
        streams: StandardStreams,
        *,
        num_ranks: int,
        options: OutputOptions,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._wall_clock = wall_clock
        info = options.terminal_info
        make_writer = partial(TerminalWriter, raw_mode=options.debug_rank is not None)
        if info.same_file:
            is_terminal = info.out_is_terminal or info.err_is_terminal
            both = make_writer({"out": streams.out, "err": streams.err}, is_terminal=is_terminal)
            self._writers: dict[StdStream, TerminalWriter] = {"out": both, "err": both}
        else:
            self._writers = {
                "out": make_writer({"out": streams.out}, is_terminal=info.out_is_terminal),
                "err": make_writer({"err": streams.err}, is_terminal=info.err_is_terminal),
            }
        self._distinct_writers = [*dict.fromkeys(self._writers.values())]
        self._live_rows: dict[RankStream, LiveRows] = {}
        self._open_streams: set[RankStream] = set()  # streams whose LiveRows are not empty
        self._line_folder = LineFolder(num_ranks, enabled=options.fold)
        self._tails = {rank: OutputTail() for rank in range(num_ranks)}
        self._pending: list[Callable[[], None]] = []  # writes, exits and messages since the last refresh
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
                names=options.names,
            )
        if options.debug_rank is not None:
            self._line_folder.rank_exited(options.debug_rank)  # its lines are not folded

    def rank_started(self, rank: int) -> None:
        """Called before a process of this rank writes, unless it is the first one of one of the `num_ranks`."""
        self._process_pending()  # its former process may have exited just now
        self._tails[rank] = OutputTail()
        self._line_folder.rank_started(rank)
        if rank in self._options.names:
            self._line_folder.rank_exited(rank)  # its lines are not folded
        if self._files is not None:
            self._files.rank_started(rank)

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        """Take bytes of a rank as they were read: chunks of any size."""
        if self._closed:
            return
        if self._files is not None:
            self._files.write(rank, stream, data)
        self._tails[rank].add(stream, data)
        self._pending.append(partial(self._print_data, rank, stream, data))
        self._pending_bytes += len(data)
        if self._pending_bytes > _MAX_PENDING_BYTES:
            self.refresh(self._now_s)

    def rank_exited(self, rank: int) -> None:
        """Called when nothing more comes from this rank."""
        self._pending.append(partial(self._finish_rank, rank))

    def print_message(self, text: str) -> None:
        """Print lines of the driver itself as `[ronde] text` on standard error, after everything written before."""
        self._pending.append(partial(self._print_message, text))

    def tail(self, rank: int, exit_code: int) -> str:
        """Return the traceback that explains this exit code of a rank, or the last lines of both streams."""
        return self._tails[rank].text(exit_code)

    def closed(self) -> OutputClosed | None:
        """Return why nothing can be printed any more; None while it can."""
        return next((writer.buffer.closed for writer in self._writers.values() if writer.buffer.closed), None)

    def is_backlogged(self) -> bool:
        """Return whether the reader of a pipe or terminal is far behind. Then the driver stops reading from ranks until
        a refresh() has changed that; if it goes on, refresh() blocks sooner or later."""
        return any(writer.buffer.pending_bytes >= HIGH_WATER_BYTES for writer in self._writers.values())

    def refresh(self, now_s: float) -> float | None:
        """Print what is due. Return when to call again at the latest (same clock); None while nothing waits."""
        self._now_s = max(now_s, self._now_s)
        self._wall_offset_s = self._wall_clock() - self._now_s
        self._process_pending()
        for key in tuple(self._open_streams):
            self._fold(key, self._live_rows[key].take_idle(self._now_s))
        self._print_folded(flush=False)
        redraw_s = self._draw_live_regions()
        for writer in self._distinct_writers:
            writer.flush()
        return self._next_refresh_s(redraw_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Print all that still waits, leave the terminal tidy, close the files but not the streams. A reader that takes
        nothing for `timeout_s` gets no more; without a timeout it is waited for. Idempotent."""
        if self._closed:
            return
        self._process_pending()
        self._closed = True
        for rank in self._tails:
            self._finish_rank(rank)
        self._print_folded(flush=True)
        if self._files is not None:
            self._files.close()
        self._process_pending()  # messages about the files
        for writer in self._distinct_writers:
            writer.close(timeout_s)

    def _process_pending(self) -> None:
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for process in pending:
            process()

    def _print_message(self, text: str) -> None:
        self._print_folded(flush=True)
        data = text.rstrip("\n").encode(errors="replace") + b"\n"
        self._print(FoldedLines((), "err", StreamText(data), self._now_s))

    def _print_data(self, rank: int, stream: StdStream, data: bytes) -> None:
        writer = self._writers[stream]
        if rank == self._options.debug_rank:
            writer.pass_through(stream, data)
            return
        key = (rank, stream)
        rows = self._live_rows.get(key)
        if rows is None:
            rows = self._live_rows[key] = LiveRows(on_terminal=writer.has_live_region)
        self._fold(key, rows.feed(data, self._now_s))
        if rows.is_empty():
            self._open_streams.discard(key)
        else:
            self._open_streams.add(key)

    def _finish_rank(self, rank: int) -> None:
        for stream in self._writers:
            rows = self._live_rows.pop((rank, stream), None)
            if rows is not None:
                self._fold((rank, stream), rows.finish())
                self._open_streams.discard((rank, stream))
        self._line_folder.rank_exited(rank)

    def _fold(self, key: RankStream, texts: list[StreamText]) -> None:
        for text in texts:
            self._line_folder.add(*key, text, self._now_s)

    def _print_folded(self, *, flush: bool) -> None:
        for item in self._line_folder.take_ready(self._now_s, flush=flush):
            self._print(item)

    def _print(self, item: FoldedLines) -> None:
        writer = self._writers[item.stream]
        prefix = self._line_prefix(item.ranks, writer, item.stream)
        if self._options.timestamps:
            wall_ms = round((item.received_s + self._wall_offset_s) * 1000)
            timestamp = timestamp_prefix(wall_ms, horovod=self._options.horovod_format)
            prefix = timestamp + prefix if self._options.horovod_format else prefix + timestamp
        writer.print((item.ranks, item.stream), prefix, item.text)

    def _line_prefix(self, ranks: tuple[int, ...], writer: TerminalWriter, stream: StdStream) -> bytes:
        color = self._options.color and writer.is_terminal
        if len(ranks) == 1 and ranks[0] in self._options.names:
            return f"[{self._options.names[ranks[0]].removeprefix('the ')}] ".encode()
        return line_prefix(ranks, stream, color=color, horovod=self._options.horovod_format)

    def _draw_live_regions(self) -> float | None:
        """Draw the live regions that have changed. Return when it has to be done again."""
        again_s = None
        for writer in self._distinct_writers:
            if not writer.has_live_region or writer.open_line_owner is not None:
                continue
            rows = self._make_live_region(writer)
            hide = any(self._live_rows[key].cursor_hidden for key in self._open_streams)
            if rows == writer.live_region and hide == writer.cursor_hidden:
                continue
            if writer.live_region and self._now_s < self._last_draw_s + _REDRAW_INTERVAL_S:
                again_s = self._last_draw_s + _REDRAW_INTERVAL_S
                continue
            writer.draw_live_region(rows, hide_cursor=hide)
            self._last_draw_s = self._now_s
        return again_s

    def _make_live_region(self, writer: TerminalWriter) -> tuple[bytes, ...]:
        """Return the visible rows of all ranks, equal ones folded, as many as there is room for."""
        groups: dict[tuple[StdStream, tuple[bytes, ...]], list[int]] = {}
        for rank, stream in sorted(self._open_streams):
            rows = self._live_rows[rank, stream].visible_rows(self._now_s) if stream in writer.streams else ()
            if rows:
                groups.setdefault((stream, rows), []).append(rank)
        limit = max(1, self._options.terminal_info.height * 2 // 3)
        drawn = []
        for (stream, rows), ranks in groups.items():
            for owners in [tuple(ranks)] if self._options.fold else [(rank,) for rank in ranks]:
                prefix = self._line_prefix(owners, writer, stream)
                drawn += [prefix + row for row in rows[-limit:]]
        if len(drawn) > limit:
            drawn[limit - 1 :] = [b"... and %d more" % (len(drawn) - limit + 1)]
        return tuple(drawn)

    def _next_refresh_s(self, redraw_s: float | None) -> float | None:
        pending = any(writer.buffer.pending_bytes for writer in self._writers.values())
        retry_s = self._now_s + _RETRY_INTERVAL_S if pending else None
        times = [redraw_s, retry_s, self._line_folder.next_due_s(self._now_s)]
        for key in self._open_streams:
            times += self._live_rows[key].change_times_s(self._now_s)
        return min((moment for moment in times if moment is not None), default=None)


def standard_output_options(streams: StandardStreams, environ: Mapping[str, str]) -> OutputOptions:
    """Return the options for printing to these streams, when the user chose nothing."""
    color = not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
    return OutputOptions(terminal_info=TerminalInfo.detect(streams), color=color)


def open_standard_printer(num_ranks: int) -> Printer:
    """Return a printer to the standard streams, with options when the user chose nothing."""
    streams = open_standard_streams()
    return Printer(streams, num_ranks=num_ranks, options=standard_output_options(streams, os.environ))
