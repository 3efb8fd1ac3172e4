"""The listening side of authenticated sockets between the processes of a job.

A peer connects (net/connect), both sides prove the job's key (net/handshake), and only then does the socket reach its
user: the coordinator (liveness connections) or the native backend (data sockets, shared memory).
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ronde.errors import StartFailed
from ronde.net.addresses import address_family, format_address, listen_error, resolve_host
from ronde.net.connect import HEARTBEAT_S, close_in_children, configure_socket, peer_credentials, peer_uid
from ronde.net.event_loop import EventLoop, LoopThread, Timer
from ronde.net.handshake import (
    INTERNAL_ERROR,
    NONCE_BYTES,
    OTHER_ROUND,
    ConnectionRequest,
    HandshakeFailed,
    ServerHandshake,
)
from ronde.net.keys import JobKey
from ronde.net.open_files import is_open_files_error, make_open_files_error
from ronde.types import Deadline, Topology

__all__ = ["ConnectionRequest", "Listener"]

HANDSHAKE_S = 5.0
"""A peer that has not proved the key by then is refused."""
EVICT_AFTER_S = 1.0
"""With MAX_PENDING_HANDSHAKES, a handshake older than this is refused to make room. Usual ones take milliseconds."""
MAX_PENDING_HANDSHAKES = 64
"""Further connections wait in the kernel's queue."""
FULL_PAUSE_S = 0.01
OUT_OF_DESCRIPTORS_PAUSE_S = 0.5
BACKLOG = 1024
REFUSAL_LOG_INTERVAL_S = 10.0

logger = logging.getLogger("ronde.net")


class Listener:
    """Accepts connections of peers that prove the job's key, at an abstract Unix socket, a TCP port, or both.

    Handshakes run in the given loop, which never waits for a peer; without a loop, in a thread of the listener's own.
    `make_reply` returns the reply to a peer; `on_connection` may take a socket by returning True. Both are called by
    the loop and must not wait. All other sockets are returned by accept().
    """

    def __init__(
        self,
        key: JobKey,
        *,
        unix: bool,
        tcp_host: str | None,
        port: int = 0,
        loop: EventLoop | None = None,
        make_reply: Callable[[ConnectionRequest], bytes] | None = None,
        on_connection: Callable[[ConnectionRequest, socket.socket], bool] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.unix_name = ""
        """Name of the abstract socket, for the address `unix:NAME`; empty without one."""
        self.tcp_port = 0
        self.num_refused = 0
        """Peers that did not prove the key."""
        self._key = key
        self._make_reply = make_reply or (lambda request: b"")
        self._on_connection = on_connection or (lambda request, sock: False)
        self._heartbeat_s = heartbeat_s
        self._condition = threading.Condition()  # guards the next six, which accept() waits for
        self._topology: Topology | None = None
        self._early: list[tuple[ConnectionRequest, socket.socket]] = []
        """Connections for a round that came before start_round()."""
        self._accepted: dict[tuple[str, int], deque[tuple[ConnectionRequest, socket.socket]]] = {}
        self._served: dict[str, Callable[[ConnectionRequest, socket.socket], None]] = {}
        self._failed_ranks: dict[int, Exception] = {}
        self._closed_reason = ""
        self.on_shortage: Callable[[StartFailed], None] = lambda problem: None
        """Called by the loop when no connection can be accepted, because this process has too many open files."""
        self._shortage: StartFailed | None = None
        """Why no connection can be accepted now: this process has too many open files."""
        self._log_paused_until: Deadline | None = None
        self._num_not_logged = 0
        self._pending: dict[socket.socket, _PendingHandshake] = {}  # the oldest first
        self._timeout: Timer | None = None
        self._accept_pause: Timer | None = None
        self._listening_sockets: list[socket.socket] = []
        self._listen(unix, tcp_host, port)
        self._thread: LoopThread | None = None
        if loop is None:
            self._thread = LoopThread("ronde-listener")
            loop = self._thread.loop
        self._loop = loop
        self._start_accepting()
        if self._thread is not None:
            self._thread.start()

    def start_round(self, topology: Topology) -> None:
        """From now on this listener is that of a member of this round: only the processes that are its members can
        connect, and only for this round. Others are refused, also those that have connected before.
        To be called before serve()."""
        with self._condition:
            self._topology = topology
            early, self._early = self._early, []
        for request, sock in early:
            if self._is_expected(request):
                self._keep(request, sock)
            else:
                sock.close()

    def accept(self, purpose: str, rank: int, deadline: Deadline) -> socket.socket:
        """Return the next socket of this rank for this purpose. For any thread but the loop's."""
        with self._condition:
            while True:
                if rank in self._failed_ranks:
                    raise self._failed_ranks[rank].with_traceback(None)
                accepted = self._accepted.get((purpose, rank))
                if accepted:
                    return accepted.popleft()[1]
                if self._shortage is not None:
                    raise self._shortage.with_traceback(None)
                if self._closed_reason:
                    raise StartFailed(f"rank {rank} can no longer connect for {purpose!r}: {self._closed_reason}")
                if deadline.expired:
                    raise StartFailed(
                        f"rank {rank} did not connect for {purpose!r} within {deadline.timeout_s:g} s; "
                        f"look at the output of rank {rank}, and whether its host can reach this one"
                    )
                self._condition.wait(deadline.remaining_s)

    def serve(self, purpose: str, on_connection: Callable[[ConnectionRequest, socket.socket], None]) -> None:
        """Hand every socket for this purpose to a function, and none to accept(). The loop calls it, so it must not
        wait. For any thread."""
        with self._condition:
            self._served[purpose] = on_connection
            for key in [key for key in self._accepted if key[0] == purpose]:
                for request, sock in self._accepted.pop(key):
                    self._loop.call_soon_threadsafe(functools.partial(self._hand_to, on_connection, request, sock))

    def fail_rank(self, rank: int, error: Exception) -> None:
        """Make every accept() for this rank raise the error; the first error stays. For any thread."""
        with self._condition:
            self._failed_ranks.setdefault(rank, error)
            for purpose, _ in [key for key in self._accepted if key[1] == rank]:
                _close_all(sock for _, sock in self._accepted.pop((purpose, rank)))
            self._condition.notify_all()

    def close(self) -> None:
        """End all accept() calls and close every socket nobody took. Idempotent. A listener with a given loop is closed
        by the loop's thread, or after it has ended."""
        self._end_waits("the listener was closed")
        if self._thread is None:
            self._close_sockets()
        else:
            self._thread.call(self._close_sockets)
            self._thread.stop()

    def _listen(self, unix: bool, tcp_host: str | None, port: int) -> None:
        try:
            if unix:  # with a random name, in no file system: it ends with the process
                self._add_listening_socket(socket.AF_UNIX, f"\0ronde-{secrets.token_hex(16)}")
                self.unix_name = self._listening_sockets[-1].getsockname()[1:].decode()
            if tcp_host is not None:
                address = resolve_host(tcp_host, port)[0]
                try:
                    self._add_listening_socket(address_family(address[0]), address)
                except OSError as error:
                    if is_open_files_error(error.errno):
                        raise
                    raise listen_error(tcp_host, port, error.strerror) from None
                self.tcp_port = int(self._listening_sockets[-1].getsockname()[1])
        except BaseException:
            _close_all(self._listening_sockets)
            raise

    def _add_listening_socket(self, family: socket.AddressFamily, address: str | tuple[str, int]) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        self._listening_sockets.append(sock)
        close_in_children(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)

    def _end_waits(self, reason: str) -> None:
        with self._condition:
            self._closed_reason = self._closed_reason or reason
            for accepted in self._accepted.values():
                _close_all(sock for _, sock in accepted)
            self._accepted.clear()
            _close_all(sock for _, sock in self._early)
            self._early.clear()
            self._condition.notify_all()

    def _set_shortage(self, problem: StartFailed | None) -> None:
        with self._condition:
            self._shortage = problem
            self._condition.notify_all()
        if problem is not None:
            self.on_shortage(problem)

    # --- in the loop -----------------------------------------------------------------------------------------------

    def _guarded(self, step: Callable[..., None], *args: object) -> None:
        """A mistake in here ends this listener, not the loop, which others use as well."""
        try:
            step(*args)
        except Exception as error:
            logger.exception("the listener failed")
            self._end_waits(f"the listener failed: {error!r}")
            self._close_sockets()

    def _close_sockets(self) -> None:
        for timer in (self._timeout, self._accept_pause):
            if timer is not None:
                timer.cancel()
        for sock in self._listening_sockets:
            self._loop.remove_reader(sock.fileno())
        for pending in list(self._pending.values()):
            self._remove_pending(pending)
            pending.sock.close()
        _close_all(self._listening_sockets)
        self._listening_sockets.clear()

    def _start_accepting(self) -> None:
        self._accept_pause = None
        for sock in self._listening_sockets:
            self._loop.add_reader(sock.fileno(), functools.partial(self._guarded, self._accept_socket, sock))

    def _pause_accepting(self, pause_s: float) -> None:
        if self._accept_pause is None:
            for sock in self._listening_sockets:
                self._loop.remove_reader(sock.fileno())
            self._accept_pause = self._loop.call_later(pause_s, self._start_accepting)

    def _accept_socket(self, listening_socket: socket.socket) -> None:
        if len(self._pending) >= MAX_PENDING_HANDSHAKES:
            oldest = next(iter(self._pending.values()))
            if oldest.deadline.timeout_s - oldest.deadline.remaining_s < EVICT_AFTER_S:
                return self._pause_accepting(FULL_PAUSE_S)
            self._refuse(oldest, "was silent while others waited")
        try:
            sock, _ = listening_socket.accept()
        except (BlockingIOError, ConnectionError):  # the peer has closed it again
            return
        except OSError as error:  # out of descriptors or memory: a retry at once would only use up the processor
            logger.warning("cannot accept a connection (%s); raise the limit of open files (ulimit -n)", error.strerror)
            if is_open_files_error(error.errno):
                self._set_shortage(make_open_files_error("no connection can be accepted"))
            return self._pause_accepting(OUT_OF_DESCRIPTORS_PAUSE_S)
        if self._shortage is not None:
            self._set_shortage(None)
        sock.setblocking(False)
        close_in_children(sock)
        handshake = ServerHandshake(self._key, secrets.token_bytes(NONCE_BYTES), self._call_make_reply)
        pending = _PendingHandshake(sock, _describe_peer(sock), handshake, Deadline(HANDSHAKE_S))
        self._pending[sock] = pending
        self._loop.add_reader(sock.fileno(), functools.partial(self._guarded, self._advance, pending))
        if self._timeout is None:
            self._timeout = self._loop.call_later(HANDSHAKE_S, functools.partial(self._guarded, self._check_timeouts))
        if sock.family == socket.AF_UNIX and peer_uid(sock) != os.getuid():
            return self._refuse(pending, "belongs to another user")
        self._advance(pending)  # most peers have sent their first message by now

    def _check_timeouts(self) -> None:
        self._timeout = None
        for pending in list(self._pending.values()):
            if not pending.deadline.expired:
                again = functools.partial(self._guarded, self._check_timeouts)
                self._timeout = self._loop.call_later(pending.deadline.remaining_s, again)
                return
            self._refuse(pending, f"did not prove the job's key within {HANDSHAKE_S:g} s")

    def _advance(self, pending: _PendingHandshake) -> None:
        """Go on with a handshake as far as it goes without waiting."""
        if pending.sock not in self._pending:
            return
        try:
            if not pending.unsent:
                data = pending.sock.recv(pending.handshake.num_wanted)
                if not data:
                    return self._refuse(pending, "closed the connection in the middle of the handshake")
                pending.unsent = pending.handshake.feed(data)
            if pending.unsent:
                pending.unsent = pending.unsent[pending.sock.send(pending.unsent) :]
        except BlockingIOError:
            pass
        except HandshakeFailed as failure:
            return self._refuse(pending, str(failure), reply=failure.reply)
        except OSError as error:
            return self._refuse(pending, f"lost its connection ({error.strerror})")
        if pending.handshake.request is not None and not pending.unsent:
            return self._hand_over(pending, pending.handshake.request)
        if bool(pending.unsent) != pending.is_writing:
            pending.is_writing = not pending.is_writing
            advance = functools.partial(self._guarded, self._advance, pending)
            if pending.is_writing:
                self._loop.remove_reader(pending.sock.fileno())
                self._loop.add_writer(pending.sock.fileno(), advance)
            else:
                self._loop.remove_writer(pending.sock.fileno())
                self._loop.add_reader(pending.sock.fileno(), advance)

    def _is_expected(self, request: ConnectionRequest) -> bool:
        """Whether the process may connect: as a member of this listener's round, or because nobody knows better yet."""
        topology = self._topology
        if topology is None:
            return True
        is_member = 0 <= request.rank < topology.size and topology.members[request.rank].worker == request.worker
        return is_member and request.round == topology.round

    def _call_make_reply(self, request: ConnectionRequest) -> bytes:
        if not self._is_expected(request):
            raise HandshakeFailed(f"is rank {request.rank} of another round of this job", reply=OTHER_ROUND)
        try:
            return self._make_reply(request)
        except Exception:  # a mistake of the listener's owner concerns this peer only
            logger.exception("no reply for %s of rank %d", request.purpose, request.rank)
            raise HandshakeFailed("could not be answered", reply=INTERNAL_ERROR) from None

    def _hand_over(self, pending: _PendingHandshake, request: ConnectionRequest) -> None:
        self._remove_pending(pending)
        sock = pending.sock
        try:
            configure_socket(sock, self._heartbeat_s)
            if self._on_connection(request, sock):
                return
        except Exception:  # a mistake of the listener's owner concerns this peer only
            logger.exception("%s of rank %d could not be accepted", request.purpose, request.rank)
            sock.close()
            return
        with self._condition:
            if self._topology is None and request.round and not self._closed_reason:
                self._early.append((request, sock))
                return
        self._keep(request, sock)

    def _keep(self, request: ConnectionRequest, sock: socket.socket) -> None:
        """Hand a connection to whoever waits for it, or will."""
        with self._condition:
            if self._closed_reason or request.rank in self._failed_ranks:
                sock.close()
                return
            served = self._served.get(request.purpose)
            if served is None:
                self._accepted.setdefault((request.purpose, request.rank), deque()).append((request, sock))
                self._condition.notify_all()
        if served is not None:
            self._hand_to(served, request, sock)

    def _hand_to(
        self,
        served: Callable[[ConnectionRequest, socket.socket], None],
        request: ConnectionRequest,
        sock: socket.socket,
    ) -> None:
        try:
            served(request, sock)
        except Exception:  # a mistake of the function's owner concerns this peer only
            logger.exception("a connection of rank %d could not be accepted", request.rank)
            sock.close()

    def _refuse(self, pending: _PendingHandshake, reason: str, *, reply: bytes = b"") -> None:
        self.num_refused += 1
        self._log_refusal(f"refused {pending.peer}: it {reason}")
        self._remove_pending(pending)
        try:
            if reply:
                pending.sock.send(reply)  # a few bytes into an empty buffer: this does not block
        except OSError:
            pass
        pending.sock.close()

    def _log_refusal(self, text: str) -> None:
        """Log the first refusal, then at most one line per interval with the number of those that were left out."""
        if self._log_paused_until is not None and not self._log_paused_until.expired:
            self._num_not_logged += 1
            return
        more = f" ({self._num_not_logged} more since the last such line)" if self._num_not_logged else ""
        logger.warning("%s%s", text, more)
        self._log_paused_until, self._num_not_logged = Deadline(REFUSAL_LOG_INTERVAL_S), 0

    def _remove_pending(self, pending: _PendingHandshake) -> None:
        self._loop.remove_reader(pending.sock.fileno())
        self._loop.remove_writer(pending.sock.fileno())
        del self._pending[pending.sock]


@dataclass(eq=False, slots=True)
class _PendingHandshake:
    sock: socket.socket
    peer: str
    handshake: ServerHandshake
    deadline: Deadline
    unsent: bytes = b""
    is_writing: bool = False
    """The loop waits until the socket can be written, and not until it can be read."""


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def _describe_peer(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        pid, uid, _ = peer_credentials(sock)
        return f"a connection to the Unix socket (process {pid} of user {uid})"
    try:
        host, port, *_ = sock.getpeername()
    except OSError:  # it is closed again
        return "a connection that was closed"
    return f"a connection from {format_address(host, port)}"
