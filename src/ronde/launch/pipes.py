"""Descriptors that are read and written without waiting, on a Loop. Used by the agent for what ranks print and are
handed, and by launch/remote for the frames. Each owns its descriptor."""

from __future__ import annotations

import collections
import errno
import itertools
import os
from collections.abc import Callable

from ronde.launch.loop import Loop

__all__ = ["Reader", "Writer"]

READ_BYTES = 64 * 1024
"""At most so much per turn, so that everybody has his; a pipe holds no more."""
DRAIN_BYTES = 1024 * 1024
"""More than pipes and terminals hold: what a dead process has written is among it."""
NUM_BUFFERS = 64
"""So many pieces go out with one call."""


class Reader:
    """Hands on what comes from a descriptor, in order, until its end."""

    def __init__(self, loop: Loop, fd: int, got: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self.fd = fd
        """-1 once it is closed."""
        self._got = got
        self._ended = ended
        self._paused = False
        loop.watch(fd, self._read)

    def pause(self, on: bool) -> None:
        """Leave what comes where it is, so that its writer waits; or go on."""
        if on != self._paused and self.fd >= 0:
            self._paused = on
            if on:
                self._loop.unwatch(self.fd)
            else:
                self._loop.watch(self.fd, self._read)

    def drain(self) -> None:
        """Its writer is gone, though others may hold its end: take what it wrote, and end."""
        num_left = DRAIN_BYTES
        while self.fd >= 0 and num_left > 0:
            data = self._take()
            if not data:
                return self._end()
            num_left -= len(data)
            self._got(data)
        if self.fd >= 0:
            self._end()

    def close(self) -> None:
        """Stop, and free the descriptor; nobody is told. Idempotent."""
        if self.fd >= 0:
            self._loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1

    def _read(self) -> None:
        data = self._take()
        if data:
            self._got(data)
        elif data is not None:
            self._end()

    def _take(self) -> bytes | None:
        """What is there; nothing at the end, None when there is nothing yet."""
        try:
            return os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ECONNRESET):  # a terminal's way to end, and a socket's
                raise
            return b""

    def _end(self) -> None:
        self.close()
        self._ended()


class Writer:
    """Takes data at once and writes it as the other side reads. `moved` is called when some of it has gone, `broken`
    once when the other side does not read any more; what still waits is then forgotten."""

    def __init__(
        self,
        loop: Loop,
        fd: int,
        *,
        moved: Callable[[], None] = lambda: None,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        os.set_blocking(fd, False)
        self._loop = loop
        self._fd = fd
        self._moved = moved
        self._broken = broken
        self._waiting: collections.deque[memoryview] = collections.deque()
        self._finishing = False
        self.num_waiting_bytes = 0
        """Taken, but not written yet."""

    def write(self, data: bytes) -> None:
        """Take it. Nothing is copied."""
        if self._fd < 0 or not data:
            return
        if not self._waiting:
            self._loop.watch(self._fd, self._write, write=True)
        self._waiting.append(memoryview(data))
        self.num_waiting_bytes += len(data)

    def finish(self) -> None:
        """Close when all is written."""
        self._finishing = True
        if not self._waiting:
            self.close()

    def close(self) -> None:
        """Forget what waits, and free the descriptor. Idempotent."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._waiting.clear()
            self.num_waiting_bytes = 0

    def _write(self) -> None:
        try:
            num_written = os.writev(self._fd, list(itertools.islice(self._waiting, NUM_BUFFERS)))
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ECONNRESET):  # the ways of pipes, terminals, sockets
                raise
            self.close()
            self._broken()
            return
        self._forget(num_written)
        if not self._waiting:
            self._loop.unwatch(self._fd)
            if self._finishing:
                self.close()
        self._moved()

    def _forget(self, num_bytes: int) -> None:
        self.num_waiting_bytes -= num_bytes
        while num_bytes:
            first = self._waiting.popleft()
            if len(first) > num_bytes:
                self._waiting.appendleft(first[num_bytes:])
                break
            num_bytes -= len(first)
