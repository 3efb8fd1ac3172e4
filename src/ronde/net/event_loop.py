"""One thread that waits for everything at once: descriptors, timers, and calls from other threads.

Who owns a Loop runs it; everything it watches is then touched by that thread alone, and needs no lock. Used by the
driver, the agent, and LocalJob.

Descriptors that are read and written without waiting, on a Loop. Used by the agent for what ranks print and are
handed, and by launch/remote for the frames. Each owns its descriptor.
"""

from __future__ import annotations

import collections
import errno
import heapq
import itertools
import os
import selectors
import time
from collections.abc import Callable

from ronde.net.descriptors import WakeupFd

__all__ = ["EventLoop", "PipeReader", "PipeWriter", "Timer"]


class Timer:
    """A call that waits for its time. Made by Loop.at."""

    __slots__ = ("_callback", "due_s")

    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s = due_s
        """When, in seconds of time.monotonic()."""
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Do not call. Idempotent, and without effect after the call."""
        self._callback = None

    @property
    def pending(self) -> bool:
        """Whether the call is still to come."""
        return self._callback is not None

    def fire(self) -> None:
        """Make the call, once."""
        call, self._callback = self._callback, None
        if call is not None:
            call()


class _FdCallback:
    """A descriptor and what to call; its identity tells it from a later watch of the same number."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback


class EventLoop:
    """Calls back when a descriptor is ready, when a time has come, and when another thread asks for it.

    A call that raises ends run() with its error. All methods but soon() belong to the thread that runs the loop.
    """

    def __init__(self) -> None:
        # poll, not epoll: it also takes files and /dev/null, which may stand where a pipe is expected.
        self._selector = selectors.PollSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._ready: collections.deque[Callable[[], None]] = collections.deque()
        self._wakeup = WakeupFd()
        self._closed = False
        self.add_reader(self._wakeup.fileno(), self._wakeup.clear)

    def add_reader(self, fd: int, callback: Callable[[], None], *, write: bool = False) -> None:
        """Call whenever the descriptor can be read (or written, or has come to its end), until unwatch(). A descriptor
        has one watch; to wait for both, watch a duplicate."""
        self._selector.register(fd, selectors.EVENT_WRITE if write else selectors.EVENT_READ, _FdCallback(callback))

    def remove_reader(self, fd: int) -> None:
        """No more calls for this descriptor; to be said before it is closed. Fine if it is not watched."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call once, that many seconds from now."""
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, (timer.due_s, next(self._order), timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """Call in the loop's thread, in the order of asking. From any thread and from a signal handler; after close()
        it is forgotten."""
        self._ready.append(callback)
        self._wakeup.notify()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Turn until it is true; it is looked at between turns."""
        while not condition():
            self._run_once()

    def close(self) -> None:
        """Forget everything that waits. The descriptors are their owners' to close. Idempotent."""
        if not self._closed:
            self._closed = True
            self._selector.close()
            self._wakeup.close()
            self._timers.clear()
            self._ready.clear()

    def _run_once(self) -> None:
        for key, _ in self._selector.select(self._select_timeout_s()):
            # An earlier call of this turn may have ended this watch, and even begun another with its number.
            now = self._selector.get_map().get(key.fd)
            if now is not None and now.data is key.data:
                key.data.callback()
        for _ in range(len(self._ready)):  # not those that these ask for: descriptors have their turn, too
            self._ready.popleft()()
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2].fire()

    def _select_timeout_s(self) -> float | None:
        if self._ready:
            return 0.0
        while self._timers and not self._timers[0][2].pending:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None


MAX_READ_BYTES = 64 * 1024
"""At most so much per turn, so that everybody has his; a pipe holds no more."""
MAX_REMAINING_BYTES = 1024 * 1024
"""More than pipes and terminals hold: what a dead process has written is among it."""
MAX_BUFFERS_PER_WRITE = 64
"""So many pieces go out with one call."""


class PipeReader:
    """Hands on what comes from a descriptor, in order, until its end."""

    def __init__(self, loop: EventLoop, fd: int, on_data: Callable[[bytes], None], on_eof: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self.fd = fd
        """-1 once it is closed."""
        self._on_data = on_data
        self._on_eof = on_eof
        self._paused = False
        loop.add_reader(fd, self._on_readable)

    def set_paused(self, paused: bool) -> None:
        """Leave what comes where it is, so that its writer waits; or go on."""
        if paused != self._paused and self.fd >= 0:
            self._paused = paused
            if paused:
                self._loop.remove_reader(self.fd)
            else:
                self._loop.add_reader(self.fd, self._on_readable)

    def read_remaining(self) -> None:
        """Its writer is gone, though others may hold its end: take what it wrote, and end."""
        num_left = MAX_REMAINING_BYTES
        while self.fd >= 0 and num_left > 0:
            data = self._read_available()
            if not data:
                return self._close_at_eof()
            num_left -= len(data)
            self._on_data(data)
        if self.fd >= 0:
            self._close_at_eof()

    def close(self) -> None:
        """Stop, and free the descriptor; nobody is told. Idempotent."""
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1

    def _on_readable(self) -> None:
        data = self._read_available()
        if data:
            self._on_data(data)
        elif data is not None:
            self._close_at_eof()

    def _read_available(self) -> bytes | None:
        """What is there; nothing at the end, None when there is nothing yet."""
        try:
            return os.read(self.fd, MAX_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ECONNRESET):  # a terminal's way to end, and a socket's
                raise
            return b""

    def _close_at_eof(self) -> None:
        self.close()
        self._on_eof()


class PipeWriter:
    """Takes data at once and writes it as the other side reads. `moved` is called when some of it has gone, `broken`
    once when the other side does not read any more; what still waits is then forgotten."""

    def __init__(
        self,
        loop: EventLoop,
        fd: int,
        *,
        on_written: Callable[[], None] = lambda: None,
        on_broken_pipe: Callable[[], None] = lambda: None,
    ) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._on_written = on_written
        self._on_broken_pipe = on_broken_pipe
        self._pending: collections.deque[memoryview] = collections.deque()
        self._eof_requested = False
        self.pending_bytes = 0
        """Taken, but not written yet."""

    def write(self, data: bytes) -> None:
        """Take it. Nothing is copied."""
        if self._fd < 0 or not data:
            return
        if not self._pending:
            self._loop.add_reader(self._fd, self._on_writable, write=True)
        self._pending.append(memoryview(data))
        self.pending_bytes += len(data)

    def write_eof(self) -> None:
        """Close when all is written."""
        self._eof_requested = True
        if not self._pending:
            self.close()

    def close(self) -> None:
        """Forget what waits, and free the descriptor. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._pending.clear()
            self.pending_bytes = 0

    def _on_writable(self) -> None:
        try:
            num_written = os.writev(self._fd, list(itertools.islice(self._pending, MAX_BUFFERS_PER_WRITE)))
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ECONNRESET):  # the ways of pipes, terminals, sockets
                raise
            self.close()
            self._on_broken_pipe()
            return
        self._discard_written(num_written)
        if not self._pending:
            self._loop.remove_reader(self._fd)
            if self._eof_requested:
                self.close()
        self._on_written()

    def _discard_written(self, num_bytes: int) -> None:
        self.pending_bytes -= num_bytes
        while num_bytes:
            first = self._pending.popleft()
            if len(first) > num_bytes:
                self._pending.appendleft(first[num_bytes:])
                break
            num_bytes -= len(first)
