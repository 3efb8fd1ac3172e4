"""A Unix socket in the file system on which processes of the same user ask questions: one line in, one line out.

The kernel says which user is at the other end: both sides refuse another one. Used by the driver's monitor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ronde.net.connect import peer_credentials, peer_uid
from ronde.net.event_loop import LoopThread, PipeReader, PipeWriter, Timer
from ronde.types import Deadline

MAX_SOCKET_PATH_BYTES = 107
"""The longest path that the kernel takes for a Unix socket."""
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 256 * 1024 * 1024
READ_BYTES = 65536
IDLE_TIMEOUT_S = 10.0
"""How long a client may take for its next request, or to read a reply."""
OUT_OF_DESCRIPTORS_PAUSE_S = 0.5
MAX_CLIENTS = 8
"""Further clients are refused."""
BACKLOG = 128
"""Connections that are not accepted yet. With a short queue a burst of them would get an error of the kernel."""

OnRequest: TypeAlias = "Callable[[bytes, Callable[[bytes], None]], None]"

logger = logging.getLogger("ronde.net")


class UnixLineServer:
    """Answers requests until it is closed. The path must be free, in a directory that only its user can enter.

    `on_request` gets a line and a function that sends the reply, which any thread may call later; lines have no newline
    here. It runs in the loop of the given thread, or of one that the server starts, and must not wait.
    """

    def __init__(self, path: Path, on_request: OnRequest, *, thread: LoopThread | None = None) -> None:
        self.path = path
        self.num_refused = 0
        """Clients that were refused."""
        self.on_request = on_request
        self.clients: set[_Client] = set()
        self._closed = False
        self._listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening_socket.bind(str(path))
            path.chmod(0o600)
            self._listening_socket.listen(BACKLOG)
            self._listening_socket.setblocking(False)
        except BaseException:
            self._listening_socket.close()
            raise
        self._thread = thread or LoopThread("ronde-monitor")
        self._owns_thread = thread is None
        self.loop = self._thread.loop
        self._accept_pause: Timer | None = None
        self._thread.call(self._start_accepting)
        if self._owns_thread:
            self._thread.start()

    def close(self) -> None:
        """Close all connections and remove the path. Idempotent. For any thread."""
        self._thread.call(self._close_sockets)
        if self._owns_thread:
            self._thread.stop()

    def _close_sockets(self) -> None:
        if not self._closed:
            self._closed = True
            self.path.unlink(missing_ok=True)
            if self._accept_pause is not None:
                self._accept_pause.cancel()
            self.loop.remove_reader(self._listening_socket.fileno())
            self._listening_socket.close()
            for client in list(self.clients):
                client.close()

    def _start_accepting(self) -> None:
        self.loop.add_reader(self._listening_socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listening_socket.accept()
        except (BlockingIOError, ConnectionError):  # the client has closed it again
            return
        except OSError:  # out of descriptors or memory: a retry at once would only use up the processor
            self.loop.remove_reader(self._listening_socket.fileno())
            self._accept_pause = self.loop.call_later(OUT_OF_DESCRIPTORS_PAUSE_S, self._start_accepting)
            return
        if peer_uid(sock) != os.getuid() or len(self.clients) >= MAX_CLIENTS:
            self.num_refused += 1
            sock.close()
            return
        with sock, contextlib.suppress(OSError):  # no descriptor for the other direction: it is closed
            writing_fd = os.dup(sock.fileno())
            reading_fd = sock.detach()
            try:
                self.clients.add(_Client(self, reading_fd, writing_fd))
            except OSError:  # the kernel has no memory to watch them
                os.close(reading_fd)
                os.close(writing_fd)


class _Client:
    """A connection, which has one request at a time: nothing is read while one is being answered."""

    def __init__(self, server: UnixLineServer, reading_fd: int, writing_fd: int) -> None:
        self._server = server
        self._unread = b""
        self._reader = PipeReader(server.loop, reading_fd, self._on_data, self.close)
        self._writer = PipeWriter(server.loop, writing_fd, on_written=self._on_written, on_broken_pipe=self.close)
        self._timer = server.loop.call_later(IDLE_TIMEOUT_S, self.close)

    def close(self) -> None:
        self._timer.cancel()
        self._reader.close()
        self._writer.close()
        self._server.clients.discard(self)

    def _on_data(self, data: bytes) -> None:
        line, newline, rest = (self._unread + data).partition(b"\n")
        if not newline:
            self._unread = line
            return self.close() if len(line) > MAX_REQUEST_BYTES else None
        self._unread = rest
        self._timer.cancel()
        self._reader.pause_reading()
        try:
            self._server.on_request(line, self._reply)
        except Exception:  # a mistake of the server's owner concerns this client only
            logger.exception("a request could not be answered")
            self.close()

    def _reply(self, reply: bytes) -> None:
        self._server.loop.call_soon_threadsafe(functools.partial(self._start_writing, reply))

    def _start_writing(self, reply: bytes) -> None:
        if self in self._server.clients:
            self._timer = self._server.loop.call_later(IDLE_TIMEOUT_S, self.close)
            self._writer.write(reply + b"\n")

    def _on_written(self) -> None:
        if not self._writer.pending_bytes and self in self._server.clients:
            self._timer.cancel()
            self._timer = self._server.loop.call_later(IDLE_TIMEOUT_S, self.close)
            self._reader.resume_reading()
            self._on_data(b"")


def query_monitor(path: Path, request: bytes, deadline: Deadline) -> bytes:
    """Return the reply of the server at this path. OSError when nobody listens or does not answer in time."""
    with _connect(path, deadline) as sock:
        sock.sendall(request + b"\n")
        pieces: list[bytes] = []
        num_bytes = 0
        while not pieces or b"\n" not in pieces[-1]:
            sock.settimeout(max(deadline.remaining_s, 1e-6))
            data = sock.recv(READ_BYTES)
            if not data:
                raise ConnectionError(f"{sock.getpeername()}: the connection was closed without an answer")
            pieces.append(data)
            num_bytes += len(data)
            if num_bytes > MAX_REPLY_BYTES:
                raise ConnectionError(f"an answer of more than {MAX_REPLY_BYTES} bytes")
        return b"".join(pieces).partition(b"\n")[0]


def listening_pid(path: Path, deadline: Deadline) -> int | None:
    """Return the process that listens at this path; None if nobody does, 0 if it is too busy to answer."""
    try:
        with _connect(path, deadline) as sock:
            return peer_credentials(sock)[0]
    except (ConnectionRefusedError, FileNotFoundError):
        return None
    except (BlockingIOError, TimeoutError):
        return 0


def _connect(path: Path, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining_s, 1e-6))
        sock.connect(str(path))
        if peer_uid(sock) != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
    except BaseException:
        sock.close()
        raise
    return sock
