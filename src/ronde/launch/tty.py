"""The terminal of `ronde run`, handed to one rank: what is typed goes to it unread. Used by the driver for --debug.

Pseudo-terminals: one that a rank can be debugged in, and ones that only make its output look like a terminal's.
Used by launch/rank.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty
from collections.abc import Callable, Sequence

from ronde.net.event_loop import EventLoop

__all__ = ["EOF_CHARACTER", "RawTerminalInput", "open_pty", "set_window_size", "with_controlling_terminal"]

READ_BYTES = 4096


class RawTerminalInput:
    """Reads standard input as it is typed, until close(). Also Ctrl-C and Ctrl-Z are for the rank."""

    def __init__(self, loop: EventLoop, on_input: Callable[[bytes], None], fd: int = 0) -> None:
        self._loop = loop
        self._on_input = on_input
        self._fd = fd
        self._saved_attributes = termios.tcgetattr(fd) if os.isatty(fd) else None
        if self._saved_attributes is not None:
            # Output, too: a full-screen debugger counts on it. The Printer ends its own lines accordingly (raw_rank).
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
"""What Ctrl-D types: the end of the input."""
DEFAULT_ROWS, DEFAULT_COLUMNS = 24, 80
"""Until the driver says how large its own is."""

_WINDOW_SIZE = struct.Struct("HHHH")

# The leader of a session gets its controlling terminal by opening one, and only the process itself can do that. Without
# it, Ctrl-C would be a character like any other.
_TAKE_TERMINAL_SCRIPT = ': <>"$1"; shift; exec "$@"'


def open_pty(*, raw: bool) -> tuple[int, int]:
    """Our end and the process's; raw: what is written comes out unchanged."""
    ours, theirs = os.openpty()
    try:
        set_window_size(ours, DEFAULT_ROWS, DEFAULT_COLUMNS)
        if raw:
            tty.setraw(theirs)
    except BaseException:
        os.close(ours)
        os.close(theirs)
        raise
    return ours, theirs


def set_window_size(fd: int, rows: int, columns: int) -> None:
    """Set the size of the window; programs in it are told."""
    fcntl.ioctl(
        fd, termios.TIOCSWINSZ, _WINDOW_SIZE.pack(*(max(1, min(each, 0xFFFF)) for each in (rows, columns)), 0, 0)
    )


def with_controlling_terminal(child_fd: int, argv: Sequence[str]) -> list[str]:
    """The command that makes this terminal its session's own, and becomes `argv`."""
    return ["/bin/sh", "-c", _TAKE_TERMINAL_SCRIPT, "sh", os.ttyname(child_fd), *argv]
