"""A Unix socket at a path, where processes of the same user ask questions: one line in, one line out. Used by
launch/endpoint on both sides.

The kernel says who is at the other end: another user is refused, by both sides. Every read and write has a deadline.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from ronde.net.connect import peer_credentials, peer_uid
from ronde.net.descriptors import WakeupFd
from ronde.types import Deadline

__all__ = ["MAX_SOCKET_PATH_BYTES", "UnixLineServer", "listening_pid", "query_monitor"]

MAX_SOCKET_PATH_BYTES = 107
"""Bytes of a Unix socket's path."""
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 256 * 1024 * 1024
IDLE_TIMEOUT_S = 10.0
"""How long a caller may take for its next question, or to read an answer."""
MAX_CLIENTS = 8
"""Callers at a time; more are sent away."""
BACKLOG = 128
"""Callers that have not been let in yet. With a short queue a burst of them would see an error of the kernel's."""
CLOSE_TIMEOUT_S = 1.0
"""For those who are being answered; nobody waits for them any longer."""

logger = logging.getLogger("ronde.net")


class UnixLineServer:
    """Listens until it is closed. `answer` is called in a thread of each caller; lines have no newline."""

    def __init__(self, path: Path, make_reply: Callable[[bytes], bytes]) -> None:
        """The path must be free, in a directory that only its user can enter."""
        self.path = path
        self.num_refused = 0
        """Callers that were sent away."""
        self._make_reply = make_reply
        self._lock = threading.Lock()
        self._clients: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._listening_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening_socket.bind(str(path))
            path.chmod(0o600)
            self._listening_socket.listen(BACKLOG)
            self._listening_socket.setblocking(False)
            self._wakeup = WakeupFd()
        except BaseException:
            self._listening_socket.close()
            raise
        # Owned by the desk. Accepts callers and gives each a thread, which touches its own socket only.
        self._thread = threading.Thread(target=self._serve, name="ronde-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody, and free the path. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            callers = dict(self._clients)
        self.path.unlink(missing_ok=True)
        self._wakeup.notify()
        self._thread.join()
        for sock in callers.values():
            _shut_down(sock)
        deadline = Deadline(CLOSE_TIMEOUT_S)
        for thread in callers:
            thread.join(deadline.remaining_s)

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listening_socket, selectors.EVENT_READ)
                selector.register(self._wakeup.fileno(), selectors.EVENT_READ)
                while not self._closed:
                    selector.select()
                    self._accept()
        finally:
            self._listening_socket.close()
            self._wakeup.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listening_socket.accept()
        except OSError:  # nobody, or gone again, or out of descriptors: who wants an answer calls again
            return
        with self._lock:
            if self._closed or peer_uid(sock) != os.getuid() or len(self._clients) >= MAX_CLIENTS:
                self.num_refused += 1
                sock.close()
                return
            thread = threading.Thread(target=self._serve_client, args=(sock,), name="ronde-monitor-client", daemon=True)
            self._clients[thread] = sock
            thread.start()

    def _serve_client(self, sock: socket.socket) -> None:
        try:
            left = b""
            while not self._closed:
                question, left = _read_line(sock, left, MAX_REQUEST_BYTES, Deadline(IDLE_TIMEOUT_S))
                if question is None:
                    return
                _send(sock, self._make_reply(question) + b"\n", Deadline(IDLE_TIMEOUT_S))
        except (OSError, ValueError):  # it has gone, was silent for too long, or asks too much
            return
        except Exception:  # the edge to the owner's answer(): its mistake costs this caller, not the desk
            logger.exception("a question could not be answered")
        finally:
            with self._lock:
                self._clients.pop(threading.current_thread(), None)
            sock.close()


def query_monitor(path: Path, request: bytes, deadline: Deadline) -> bytes:
    """The answer of the desk at this path. OSError when nobody is there, or does not answer in time."""
    with _connect(path, deadline) as sock:
        _send(sock, request + b"\n", deadline)
        answer, _ = _read_line(sock, b"", MAX_REPLY_BYTES, deadline)
    if answer is None:
        raise ConnectionError(f"{path}: it hung up without an answer")
    return answer


def listening_pid(path: Path, deadline: Deadline) -> int | None:
    """The process that listens at this path; None when nobody does any more, 0 when it is too busy to tell."""
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


def _read_line(sock: socket.socket, left: bytes, limit: int, deadline: Deadline) -> tuple[bytes | None, bytes]:
    """The next line, and what came behind it; None when the other side has hung up."""
    pieces, num_bytes = [left], len(left)
    while b"\n" not in pieces[-1]:
        if num_bytes > limit:
            raise ValueError(f"a line of more than {limit} bytes")
        sock.settimeout(max(deadline.remaining_s, 1e-6))
        data = sock.recv(65536)
        if not data:
            return None, b""
        pieces.append(data)
        num_bytes += len(data)
    line, _, rest = b"".join(pieces).partition(b"\n")
    return line, rest


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.remaining_s, 1e-6))
    sock.sendall(data)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # ends a read that its thread may be in
    except OSError:
        pass
