"""The encrypted way between workers and the coordinator, over ZeroMQ. Used by comm: the coordinator has a
ControlServer, each worker a ControlClient.

Both ends prove the job's key (CURVE keys derived from it) and everything is encrypted. Each end belongs to one thread;
only wake() may be called from others. Messages of one sender arrive in order, each once, as long as both ends live;
who is alive is not decided here but by the lifelines (door).
"""

from __future__ import annotations

import logging
import math
import re
import select

import zmq
from zmq.utils import z85

from ronde.errors import ProtocolError, StartFailed
from ronde.net.addresses import format_address, parse_address, resolve_host
from ronde.net.descriptors import WakeupFd
from ronde.net.keys import JobKey
from ronde.net.messages import (
    MAX_MESSAGE_BYTES,
    CoordinatorMessage,
    WorkerMessage,
    decode_from_coordinator,
    decode_from_worker,
    encode,
)

__all__ = ["ControlClient", "ControlServer"]

FLUSH_S = 1.0
"""How long close() may take to send what was said last."""
HANDSHAKE_S = 5.0
CURVE_OVERHEAD_BYTES = 64
"""More than what encryption adds to a message."""
HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Who speaks no ZeroMQ, or encrypts for another server, is turned away before the gate is asked."""
ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a client may come in (its RFC 27), inside one context."""

_ROUTING_ID = re.compile(rb"rank-(0|[1-9][0-9]{0,8})")

logger = logging.getLogger("ronde.net")


class _ControlSocket:
    """What both ends share: a socket in a context of its own, and a poll that also wakes for a bell and for files."""

    def __init__(self, kind: int) -> None:
        self.num_refused = 0
        """Clients and messages that were turned away."""
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set(zmq.LINGER, 0)
        # Without limits on the queues: a dropped message would be a hang elsewhere, and a stuck peer gets few.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        self._socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self._wakeup = WakeupFd()
        # One descriptor for all files, so that polling costs the same with one and with a thousand.
        self._epoll = select.epoll()
        self._epoll.register(self._wakeup.fileno(), select.EPOLLIN)
        self._readable: set[int] = set()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._epoll.fileno(), zmq.POLLIN)
        self._warned_about: set[object] = set()

    def watch(self, fd: int) -> None:
        """Let poll() also return when this descriptor is readable (data, end or error), until unwatch()."""
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)

    def unwatch(self, fd: int) -> None:
        """Stop watching; before the descriptor is closed."""
        self._epoll.unregister(fd)

    def readable(self) -> set[int]:
        """The watched descriptors that were readable at the end of the last poll()."""
        return self._readable

    def notify(self) -> None:
        """Let a poll() that runs now, or else the next one, return at once. Safe from every thread."""
        self._wakeup.notify()

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Send what was said last, within flush_s, and free everything. Idempotent."""
        if self._context.closed:
            return
        self._socket.close(linger=int(flush_s * 1000))
        self._context.term()  # waits for the socket, so no longer than that
        self._epoll.close()
        self._wakeup.close()

    def _endpoint(self, host: str, port: int) -> str:
        self._socket.set(zmq.IPV6, int(":" in host))
        return f"tcp://{format_address(host, port)}"

    def _wait(self, timeout_s: float) -> dict[zmq.Socket[bytes] | int, int]:
        """Until something happens; the sockets and descriptors where it did."""
        self._readable = set()
        events: dict[zmq.Socket[bytes] | int, int] = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._epoll.fileno() in events:
            self._readable = {fd for fd, _ in self._epoll.poll(0)}
            if self._wakeup.fileno() in self._readable:
                self._readable.discard(self._wakeup.fileno())
                self._wakeup.clear()
        return events

    def _refuse(self, who: str, reason: str) -> None:
        self.num_refused += 1
        if who not in self._warned_about and len(self._warned_about) < 1000:
            self._warned_about.add(who)
            logger.warning("%s: %s; dropped, and not mentioned again", who, reason)


class ControlServer(_ControlSocket):
    """The coordinator's end. A rank that comes again takes the place of its former self."""

    def __init__(self, host: str, key: JobKey, *, port: int = 0) -> None:
        super().__init__(zmq.ROUTER)
        self._dropped_ranks: set[int] = set()
        self._client_public = z85.decode(key.client_public)
        # Clients are let in by poll() itself: no thread, and nobody comes in while nobody looks.
        self._zap_socket = self._context.socket(zmq.REP)
        self._zap_socket.set(zmq.LINGER, 0)
        self._zap_socket.bind(ZAP_ADDRESS)
        self._poller.register(self._zap_socket, zmq.POLLIN)
        self._zmq_monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._poller.register(self._zmq_monitor, zmq.POLLIN)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, key.server_secret)
        self._socket.set(zmq.ZAP_DOMAIN, b"ronde")
        try:
            self._socket.bind(self._endpoint(*resolve_host(host, port)[0]))
        except zmq.ZMQError as error:
            self.close(0)
            raise StartFailed(
                f"cannot listen on {format_address(host, port)} ({error.strerror}); "
                "choose another port, or an address that this host has"
            ) from None
        except BaseException:
            self.close(0)
            raise
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def poll(self, timeout_s: float) -> list[tuple[int, WorkerMessage]]:
        """Everything that workers have said, oldest first; waits for something to happen, at most timeout_s."""
        events = self._wait(timeout_s)
        if self._zap_socket in events:
            self._answer_zap_requests()
        if self._zmq_monitor in events:
            self._count_handshake_failures()
        found: list[tuple[int, WorkerMessage]] = []
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            rank = _parse_routing_id(parts[0])
            if rank is None:
                self._refuse(f"control client {parts[0]!r}", "is not a rank")
                continue
            try:
                message = decode_from_worker(_only_part(parts[1:]))
            except ProtocolError as error:
                self._refuse(f"control message from rank {rank}", str(error))
                continue
            self._dropped_ranks.discard(rank)
            found.append((rank, message))

    def send(self, rank: int, message: CoordinatorMessage) -> None:
        """Say something to a rank, without waiting. To one that is not there, it is said in vain."""
        if rank not in self._dropped_ranks:
            self._socket.send_multipart((b"rank-%d" % rank, encode(message)), zmq.NOBLOCK)

    def drop_rank(self, rank: int) -> None:
        """A rank is gone: keep nothing for it, until it speaks again."""
        self._dropped_ranks.add(rank)
        self._warned_about.discard(f"control message from rank {rank}")

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Send what was said last, within flush_s, and free everything. Idempotent."""
        if not self._context.closed:
            self._socket.disable_monitor()
        self._zmq_monitor.close()
        self._zap_socket.close()
        super().close(flush_s)

    def _answer_zap_requests(self) -> None:
        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self._zap_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            welcome = mechanism == b"CURVE" and credentials == [self._client_public]
            if not welcome:
                self._refuse(f"control client at {address.decode(errors='replace')}", "does not have the job's key")
            status = (b"200", b"OK") if welcome else (b"400", b"refused")
            self._zap_socket.send_multipart((version, request, *status, b"", b""))

    def _count_handshake_failures(self) -> None:
        try:
            while True:
                self._zmq_monitor.recv_multipart(zmq.NOBLOCK)
                self._refuse("a caller at the control port", "did not get through the handshake")
        except zmq.Again:
            pass


class ControlClient(_ControlSocket):
    """A worker's end."""

    def __init__(self, address: str, key: JobKey, rank: int) -> None:
        host, port = resolve_host(*parse_address(address))[0]
        super().__init__(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, b"rank-%d" % rank)
        self._socket.set(zmq.CURVE_SERVERKEY, key.server_public)
        self._socket.set(zmq.CURVE_PUBLICKEY, key.client_public)
        self._socket.set(zmq.CURVE_SECRETKEY, key.client_secret)
        self._socket.connect(self._endpoint(host, port))

    def poll(self, timeout_s: float) -> list[CoordinatorMessage]:
        """Everything that the coordinator has said, oldest first; waits for something to happen, at most timeout_s."""
        self._wait(timeout_s)
        found: list[CoordinatorMessage] = []
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            try:
                found.append(decode_from_coordinator(_only_part(parts)))
            except ProtocolError as error:
                self._refuse("control message from the coordinator", str(error))

    def send(self, message: WorkerMessage) -> None:
        """Say something to the coordinator, without waiting."""
        self._socket.send(encode(message), zmq.NOBLOCK)


def _parse_routing_id(data: bytes) -> int | None:
    found = _ROUTING_ID.fullmatch(data)
    return int(found[1]) if found else None


def _only_part(parts: list[bytes]) -> bytes:
    if len(parts) != 1:
        raise ProtocolError(f"a message has one part, got {len(parts)}")
    return parts[0]
