"""One open socket per living rank; its end is the end of the rank. Used by the coordinator.

The kernel closes a process's sockets when it dies, however it dies, so an end is seen at once. Lines are added by the
door's thread; everything else is for the coordinator's.
"""

from __future__ import annotations

import enum
import select
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from ronde.comm.coordination.membership import Departure, How
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


@dataclass(slots=True)
class _Holder:
    """Who holds a rank's seat."""

    line: Line
    attempt: str
    """The same for all connections that one process makes in one attempt to join."""
    watched: bool = False
    """Its end will be noticed: it is polled, and has not ended yet."""


class Lifelines:
    """Which ranks are connected. A rank holds its seat from add() until it is released, or until the same process calls
    anew because its handshake broke."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._lock = threading.Lock()
        self._seats: dict[int, _Holder] = {}
        self._lines: dict[int, tuple[int, Line]] = {}  # by descriptor, those that are watched; also of released ranks
        self._new: list[tuple[int, Line]] = []
        self._closed = False

    def seat(self, rank: int, attempt: str) -> Seat:
        """Who holds the rank's seat, seen by a caller: for it, a seat of its own attempt is free. From every thread."""
        with self._lock:
            return self._look(rank, attempt)

    def vacate(self, rank: int, attempt: str) -> bool:
        """The caller makes this attempt anew: its former connection, if it had one, no longer counts, and its end means
        nothing. Returns whether there was one. From every thread."""
        with self._lock:
            holder = self._seats.get(rank)
            if holder is None or holder.attempt != attempt:
                return False
            del self._seats[rank]
            return True

    def add(self, rank: int, line: Line, attempt: str) -> Seat:
        """Give the rank's seat to this line if it is free, else close the line; returns how the seat was. From every
        thread."""
        with self._lock:
            seat = self._look(rank, attempt)
            if self._closed or seat is not Seat.FREE:
                line.close()
            else:
                self._seats[rank] = _Holder(line, attempt)
                self._new.append((rank, line))
            return seat

    def watched(self) -> frozenset[int]:
        """The ranks whose death would be noticed."""
        with self._lock:
            return frozenset(rank for rank, holder in self._seats.items() if holder.watched)

    def watch_new(self) -> None:
        """Begin to watch the lines added since the last call."""
        if not self._new:  # looked at on every message: without the lock, as a new line also wakes the watcher
            return
        with self._lock:
            new, self._new = self._new, []
        for rank, line in new:
            self._lines[line.fileno()] = (rank, line)
            self._watcher.watch(line.fileno())
            with self._lock:
                holder = self._seats.get(rank)
                if holder is not None and holder.line is line:
                    holder.watched = not has_ended(line)  # one that has ended is found by the next poll

    def find_ended(self, readable: Iterable[int]) -> dict[int, Departure]:
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
                holder = self._seats.get(rank)
                if holder is not None and holder.line is line:
                    holder.watched = False
                    ended[rank] = how
        return ended

    def release(self, rank: int) -> None:
        """The rank has said goodbye or was given up: the end of its line means nothing any more, its seat is free. A
        line that came since the last watch_new() keeps the seat: it is not the one that was given up."""
        with self._lock:
            if not any(new == rank for new, _ in self._new):
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

    def _look(self, rank: int, attempt: str) -> Seat:
        holder = self._seats.get(rank)
        if holder is None or holder.attempt == attempt:
            return Seat.FREE
        return Seat.ENDED if has_ended(holder.line) else Seat.HELD


def has_ended(line: Line) -> bool:
    """Whether the process at the other end is gone, or has hung up."""
    poll = select.poll()
    try:
        poll.register(line.fileno(), _HUNG_UP)
    except ValueError:  # closed here already
        return True
    return bool(poll.poll(0))


def _how_it_ended(line: Line) -> Departure:
    """A process that ends closes its line; who cannot be reached any more leaves it to the kernel to give up."""
    try:
        line.recv(1)
    except OSError as error:
        cut = unreachable(error.errno or 0)
        if cut:
            return Departure(How.UNREACHABLE, cut)
    return Departure(How.PROCESS_GONE)
