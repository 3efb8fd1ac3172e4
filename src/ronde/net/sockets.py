"""Plain sockets: listen, connect, and what each needs before its owner gets it. Used by door.

A *place* is where a socket can connect: a numeric host and port, or the name of an abstract Unix socket.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

from ronde.errors import StartFailed
from ronde.net.addresses import family, format_address, parse_address, resolve
from ronde.types import Deadline

__all__ = [
    "NotYet",
    "Place",
    "connect",
    "describe_peer",
    "find_error",
    "listen_tcp",
    "listen_unix",
    "locate",
    "peer_credentials",
    "peer_uid",
    "tune",
    "unreachable",
]

Place: TypeAlias = "tuple[str, int] | str"

_UNIX = "unix:"
_CREDENTIALS = struct.Struct("3i")


class NotYet(Exception):
    """Nobody answers at a place now; it may be worth trying again."""


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
    place = resolve(host, port)[0]
    sock = socket.socket(family(place[0]), socket.SOCK_STREAM)
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


def locate(address: str) -> list[Place]:
    """The places that `host:port` or `unix:NAME` stands for."""
    if address.startswith(_UNIX):
        return [address]
    return [*resolve(*parse_address(address))]


def connect(places: Sequence[Place], deadline: Deadline) -> socket.socket:
    """A socket connected to the first place that answers. NotYet if one of them may answer later."""
    later: NotYet | None = None
    never: StartFailed | None = None
    for index, place in enumerate(places):
        # A silent place must not use up the time of those after it.
        share = Deadline(deadline.left_s / (len(places) - index))
        try:
            return _connect_one(place, share)
        except NotYet as error:
            later = error
        except StartFailed as error:
            never = error
    raise later or never or StartFailed("it has no address")


def _connect_one(place: Place, deadline: Deadline) -> socket.socket:
    is_unix = isinstance(place, str)
    sock = socket.socket(socket.AF_UNIX if isinstance(place, str) else family(place[0]), socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline.left_s, 1e-6))
        sock.connect("\0" + place.removeprefix(_UNIX) if isinstance(place, str) else place)
        if is_unix:
            if peer_uid(sock) != os.getuid():
                raise StartFailed("its owner is another user; run all ranks of a host as one user")
        elif sock.getsockname() == sock.getpeername():
            # With nobody listening, the kernel may choose the very port we call as our own: we would talk to
            # ourselves, and keep the port from the one we wait for.
            raise NotYet("nobody listens there")
    except OSError as error:
        sock.close()
        raise _translate(error, deadline) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _translate(error: OSError, deadline: Deadline) -> NotYet | StartFailed:
    if isinstance(error, ConnectionRefusedError):
        return NotYet("nobody listens there (connection refused)")
    if isinstance(error, ConnectionError) or error.errno == errno.EAGAIN:
        return NotYet(f"it is too busy to take the connection ({error.strerror})")
    if isinstance(error, TimeoutError):
        return StartFailed(
            f"no answer within {deadline.seconds:.3g} s; is the host up, and does a firewall let the port through?"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return StartFailed(
            f"it is unreachable from host {socket.gethostname()} ({error.strerror}); check the network between them"
        )
    return StartFailed(f"{error.strerror or error}; check the address")


def tune(sock: socket.socket, heartbeat_s: float) -> None:
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


def find_error(descriptor: int) -> int:
    """The errno with which the kernel gave up a connection; 0 if the other end closed it."""
    try:
        line = socket.socket(fileno=descriptor)
    except OSError:  # no socket any more
        return 0
    try:
        return line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    finally:
        line.detach()  # it is its owner's to close


def unreachable(error: int) -> str:
    """What to say of a connection that ended with this errno; nothing if it was closed, as by a process that died."""
    closed = (0, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
    return "" if error in closed else f"its host cannot be reached: {os.strerror(error)}"


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, from the kernel."""
    return peer_credentials(sock)[1]


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


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end of a Unix socket, from the kernel."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
