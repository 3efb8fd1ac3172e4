"""Pseudo-terminals: one that a rank can be debugged in, and ones that only make its output look like a terminal's.
Used by launch/rank."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import tty
from collections.abc import Sequence

__all__ = ["END", "open_terminal", "resize", "taking"]

END = b"\x04"
"""What Ctrl-D types: the end of the input."""
ROWS, COLUMNS = 24, 80
"""Until the driver says how large its own is."""

_SIZE = struct.Struct("HHHH")

# The leader of a session gets its controlling terminal by opening one, and only the process itself can do that. Without
# it, Ctrl-C would be a character like any other.
_TAKE = ': <>"$1"; shift; exec "$@"'


def open_terminal(*, raw: bool) -> tuple[int, int]:
    """Our end and the process's; raw: what is written comes out unchanged."""
    ours, theirs = os.openpty()
    try:
        resize(ours, ROWS, COLUMNS)
        if raw:
            tty.setraw(theirs)
    except BaseException:
        os.close(ours)
        os.close(theirs)
        raise
    return ours, theirs


def resize(fd: int, rows: int, columns: int) -> None:
    """Set the size of the window; programs in it are told."""
    fcntl.ioctl(fd, termios.TIOCSWINSZ, _SIZE.pack(*(max(1, min(each, 0xFFFF)) for each in (rows, columns)), 0, 0))


def taking(theirs: int, argv: Sequence[str]) -> list[str]:
    """The command that makes this terminal its session's own, and becomes `argv`."""
    return ["/bin/sh", "-c", _TAKE, "sh", os.ttyname(theirs), *argv]
