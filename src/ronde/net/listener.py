"""Authenticated plain sockets between the processes of a job: lifelines, data sockets, Unix sockets for descriptors.

One side has a Door and takes callers from it; the other side knocks. Used by comm (coordinator, native backend) and
launch. What happens between the two before a socket is handed out is in handshake.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ronde.errors import StartFailed
from ronde.net.addresses import address_family, format_address, resolve_host
from ronde.net.connect import (
    HEARTBEAT_S,
    configure_socket,
    peer_credentials,
    peer_uid,
)
from ronde.net.descriptors import WakeupFd
from ronde.net.handshake import (
    INTERNAL_ERROR,
    NONCE_BYTES,
    ConnectionRequest,
    HandshakeFailed,
    ServerHandshake,
)
from ronde.net.keys import JobKey
from ronde.types import Deadline

__all__ = ["ConnectionRequest", "Listener", "describe_peer", "listen_tcp", "listen_unix"]

HANDSHAKE_S = 5.0
"""A caller that has not proved itself by then is refused."""
MAX_PENDING_HANDSHAKES = 64
"""Most unfinished handshakes at a time. Further callers wait in the kernel's queue."""
EVICT_AFTER_S = 1.0
"""In a crowd, a caller that took longer than this makes room for others. Honest ones take milliseconds."""
BACKLOG = 1024

logger = logging.getLogger("ronde.net")


class Listener:
    """Lets callers in that prove the job's key, at an abstract Unix socket, at a TCP port, or both.

    `greet` makes the greeting for a caller, `arrived` may take its socket at once by returning True; both run in the
    door's thread and must not wait. Everybody else is fetched with take().
    """

    def __init__(
        self,
        key: JobKey,
        *,
        unix: bool,
        tcp_host: str | None,
        port: int = 0,
        make_reply: Callable[[ConnectionRequest], bytes] | None = None,
        on_connection: Callable[[ConnectionRequest, socket.socket], bool] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.unix_name = ""
        """Name of the abstract socket, for `unix:NAME`; empty without."""
        self.tcp_port = 0
        """The port it listens on; 0 without."""
        self.num_refused = 0
        """Callers that did not prove themselves."""
        self._key = key
        self._make_reply = make_reply or (lambda caller: b"")
        self._on_connection = on_connection or (lambda caller, sock: False)
        self._heartbeat_s = heartbeat_s
        self._condition = threading.Condition()
        self._accepted: dict[tuple[str, int], deque[socket.socket]] = {}
        self._failed_ranks: dict[int, Exception] = {}
        self._closed_reason = ""
        self._log_refusal = _RateLimitedLog()
        self._pending: dict[socket.socket, _PendingHandshake] = {}
        self._accept_pause: Deadline | None = None
        self._listening_sockets: list[socket.socket] = []
        self._listen(unix, tcp_host, port)
        self._selector = selectors.DefaultSelector()
        self._wakeup = WakeupFd()
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._start_accepting()
        # Owned by the door. Touches the listeners, the unfinished handshakes, and under the lock what take() waits for.
        self._thread = threading.Thread(target=self._serve, name="ronde-door", daemon=True)
        self._thread.start()

    def accept(self, purpose: str, rank: int, deadline: Deadline) -> socket.socket:
        """The socket of that caller, as soon as it has come; several of one kind come in the order they arrived."""
        with self._condition:
            while True:
                if rank in self._failed_ranks:
                    raise self._failed_ranks[rank].with_traceback(None)
                waiting = self._accepted.get((purpose, rank))
                if waiting:
                    return waiting.popleft()
                if self._closed_reason:
                    raise StartFailed(f"rank {rank} can no longer connect for {purpose!r}: {self._closed_reason}")
                if deadline.expired:
                    raise StartFailed(
                        f"rank {rank} did not connect for {purpose!r} within {deadline.timeout_s:g} s; "
                        f"look at the output of rank {rank}, and whether its host can reach this one"
                    )
                self._condition.wait(deadline.remaining_s)

    def fail_rank(self, rank: int, error: Exception) -> None:
        """Nobody comes from this rank any more: every take() for it raises the error. The first error stays."""
        with self._condition:
            self._failed_ranks.setdefault(rank, error)
            for purpose, who in [place for place in self._accepted if place[1] == rank]:
                _close_all(self._accepted.pop((purpose, who)))
            self._condition.notify_all()

    def close(self) -> None:
        """End all waits and close what nobody took. Idempotent."""
        self._end_waits("the door was closed")
        self._wakeup.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Listener:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _listen(self, unix: bool, tcp_host: str | None, port: int) -> None:
        try:
            if unix:
                self._listening_sockets.append(listen_unix(BACKLOG))
                self.unix_name = self._listening_sockets[-1].getsockname()[1:].decode()
            if tcp_host is not None:
                self._listening_sockets.append(listen_tcp(tcp_host, port, BACKLOG))
                self.tcp_port = int(self._listening_sockets[-1].getsockname()[1])
        except BaseException:
            self._close_listening_sockets()
            raise

    def _end_waits(self, reason: str) -> None:
        with self._condition:
            self._closed_reason = self._closed_reason or reason
            for waiting in self._accepted.values():
                _close_all(waiting)
            self._accepted.clear()
            self._condition.notify_all()

    # --- the door's thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closed_reason:
                for ready, _ in self._selector.select(self._select_timeout_s()):
                    ready.data()
                self._check_timeouts()
        except Exception as error:  # the thread's edge: whoever waits must learn of it
            logger.exception("the door broke")
            self._end_waits(f"the door broke: {error!r}")
        finally:
            self._close_listening_sockets()
            _close_all(self._pending)
            self._pending.clear()
            self._selector.close()
            self._wakeup.close()

    def _select_timeout_s(self) -> float | None:
        waits = [visit.deadline.remaining_s for visit in self._oldest_pending()]
        if self._accept_pause is not None:
            waits.append(self._accept_pause.remaining_s)
        return min(waits, default=None)

    def _oldest_pending(self) -> list[_PendingHandshake]:
        # Visits are kept in the order they began, and all may take equally long.
        return [next(iter(self._pending.values()))] if self._pending else []

    def _check_timeouts(self) -> None:
        for visit in self._oldest_pending():
            if visit.deadline.expired:
                self._refuse(visit, f"did not prove itself within {HANDSHAKE_S:g} s")
        if self._accept_pause is not None and self._accept_pause.expired:
            self._accept_pause = None
            self._start_accepting()

    def _accept_socket(self, listener: socket.socket) -> None:
        for visit in self._oldest_pending():
            if len(self._pending) < MAX_PENDING_HANDSHAKES:
                break
            if visit.deadline.timeout_s - visit.deadline.remaining_s < EVICT_AFTER_S:
                return self._pause_accepting(0.01)
            self._refuse(visit, "was silent while others waited")
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError as error:  # out of descriptors or memory: trying at once would only burn the processor
            logger.warning("cannot accept a connection (%s); raise the limit of open files (ulimit -n)", error.strerror)
            return self._pause_accepting(0.5)
        visit = self._pending[sock] = _PendingHandshake(
            sock=sock,
            peer=describe_peer(sock),
            handshake=ServerHandshake(self._key, secrets.token_bytes(NONCE_BYTES), self._call_make_reply),
            deadline=Deadline(HANDSHAKE_S),
        )
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, functools.partial(self._advance, visit))
        if sock.family == socket.AF_UNIX and peer_uid(sock) != os.getuid():
            return self._refuse(visit, "belongs to another user")
        self._advance(visit)  # most callers have spoken by now

    def _advance(self, pending: _PendingHandshake) -> None:
        """Go on with one handshake as far as it goes without waiting."""
        if pending.sock not in self._pending:  # refused since the selector spoke
            return
        try:
            if not pending.unsent:
                data = pending.sock.recv(pending.handshake.num_wanted)
                if not data:
                    return self._refuse(pending, "hung up in the middle of the handshake")
                pending.unsent = pending.handshake.feed(data)
            if pending.unsent:
                pending.unsent = pending.unsent[pending.sock.send(pending.unsent) :]
        except BlockingIOError:
            pass
        except HandshakeFailed as stranger:
            return self._refuse(pending, str(stranger), reply=stranger.reply)
        except OSError as error:
            return self._refuse(pending, f"lost its connection ({error.strerror})")
        if pending.handshake.request is not None and not pending.unsent:
            return self._hand_over(pending, pending.handshake.request)
        events = selectors.EVENT_WRITE if pending.unsent else selectors.EVENT_READ
        if self._selector.get_key(pending.sock).events != events:
            self._selector.modify(pending.sock, events, functools.partial(self._advance, pending))

    def _call_make_reply(self, request: ConnectionRequest) -> bytes:
        try:
            return self._make_reply(request)
        except Exception:  # the edge to the owner's greet(): its mistake costs this caller, not the door
            logger.exception("no greeting for %s of rank %d", request.purpose, request.rank)
            raise HandshakeFailed("could not be greeted", reply=INTERNAL_ERROR) from None

    def _hand_over(self, pending: _PendingHandshake, request: ConnectionRequest) -> None:
        self._remove_pending(pending)
        sock = pending.sock
        try:
            configure_socket(sock, self._heartbeat_s)
            if self._on_connection(request, sock):
                return
        except Exception:  # the edge to the owner's arrived(): its mistake costs this caller, not the door
            logger.exception("%s of rank %d could not be received", request.purpose, request.rank)
            sock.close()
            return
        with self._condition:
            if self._closed_reason or request.rank in self._failed_ranks:
                sock.close()
                return
            self._accepted.setdefault((request.purpose, request.rank), deque()).append(sock)
            self._condition.notify_all()

    def _refuse(self, pending: _PendingHandshake, reason: str, *, reply: bytes = b"") -> None:
        self.num_refused += 1
        self._log_refusal(f"refused {pending.peer}: it {reason}")
        self._remove_pending(pending)
        try:
            if reply:
                pending.sock.send(reply)  # a few bytes into an empty buffer: no wait, and no harm if it fails
        except OSError:
            pass
        pending.sock.close()

    def _remove_pending(self, pending: _PendingHandshake) -> None:
        self._selector.unregister(pending.sock)
        del self._pending[pending.sock]

    def _start_accepting(self) -> None:
        for listener in self._listening_sockets:
            self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept_socket, listener))

    def _pause_accepting(self, pause_s: float) -> None:
        if self._accept_pause is None:
            for listener in self._listening_sockets:
                self._selector.unregister(listener)
        self._accept_pause = Deadline(pause_s)

    def _close_listening_sockets(self) -> None:
        _close_all(self._listening_sockets)
        self._listening_sockets.clear()


@dataclass(eq=False, slots=True)
class _PendingHandshake:
    """One unfinished handshake."""

    sock: socket.socket
    peer: str
    handshake: ServerHandshake
    deadline: Deadline
    unsent: bytes = b""


class _RateLimitedLog:
    """Logs the first refusal at once and then at most one line in a while, with the number of those between."""

    INTERVAL_S = 10.0

    def __init__(self) -> None:
        self._quiet_until: Deadline | None = None
        self._num_suppressed = 0

    def __call__(self, text: str) -> None:
        """Say it, or count it."""
        if self._quiet_until is not None and not self._quiet_until.expired:
            self._num_suppressed += 1
            return
        more = f" ({self._num_suppressed} more since the last such line)" if self._num_suppressed else ""
        logger.warning("%s%s", text, more)
        self._quiet_until, self._num_suppressed = Deadline(self.INTERVAL_S), 0


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def listen_unix(backlog: int) -> socket.socket:
    """A listening abstract Unix socket with a random name: gone with the process, invisible in the file system."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0ronde-{secrets.token_hex(16)}")
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def listen_tcp(host: str, port: int, backlog: int) -> socket.socket:
    """A listening TCP socket on exactly that address; port 0 lets the system choose."""
    place = resolve_host(host, port)[0]
    sock = socket.socket(address_family(place[0]), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StartFailed(
            f"cannot listen on {format_address(host, port)} ({error.strerror}); "
            "choose another port, or an address that this host has"
        ) from None
    except BaseException:
        sock.close()
        raise
    return sock


def describe_peer(sock: socket.socket) -> str:
    """The other end, for a log."""
    if sock.family == socket.AF_UNIX:
        pid, uid, _ = peer_credentials(sock)
        return f"a caller on the Unix socket (process {pid} of user {uid})"
    try:
        host, port, *_ = sock.getpeername()
    except OSError:  # it has gone again
        return "a caller that is gone"
    return f"a caller from {format_address(host, port)}"
