"""Who has no key, or has it and talks nonsense, learns and changes nothing on the control port."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from ronde.net import control
from ronde.net.keys import JobKey
from ronde.net.messages import VERSION, MissingRanks, RankHeartbeat, RankHeartbeatReply, encode
from ronde.types import Deadline
from tests.unit.net.polled import PolledClient, PolledServer

LOCAL = "127.0.0.1"
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class RawClient:
    """A plain ZeroMQ client, which says what it likes."""

    def __init__(
        self,
        port: int,
        *,
        server_public: bytes | None = None,
        pair: tuple[bytes, bytes] | None = None,
        routing_id: bytes = b"rank-0",
    ) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTING_ID, routing_id)
        if server_public is not None and pair is not None:
            self.socket.set(zmq.CURVE_SERVERKEY, server_public)
            self.socket.set(zmq.CURVE_PUBLICKEY, pair[0])
            self.socket.set(zmq.CURVE_SECRETKEY, pair[1])
        self.monitor = self.socket.get_monitor_socket(REFUSED)
        self.socket.connect(f"tcp://{LOCAL}:{port}")

    def wait_until_refused(self, server: PolledServer) -> None:
        deadline = Deadline(20)
        while not self.monitor.poll(0):
            assert not deadline.expired, "nobody refused it"
            assert server.poll(0.01) == []
        assert recv_monitor_message(self.monitor)["event"] & REFUSED

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self.context.term()


@pytest.fixture
def raw(server: PolledServer) -> Iterator[Callable[..., RawClient]]:
    made: list[RawClient] = []

    def make(**options: object) -> RawClient:
        made.append(RawClient(server.port, **options))  # type: ignore[arg-type]  # handed on as they are
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def honest(server: PolledServer, key: JobKey) -> Iterator[PolledClient]:
    """Rank 0, known to the server."""
    client = PolledClient(f"{LOCAL}:{server.port}", key, 0)
    client.send(RankHeartbeat(0))
    hear(server, 0)
    yield client
    client.close()


def hear(server: PolledServer, number: int) -> None:
    """Nothing but this beat of rank 0 comes."""
    deadline = Deadline(20)
    while not deadline.expired:
        found = server.poll(deadline.remaining_s)
        if found:
            assert found == [(0, RankHeartbeat(number))]
            return
    pytest.fail("rank 0 was not heard")


def still_talk(server: PolledServer, honest: PolledClient) -> None:
    """Rank 0 is still the one it was."""
    honest.send(RankHeartbeat(77))
    hear(server, 77)
    server.send(0, RankHeartbeatReply(77, 1))
    deadline = Deadline(20)
    answers = honest.poll(0)
    while not answers and not deadline.expired:
        answers = honest.poll(deadline.remaining_s)
    assert answers == [RankHeartbeatReply(77, 1)]


@pytest.mark.parametrize("peer", ["no key", "wrong server key", "wrong client key"])
def test_a_peer_is_refused_and_replaces_nobody(
    server: PolledServer, honest: PolledClient, raw: Callable[..., RawClient], key: JobKey, peer: str
) -> None:
    pair = zmq.curve_keypair()
    server_public = {"no key": None, "wrong server key": zmq.curve_keypair()[0], "wrong client key": key.server_public}
    client = raw(server_public=server_public[peer], pair=pair)
    client.socket.send(encode(RankHeartbeat(666)), zmq.NOBLOCK)
    client.wait_until_refused(server)
    server.send(0, MissingRanks(0, "w", (1,)))
    assert honest.poll(20) == [MissingRanks(0, "w", (1,))]
    still_talk(server, honest)
    assert client.socket.poll(0) == 0, "it heard something"


def test_a_client_with_the_wrong_key_is_logged_once(
    server: PolledServer, raw: Callable[..., RawClient], key: JobKey, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        raw(server_public=key.server_public, pair=zmq.curve_keypair()).wait_until_refused(server)
    assert server.num_refused >= 3
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("control client at 127.0.0.1: does not have the job's key")


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", bytes(4096), b""])
def test_noise_on_the_port_changes_nothing(server: PolledServer, honest: PolledClient, noise: bytes) -> None:
    with socket.create_connection((LOCAL, server.port), timeout=20) as peer:
        peer.sendall(noise)
        still_talk(server, honest)
    still_talk(server, honest)


def member(raw: Callable[..., RawClient], key: JobKey, routing_id: bytes) -> RawClient:
    return raw(server_public=key.server_public, pair=(key.client_public, key.client_secret), routing_id=routing_id)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [bytes([VERSION])],
        [b"garbage"],
        [bytes([VERSION + 1]) + encode(RankHeartbeat(1))[1:]],
        [b"", encode(RankHeartbeat(1))],
        [encode(RankHeartbeat(1))] * 2,
    ],
    ids=["empty", "version only", "garbage", "another version", "two parts", "twice"],
)
def test_a_member_that_sends_nonsense_is_logged_once_and_not_heard(
    server: PolledServer,
    honest: PolledClient,
    raw: Callable[..., RawClient],
    key: JobKey,
    parts: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = member(raw, key, b"rank-5")
    for _ in range(3):
        client.socket.send_multipart(parts)
    refused_until(server, 3)
    assert len(caplog.records) == 1
    assert "control message from rank 5" in caplog.text
    still_talk(server, honest)
    client.socket.send(encode(RankHeartbeat(5)))
    assert server.poll(20) == [(5, RankHeartbeat(5))], "it is heard again when it talks sense"


def refused_until(server: PolledServer, num: int) -> None:
    deadline = Deadline(20)
    while server.num_refused < num:
        assert not deadline.expired
        assert server.poll(deadline.remaining_s) == []


@pytest.mark.parametrize(
    "routing_id", [b"rank-", b"rank--1", b"rank-01", b"rank-1\n", b"rank-9999999999", b"\x01", b"x" * 255]
)
def test_a_member_that_is_no_rank_is_ignored(
    server: PolledServer, raw: Callable[..., RawClient], key: JobKey, routing_id: bytes
) -> None:
    member(raw, key, routing_id).socket.send(encode(RankHeartbeat(1)))
    refused_until(server, 1)


def test_a_member_that_says_too_much_is_cut_off(
    key: JobKey, raw: Callable[..., RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_MESSAGE_BYTES", 1000)
    server = PolledServer(LOCAL, key)
    honest = PolledClient(f"{LOCAL}:{server.port}", key, 0)
    still_talk(server, honest)
    client = RawClient(
        server.port, server_public=key.server_public, pair=(key.client_public, key.client_secret), routing_id=b"rank-5"
    )
    client.socket.send(bytes(100_000))
    client.wait_until_refused(server)
    still_talk(server, honest)
    client.close()
    honest.close()
    server.close()


def test_random_messages_of_a_member_change_nothing(key: JobKey) -> None:
    server = PolledServer(LOCAL, key)
    honest = PolledClient(f"{LOCAL}:{server.port}", key, 0)
    client = RawClient(
        server.port, server_public=key.server_public, pair=(key.client_public, key.client_secret), routing_id=b"rank-5"
    )

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.binary(max_size=50).map(lambda tail: b"\x01" + tail), min_size=1, max_size=3))
    def say(parts: list[bytes]) -> None:
        before = server.num_refused
        client.socket.send_multipart(parts)
        refused_until(server, before + 1)

    try:
        still_talk(server, honest)
        say()
        still_talk(server, honest)
    finally:
        client.close()
        honest.close()
        server.close()


def test_a_coordinator_that_sends_nonsense_is_ignored(
    server: PolledServer, honest: PolledClient, caplog: pytest.LogCaptureFixture
) -> None:
    for parts in ([b"garbage"], [b""], [b"a", b"b"], [encode(RankHeartbeat(1))]):
        server._socket.send_multipart([b"rank-0", *parts])
    deadline = Deadline(20)
    while honest.num_refused < 4 and not deadline.expired:
        assert honest.poll(deadline.remaining_s) == []
    assert honest.num_refused == 4
    assert len(caplog.records) == 1
    still_talk(server, honest)


def test_nothing_is_sent_to_a_false_coordinator(key: JobKey, other_key: JobKey) -> None:
    server = PolledServer(LOCAL, other_key)
    client = PolledClient(f"{LOCAL}:{server.port}", key, 0)
    monitor = client._socket.get_monitor_socket(REFUSED)
    client.send(RankHeartbeat(1))
    deadline = Deadline(20)
    while not monitor.poll(0) and not deadline.expired:
        assert server.poll(0.01) == []
    assert recv_monitor_message(monitor)["event"] & REFUSED
    client._socket.disable_monitor()
    monitor.close()
    client.close(flush_s=0)
    server.close()
