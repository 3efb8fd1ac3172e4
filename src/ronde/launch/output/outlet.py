"""The way out of the process: bytes for one place, written as fast as its reader takes them. Used by Console.

A reader may stop for as long as it likes (`| less`, Ctrl-S). Until much waits, that holds up nobody: what a pipe or a
terminal does not take now is kept for the next time. Files always take everything.
"""

from __future__ import annotations

import os
import select
import stat
from collections import deque
from collections.abc import Mapping
from typing import BinaryIO

from ronde.launch.messages import Stream
from ronde.launch.output.screen import Gone

__all__ = ["FULL_BYTES", "Outlet"]

FULL_BYTES = 1024 * 1024
"""When so much waits, it is time not to read more from the ranks."""
_BLOCK_BYTES = 64 * FULL_BYTES
"""When so much waits, because somebody went on, everybody waits for the reader. Far from FULL_BYTES: when nothing more
is read, hundreds of dead ranks may still have left a pipe full each, and a driver that waits here hears no Ctrl-C."""
_SLICE_BYTES = 4096
"""A pipe that takes anything takes so much at once (PIPE_BUF)."""
_RUN_BYTES = 64 * 1024
"""Small parts are joined up to about this size."""
_PATIENCE_MS = 10
"""A reader that is just busy takes more within this time."""
_WAIT_MS = 1000


class Outlet:
    """The files that lead to one place, in one order. After an error nothing is written any more."""

    def __init__(self, files: Mapping[Stream, BinaryIO]) -> None:
        self.gone: Gone | None = None
        """Why nothing can be written any more."""
        self.num_bytes = 0
        """So much waits."""
        self._doors: dict[Stream, _Pipe | _File] = {stream: _door(file) for stream, file in files.items()}
        self._parts: deque[tuple[Stream, memoryview]] = deque()
        self._stuck = False  # the last try wrote nothing

    def add(self, stream: Stream, data: bytes) -> None:
        """To be written with the next flush."""
        if data and not self.gone:
            self._parts.append((stream, memoryview(data)))
            self.num_bytes += len(data)

    def flush(self, *, wait: bool = False, give_up_s: float | None = None) -> None:
        """Write as much as is taken at once; or, when asked or when too much waits, all: but not to a reader that takes
        nothing for give_up_s."""
        stream: Stream = "out"
        try:
            while self._parts:
                stream = self._parts[0][0]
                wait = wait or self.num_bytes > _BLOCK_BYTES
                if wait:
                    patience_ms = _WAIT_MS if give_up_s is None else int(1000 * give_up_s)
                else:
                    patience_ms = 0 if self._stuck else _PATIENCE_MS
                self._stuck = self._write(stream, patience_ms) == 0
                if self._stuck and (not wait or give_up_s is not None):
                    return
        except (OSError, ValueError) as error:  # ValueError: somebody closed the file
            why = f"cannot write to standard {'error' if stream == 'err' else 'output'}: {error}"
            self.gone = Gone(why, unread=isinstance(error, BrokenPipeError))
            self._parts.clear()
            self.num_bytes = 0

    def _write(self, stream: Stream, patience_ms: int) -> int:
        """One step: as much as goes now of what is for the same file. Answers how much that was."""
        run, size = [], 0
        while self._parts and self._parts[0][0] == stream and size < _RUN_BYTES:
            run.append(self._parts.popleft()[1])
            size += len(run[-1])
        data = memoryview(b"".join(run)) if len(run) > 1 else run[0]
        num_written = self._doors[stream].write(data, patience_ms)
        self.num_bytes -= num_written
        if num_written < size:
            self._parts.appendleft((stream, data[num_written:]))
        return num_written


class _File:
    """Takes everything."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: memoryview, patience_ms: int) -> int:
        num_written = self._file.write(data)
        self._file.flush()
        return num_written


class _Pipe:
    """A pipe or terminal: takes what its reader has room for."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: memoryview, patience_ms: int) -> int:
        if not self._poll.poll(patience_ms):
            return 0
        try:
            return os.write(self._fd, data[:_SLICE_BYTES])
        except BlockingIOError:  # somebody has made it non-blocking
            return 0


def _door(file: BinaryIO) -> _File | _Pipe:
    try:
        fd = file.fileno()
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
    except (OSError, ValueError):  # not a file of the system
        return _File(file)
    if regular:
        return _File(file)
    file.flush()  # what was written to it before
    return _Pipe(fd)
