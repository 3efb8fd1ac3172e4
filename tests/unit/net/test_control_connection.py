"""Control connections: messages arrive whole and in order, and who has no key or sends nonsense changes nothing."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from ronde.errors import ProtocolError, StartFailed
from ronde.net import control_connection
from ronde.net.control_connection import make_frame
from ronde.net.keys import JobKey
from ronde.net.messages import (
    VERSION,
    CoordinatorMessage,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    MissingRanks,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    TraceBatch,
    WorkerMessage,
    encode,
)
from ronde.types import Deadline
from tests.forwarder import Forwarder
from tests.unit.net.polled import PolledClient, PolledServer, run_for

LOCAL = "127.0.0.1"
PATIENCE_S = 20

Connect = Callable[[int], PolledClient]


@pytest.fixture
def server(key: JobKey) -> Iterator[PolledServer]:
    made = PolledServer(LOCAL, key)
    yield made
    made.close()


@pytest.fixture
def connect(server: PolledServer, key: JobKey) -> Iterator[Connect]:
    """Makes clients that the server knows."""
    clients: list[PolledClient] = []

    def make(number: int) -> PolledClient:
        client = PolledClient(f"{LOCAL}:{server.port}", key, f"worker{number}-0")
        clients.append(client)
        client.send(RankHeartbeat(-1))
        assert heard(server) == [(f"worker{number}-0", RankHeartbeat(-1))]
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def honest(connect: Connect) -> PolledClient:
    """Rank 0, known to the server."""
    return connect(0)


def heard(server: PolledServer, num: int = 1) -> list[tuple[str, WorkerMessage]]:
    """What workers say, until it is so many messages."""
    found: list[tuple[str, WorkerMessage]] = []
    deadline = Deadline(PATIENCE_S)
    while len(found) < num and not deadline.expired:
        found += server.poll(deadline.remaining_s)
    return found


def told(client: PolledClient, num: int = 1) -> list[CoordinatorMessage]:
    """What the coordinator says, until it is so many messages."""
    found: list[CoordinatorMessage] = []
    deadline = Deadline(PATIENCE_S)
    while len(found) < num and not deadline.expired:
        found += client.poll(deadline.remaining_s)
    return found


def still_talk(server: PolledServer, honest: PolledClient) -> None:
    """Rank 0 is still the one it was, and nobody else is heard."""
    honest.send(RankHeartbeat(77))
    assert heard(server) == [("worker0-0", RankHeartbeat(77))]
    server.send("worker0-0", RankHeartbeatReply(77, 1))
    assert told(honest) == [RankHeartbeatReply(77, 1)]


def test_messages_go_both_ways_to_whom_they_are_meant_for(server: PolledServer, connect: Connect) -> None:
    clients = [connect(rank) for rank in range(3)]
    for rank, client in enumerate(clients):
        client.send(LeaveRound(LeaveReason.SHUTDOWN, str(rank)))
    expected = [(f"worker{rank}-0", LeaveRound(LeaveReason.SHUTDOWN, str(rank))) for rank in range(3)]
    assert sorted(heard(server, 3), key=lambda pair: pair[0]) == expected
    for rank in range(3):
        server.send(f"worker{rank}-0", MissingRanks(0, "w", (rank,)))
    assert [told(client) for client in clients] == [[MissingRanks(0, "w", (rank,))] for rank in range(3)]


def test_a_message_for_all_arrives_at_each_and_a_rank_that_is_gone_does_not_matter(
    server: PolledServer, connect: Connect
) -> None:
    clients = [connect(rank) for rank in range(3)]
    for client in clients:
        client.send(RankHeartbeat(0))
    heard(server, 3)
    for message in (RankLost(7, "killed"), RankLost(8, "x" * 1_000_000)):
        server.send_to_all(("worker0-0", "worker9-0", "worker2-0"), message)
        assert [told(clients[rank]) for rank in (0, 2)] == [[message]] * 2
    server.send("worker1-0", LeaveConfirmed())
    assert told(clients[1]) == [LeaveConfirmed()]


def test_many_messages_and_a_large_one_arrive_all_and_in_order(server: PolledServer, honest: PolledClient) -> None:
    for number in range(5000):
        honest.send(RankHeartbeat(number))
    large = TraceBatch(events=(bytes(8 * 1024 * 1024),) * 2)
    honest.send(large)
    assert heard(server, 5001) == [
        *(("worker0-0", RankHeartbeat(number)) for number in range(5000)),
        ("worker0-0", large),
    ]
    for number in range(5000):
        server.send("worker0-0", RankHeartbeatReply(number, 0))
    assert told(honest, 5000) == [RankHeartbeatReply(number, 0) for number in range(5000)]


def test_the_largest_message_arrives_and_a_larger_one_is_refused(key: JobKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """What encryption adds does not count. One that is made regardless ends the connection of its sender."""
    monkeypatch.setattr(control_connection, "MAX_MESSAGE_BYTES", 1000)
    monkeypatch.setattr("ronde.net.messages.MAX_MESSAGE_BYTES", 1000)
    server = PolledServer(LOCAL, key)
    client = PolledClient(f"{LOCAL}:{server.port}", key)
    rest = len(encode(LeaveRound(LeaveReason.SHUTDOWN, "x" * 300))) - 300
    largest = LeaveRound(LeaveReason.SHUTDOWN, "x" * (1000 - rest))
    client.send(largest)
    assert heard(server) == [("worker0-0", largest)]
    for send in (client.send, lambda message: server.send("worker0-0", message)):
        with pytest.raises(ProtocolError, match="at most 1000"):
            send(LeaveRound(LeaveReason.SHUTDOWN, "x" * (1001 - rest)))
    cheat = RawClient(server.port, key=key, routing_id=b"worker5-0")
    cheat.socket.send(bytes(100_000))
    cheat.wait_until_refused(server)
    still_talk(server, client)
    for end in (cheat, client, server):
        end.close()


def test_workers_of_one_rank_are_told_apart_and_one_that_was_replaced_gets_nothing_more(
    server: PolledServer, connect: Connect
) -> None:
    former, latter = connect(4), connect(5)
    server.forget("worker4-0")
    server.send("worker4-0", LeaveConfirmed())
    server.send("worker5-0", MissingRanks(0, "w", (1,)))
    assert told(latter) == [MissingRanks(0, "w", (1,))]
    assert former.poll(0) == []


def test_what_is_said_to_nobody_is_said_in_vain(server: PolledServer, connect: Connect) -> None:
    server.send("worker9-0", RankLost(rank=1, reason="killed"))
    connect(1).close()
    for _ in range(10):
        server.send("worker1-0", LeaveConfirmed())
    assert server.poll(0) == []


def test_what_was_sent_before_close_is_heard_after_close(server: PolledServer, connect: Connect) -> None:
    leaving, staying = connect(0), connect(1)
    leaving.send(LeaveRound(LeaveReason.SHUTDOWN))
    leaving.close()
    leaving.close()
    assert heard(server) == [("worker0-0", LeaveRound(LeaveReason.SHUTDOWN))]
    server.send("worker1-0", MissingRanks(0, "w", (7,)))
    server.close()
    server.close()
    assert told(staying) == [MissingRanks(0, "w", (7,))]


def test_closing_does_not_wait_for_somebody_who_is_gone(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as place_holder:
        port = place_holder.getsockname()[1]
    client = PolledClient(f"{LOCAL}:{port}", key)
    client.send(RankHeartbeat(1))
    start = time.monotonic()
    client.close(flush_s=0.05)
    assert time.monotonic() - start < 10


def test_an_address_that_cannot_be_used_is_named(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"cannot listen on {LOCAL}:{port} .*another port"):
            PolledServer(LOCAL, key, port=port)
    with pytest.raises(StartFailed, match="is unknown"):
        PolledServer("no-such-host.invalid", key)
    with pytest.raises(StartFailed, match="is unknown"):
        PolledClient("no-such-host.invalid:80", key)


def test_no_socket_survives_exec(server: PolledServer, connect: Connect) -> None:
    """ZeroMQ's own descriptors as well as ours."""
    before = {link.name for link in Path("/proc/self/fd").iterdir()}
    connect(0)
    for link in Path("/proc/self/fd").iterdir():
        if link.name not in before and link.exists():
            assert not os.get_inheritable(int(link.name)), link.readlink()


def test_messages_that_nobody_takes_wait_in_the_queue(server: PolledServer, honest: PolledClient) -> None:
    found: list[CoordinatorMessage] = []

    def take_one(message: CoordinatorMessage) -> None:
        found.append(message)
        honest.stop_receiving()

    honest.stop_receiving()
    for number in range(3):
        server.send("worker0-0", RankHeartbeatReply(number, 0))
    for number in range(3):
        honest.start_receiving(honest.loop, take_one)
        run_for(honest.loop, PATIENCE_S, lambda number=number: len(found) > number)  # type: ignore[misc]
        run_for(honest.loop, 0, lambda: False)
        assert found == [RankHeartbeatReply(each, 0) for each in range(number + 1)]


def test_a_long_queue_leaves_other_callbacks_their_turn(server: PolledServer, honest: PolledClient) -> None:
    honest.stop_receiving()
    num = 3 * control_connection.MAX_MESSAGES_PER_TURN
    for number in range(num):
        server.send("worker0-0", RankHeartbeatReply(number, 0))
    server.close(flush_s=PATIENCE_S)  # all are on their way
    found: list[CoordinatorMessage] = []
    seen: list[int] = []

    def look() -> None:
        seen.append(len(found))
        honest.loop.call_later(0, look)

    honest.start_receiving(honest.loop, found.append)
    look()
    run_for(honest.loop, PATIENCE_S, lambda: len(found) == num)
    assert len(found) == num
    assert max(after - before for before, after in itertools.pairwise(seen)) <= control_connection.MAX_MESSAGES_PER_TURN


# --- a connection that breaks ----------------------------------------------------------------------------------------


@pytest.fixture
def forwarder(server: PolledServer) -> Iterator[Forwarder]:
    with Forwarder(server.port) as made:
        yield made


@pytest.fixture
def cut_off(forwarder: Forwarder, server: PolledServer, key: JobKey) -> Iterator[PolledClient]:
    """Rank 0, known to the server, which it reaches through the forwarder."""
    client = PolledClient(f"{LOCAL}:{forwarder.port}", key, heartbeat_s=0.5)
    client.send(RankHeartbeat(-1))
    assert heard(server) == [("worker0-0", RankHeartbeat(-1))]
    yield client
    client.close(0)


def talk_again(server: PolledServer, client: PolledClient) -> None:
    """Messages go both ways again. The server knows that the client is back when it has received something."""
    client.send(RankHeartbeat(78))
    assert heard(server) == [("worker0-0", RankHeartbeat(78))]
    server.send("worker0-0", RankHeartbeatReply(78, 1))
    assert told(client) == [RankHeartbeatReply(78, 1)]


def wait_until_swallowed(forwarder: Forwarder, client: PolledClient) -> None:
    deadline = Deadline(PATIENCE_S)
    while not forwarder.num_swallowed:
        assert not deadline.expired
        client.poll(0.01)


def test_a_connection_that_breaks_while_nothing_is_under_way_loses_nothing(
    server: PolledServer, forwarder: Forwarder, cut_off: PolledClient
) -> None:
    still_talk(server, cut_off)
    for _ in range(3):
        forwarder.cut()
        talk_again(server, cut_off)
    assert (server.num_lost, cut_off.problems) == ({}, [])


def test_lost_messages_of_a_rank_are_reported_before_its_next_one(
    server: PolledServer, forwarder: Forwarder, cut_off: PolledClient
) -> None:
    forwarder.swallow_to_server = True
    for number in range(3):
        cut_off.send(RankHeartbeat(number))
    wait_until_swallowed(forwarder, cut_off)
    forwarder.cut()
    deadline = Deadline(PATIENCE_S)
    while not server.num_lost:
        assert not deadline.expired
        cut_off.send(RankHeartbeat(4))
        server.poll(0.1)
    assert set(server.num_lost) == {"worker0-0"} and cut_off.problems == []
    server.num_lost.clear()
    cut_off.send(LeaveRound(LeaveReason.SHUTDOWN))  # arrives after all others
    while ("worker0-0", LeaveRound(LeaveReason.SHUTDOWN)) not in heard(server):
        pass
    assert server.num_lost == {}, "one loss is reported once"


def test_lost_messages_of_the_coordinator_are_reported_before_its_next_one(
    server: PolledServer, forwarder: Forwarder, cut_off: PolledClient
) -> None:
    forwarder.swallow_to_client = True
    server.send("worker0-0", MissingRanks(0, "w", ()))
    wait_until_swallowed(forwarder, cut_off)
    forwarder.cut()
    server.send("worker0-0", MissingRanks(0, "x", ()))  # to nobody: the client is not back yet
    assert cut_off.problems == []
    talk_again(server, cut_off)
    lost = "the control connection to the coordinator broke, and 2 messages of the coordinator got lost"
    assert (server.num_lost, cut_off.problems) == ({}, [lost])


def test_a_connection_that_does_not_come_back_is_reported(
    server: PolledServer, forwarder: Forwarder, cut_off: PolledClient
) -> None:
    forwarder.cut(for_good=True)
    run_for(cut_off.loop, PATIENCE_S, lambda: bool(cut_off.problems))
    why = "the control connection to the coordinator broke, and was not made again within 0.5 s"
    assert cut_off.problems == [why]


def test_a_connection_that_breaks_while_nobody_looks_is_reported_later(
    server: PolledServer, forwarder: Forwarder, cut_off: PolledClient
) -> None:
    cut_off.stop_receiving()
    forwarder.cut(for_good=True)
    problems: list[str] = []
    cut_off.start_receiving(cut_off.loop, lambda message: None, problems.append)
    run_for(cut_off.loop, PATIENCE_S, lambda: bool(problems))
    assert len(problems) == 1 and "was not made again" in problems[0]


def test_the_round_of_a_worker_travels_with_its_messages(server: PolledServer, honest: PolledClient) -> None:
    honest.round = 1 << 62
    honest.send(RankHeartbeat(1))
    heard(server)
    assert server.rounds == [0, 1 << 62]


# --- who has no key, or has it and sends nonsense --------------------------------------------------------------------

REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class RawClient:
    """A plain ZeroMQ client, which says what it likes: with the job's key, other keys, or none."""

    def __init__(
        self,
        port: int,
        *,
        key: JobKey | None = None,
        keys: tuple[bytes, bytes, bytes] | None = None,
        routing_id: bytes = b"worker0-0",
    ) -> None:
        if key is not None:
            keys = (key.server_public, key.client_public, key.client_secret)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTING_ID, routing_id)
        options = (zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY)
        for option, value in zip(options, keys or (), strict=bool(keys)):
            self.socket.set(option, value)
        self.monitor = self.socket.get_monitor_socket(REFUSED)
        self.socket.connect(f"tcp://{LOCAL}:{port}")

    def wait_until_refused(self, server: PolledServer) -> None:
        deadline = Deadline(PATIENCE_S)
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


def refused_until(server: PolledServer, num: int) -> None:
    deadline = Deadline(PATIENCE_S)
    while server.num_refused < num:
        assert not deadline.expired
        assert server.poll(deadline.remaining_s) == []


@pytest.mark.parametrize("peer", ["no key", "wrong server key", "wrong client key"])
def test_a_peer_is_refused_logged_once_and_replaces_nobody(
    server: PolledServer,
    honest: PolledClient,
    raw: Callable[..., RawClient],
    key: JobKey,
    peer: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server_public = zmq.curve_keypair()[0] if peer == "wrong server key" else key.server_public
    for _ in range(3):
        client = raw(keys=None if peer == "no key" else (server_public, *zmq.curve_keypair()))
        client.socket.send(make_frame(0, 0, RankHeartbeat(666)), zmq.NOBLOCK)
        client.wait_until_refused(server)
        still_talk(server, honest)
        assert client.socket.poll(0) == 0, "it heard something"
    if peer == "wrong client key":
        (line,) = caplog.messages
        assert line.startswith("control client at 127.0.0.1: does not have the job's key")


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", bytes(4096), b""])
def test_noise_on_the_port_changes_nothing(server: PolledServer, honest: PolledClient, noise: bytes) -> None:
    with socket.create_connection((LOCAL, server.port), timeout=PATIENCE_S) as peer:
        peer.sendall(noise)
        still_talk(server, honest)
    still_talk(server, honest)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [bytes(16) + bytes([VERSION])],
        [b"garbage"],
        [bytes(16) + b"garbage"],
        [bytes(16) + bytes([VERSION + 1]) + encode(RankHeartbeat(1))[1:]],
        [b"", make_frame(0, 0, RankHeartbeat(1))],
        [make_frame(0, 0, RankHeartbeat(1))] * 2,
    ],
    ids=["empty", "version only", "garbage", "garbage after a number", "another version", "two parts", "twice"],
)
def test_a_member_that_sends_nonsense_is_logged_once_and_not_heard(
    server: PolledServer,
    honest: PolledClient,
    raw: Callable[..., RawClient],
    key: JobKey,
    parts: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = raw(key=key, routing_id=b"worker5-0")
    for _ in range(3):
        client.socket.send_multipart(parts)
    refused_until(server, 3)
    assert len(caplog.records) == 1
    assert "control message from worker5-0" in caplog.text
    still_talk(server, honest)
    client.socket.send(make_frame(0, 0, RankHeartbeat(5)))
    assert server.poll(PATIENCE_S) == [("worker5-0", RankHeartbeat(5))], "it is heard again when it talks sense"


@pytest.mark.parametrize(
    "routing_id",
    [
        b"worker",
        b"worker-",
        b"-0",
        b"worker--1",
        b"Worker-1",
        b"worker-1\n",
        b"worker-x",
        b"\x01",
        b"x" * 255,
    ],
)
def test_a_member_that_is_no_worker_is_ignored(
    server: PolledServer, raw: Callable[..., RawClient], key: JobKey, routing_id: bytes
) -> None:
    raw(key=key, routing_id=routing_id).socket.send(make_frame(0, 0, RankHeartbeat(1)))
    refused_until(server, 1)


def test_random_messages_of_a_member_change_nothing(
    server: PolledServer, honest: PolledClient, raw: Callable[..., RawClient], key: JobKey
) -> None:
    client = raw(key=key, routing_id=b"worker5-0")

    @settings(deadline=None, max_examples=50)
    @given(st.lists(st.binary(max_size=50).map(lambda tail: b"\x01" + tail), min_size=1, max_size=3))
    def say(parts: list[bytes]) -> None:
        before = server.num_refused
        client.socket.send_multipart(parts)
        refused_until(server, before + 1)

    say()
    still_talk(server, honest)


def test_a_coordinator_that_sends_nonsense_is_ignored(
    server: PolledServer, honest: PolledClient, caplog: pytest.LogCaptureFixture
) -> None:
    for parts in ([b"garbage"], [b""], [b"a", b"b"], [make_frame(0, 0, RankHeartbeat(1))]):
        server._socket.send_multipart([b"worker0-0", *parts])
    deadline = Deadline(PATIENCE_S)
    while honest.num_refused < 4 and not deadline.expired:
        assert honest.poll(deadline.remaining_s) == []
    assert honest.num_refused == 4
    assert len(caplog.records) == 1
    still_talk(server, honest)


def test_nothing_is_sent_to_a_false_coordinator(key: JobKey, other_key: JobKey) -> None:
    server = PolledServer(LOCAL, other_key)
    client = PolledClient(f"{LOCAL}:{server.port}", key)
    client.send(RankHeartbeat(1))
    refused_until(server, 1)
    client.close(flush_s=0)
    server.close()
