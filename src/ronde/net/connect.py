"""Plain sockets: listen, connect, and what each needs before its owner gets it. Used by door.

A *place* is where a socket can connect: a numeric host and port, or the name of an abstract Unix socket.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ronde.errors import StartFailed
from ronde.net.addresses import address_family, parse_address, resolve_host
from ronde.net.handshake import NONCE_BYTES, ClientHandshake, ConnectionRequest, HandshakeFailed
from ronde.net.keys import JobKey
from ronde.types import Deadline

__all__ = [
    "ConnectFailed",
    "Connection",
    "HEARTBEAT_S",
    "NotListening",
    "SocketAddress",
    "configure_socket",
    "connect_authenticated",
    "connect_socket",
    "describe_disconnect",
    "peer_credentials",
    "peer_uid",
    "resolve_address",
    "socket_error",
]

HEARTBEAT_S = 10.0

Connection: TypeAlias = socket.socket
"""What a door gives out and knock() returns; its own name, for those who only pass it on."""

SocketAddress: TypeAlias = "tuple[str, int] | str"

_UNIX_PREFIX = "unix:"
_CREDENTIALS = struct.Struct("3i")


class ConnectFailed(StartFailed):
    """A connection could not be made; `reason` is the message without who wanted it and where."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class NotListening(Exception):
    """Nobody answers at a place now; it may be worth trying again."""


def resolve_address(address: str) -> list[SocketAddress]:
    """The places that `host:port` or `unix:NAME` stands for."""
    if address.startswith(_UNIX_PREFIX):
        return [address]
    return [*resolve_host(*parse_address(address))]


def connect_socket(addresses: Sequence[SocketAddress], deadline: Deadline) -> socket.socket:
    """A socket connected to the first place that answers. NotYet if one of them may answer later."""
    later: NotListening | None = None
    never: StartFailed | None = None
    for index, place in enumerate(addresses):
        # A silent place must not use up the time of those after it.
        share = Deadline(deadline.remaining_s / (len(addresses) - index))
        try:
            return _connect_to(place, share)
        except NotListening as error:
            later = error
        except StartFailed as error:
            never = error
    raise later or never or StartFailed("it has no address")


def _connect_to(address: SocketAddress, deadline: Deadline) -> socket.socket:
    is_unix = isinstance(address, str)
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else address_family(address[0]), socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.remaining_s, 1e-6))
        sock.connect("\0" + address.removeprefix(_UNIX_PREFIX) if isinstance(address, str) else address)
        if is_unix:
            if peer_uid(sock) != os.getuid():
                raise StartFailed("its owner is another user; run all ranks of a host as one user")
        elif sock.getsockname() == sock.getpeername():
            # With nobody listening, the kernel may choose the very port we call as our own: we would talk to
            # ourselves, and keep the port from the one we wait for.
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


def configure_socket(sock: socket.socket, heartbeat_s: float) -> None:
    """Make a socket ready for its owner: blocking, without delay, and watched while nothing travels on it.

    A cut link is noticed within heartbeat_s (at least 4 s: the kernel counts whole seconds) by a side that has nothing
    to send. TCP_USER_TIMEOUT would also watch a sending side, but it kills healthy connections: it does not tell a
    lost peer from one that is busy and does not read.
    """
    sock.settimeout(None)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(heartbeat_s / 4))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def socket_error(descriptor: int) -> int:
    """The errno with which the kernel gave up a connection; 0 if the other end closed it."""
    try:
        line = socket.socket(fileno=descriptor)
    except OSError:  # no socket any more
        return 0
    try:
        return line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    finally:
        line.detach()  # it is its owner's to close


def describe_disconnect(error: int) -> str:
    """What to say of a connection that ended with this errno; nothing if it was closed, as by a process that died."""
    closed = (0, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
    return "" if error in closed else f"its host cannot be reached: {os.strerror(error)}"


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, from the kernel."""
    return peer_credentials(sock)[1]


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a Unix socket, from the kernel."""
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
    """Connect to the door at `host:port` or `unix:NAME`: the socket, and the door's greeting.

    A door that is not open yet is tried again until the deadline, or until before_retry() raises because it will never
    be. Everything else that goes wrong raises StartFailed at once: a retry would not help an unknown name, a cut
    network or a wrong key.
    """
    what = f"rank {request.rank} could not connect to {address} for {request.purpose!r}"
    pause_s = 0.005
    try:
        places = resolve_address(address)
        while True:
            try:
                return _connect_once(places, key, request, deadline, heartbeat_s)
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
    side = ClientHandshake(key, secrets.token_bytes(NONCE_BYTES), request)
    sock = connect_socket(addresses, deadline)
    try:
        _send_all(sock, side.hello, deadline)
        while side.reply is None:
            sock.settimeout(max(deadline.remaining_s, 1e-6))
            data = sock.recv(side.num_wanted)
            if not data:
                raise NotListening("it hung up in the middle of the handshake")
            answer = side.feed(data)
            if answer:  # sending even nothing fails when the door's owner has hung up right after the welcome
                _send_all(sock, answer, deadline)
        configure_socket(sock, heartbeat_s)
        return sock, side.reply
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError):
            raise StartFailed(
                f"somebody listens there but did not answer within {deadline.timeout_s:g} s; "
                "check that it is ronde, and whether that process is stopped"
            ) from None
        if isinstance(error, ConnectionError):
            raise NotListening(f"it hung up in the middle of the handshake ({error.strerror})") from None
        raise


def _send_all(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    sock.settimeout(max(deadline.remaining_s, 1e-6))
    sock.sendall(data)
