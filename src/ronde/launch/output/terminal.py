"""Writing to the user's terminal, pipe or file.

A TerminalWriter knows what stands on the last line: nothing; a line that its owner has not ended yet (the *open line*),
which the owner continues unless somebody else prints; or, on a terminal, the *live region*: rows that are erased before
anything is printed and drawn again after it.

Its OutputBuffer writes as fast as the reader takes the bytes. A reader may stop for as long as it likes (`| less`,
Ctrl-S). Until much waits, that holds up nobody: what a pipe or terminal does not take now is kept for the next flush.
Files take everything.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import RawIOBase
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

from ronde.launch.output.progress import StreamText
from ronde.launch.protocol import StdStream

HIGH_WATER_BYTES = 1024 * 1024
"""When this much waits to be written, the driver stops reading from the ranks."""
_BLOCKING_BYTES = 64 * HIGH_WATER_BYTES
"""When this much waits to be written, because the driver went on reading, flush() waits for the reader. It is far above
HIGH_WATER_BYTES: after reading stops, hundreds of dead ranks may still have left a full pipe each, and a driver that
waits here does not handle Ctrl-C."""
_PIPE_WRITE_BYTES = 4096
"""A pipe that takes anything takes so much at once (PIPE_BUF)."""
_JOINED_WRITE_BYTES = 64 * 1024
"""Small parts are joined up to about this size."""
_BUSY_READER_TIMEOUT_MS = 10
"""A reader that is just busy takes more within this time."""
_BLOCKING_POLL_MS = 1000
_MAX_ROW_BYTES = 4096
"""No row of a terminal needs more."""
_RESET_STYLE = b"\x1b[0m"

LineOwner: TypeAlias = tuple[tuple[int, ...], StdStream]
"""The ranks and the stream that a line belongs to."""
_DEBUG_RANK: LineOwner = ((-1,), "out")


class StandardStreams(NamedTuple):
    """Where the lines go: binary files, such as `sys.stdout.buffer` and `sys.stderr.buffer`."""

    out: BinaryIO
    err: BinaryIO


class OutputClosed(NamedTuple):
    """Why nothing can be printed any more."""

    reason: str
    broken_pipe: bool = False
    """The reader of a pipe has exited, as `| head` does when it has seen enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TerminalInfo:
    """What the two standard streams are."""

    out_is_terminal: bool = False
    err_is_terminal: bool = False
    same_file: bool = False
    """Both lead to the same terminal, pipe or file."""
    height: int = 24

    @classmethod
    def detect(cls, streams: StandardStreams) -> TerminalInfo:
        try:
            same_file = os.path.sameopenfile(streams.out.fileno(), streams.err.fileno())
        except (OSError, ValueError):  # no files of the operating system: a notebook's
            return cls(same_file=True)
        terminals = [file for file in streams if file.isatty()]
        return cls(
            out_is_terminal=streams.out in terminals,
            err_is_terminal=streams.err in terminals,
            same_file=same_file,
            height=os.get_terminal_size(terminals[-1].fileno()).lines or 24 if terminals else 24,
        )


class OutputBuffer:
    """Bytes that wait to be written to one or two files, in one order. After an error nothing is written any more."""

    def __init__(self, files: Mapping[StdStream, BinaryIO]) -> None:
        self.closed: OutputClosed | None = None
        self.pending_bytes = 0
        self._files = files
        self._pipes: dict[StdStream, select.poll] = {}  # a regular file, or one that is only Python's, takes everything
        for stream, file in files.items():
            with contextlib.suppress(OSError, ValueError):
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    file.flush()  # what was written to it before comes first
                    self._pipes[stream] = select.poll()
                    self._pipes[stream].register(file.fileno(), select.POLLOUT)
        self._parts: deque[tuple[StdStream, memoryview]] = deque()
        self._reader_blocked = False  # the last attempt wrote nothing

    def add(self, stream: StdStream, data: bytes) -> None:
        if data and not self.closed:
            self._parts.append((stream, memoryview(data)))
            self.pending_bytes += len(data)

    def flush(self, *, wait: bool = False, timeout_s: float | None = None) -> None:
        """Write what the readers take at once. With `wait`, or when too much is pending, write everything; but give up
        on a reader that takes nothing for `timeout_s`."""
        stream: StdStream = "out"
        try:
            while self._parts:
                stream = self._parts[0][0]
                wait = wait or self.pending_bytes > _BLOCKING_BYTES
                if wait:
                    poll_ms = _BLOCKING_POLL_MS if timeout_s is None else int(1000 * timeout_s)
                else:
                    poll_ms = 0 if self._reader_blocked else _BUSY_READER_TIMEOUT_MS
                self._reader_blocked = self._write_some(stream, poll_ms) == 0
                if self._reader_blocked and (not wait or timeout_s is not None):
                    return
        except (OSError, ValueError) as error:  # ValueError: somebody closed the file
            reason = f"cannot write to standard {'error' if stream == 'err' else 'output'}: {error}"
            self.closed = OutputClosed(reason, broken_pipe=isinstance(error, BrokenPipeError))
            self._parts.clear()
            self.pending_bytes = 0

    def _write_some(self, stream: StdStream, poll_ms: int) -> int:
        """Write once, of the first parts that are for this stream. Return the number of bytes written."""
        parts, size = [], 0
        while self._parts and self._parts[0][0] == stream and size < _JOINED_WRITE_BYTES:
            parts.append(self._parts.popleft()[1])
            size += len(parts[-1])
        data = memoryview(b"".join(parts)) if len(parts) > 1 else parts[0]
        num_written = 0
        pipe = self._pipes.get(stream)
        if pipe is None:
            num_written = self._files[stream].write(data)
            self._files[stream].flush()
        elif pipe.poll(poll_ms):
            with contextlib.suppress(BlockingIOError):  # somebody has made it non-blocking
                num_written = os.write(self._files[stream].fileno(), data[:_PIPE_WRITE_BYTES])
        self.pending_bytes -= num_written
        if num_written < size:
            self._parts.appendleft((stream, data[num_written:]))
        return num_written


class TerminalWriter:
    """Prints lines of many owners to one terminal, pipe or file, which may be both standard streams."""

    def __init__(self, files: Mapping[StdStream, BinaryIO], *, is_terminal: bool, raw_mode: bool = False) -> None:
        self.streams = tuple(files)
        self.is_terminal = is_terminal
        self.has_live_region = is_terminal and not raw_mode
        self.live_region: tuple[bytes, ...] = ()
        """The rows that stand at the bottom now."""
        self.cursor_hidden = False
        self.buffer = OutputBuffer(files)
        self._raw_mode = raw_mode and is_terminal
        self.open_line_owner: LineOwner | None = None
        """Whose line is not ended. Then there is no room for a live region."""
        self._debug_prompt = b""  # the last line of the rank that has the terminal, without its end

    def print(self, owner: LineOwner, prefix: bytes, text: StreamText) -> None:
        """Print whole lines or a piece of a line, each line with the prefix."""
        self._erase_live_region()
        stream = owner[1]
        continues = text.continued and self.open_line_owner == owner
        if text.continued and not continues and text.data == b"\n":
            return  # somebody else's line has ended it already
        if not continues:
            self._end_open_line()
        ended = text.data.endswith(b"\n")
        data = text.data[:-1] if ended else text.data
        end = _RESET_STYLE + b"\n" if self.is_terminal and b"\x1b" in data else b"\n"
        if b"\n" in data:
            data = data.replace(b"\n", end + prefix)
        self._write(stream, b"".join((b"" if continues else prefix, data, end if ended else b"")))
        self.open_line_owner = None if ended else owner

    def pass_through(self, stream: StdStream, data: bytes) -> None:
        """Print bytes of the rank that has the terminal, unchanged."""
        if self.open_line_owner not in (None, _DEBUG_RANK):
            self._end_open_line()
        self.buffer.add(stream, data)
        last = data.rfind(b"\n") + 1
        self._debug_prompt = (data[last:] if last else self._debug_prompt + data)[-_MAX_ROW_BYTES:]
        self.open_line_owner = _DEBUG_RANK if self._debug_prompt else None

    def draw_live_region(self, rows: Sequence[bytes], *, hide_cursor: bool) -> None:
        """Show these rows at the bottom, until the next print. Only for a terminal without an open line."""
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
        if self._debug_prompt and self.open_line_owner is None:  # others printed: the prompt appears again below
            self.buffer.add(self.streams[0], self._debug_prompt)
            self.open_line_owner = _DEBUG_RANK
        self.buffer.flush()

    def close(self, timeout_s: float | None = None) -> None:
        """End an open line, erase the live region, show the cursor, and write everything; see Printer.close."""
        self._debug_prompt = b""
        self._end_open_line()
        self.draw_live_region((), hide_cursor=False)
        self.buffer.flush(wait=True, timeout_s=timeout_s)

    def _write(self, stream: StdStream, data: bytes) -> None:
        self.buffer.add(stream, data.replace(b"\n", b"\r\n") if self._raw_mode else data)

    def _erase_live_region(self) -> None:
        if self.live_region:
            up = b"\x1b[%dA" % (len(self.live_region) - 1) if len(self.live_region) > 1 else b""
            self._write(self.streams[-1], b"\r" + up + b"\x1b[J")
            self.live_region = ()

    def _end_open_line(self) -> None:
        if self.open_line_owner is not None:
            stream = self.open_line_owner[1] if self.open_line_owner != _DEBUG_RANK else self.streams[0]
            self._write(stream, _RESET_STYLE + b"\n" if self.is_terminal else b"\n")
            self.open_line_owner = None


def open_standard_streams() -> StandardStreams:
    """Return sys.stdout and sys.stderr as binary files, also where they are none: in a notebook, in a test."""
    files = []
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as where it is closed
            stream.flush()  # what was printed before comes first
        files.append(cast("BinaryIO", getattr(stream, "buffer", None) or _TextStreamWriter(stream)))
    return StandardStreams(*files)


class _TextStreamWriter(RawIOBase):
    """A binary file that writes to a stream which takes only text; to nowhere if there is none."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: Any) -> int:  # bytes of any kind
        if self._stream is not None:
            self._stream.write(self._decoder.decode(bytes(data)))
        return len(data)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
