"""One thread that waits for everything at once: descriptors, timers, and calls from other threads.

Who owns a Loop runs it; everything it watches is then touched by that thread alone, and needs no lock. Used by the
driver, the agent, and LocalJob.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import selectors
import time
from collections.abc import Callable

from ronde.net.descriptors import Bell

__all__ = ["Loop", "Timer"]


class Timer:
    """A call that waits for its time. Made by Loop.at."""

    __slots__ = ("_call", "due_s")

    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s = due_s
        """When, in seconds of time.monotonic()."""
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call. Idempotent, and without effect after the call."""
        self._call = None

    @property
    def waits(self) -> bool:
        """Whether the call is still to come."""
        return self._call is not None

    def fire(self) -> None:
        """Make the call, once."""
        call, self._call = self._call, None
        if call is not None:
            call()


class _Watch:
    """A descriptor and what to call; its identity tells it from a later watch of the same number."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call


class Loop:
    """Calls back when a descriptor is ready, when a time has come, and when another thread asks for it.

    A call that raises ends run() with its error. All methods but soon() belong to the thread that runs the loop.
    """

    def __init__(self) -> None:
        # poll, not epoll: it also takes files and /dev/null, which may stand where a pipe is expected.
        self._selector = selectors.PollSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: collections.deque[Callable[[], None]] = collections.deque()
        self._bell = Bell()
        self._closed = False
        self.watch(self._bell.fileno(), self._bell.clear)

    def watch(self, fd: int, call: Callable[[], None], *, write: bool = False) -> None:
        """Call whenever the descriptor can be read (or written, or has come to its end), until unwatch(). A descriptor
        has one watch; to wait for both, watch a duplicate."""
        self._selector.register(fd, selectors.EVENT_WRITE if write else selectors.EVENT_READ, _Watch(call))

    def unwatch(self, fd: int) -> None:
        """No more calls for this descriptor; to be said before it is closed. Fine if it is not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def at(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call once, that many seconds from now."""
        timer = Timer(time.monotonic() + delay_s, call)
        heapq.heappush(self._timers, (timer.due_s, next(self._order), timer))
        return timer

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the loop's thread, in the order of asking. From any thread and from a signal handler; after close()
        it is forgotten."""
        self._soon.append(call)
        self._bell.ring()

    def run(self, until: Callable[[], bool]) -> None:
        """Turn until it is true; it is looked at between turns."""
        while not until():
            self._turn()

    def close(self) -> None:
        """Forget everything that waits. The descriptors are their owners' to close. Idempotent."""
        if not self._closed:
            self._closed = True
            self._selector.close()
            self._bell.close()
            self._timers.clear()
            self._soon.clear()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            # An earlier call of this turn may have ended this watch, and even begun another with its number.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:
                key.data.call()
        for _ in range(len(self._soon)):  # not those that these ask for: descriptors have their turn, too
            self._soon.popleft()()
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2].fire()

    def _patience_s(self) -> float | None:
        if self._soon:
            return 0.0
        while self._timers and not self._timers[0][2].waits:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
