"""The way out of the process: bytes for one place, written as fast as its reader takes them. Used by Console.

A reader may stop for as long as it likes (`| less`, Ctrl-S). Until much waits, that holds up nobody: what a pipe or a
terminal does not take now is kept for the next time. Files always take everything.

Where lines end up: a terminal with a live region at its bottom, or a pipe or file. Used by the Printer.

What stands on the last line of a console is one of: nothing; a line that somebody has not ended yet (*open*), whose
owner may go on with it until somebody else prints; on a terminal, the *region*: rows that are erased before anything is
printed and drawn again after it.

This process's own standard streams as a Target, also where they are no files: in a notebook, in a test. Used by
launch/function.
"""

from __future__ import annotations

import codecs
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import Any, BinaryIO, NamedTuple, cast

from ronde.launch.output.progress import StreamText
from ronde.launch.protocol import StdStream

__all__ = [
    "HIGH_WATER_BYTES",
    "LineOwner",
    "OutputBuffer",
    "OutputClosed",
    "StandardStreams",
    "TerminalInfo",
    "TerminalWriter",
    "open_standard_streams",
]

HIGH_WATER_BYTES = 1024 * 1024
"""When so much waits, it is time not to read more from the ranks."""
_BLOCKING_BYTES = 64 * HIGH_WATER_BYTES
"""When so much waits, because somebody went on, everybody waits for the reader. Far from FULL_BYTES: when nothing more
is read, hundreds of dead ranks may still have left a pipe full each, and a driver that waits here hears no Ctrl-C."""
_PIPE_WRITE_BYTES = 4096
"""A pipe that takes anything takes so much at once (PIPE_BUF)."""
_JOINED_WRITE_BYTES = 64 * 1024
"""Small parts are joined up to about this size."""
_BUSY_READER_TIMEOUT_MS = 10
"""A reader that is just busy takes more within this time."""
_BLOCKING_POLL_MS = 1000


class OutputBuffer:
    """The files that lead to one place, in one order. After an error nothing is written any more."""

    def __init__(self, files: Mapping[StdStream, BinaryIO]) -> None:
        self.closed: OutputClosed | None = None
        """Why nothing can be written any more."""
        self.pending_bytes = 0
        """So much waits."""
        self._outputs: dict[StdStream, _PipeOutput | _FileOutput] = {
            stream: _make_output(file) for stream, file in files.items()
        }
        self._parts: deque[tuple[StdStream, memoryview]] = deque()
        self._reader_blocked = False  # the last try wrote nothing

    def add(self, stream: StdStream, data: bytes) -> None:
        """To be written with the next flush."""
        if data and not self.closed:
            self._parts.append((stream, memoryview(data)))
            self.pending_bytes += len(data)

    def flush(self, *, wait: bool = False, timeout_s: float | None = None) -> None:
        """Write as much as is taken at once; or, when asked or when too much waits, all: but not to a reader that takes
        nothing for give_up_s."""
        stream: StdStream = "out"
        try:
            while self._parts:
                stream = self._parts[0][0]
                wait = wait or self.pending_bytes > _BLOCKING_BYTES
                if wait:
                    patience_ms = _BLOCKING_POLL_MS if timeout_s is None else int(1000 * timeout_s)
                else:
                    patience_ms = 0 if self._reader_blocked else _BUSY_READER_TIMEOUT_MS
                self._reader_blocked = self._write(stream, patience_ms) == 0
                if self._reader_blocked and (not wait or timeout_s is not None):
                    return
        except (OSError, ValueError) as error:  # ValueError: somebody closed the file
            why = f"cannot write to standard {'error' if stream == 'err' else 'output'}: {error}"
            self.closed = OutputClosed(why, broken_pipe=isinstance(error, BrokenPipeError))
            self._parts.clear()
            self.pending_bytes = 0

    def _write(self, stream: StdStream, timeout_ms: int) -> int:
        """One step: as much as goes now of what is for the same file. Answers how much that was."""
        run, size = [], 0
        while self._parts and self._parts[0][0] == stream and size < _JOINED_WRITE_BYTES:
            run.append(self._parts.popleft()[1])
            size += len(run[-1])
        data = memoryview(b"".join(run)) if len(run) > 1 else run[0]
        num_written = self._outputs[stream].write(data, timeout_ms)
        self.pending_bytes -= num_written
        if num_written < size:
            self._parts.appendleft((stream, data[num_written:]))
        return num_written


class _FileOutput:
    """Takes everything."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview, timeout_ms: int) -> int:
        num_written = self._file.write(data)
        self._file.flush()
        return num_written


class _PipeOutput:
    """A pipe or terminal: takes what its reader has room for."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: memoryview, timeout_ms: int) -> int:
        if not self._poll.poll(timeout_ms):
            return 0
        try:
            return os.write(self._fd, data[:_PIPE_WRITE_BYTES])
        except BlockingIOError:  # somebody has made it non-blocking
            return 0


def _make_output(file: BinaryIO) -> _FileOutput | _PipeOutput:
    try:
        fd = file.fileno()
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except (OSError, ValueError):  # not a file of the system
        return _FileOutput(file)
    if regular:
        return _FileOutput(file)
    file.flush()  # what was written to it before
    return _PipeOutput(fd)


LineOwner = tuple[tuple[int, ...], StdStream]
"""Whose line it is."""

_RESET_STYLE = b"\x1b[0m"
_MAX_ROW_BYTES = 4096
"""No row of a terminal needs more."""
_DEBUG_RANK: LineOwner = ((-1,), "out")


class TerminalWriter:
    """Collects bytes for the files that lead to one place, and writes them with `flush`."""

    def __init__(self, files: Mapping[StdStream, BinaryIO], *, is_terminal: bool, raw_mode: bool = False) -> None:
        self.streams = tuple(files)
        self.is_terminal = is_terminal
        self.live_region: tuple[bytes, ...] = ()
        """The rows that stand at the bottom now."""
        self.cursor_hidden = False
        """The cursor is."""
        self._buffer = OutputBuffer(files)
        self._raw_mode = raw_mode
        self._open_line_owner: LineOwner | None = None
        self._debug_prompt = b""  # what the rank with the terminal has on its last line

    @property
    def closed(self) -> OutputClosed | None:
        """Why nothing can be written any more."""
        return self._buffer.closed

    @property
    def is_backlogged(self) -> bool:
        """Whether its reader is far behind."""
        return self._buffer.pending_bytes >= HIGH_WATER_BYTES

    @property
    def has_pending(self) -> bool:
        """Whether its reader has not taken everything."""
        return self._buffer.pending_bytes > 0

    @property
    def has_open_line(self) -> bool:
        """Whether the last line belongs to somebody who has not ended it: no place for a region."""
        return self._open_line_owner is not None

    def print(self, owner: LineOwner, prefix: bytes, text: StreamText) -> None:
        """Whole lines or a piece, each line with the prefix."""
        self._erase_live_region()
        stream = owner[1]
        goes_on = text.continued and self._open_line_owner == owner
        if text.continued and not goes_on and text.data == b"\n":
            return  # somebody else's line has ended it already
        if not goes_on:
            self._end_open_line()
        ended = text.data.endswith(b"\n")
        data = text.data[:-1] if ended else text.data
        end = _RESET_STYLE + b"\n" if self.is_terminal and b"\x1b" in data else b"\n"
        if b"\n" in data:
            data = data.replace(b"\n", end + prefix)
        self._write(stream, b"".join((b"" if goes_on else prefix, data, end if ended else b"")))
        self._open_line_owner = None if ended else owner

    def pass_through(self, stream: StdStream, data: bytes) -> None:
        """Bytes of the rank that has the terminal."""
        if self._open_line_owner not in (None, _DEBUG_RANK):
            self._end_open_line()
        self._buffer.add(stream, data)
        last = data.rfind(b"\n") + 1
        self._debug_prompt = (data[last:] if last else self._debug_prompt + data)[-_MAX_ROW_BYTES:]
        self._open_line_owner = _DEBUG_RANK if self._debug_prompt else None

    def draw_live_region(self, rows: Sequence[bytes], *, hide_cursor: bool) -> None:
        """Show these rows at the bottom, until the next print. For a terminal without an open line only."""
        self._erase_live_region()
        if hide_cursor != self.cursor_hidden:
            self.cursor_hidden = hide_cursor
            self._write(self.streams[-1], b"\x1b[?25l" if hide_cursor else b"\x1b[?25h")
        if rows:
            # Without wrapping a row stays a row, however wide it is, and however narrow the terminal becomes.
            drawn = b"\n".join(row[:_MAX_ROW_BYTES] + _RESET_STYLE for row in rows)
            self._write(self.streams[-1], b"\x1b[?7l" + drawn + b"\x1b[?7h")
        self.live_region = tuple(rows)

    def flush(self) -> None:
        """Write what was collected, as far as it is taken now."""
        if self._debug_prompt and self._open_line_owner is None:  # others printed: the prompt appears again below
            self._buffer.add(self.streams[0], self._debug_prompt)
            self._open_line_owner = _DEBUG_RANK
        self._buffer.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """End an open line, erase the region, show the cursor; see Screen.close."""
        self._debug_prompt = b""
        self._end_open_line()
        self.draw_live_region((), hide_cursor=False)
        self._buffer.flush(wait=True, timeout_s=timeout_s)

    def _write(self, stream: StdStream, data: bytes) -> None:
        self._buffer.add(stream, data.replace(b"\n", b"\r\n") if self._raw_mode else data)

    def _erase_live_region(self) -> None:
        if self.live_region:
            up = b"\x1b[%dA" % (len(self.live_region) - 1) if len(self.live_region) > 1 else b""
            self._write(self.streams[-1], b"\r" + up + b"\x1b[J")
            self.live_region = ()

    def _end_open_line(self) -> None:
        if self._open_line_owner is not None:
            stream = self._open_line_owner[1] if self._open_line_owner != _DEBUG_RANK else self.streams[0]
            self._write(stream, _RESET_STYLE + b"\n" if self.is_terminal else b"\n")
            self._open_line_owner = None


def open_standard_streams() -> StandardStreams:
    """What sys.stdout and sys.stderr are now."""
    return StandardStreams(_binary_file(sys.stdout), _binary_file(sys.stderr))


def _binary_file(stream: Any) -> BinaryIO:  # a text stream, perhaps a notebook's; None, when it is closed
    if stream is not None:
        stream.flush()  # what was printed before comes before
    return cast("BinaryIO", getattr(stream, "buffer", None) or _TextStreamWriter(stream))


class _TextStreamWriter(RawIOBase):
    """Takes bytes for a stream that takes text only."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: Any) -> int:  # bytes of any kind
        """All of it."""
        if self._stream is not None:
            self._stream.write(self._decoder.decode(bytes(data)))
        return len(data)

    def flush(self) -> None:
        """What was written."""
        if self._stream is not None:
            self._stream.flush()


class StandardStreams(NamedTuple):
    """Where the lines go: binary files, such as `sys.stdout.buffer` and `sys.stderr.buffer`."""

    out: BinaryIO
    err: BinaryIO


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalInfo:
    """What the two files of a target are."""

    out_is_terminal: bool = False
    """Standard output is a terminal."""
    err_is_terminal: bool = False
    """Standard error is a terminal."""
    same_file: bool = False
    """Both lead to the same terminal, pipe or file."""
    height: int = 24
    """Rows of the terminal."""

    def __post_init__(self) -> None:
        """Check it at once."""
        if self.height < 1:
            raise ValueError(f"a terminal has at least one row, got {self.height}")

    @classmethod
    def detect(cls, streams: StandardStreams) -> TerminalInfo:
        """Look at real files."""
        terminals = tuple(file.isatty() for file in streams)
        height = 0
        for file, terminal in zip(streams, terminals, strict=True):
            if terminal:
                height = os.get_terminal_size(file.fileno()).lines
        return cls(
            out_is_terminal=terminals[0],
            err_is_terminal=terminals[1],
            same_file=os.path.sameopenfile(streams.out.fileno(), streams.err.fileno()),
            height=height or 24,
        )


class OutputClosed(NamedTuple):
    """Why nothing can be shown any more."""

    reason: str
    broken_pipe: bool = False
    """The reader of a pipe has left, as `| head` does when it has seen enough."""
