"""An event loop: one thread waits for descriptors, timers and calls from other threads, and runs a callback for each.

Every process of a job is built on it: driver, agent, coordinator, and the control thread of a rank. Whatever is
registered with a loop is touched only by the thread that runs it, and needs no lock. Method names are asyncio's, which
is not used because its import takes longer than the whole start of a rank.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import heapq
import itertools
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ronde.errors import StartFailed

CALL_TIMEOUT_S = 10.0
"""LoopThread.call raises after this long. A loop answers within milliseconds unless the host is overloaded."""
ALIVE_CHECK_S = 0.1
"""How often LoopThread.call checks that the thread still runs."""
MAX_READ_BYTES = 64 * 1024
"""Read at most per turn, so that other callbacks get their turn; a pipe holds no more."""
MAX_REMAINING_BYTES = 1024 * 1024
"""Read at most by read_remaining(). Pipes and terminals hold less."""
MAX_BUFFERS_PER_WRITE = 64

_READ_EVENTS = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
_WRITE_EVENTS = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR

T = TypeVar("T")

THREADS_HINT = "raise the limit of processes (`ulimit -u`), or that of the container (its pids limit)"
"""What to do when a thread cannot be started."""


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; StartFailed if the system refuses."""
    try:
        thread.start()
    except RuntimeError as error:
        raise StartFailed(f"the thread {thread.name} could not be started ({error}); {THREADS_HINT}") from None


def check_threads_can_start(num_threads: int, what: str) -> None:
    """StartFailed if the system refuses so many threads. For a library that ends the process in that case."""
    may_end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(num_threads):
            thread = threading.Thread(target=may_end.wait, name=what, daemon=True)
            start_thread(thread)
            started.append(thread)
    finally:
        may_end.set()
        for thread in started:
            thread.join()


class Timer:
    """A call at a time in the future. Returned by EventLoop.call_later."""

    __slots__ = ("_callback", "due_s")

    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s = due_s
        """When, in seconds of time.monotonic()."""
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Prevent the call. Idempotent; has no effect after the call."""
        self._callback = None

    @property
    def pending(self) -> bool:
        return self._callback is not None

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


@dataclass(eq=False, slots=True)
class _Watch:
    """The callbacks of one descriptor. A descriptor that is closed and opened again gets a new watch."""

    fd: int
    reader: Callable[[], None] | None = None
    writer: Callable[[], None] | None = None
    has_input: Callable[[], bool] | None = None


class EventLoop:
    """Runs callbacks when a descriptor is ready, when a time has come, and when another thread asks for it.

    An exception in a callback ends run_until(), which raises it. All methods but call_soon_threadsafe() are for the
    thread that runs the loop, or for any thread while none does.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        self._files: dict[int, _Watch] = {}
        """Files and /dev/null, which epoll does not take: always ready."""
        self._queues: dict[int, _Watch] = {}
        """Descriptors with a has_input function."""
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_ids = itertools.count()
        self._ready: collections.deque[Callable[[], None]] = collections.deque()
        self._closed = False
        self._wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Without it, a late call of another thread could write into another file that got the same number. Reentrant:
        # a signal handler may ask for a call while its own thread does.
        self._wakeup_lock = threading.RLock()
        self.add_reader(self._wakeup_fd, self._clear_wakeup)

    def add_reader(self, fd: int, callback: Callable[[], None], *, has_input: Callable[[], bool] | None = None) -> None:
        """Call back whenever the descriptor can be read or is at its end, until remove_reader().

        `has_input` is for descriptors that become readable only once per change, as that of a ZeroMQ socket: it is
        asked before every wait and when the descriptor is readable, and the callback is called when it returns True.
        """
        watch = self._watches.get(fd) or _Watch(fd)
        assert watch.reader is None, f"descriptor {fd} has a reader"
        watch.reader, watch.has_input = callback, has_input
        if has_input is not None:
            self._queues[fd] = watch
        self._update(watch)

    def remove_reader(self, fd: int) -> None:
        """Call this before the descriptor is closed. Has no effect without a reader, and after close()."""
        watch = self._watches.get(fd)
        if watch is not None and watch.reader is not None:
            watch.reader = watch.has_input = None
            self._queues.pop(fd, None)
            self._update(watch)

    def add_writer(self, fd: int, callback: Callable[[], None]) -> None:
        """Call back whenever the descriptor can be written or its other end is closed, until remove_writer()."""
        watch = self._watches.get(fd) or _Watch(fd)
        assert watch.writer is None, f"descriptor {fd} has a writer"
        watch.writer = callback
        self._update(watch)

    def remove_writer(self, fd: int) -> None:
        """Call this before the descriptor is closed. Has no effect without a writer, and after close()."""
        watch = self._watches.get(fd)
        if watch is not None and watch.writer is not None:
            watch.writer = None
            self._update(watch)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, (timer.due_s, next(self._timer_ids), timer))
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Call back soon, and when called by the callback of a descriptor, after those of all others that are ready."""
        self._ready.append(callback)

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        """call_soon() for any thread and for signal handlers. After close() the callback is dropped."""
        self._ready.append(callback)
        with self._wakeup_lock:
            if not self._closed:
                os.eventfd_write(self._wakeup_fd, 1)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Run until the condition is true. It is checked between turns."""
        while not condition():
            self._run_once()

    def close(self) -> None:
        """Drop all callbacks. The descriptors stay open. Idempotent."""
        with self._wakeup_lock:
            if not self._closed:
                self._closed = True
                os.close(self._wakeup_fd)
                self._epoll.close()
        for registered in (self._watches, self._files, self._queues, self._timers, self._ready):
            registered.clear()

    def _clear_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup_fd)

    def _update(self, watch: _Watch) -> None:
        fd = watch.fd
        events = (select.EPOLLIN if watch.reader else 0) | (select.EPOLLOUT if watch.writer else 0)
        known = self._watches.get(fd) is watch
        if not events:
            del self._watches[fd]
            if self._files.pop(fd, None) is None:
                self._epoll.unregister(fd)
        elif known and fd not in self._files:
            self._epoll.modify(fd, events)
        elif not known:
            try:
                self._epoll.register(fd, events)
            except PermissionError:
                self._files[fd] = watch
            self._watches[fd] = watch

    def _run_once(self) -> None:
        queues = [watch for watch in self._queues.values() if watch.has_input is not None and watch.has_input()]
        while self._timers and not self._timers[0][2].pending:
            heapq.heappop(self._timers)
        wait_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        if queues or self._ready or self._files:
            wait_s = 0.0
        # The watches are looked up before any callback: one may close a descriptor, another get its number.
        found = [(self._watches[fd], events) for fd, events in self._epoll.poll(wait_s) if fd in self._watches]
        self._run_ready()  # first: what another thread asked for may be older than what is read now
        for watch, events in found:
            if watch.has_input is not None:
                if watch not in queues and watch.has_input() and watch.reader is not None:
                    watch.reader()
                continue
            if watch.reader is not None and events & _READ_EVENTS:
                watch.reader()
            if watch.writer is not None and events & _WRITE_EVENTS:
                watch.writer()
        for watch in queues:
            if watch.reader is not None:
                watch.reader()
        for watch in list(self._files.values()):
            for callback in (watch.reader, watch.writer):
                if callback is not None:
                    callback()
        self._run_ready()
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2].fire()

    def _run_ready(self) -> None:
        for _ in range(len(self._ready)):  # not those that these add: descriptors have their turn first
            if self._ready:  # a callback may close the loop
                self._ready.popleft()()


class LoopThread:
    """An EventLoop and the thread that runs it."""

    def __init__(self, name: str) -> None:
        self.loop = EventLoop()
        self._name = name
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self, run: Callable[[], None] | None = None) -> None:
        """Run the loop in a new thread. `run` replaces what the thread does: it runs the loop itself."""
        thread = threading.Thread(target=run or self._run, name=self._name, daemon=True)
        start_thread(thread)
        self._thread = thread

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> T:
        """Return what the function returns in the loop's thread; raises what it raises. While no thread runs the loop,
        or in that thread itself, the function is called directly."""
        if not self.is_running() or threading.current_thread() is self._thread:
            return function()
        from concurrent.futures import Future, wait  # not at the top: a rank has no use for it

        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # raised in the thread that asked
                future.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        waited_s = 0.0
        while not wait([future], ALIVE_CHECK_S).done:
            waited_s += ALIVE_CHECK_S
            if not self.is_running():
                return future.result() if future.done() else function()
            if waited_s >= CALL_TIMEOUT_S:
                raise TimeoutError(f"{self._name} did not answer within {CALL_TIMEOUT_S:g} s; its host is very busy")
        return future.result()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; returns whether it has ended."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self.is_running()

    def stop(self) -> None:
        """End the thread started by start() without `run`, wait for it and close the loop. Idempotent."""
        self._stopping = True
        if self._thread is not None and self._thread.is_alive():
            self.loop.call_soon_threadsafe(lambda: None)
            if threading.current_thread() is self._thread:
                return
            self._thread.join()
        self.loop.close()

    def _run(self) -> None:
        try:
            self.loop.run_until(lambda: self._stopping)
        finally:
            self.loop.close()


class PipeReader:
    """Reads a descriptor, which it owns, and hands on the data in order until its end."""

    def __init__(self, loop: EventLoop, fd: int, on_data: Callable[[bytes], None], on_eof: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self.fd = fd
        """-1 once it is closed."""
        self._on_data = on_data
        self._on_eof = on_eof
        self._paused = False
        loop.add_reader(fd, self._on_readable)

    def pause_reading(self) -> None:
        """Leave data where it is, so that its writer has to wait. Idempotent."""
        if not self._paused and self.fd >= 0:
            self._paused = True
            self._loop.remove_reader(self.fd)

    def resume_reading(self) -> None:
        """Idempotent."""
        if self._paused and self.fd >= 0:
            self._paused = False
            self._loop.add_reader(self.fd, self._on_readable)

    def read_available(self) -> None:
        """Hand on what is there now, unless reading is paused."""
        for _ in range(MAX_REMAINING_BYTES // MAX_READ_BYTES):
            data = None if self._paused or self.fd < 0 else self._read_available()
            if not data:
                break
            self._on_data(data)

    def read_remaining(self) -> None:
        """Read what is there, then close. Called when the writer has ended, though other processes may hold its end."""
        num_left = MAX_REMAINING_BYTES
        while self.fd >= 0 and num_left > 0:
            data = self._read_available()
            if not data:
                break
            num_left -= len(data)
            self._on_data(data)
        if self.fd >= 0:
            self._close_at_eof()

    def close(self) -> None:
        """Close the descriptor without calling on_eof. Idempotent."""
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
        """Return what is there; b"" at the end, None when there is nothing yet."""
        try:
            return os.read(self.fd, MAX_READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            # The end of a terminal, and of a socket; and a socket for which the kernel has no memory.
            if error.errno not in (errno.EIO, errno.ECONNRESET, errno.ENOMEM, errno.ENOBUFS):
                raise
            return b""

    def _close_at_eof(self) -> None:
        self.close()
        self._on_eof()


class PipeWriter:
    """Takes data at once and writes it to a descriptor, which it owns, as fast as the other side reads.

    `on_written` is called when some of it was written; `on_broken_pipe` once, when the other side is closed: data that
    was not written is dropped then.
    """

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
        """Nothing is copied."""
        if self._fd < 0 or not data:
            return
        if not self._pending:
            self._loop.add_writer(self._fd, self._on_writable)
        self._pending.append(memoryview(data))
        self.pending_bytes += len(data)

    def write_eof(self) -> None:
        """Close when all is written."""
        self._eof_requested = True
        if not self._pending:
            self.close()

    def close(self) -> None:
        """Drop what is not written, and close the descriptor. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
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
            # Of pipes, terminals and sockets; and a socket for which the kernel has no memory.
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ECONNRESET, errno.ENOMEM, errno.ENOBUFS):
                raise
            self.close()
            self._on_broken_pipe()
            return
        self.pending_bytes -= num_written
        while num_written:
            first = self._pending.popleft()
            if len(first) > num_written:
                self._pending.appendleft(first[num_written:])
            num_written -= min(num_written, len(first))
        if not self._pending:
            self._loop.remove_writer(self._fd)
            if self._eof_requested:
                self.close()
        self._on_written()
