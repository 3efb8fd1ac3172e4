"""The terminal of `ronde run`, handed to one rank: what is typed goes to it unread. Used by the driver for --debug."""

from __future__ import annotations

import os
import termios
import tty
from collections.abc import Callable

from ronde.launch.loop import Loop

__all__ = ["Keyboard"]

READ_BYTES = 4096


class Keyboard:
    """Reads standard input as it is typed, until close(). Also Ctrl-C and Ctrl-Z are for the rank."""

    def __init__(self, loop: Loop, typed: Callable[[bytes], None], fd: int = 0) -> None:
        self._loop = loop
        self._typed = typed
        self._fd = fd
        self._before = termios.tcgetattr(fd) if os.isatty(fd) else None
        if self._before is not None:
            # Output, too: a full-screen debugger counts on it. The Printer ends its own lines accordingly (raw_rank).
            tty.setraw(fd, termios.TCSADRAIN)
        loop.watch(fd, self._read)

    def close(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        if self._fd < 0:
            return
        self._loop.unwatch(self._fd)
        if self._before is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        self._fd = -1

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except OSError:  # the terminal's window was closed
            data = b""
        self._typed(data)
        if not data and self._fd >= 0:
            self._loop.unwatch(self._fd)
