"""The connecting side of authenticated sockets, and what both sides need to know about a socket.

An address is `host:port`, or `unix:NAME` for an abstract Unix socket.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ronde.errors import StartFailed
from ronde.net.addresses import address_family, parse_address, resolve_host
from ronde.net.event_loop import EventLoop, Timer
from ronde.net.handshake import NONCE_BYTES, ClientHandshake, ConnectionRequest, HandshakeFailed
from ronde.net.keys import JobKey
from ronde.net.open_files import is_open_files_error, make_open_files_error
from ronde.types import Deadline

HEARTBEAT_S = 10.0
FIRST_RETRY_PAUSE_S = 0.005
MAX_RETRY_PAUSE_S = 0.2
"""A connection is tried again after a pause, twice as long each time."""

Connection: TypeAlias = socket.socket
"""A connected socket, for modules that only pass it on."""

SocketAddress: TypeAlias = "tuple[str, int] | str"
"""A numeric host and port, or `unix:NAME`."""

_UNIX_PREFIX = "unix:"
_CREDENTIALS = struct.Struct("3i")
_CLOSED_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class ConnectFailed(StartFailed):
    """A connection could not be made; `reason` is the message without who wanted it and where."""

    def __init__(self, message: str, reason: str = "", *, is_own_fault: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_own_fault = is_own_fault
        """Whether this process could not make a socket, whatever the other side does."""


class NotListening(Exception):
    """Nobody listens at an address now; a later attempt may succeed."""


def resolve_address(address: str) -> list[SocketAddress]:
    """Return all addresses that `host:port` or `unix:NAME` stands for."""
    if address.startswith(_UNIX_PREFIX):
        return [address]
    return [*resolve_host(*parse_address(address))]


def connect_socket(addresses: Sequence[SocketAddress], deadline: Deadline) -> socket.socket:
    """Return a socket connected to the first address that answers. Raises NotListening if one may answer later."""
    temporary: NotListening | None = None
    permanent: StartFailed | None = None
    for index, address in enumerate(addresses):
        # An address that does not answer must not use up the time of those after it.
        share = Deadline(deadline.remaining_s / (len(addresses) - index))
        try:
            return _connect_to(address, share)
        except NotListening as error:
            temporary = error
        except StartFailed as error:
            permanent = error
    raise temporary or permanent or StartFailed("it has no address")


def _connect_to(address: SocketAddress, deadline: Deadline) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else address_family(address[0])
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining_s, 1e-6))
        sock.connect("\0" + address.removeprefix(_UNIX_PREFIX) if isinstance(address, str) else address)
        if family == socket.AF_UNIX:
            if peer_uid(sock) != os.getuid():
                raise StartFailed("its owner is another user; run all ranks of a host as one user")
        elif sock.getsockname() == sock.getpeername():
            # Without a listener the kernel may choose the port that we connect to as our own: we would be connected to
            # ourselves, and occupy the port of the process that we wait for.
            raise NotListening("nobody listens there")
    except OSError as error:
        sock.close()
        raise _connect_error(error, deadline) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _connect_error(error: OSError, deadline: Deadline) -> NotListening | StartFailed:
    if isinstance(error, ConnectionRefusedError):
        return NotListening("nobody listens there (connection refused)")
    if isinstance(error, ConnectionError) or error.errno in (errno.EAGAIN, errno.ENOTCONN):
        return NotListening(f"it is too busy to take the connection ({error.strerror})")
    if isinstance(error, TimeoutError):
        return StartFailed(
            f"no answer within {deadline.timeout_s:.3g} s; is the host up, and does a firewall let the port through?"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return StartFailed(
            f"it is unreachable from host {socket.gethostname()} ({error.strerror}); check the network between them"
        )
    return StartFailed(f"{error.strerror or error}; check the address")


def make_record_pair() -> tuple[Connection, Connection]:
    """Return two sockets of this process, connected with each other: each send is one record, nothing blocks, and
    forked children do not keep them."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setblocking(False)
        close_in_children(sock)
    return pair


_not_for_children: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Let forked children of this process close their copy of the socket right after the fork. If they kept it, the
    other side would not notice the death of this process, and nobody else could listen at its port."""
    _not_for_children.add(sock)


def _close_in_this_child() -> None:
    for sock in list(_not_for_children):
        sock.close()  # without shutdown(2), so it tells the other side nothing


os.register_at_fork(after_in_child=_close_in_this_child)


def configure_socket(sock: socket.socket, heartbeat_s: float) -> None:
    """Make a socket blocking, without Nagle's delay, and with TCP keepalive; forked children do not keep it.

    A cut link is noticed within heartbeat_s by a side that has nothing to send, but not before two probes were lost,
    which takes 3 s, as the kernel counts whole seconds. TCP_USER_TIMEOUT would also check a sending side, but it ends
    healthy connections: it does not tell a lost peer from one that is busy and does not read.
    """
    sock.settimeout(None)
    close_in_children(sock)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(heartbeat_s / 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3 if heartbeat_s >= 4 * probe_s else 2)


def socket_error(descriptor: int) -> int:
    """Return the errno with which the kernel ended a connection; 0 if the other side closed it."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:  # not a socket any more
        return 0
    try:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    finally:
        sock.detach()  # the descriptor stays open


def send_and_hang_up(descriptor: int, data: bytes) -> None:
    """Send a few bytes without waiting, and then the end of the connection. It may be closed already."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:  # not a socket any more
        return
    try:
        sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        sock.shutdown(socket.SHUT_WR)
    except OSError:  # the other side knows
        pass
    finally:
        sock.detach()  # the descriptor stays open


def is_closed(sock: socket.socket) -> bool:
    """Return whether the other side has closed the connection, or its process has ended."""
    poll = select.poll()
    try:
        poll.register(sock.fileno(), _CLOSED_EVENTS)
    except ValueError:  # closed on this side
        return True
    return bool(poll.poll(0))


def describe_disconnect(error: int) -> str:
    """Describe a connection that ended with this errno; empty if it was closed, as when its process died."""
    closed = (0, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
    return "" if error in closed else f"its host cannot be reached: {os.strerror(error)}"


def peer_uid(sock: socket.socket) -> int:
    """Return the user at the other end of a Unix socket, as the kernel knows it."""
    return peer_credentials(sock)[1]


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group at the other end of a Unix socket, as the kernel knows them."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def connect_authenticated(
    address: str,
    key: JobKey,
    request: ConnectionRequest,
    deadline: Deadline,
    *,
    heartbeat_s: float = HEARTBEAT_S,
    before_retry: Callable[[], None] = lambda: None,
) -> tuple[socket.socket, bytes]:
    """Connect to the listener at this address and return the socket and the listener's reply.

    While nobody listens there it is tried again until the deadline, or until before_retry() raises. Everything else
    that goes wrong raises StartFailed at once: a retry does not help an unknown name, a cut network or a wrong key.
    """
    what = f"rank {request.rank} could not connect to {address} for {request.purpose!r}"
    pause_s = FIRST_RETRY_PAUSE_S
    try:
        addresses = resolve_address(address)
        while True:
            try:
                return _connect_once(addresses, key, request, deadline, heartbeat_s)
            except NotListening as error:
                problem = error
            before_retry()
            time.sleep(min(pause_s, deadline.remaining_s))
            pause_s = min(2 * pause_s, MAX_RETRY_PAUSE_S)
            if deadline.expired:
                raise StartFailed(
                    f"{problem}, for {deadline.timeout_s:g} s; is the other side running, and is this its address?"
                )
    except (StartFailed, HandshakeFailed) as error:
        raise ConnectFailed(f"{what}: {error}", str(error)) from None


def _connect_once(
    addresses: Sequence[SocketAddress], key: JobKey, request: ConnectionRequest, deadline: Deadline, heartbeat_s: float
) -> tuple[socket.socket, bytes]:
    handshake = ClientHandshake(key, secrets.token_bytes(NONCE_BYTES), request)
    sock = connect_socket(addresses, deadline)
    try:
        answer = handshake.hello
        while handshake.reply is None:
            sock.settimeout(max(deadline.remaining_s, 1e-6))
            if answer:  # even an empty send fails if the other side has closed the connection right after its reply
                sock.sendall(answer)
            data = sock.recv(handshake.num_wanted)
            if not data:
                raise NotListening("it closed the connection in the middle of the handshake")
            answer = handshake.feed(data)
        configure_socket(sock, heartbeat_s)
        return sock, handshake.reply
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise StartFailed(
                f"something listens there but did not answer within {deadline.timeout_s:g} s; "
                "check that it is ronde, and whether that process is stopped"
            ) from None
        if isinstance(error, ConnectionError):
            raise NotListening(f"it closed the connection in the middle of the handshake ({error.strerror})") from None
        raise


class PendingConnection:
    """As connect_authenticated, but made by an event loop, which does not wait for it and can make many at a time.

    `on_done` is called once in the loop, with the socket or with the error, unless cancel() comes first. While nobody
    listens there it is tried again until the deadline. A host whose kernel gives no answer for `answer_s` cannot be
    reached, which is an error; whether the process answers is another matter. For the loop's thread only.
    """

    def __init__(
        self,
        loop: EventLoop,
        address: str,
        key: JobKey,
        request: ConnectionRequest,
        deadline: Deadline,
        on_done: Callable[[socket.socket | ConnectFailed], None],
        *,
        heartbeat_s: float = HEARTBEAT_S,
        answer_s: float = math.inf,
    ) -> None:
        self._loop = loop
        self._address = address
        self._key = key
        self._request = request
        self._deadline = deadline
        self._on_done: Callable[[socket.socket | ConnectFailed], None] | None = on_done
        self._heartbeat_s = heartbeat_s
        self._sock: socket.socket | None = None
        self._handshake: ClientHandshake | None = None
        """Set when the socket is connected."""
        self._unsent = b""
        self._pause_s = FIRST_RETRY_PAUSE_S
        self._problem = "it does not answer; is the host up, and does a firewall let the port through?"
        """What is wrong if the time is over now."""
        self._answer_s = answer_s
        self._no_answer: Timer | None = None
        self._retry: Timer | None = None
        self._timeout = loop.call_later(deadline.remaining_s, self._on_timeout)
        loop.call_soon(self._start)

    @property
    def problem(self) -> str:
        """Why it is not connected yet. For any thread."""
        return f"{self._describe()}: {self._problem}"

    def cancel(self) -> None:
        """Give up; on_done is not called. Has no effect when it was."""
        self._on_done = None
        self._close()
        self._timeout.cancel()

    def _start(self) -> None:
        self._retry = None
        if self._on_done is None:
            return
        try:
            address = resolve_address(self._address)[0]
            family = socket.AF_UNIX if isinstance(address, str) else address_family(address[0])
            self._sock = socket.socket(family, socket.SOCK_STREAM)
            close_in_children(self._sock)
            self._sock.setblocking(False)
            target = "\0" + address.removeprefix(_UNIX_PREFIX) if isinstance(address, str) else address
            error = self._sock.connect_ex(target)
        except StartFailed as failure:
            return self._finish(failure)
        except OSError as failure:
            if is_open_files_error(failure.errno):
                return self._finish(make_open_files_error("no socket could be made"), is_own_fault=True)
            return self._finish(StartFailed(str(failure)))
        if error not in (0, errno.EINPROGRESS):
            return self._on_connect_error(OSError(error, os.strerror(error)))
        self._loop.add_writer(self._sock.fileno(), self._on_connected)
        if self._answer_s < math.inf:
            self._no_answer = self._loop.call_later(self._answer_s, self._on_no_answer)

    def _on_no_answer(self) -> None:
        self._no_answer = None
        assert self._sock is not None
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLOUT)
        if poll.poll(0):  # it has come, and this loop is late
            return
        self._finish(StartFailed(f"no answer within {self._answer_s:g} s; is the network between the hosts cut?"))

    def _on_connected(self) -> None:
        assert self._sock is not None
        self._stop_waiting()
        self._loop.remove_writer(self._sock.fileno())
        error = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return self._on_connect_error(OSError(error, os.strerror(error)))
        if self._sock.family == socket.AF_UNIX:
            if peer_uid(self._sock) != os.getuid():
                return self._finish(StartFailed("its owner is another user; run all ranks of a host as one user"))
        else:
            try:
                if self._sock.getsockname() == self._sock.getpeername():
                    return self._try_again("nobody listens there")
            except OSError as failure:  # the other side has closed it since
                return self._on_connect_error(failure)
        self._problem = "something listens there but does not answer; check whether that process is stopped"
        self._handshake = ClientHandshake(self._key, secrets.token_bytes(NONCE_BYTES), self._request)
        self._unsent = self._handshake.hello
        self._loop.add_reader(self._sock.fileno(), self._advance)
        self._advance()

    def _advance(self) -> None:
        """Go on with the handshake as far as it goes without waiting. Its messages fit into an empty socket buffer."""
        sock, handshake = self._sock, self._handshake
        assert sock is not None and handshake is not None
        try:
            while True:
                if self._unsent:
                    self._unsent = self._unsent[sock.send(self._unsent) :]
                data = sock.recv(handshake.num_wanted)
                if not data:
                    return self._try_again("it closed the connection in the middle of the handshake")
                self._unsent = handshake.feed(data)
                if handshake.reply is not None:
                    break
        except BlockingIOError:
            return
        except HandshakeFailed as failure:
            return self._finish(StartFailed(str(failure)))
        except OSError as error:
            return self._try_again(f"it closed the connection in the middle of the handshake ({error.strerror})")
        self._loop.remove_reader(sock.fileno())
        self._sock = None
        configure_socket(sock, self._heartbeat_s)
        self._finish(sock)

    def _on_connect_error(self, error: OSError) -> None:
        failure = _connect_error(error, self._deadline)
        if isinstance(failure, NotListening):
            self._try_again(str(failure))
        else:
            self._finish(failure)

    def _try_again(self, problem: str) -> None:
        self._problem = problem
        self._close()
        self._retry = self._loop.call_later(self._pause_s, self._start)
        self._pause_s = min(2 * self._pause_s, MAX_RETRY_PAUSE_S)

    def _on_timeout(self) -> None:
        self._finish(StartFailed(f"{self._problem}, for {self._deadline.timeout_s:g} s"))

    def _close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._sock is not None:
            self._loop.remove_writer(self._sock.fileno())
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        self._sock = self._handshake = None
        self._unsent = b""
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._no_answer is not None:
            self._no_answer.cancel()
            self._no_answer = None

    def _describe(self) -> str:
        return f"rank {self._request.rank} could not connect to {self._address} for {self._request.purpose!r}"

    def _finish(self, outcome: socket.socket | StartFailed, *, is_own_fault: bool = False) -> None:
        on_done = self._on_done
        self.cancel()
        if on_done is not None:
            if isinstance(outcome, StartFailed):
                outcome = ConnectFailed(f"{self._describe()}: {outcome}", str(outcome), is_own_fault=is_own_fault)
            on_done(outcome)
