"""Pseudo-terminals for ranks, and the driver's own terminal in raw mode for `--debug`."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty
from collections.abc import Callable, Sequence

from ronde.net.event_loop import EventLoop

READ_BYTES = 4096


class RawTerminalInput:
    """Reads standard input as it is typed, until close(). Ctrl-C and Ctrl-Z are passed on to the rank, too."""

    def __init__(self, loop: EventLoop, on_input: Callable[[bytes], None], fd: int = 0) -> None:
        self._loop = loop
        self._on_input = on_input
        self._fd = fd
        self._saved_attributes = termios.tcgetattr(fd) if os.isatty(fd) else None
        if self._saved_attributes is not None:
            # Output, too: a full-screen debugger needs it. The Printer ends its own lines accordingly (debug_rank).
            tty.setraw(fd, termios.TCSADRAIN)
        loop.add_reader(fd, self._read)

    def close(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        if self._saved_attributes is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved_attributes)
        self._fd = -1

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except OSError:  # the terminal's window was closed
            data = b""
        self._on_input(data)
        if not data and self._fd >= 0:
            self._loop.remove_reader(self._fd)


EOF_CHARACTER = b"\x04"
"""Ctrl-D: the end of the input."""
DEFAULT_ROWS, DEFAULT_COLUMNS = 24, 80
"""Until the driver sends the size of its own terminal."""

_WINDOW_SIZE = struct.Struct("HHHH")

# The leader of a session gets its controlling terminal by opening one, which only the process itself can do. Without
# it, Ctrl-C would be a character like any other.
_TAKE_TERMINAL_SCRIPT = ': <>"$1"; shift; exec "$@"'


def open_pty(*, raw: bool) -> tuple[int, int]:
    """Open a pty; return the parent's and the child's descriptor. Raw: what is written comes out unchanged."""
    parent_fd, child_fd = os.openpty()
    try:
        set_window_size(parent_fd, DEFAULT_ROWS, DEFAULT_COLUMNS)
        if raw:
            tty.setraw(child_fd)
    except BaseException:
        os.close(parent_fd)
        os.close(child_fd)
        raise
    return parent_fd, child_fd


def set_window_size(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(
        fd, termios.TIOCSWINSZ, _WINDOW_SIZE.pack(*(max(1, min(each, 0xFFFF)) for each in (rows, columns)), 0, 0)
    )


def with_controlling_terminal(child_fd: int, argv: Sequence[str]) -> tuple[str, ...]:
    """Return the command that makes this pty the controlling terminal of its session, and then becomes `argv`."""
    return ("/bin/sh", "-c", _TAKE_TERMINAL_SCRIPT, "sh", os.ttyname(child_fd), *argv)
