"""The connecting side of authenticated sockets, and what both sides need to know about a socket.

An address is `host:port`, or `unix:NAME` for an abstract Unix socket.
"""

from __future__ import annotations

import errno
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
from ronde.net.handshake import NONCE_BYTES, ClientHandshake, ConnectionRequest, HandshakeFailed
from ronde.net.keys import JobKey
from ronde.types import Deadline

HEARTBEAT_S = 10.0

Connection: TypeAlias = socket.socket
"""A connected socket, for modules that only pass it on."""

SocketAddress: TypeAlias = "tuple[str, int] | str"
"""A numeric host and port, or `unix:NAME`."""

_UNIX_PREFIX = "unix:"
_CREDENTIALS = struct.Struct("3i")
_CLOSED_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class ConnectFailed(StartFailed):
    """A connection could not be made; `reason` is the message without who wanted it and where."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


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
    if isinstance(error, ConnectionError) or error.errno == errno.EAGAIN:
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

    A cut link is noticed within heartbeat_s (at least 4 s: the kernel counts whole seconds) by a side that has nothing
    to send. TCP_USER_TIMEOUT would also check a sending side, but it ends healthy connections: it does not tell a lost
    peer from one that is busy and does not read.
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
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


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
    pause_s = 0.005
    try:
        addresses = resolve_address(address)
        while True:
            try:
                return _connect_once(addresses, key, request, deadline, heartbeat_s)
            except NotListening as error:
                problem = error
            before_retry()
            time.sleep(min(pause_s, deadline.remaining_s))
            pause_s = min(2 * pause_s, 0.2)
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
