"""The encrypted message connection between workers and the coordinator, over ZeroMQ.

The coordinator has a ControlServer, each worker a ControlClient. Both prove the job's key (CURVE keys derived from it),
and everything is encrypted. Whether a rank lives is decided by its liveness connection, not here. All methods are for
the thread that runs the loop.

Messages of one sender arrive in order, each once. ZeroMQ makes a broken connection again by itself, but what was under
way is lost. So each side numbers its messages, and the other one reports a gap. As both send at least every second
(heartbeats), a loss is noticed soon after the connection is there again, and a client reports a connection that does
not come back.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from ronde.errors import ProtocolError
from ronde.net.addresses import format_address, listen_error, parse_address, resolve_host
from ronde.net.connect import HEARTBEAT_S
from ronde.net.event_loop import EventLoop, Timer, check_threads_can_start
from ronde.net.keys import JobKey
from ronde.net.messages import (
    MAX_MESSAGE_BYTES,
    CoordinatorMessage,
    WorkerMessage,
    WorkerMessageDecoder,
    decode_from_coordinator,
    encode,
)
from ronde.net.open_files import is_open_files_error
from ronde.text import format_count

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
CONNECTION_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_SENDER = re.compile(rb"[0-9a-z]{1,32}-[0-9]{1,18}")
_SEQUENCE = struct.Struct("!Q")
_FRAME = struct.Struct("!QQ")
_MONITOR_EVENT = struct.Struct("=HI")

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
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + _FRAME.size + CURVE_OVERHEAD_BYTES)
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


@dataclass(slots=True)
class _KnownClient:
    """What was exchanged with a client."""

    num_received: int = 0
    num_sent: int = 0


class ControlServer(_ControlSocket):
    """The coordinator's side. It knows clients by the names that the coordinator gave them when it admitted them, which
    are their ZeroMQ routing ids; which rank a client is, and whether it still is, the coordinator knows."""

    def __init__(self, host: str, key: JobKey, *, port: int = 0) -> None:
        super().__init__(zmq.ROUTER)
        self._client_public = z85.decode(key.client_public)
        self._clients: dict[str, _KnownClient] = {}
        """By name."""
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
        except BaseException as error:
            self.close(0)
            if isinstance(error, zmq.ZMQError) and not is_open_files_error(error.errno):
                raise listen_error(host, port, error.strerror) from None
            raise
        self.port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def start_receiving(
        self,
        loop: EventLoop,
        on_message: Callable[[str, int, WorkerMessage], None],
        on_lost: Callable[[str, int], None] = lambda sender, num_lost: None,
    ) -> None:
        """Hand every message to on_message, with its sender's name and the id of the round that it was sent in. Let
        clients connect. on_lost gets a name and how many messages were lost, before the next one is handed on."""
        decoder = WorkerMessageDecoder()

        def on_parts(parts: list[bytes]) -> None:
            if not _SENDER.fullmatch(parts[0]):
                return self._refuse(f"control client {parts[0]!r}", "is not a worker")
            sender = parts[0].decode()
            client = self._clients.get(sender)
            if client is None:
                client = self._clients[sender] = _KnownClient()
            try:
                sequence, round, data = _split_frame(parts[1:])
                message = decoder.decode(data)
            except ProtocolError as error:  # it counts as lost
                return self._refuse(f"control message from {sender}", str(error))
            num_lost, client.num_received = sequence - client.num_received, sequence + 1
            if num_lost:
                on_lost(sender, num_lost)
            on_message(sender, round, message)

        _add_zmq_reader(loop, self._zap_socket, self._answer_zap_requests)
        _add_zmq_reader(loop, self._zmq_monitor, self._count_handshake_failures)
        self._start_receiving(loop, on_parts)

    def send(self, name: str, message: CoordinatorMessage) -> None:
        """Send a message without waiting. It is dropped if the client has sent nothing yet, or is not connected."""
        self.send_to_all((name,), message)

    def send_to_all(self, names: Sequence[str], message: CoordinatorMessage) -> None:
        """Send a message to these clients. It is encoded once, and all share its memory."""
        frame = zmq.Frame(encode(message, for_many=len(names) > 1), copy=True)
        send, more = self._socket.send, zmq.NOBLOCK | zmq.SNDMORE
        for name in names:
            client = self._clients.get(name)
            if client is not None:
                send(name.encode(), more)
                send(_SEQUENCE.pack(client.num_sent), more)
                send(frame, zmq.NOBLOCK, copy=False)
                client.num_sent += 1

    def forget(self, name: str) -> None:
        """Another client has taken the place of this one."""
        self._clients.pop(name, None)

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
    """A worker's side. `name` is the one that the coordinator gave it with its admission."""

    def __init__(self, address: str, key: JobKey, name: str, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        host, port = resolve_host(*parse_address(address))[0]
        super().__init__(zmq.DEALER)
        self.round = 0
        """The id of the round that the worker is in, which every message carries; 0 before it knows of one."""
        self._num_received = self._num_sent = 0
        self._heartbeat_s = heartbeat_s
        """A broken connection that is not made again within this time is reported."""
        self._is_broken = False
        self._broken_timer: Timer | None = None
        self._zmq_monitor = self._socket.get_monitor_socket(CONNECTION_EVENTS)
        self._helpers.append(self._zmq_monitor)
        self._socket.set(zmq.ROUTING_ID, name.encode())
        self._socket.set(zmq.CURVE_SERVERKEY, key.server_public)
        self._socket.set(zmq.CURVE_PUBLICKEY, key.client_public)
        self._socket.set(zmq.CURVE_SECRETKEY, key.client_secret)
        self._socket.connect(self._endpoint(host, port))

    def start_receiving(
        self,
        loop: EventLoop,
        on_message: Callable[[CoordinatorMessage], None],
        on_lost: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Hand every message to on_message until stop_receiving(), which on_message may call. on_lost gets the reason
        when messages were lost, or the connection is broken for longer than heartbeat_s."""

        def on_parts(parts: list[bytes]) -> None:
            try:
                if len(parts) != 2 or len(parts[0]) != _SEQUENCE.size:
                    raise ProtocolError(f"a message has a number and one part, got {len(parts)} parts")
                sequence = _SEQUENCE.unpack(parts[0])[0]
                message = decode_from_coordinator(parts[1])
            except ProtocolError as error:  # it counts as lost
                return self._refuse("control message from the coordinator", str(error))
            num_lost, self._num_received = sequence - self._num_received, sequence + 1
            if num_lost:
                lost = format_count(num_lost, "message")
                on_lost(f"the control connection to the coordinator broke, and {lost} of the coordinator got lost")
            on_message(message)

        _add_zmq_reader(loop, self._zmq_monitor, lambda: self._watch_connection(loop, on_lost))
        self._start_receiving(loop, on_parts)
        self._await_connection(loop, on_lost)

    def stop_receiving(self) -> None:
        super().stop_receiving()
        if self._broken_timer is not None:
            self._broken_timer.cancel()
            self._broken_timer = None

    def send(self, message: WorkerMessage) -> None:
        """Send a message without waiting."""
        self._socket.send(make_frame(self._num_sent, self.round, message), zmq.NOBLOCK)
        self._num_sent += 1

    def _watch_connection(self, loop: EventLoop, on_lost: Callable[[str], None]) -> None:
        try:
            while True:
                event, _ = _MONITOR_EVENT.unpack(self._zmq_monitor.recv_multipart(zmq.NOBLOCK)[0])
                self._is_broken = event == zmq.EVENT_DISCONNECTED
        except zmq.Again:
            self._await_connection(loop, on_lost)

    def _await_connection(self, loop: EventLoop, on_lost: Callable[[str], None]) -> None:
        """Report a broken connection after a while, unless it is made again."""
        if not self._is_broken and self._broken_timer is not None:
            self._broken_timer.cancel()
            self._broken_timer = None
        elif self._is_broken and self._broken_timer is None:
            limit = f"{self._heartbeat_s:g} s"
            why = f"the control connection to the coordinator broke, and was not made again within {limit}"
            self._broken_timer = loop.call_later(self._heartbeat_s, lambda: on_lost(why))


def _add_zmq_reader(loop: EventLoop, sock: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
    """The descriptor of a ZeroMQ socket becomes readable once for any number of messages, and also when none is there:
    the loop has to ask the socket itself."""
    loop.add_reader(sock.fileno(), callback, has_input=lambda: bool(int(sock.get(zmq.EVENTS)) & zmq.POLLIN))


def make_frame(sequence: int, round: int, message: WorkerMessage) -> bytes:
    """Return the bytes that a worker sends: how many messages it has sent before, the id of its round, and the message.
    The coordinator sends number and message as parts, because many ranks get the same message. It needs no round: a
    worker gets its messages in order, and RoundStarted comes before those of the round."""
    return _FRAME.pack(sequence, round) + encode(message)


def _split_frame(parts: list[bytes]) -> tuple[int, int, bytes]:
    if len(parts) != 1:
        raise ProtocolError(f"a message has one part, got {len(parts)}")
    if len(parts[0]) < _FRAME.size:
        raise ProtocolError(f"a message has at least {_FRAME.size} bytes, got {len(parts[0])}")
    return *_FRAME.unpack_from(parts[0]), parts[0][_FRAME.size :]
