"""The encrypted message connection between workers and the coordinator, over ZeroMQ.

The coordinator has a ControlServer, each worker a ControlClient. Both prove the job's key (CURVE keys derived from it),
and everything is encrypted. Messages of one sender arrive in order, each once, as long as both sides live; whether a
rank lives is decided by its liveness connection, not here. All methods are for the thread that runs the loop.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import zmq
from zmq.utils import z85

from ronde.errors import ProtocolError
from ronde.net.addresses import format_address, listen_error, parse_address, resolve_host
from ronde.net.event_loop import EventLoop, check_threads_can_start
from ronde.net.keys import JobKey
from ronde.net.messages import (
    MAX_MESSAGE_BYTES,
    CoordinatorMessage,
    WorkerMessage,
    decode_from_coordinator,
    decode_from_worker,
    encode,
)

NUM_ZMQ_THREADS = 2
"""Threads of a context."""
FLUSH_S = 1.0
"""How long close() may take to send what is still queued."""
HANDSHAKE_S = 5.0
CURVE_OVERHEAD_BYTES = 64
"""An upper bound of what encryption adds to the size of a message."""
MAX_MESSAGES_PER_TURN = 1000
MAX_BYTES_PER_TURN = 4 * 1024 * 1024
"""How much is received in one turn of the loop, so that other callbacks get their turn."""
MAX_WARNINGS = 1000
HANDSHAKE_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""Connections without ZeroMQ's protocol, or encrypted for another server: refused before ZAP_ADDRESS is asked."""
ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether a client may connect (its RFC 27), inside one context."""
_ROUTING_ID = re.compile(rb"rank-(0|[1-9][0-9]{0,8})")

logger = logging.getLogger("ronde.net")


class _ControlSocket:
    """A ZeroMQ socket in a context of its own, which an EventLoop reads."""

    def __init__(self, kind: int) -> None:
        self.num_refused = 0
        """Clients and messages that were refused."""
        check_threads_can_start(NUM_ZMQ_THREADS, "of ZeroMQ")
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set(zmq.LINGER, 0)
        # No limits on the queues: a dropped message would be a hang elsewhere, and a peer that is stuck gets few.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
        self._socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self._helpers: list[zmq.Socket[bytes]] = []
        """Other sockets of this context, which the loop reads as well."""
        self._loop: EventLoop | None = None
        self._warned_about: set[object] = set()

    def stop_receiving(self) -> None:
        """Leave further messages in the queue, and let no further clients connect. Idempotent."""
        if self._loop is not None:
            for sock in (self._socket, *self._helpers):
                self._loop.remove_reader(sock.fileno())
            self._loop = None

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Send what is queued, within flush_s, and free everything. Idempotent."""
        if self._context.closed:
            return
        self.stop_receiving()
        self._socket.disable_monitor()
        for helper in self._helpers:
            helper.close()
        self._socket.close(linger=int(flush_s * 1000))
        self._context.term()  # waits for the socket, so no longer than that

    def _start_receiving(self, loop: EventLoop, on_parts: Callable[[list[bytes]], None]) -> None:
        self._loop = loop
        _add_zmq_reader(loop, self._socket, lambda: self._receive(on_parts))

    def _receive(self, on_parts: Callable[[list[bytes]], None]) -> None:
        num_bytes = 0
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._loop is None or num_bytes > MAX_BYTES_PER_TURN:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            num_bytes += sum(map(len, parts))
            on_parts(parts)

    def _endpoint(self, host: str, port: int) -> str:
        self._socket.set(zmq.IPV6, int(":" in host))
        return f"tcp://{format_address(host, port)}"

    def _refuse(self, who: str, reason: str) -> None:
        self.num_refused += 1
        if who not in self._warned_about and len(self._warned_about) < MAX_WARNINGS:
            self._warned_about.add(who)
            logger.warning("%s: %s; dropped, and not mentioned again", who, reason)


class ControlServer(_ControlSocket):
    """The coordinator's side. A rank that connects again replaces its former connection."""

    def __init__(self, host: str, key: JobKey, *, port: int = 0) -> None:
        super().__init__(zmq.ROUTER)
        self._client_public = z85.decode(key.client_public)
        # ZeroMQ asks this socket about every client; as the loop answers, no thread is needed.
        self._zap_socket = self._context.socket(zmq.REP)
        self._zap_socket.set(zmq.LINGER, 0)
        self._zap_socket.bind(ZAP_ADDRESS)
        self._zmq_monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._helpers += [self._zap_socket, self._zmq_monitor]
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, key.server_secret)
        self._socket.set(zmq.ZAP_DOMAIN, b"ronde")
        try:
            self._socket.bind(self._endpoint(*resolve_host(host, port)[0]))
        except zmq.ZMQError as error:
            self.close(0)
            raise listen_error(host, port, error.strerror) from None
        except BaseException:
            self.close(0)
            raise
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def start_receiving(self, loop: EventLoop, on_message: Callable[[int, WorkerMessage], None]) -> None:
        """Hand every message and the rank of its sender to on_message, and let clients connect."""

        def on_parts(parts: list[bytes]) -> None:
            sender = _ROUTING_ID.fullmatch(parts[0])
            if sender is None:
                return self._refuse(f"control client {parts[0]!r}", "is not a rank")
            rank = int(sender[1])
            try:
                message = decode_from_worker(_only_part(parts[1:]))
            except ProtocolError as error:
                return self._refuse(f"control message from rank {rank}", str(error))
            on_message(rank, message)

        _add_zmq_reader(loop, self._zap_socket, self._answer_zap_requests)
        _add_zmq_reader(loop, self._zmq_monitor, self._count_handshake_failures)
        self._start_receiving(loop, on_parts)

    def send(self, rank: int, message: CoordinatorMessage) -> None:
        """Send a message without waiting. It is dropped if the rank is not connected."""
        self._socket.send_multipart((b"rank-%d" % rank, encode(message)), zmq.NOBLOCK)

    def _answer_zap_requests(self) -> None:
        while True:
            try:
                version, request, _, address, _, mechanism, *credentials = self._zap_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            is_member = mechanism == b"CURVE" and credentials == [self._client_public]
            if not is_member:
                self._refuse(f"control client at {address.decode(errors='replace')}", "does not have the job's key")
            status = (b"200", b"OK") if is_member else (b"400", b"refused")
            self._zap_socket.send_multipart((version, request, *status, b"", b""))

    def _count_handshake_failures(self) -> None:
        try:
            while True:
                self._zmq_monitor.recv_multipart(zmq.NOBLOCK)
                self._refuse("a connection to the control port", "failed in the handshake")
        except zmq.Again:
            pass


class ControlClient(_ControlSocket):
    """A worker's side."""

    def __init__(self, address: str, key: JobKey, rank: int) -> None:
        host, port = resolve_host(*parse_address(address))[0]
        super().__init__(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, b"rank-%d" % rank)
        self._socket.set(zmq.CURVE_SERVERKEY, key.server_public)
        self._socket.set(zmq.CURVE_PUBLICKEY, key.client_public)
        self._socket.set(zmq.CURVE_SECRETKEY, key.client_secret)
        self._socket.connect(self._endpoint(host, port))

    def start_receiving(self, loop: EventLoop, on_message: Callable[[CoordinatorMessage], None]) -> None:
        """Hand every message to on_message until stop_receiving(), which on_message may call."""

        def on_parts(parts: list[bytes]) -> None:
            try:
                message = decode_from_coordinator(_only_part(parts))
            except ProtocolError as error:
                return self._refuse("control message from the coordinator", str(error))
            on_message(message)

        self._start_receiving(loop, on_parts)

    def send(self, message: WorkerMessage) -> None:
        """Send a message without waiting."""
        self._socket.send(encode(message), zmq.NOBLOCK)


def _add_zmq_reader(loop: EventLoop, sock: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
    """The descriptor of a ZeroMQ socket becomes readable once for any number of messages, and also when none is there:
    the loop has to ask the socket itself."""
    loop.add_reader(sock.fileno(), callback, has_input=lambda: bool(int(sock.get(zmq.EVENTS)) & zmq.POLLIN))


def _only_part(parts: list[bytes]) -> bytes:
    if len(parts) != 1:
        raise ProtocolError(f"a message has one part, got {len(parts)}")
    return parts[0]
