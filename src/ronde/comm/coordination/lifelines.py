"""One open socket per living rank; its end is the end of the rank. Used by the coordinator.

The kernel closes a process's sockets when it dies, however it dies, so an end is seen at once. Lines are added by the
door's thread; everything else is for the coordinator's.
"""

from __future__ import annotations

import enum
import select
import threading
from collections.abc import Iterable
from typing import Protocol

from ronde.net.sockets import unreachable

__all__ = ["Lifelines", "Line", "Seat", "Watcher", "has_ended"]

_HUNG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class Line(Protocol):
    """The part of a socket that is needed here."""

    def fileno(self) -> int:
        """For pollers."""

    def recv(self, num_bytes: int, /) -> bytes:
        """Read what came."""

    def close(self) -> None:
        """Hang up."""


class Watcher(Protocol):
    """Who polls the lines: the control server."""

    def watch(self, fd: int) -> None:
        """Wake when it is readable."""

    def unwatch(self, fd: int) -> None:
        """No longer."""


class Seat(enum.Enum):
    """Of one rank: nobody is there, a living process is, or one whose line has ended but who is not given up yet."""

    FREE = enum.auto()
    HELD = enum.auto()
    ENDED = enum.auto()


class Lifelines:
    """Which ranks are connected. A rank holds its seat from add() until it is released."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._lock = threading.Lock()
        self._seats: dict[int, Line] = {}
        self._lines: dict[int, tuple[int, Line]] = {}  # by descriptor, those that are watched; also of released ranks
        self._new: list[tuple[int, Line]] = []
        self._closed = False

    def seat(self, rank: int) -> Seat:
        """Who holds the rank's seat. From every thread."""
        with self._lock:
            return self._look(rank)

    def add(self, rank: int, line: Line) -> bool:
        """Give the rank's seat to this line. If it is not free, the line is closed. From every thread."""
        with self._lock:
            if self._closed or self._look(rank) is not Seat.FREE:
                line.close()
                return False
            self._seats[rank] = line
            self._new.append((rank, line))
            return True

    def watch_new(self) -> None:
        """Begin to watch the lines added since the last call."""
        if not self._new:  # looked at on every message: without the lock, as a new line also wakes the watcher
            return
        with self._lock:
            new, self._new = self._new, []
        for rank, line in new:
            self._lines[line.fileno()] = (rank, line)
            self._watcher.watch(line.fileno())

    def find_ended(self, readable: Iterable[int]) -> dict[int, str]:
        """Close those of the readable lines that have ended; returns the ranks among them that hold their seat, and
        how each ended."""
        ended = {}
        for fd in [fd for fd in readable if fd in self._lines]:
            rank, line = self._lines[fd]
            if not has_ended(line):
                line.recv(4096)  # nobody is meant to write here; what is left unread would wake us for ever
                continue
            del self._lines[fd]
            self._watcher.unwatch(fd)
            how = _how_it_ended(line)
            line.close()
            with self._lock:
                if self._seats.get(rank) is line:
                    ended[rank] = how
        return ended

    def release(self, rank: int) -> None:
        """The rank has said goodbye or was given up: the end of its line means nothing any more, its seat is free."""
        with self._lock:
            self._seats.pop(rank, None)

    def close(self) -> None:
        """Hang up on everybody, when nobody polls any more. Idempotent."""
        with self._lock:
            self._closed = True
            lines = [line for _, line in (*self._lines.values(), *self._new)]
            self._lines.clear()
            self._new.clear()
        for line in lines:
            line.close()

    def _look(self, rank: int) -> Seat:
        line = self._seats.get(rank)
        if line is None:
            return Seat.FREE
        return Seat.ENDED if has_ended(line) else Seat.HELD


def has_ended(line: Line) -> bool:
    """Whether the process at the other end is gone, or has hung up."""
    poll = select.poll()
    try:
        poll.register(line.fileno(), _HUNG_UP)
    except ValueError:  # closed here already
        return True
    return bool(poll.poll(0))


def _how_it_ended(line: Line) -> str:
    """A process that ends closes its line; who cannot be reached any more leaves it to the kernel to give up."""
    try:
        line.recv(1)
    except OSError as error:
        return unreachable(error.errno or 0) or "its process is gone"
    return "its process is gone"
