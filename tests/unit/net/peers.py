"""Callers of a listener, honest and raw, for its tests."""

from __future__ import annotations

import socket

from ronde.net.connect import connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline

LOCAL = "127.0.0.1"


def address(listener: Listener, link: str) -> str:
    return f"unix:{listener.unix_name}" if link == "unix" else f"{LOCAL}:{listener.tcp_port}"


def raw(listener: Listener, link: str) -> socket.socket:
    """A connection that has not said anything yet."""
    if link == "tcp":
        return socket.create_connection((LOCAL, listener.tcp_port), timeout=20)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect("\0" + listener.unix_name)
    return sock


def meet(listener: Listener, link: str, key: JobKey, rank: int = 0, purpose: str = "data") -> None:
    """An honest caller comes, and both ends talk."""
    here, _ = connect_authenticated(address(listener, link), key, ConnectionRequest(purpose, rank), Deadline(20))
    with here, listener.accept(purpose, rank, Deadline(20)) as there:
        here.sendall(b"ping")
        assert there.recv(4) == b"ping"


def ends(sock: socket.socket) -> bool:
    """Wait until the other side has hung up; False if it says anything."""
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True
