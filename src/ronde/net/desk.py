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

from ronde.net.descriptors import Bell
from ronde.net.sockets import peer_credentials, peer_uid
from ronde.types import Deadline

__all__ = ["PATH_LIMIT", "Desk", "ask", "who_listens"]

PATH_LIMIT = 107
"""Bytes of a Unix socket's path."""
QUESTION_LIMIT = 4096
ANSWER_LIMIT = 256 * 1024 * 1024
IDLE_S = 10.0
"""How long a caller may take for its next question, or to read an answer."""
MOST_CALLERS = 8
"""Callers at a time; more are sent away."""
BACKLOG = 128
"""Callers that have not been let in yet. With a short queue a burst of them would see an error of the kernel's."""
CLOSING_S = 1.0
"""For those who are being answered; nobody waits for them any longer."""

logger = logging.getLogger("ronde.net")


class Desk:
    """Listens until it is closed. `answer` is called in a thread of each caller; lines have no newline."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        """The path must be free, in a directory that only its user can enter."""
        self.path = path
        self.refused = 0
        """Callers that were sent away."""
        self._answer = answer
        self._lock = threading.Lock()
        self._callers: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            path.chmod(0o600)
            self._listener.listen(BACKLOG)
            self._listener.setblocking(False)
            self._bell = Bell()
        except BaseException:
            self._listener.close()
            raise
        # Owned by the desk. Accepts callers and gives each a thread, which touches its own socket only.
        self._thread = threading.Thread(target=self._serve, name="ronde-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody, and free the path. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            callers = dict(self._callers)
        self.path.unlink(missing_ok=True)
        self._bell.ring()
        self._thread.join()
        for sock in callers.values():
            _hang_up(sock)
        deadline = Deadline(CLOSING_S)
        for thread in callers:
            thread.join(deadline.left_s)

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._bell.fileno(), selectors.EVENT_READ)
                while not self._closed:
                    selector.select()
                    self._accept()
        finally:
            self._listener.close()
            self._bell.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # nobody, or gone again, or out of descriptors: who wants an answer calls again
            return
        with self._lock:
            if self._closed or peer_uid(sock) != os.getuid() or len(self._callers) >= MOST_CALLERS:
                self.refused += 1
                sock.close()
                return
            thread = threading.Thread(target=self._converse, args=(sock,), name="ronde-desk-caller", daemon=True)
            self._callers[thread] = sock
            thread.start()

    def _converse(self, sock: socket.socket) -> None:
        try:
            left = b""
            while not self._closed:
                question, left = _read_line(sock, left, QUESTION_LIMIT, Deadline(IDLE_S))
                if question is None:
                    return
                _send(sock, self._answer(question) + b"\n", Deadline(IDLE_S))
        except (OSError, ValueError):  # it has gone, was silent for too long, or asks too much
            return
        except Exception:  # the edge to the owner's answer(): its mistake costs this caller, not the desk
            logger.exception("a question could not be answered")
        finally:
            with self._lock:
                self._callers.pop(threading.current_thread(), None)
            sock.close()


def ask(path: Path, question: bytes, deadline: Deadline) -> bytes:
    """The answer of the desk at this path. OSError when nobody is there, or does not answer in time."""
    with _connect(path, deadline) as sock:
        _send(sock, question + b"\n", deadline)
        answer, _ = _read_line(sock, b"", ANSWER_LIMIT, deadline)
    if answer is None:
        raise ConnectionError(f"{path}: it hung up without an answer")
    return answer


def who_listens(path: Path, deadline: Deadline) -> int | None:
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
        sock.settimeout(max(deadline.left_s, 1e-6))
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
        sock.settimeout(max(deadline.left_s, 1e-6))
        data = sock.recv(65536)
        if not data:
            return None, b""
        pieces.append(data)
        num_bytes += len(data)
    line, _, rest = b"".join(pieces).partition(b"\n")
    return line, rest


def _send(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.left_s, 1e-6))
    sock.sendall(data)


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)  # ends a read that its thread may be in
    except OSError:
        pass
