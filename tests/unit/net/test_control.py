from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ronde.errors import ProtocolError, StartFailed
from ronde.net import control
from ronde.net.keys import JobKey
from ronde.net.messages import (
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
from tests.services import needs
from tests.unit.net.polled import PolledClient, PolledServer, run_for

LOCAL = "127.0.0.1"


@pytest.fixture
def join(server: PolledServer, key: JobKey) -> Iterator[Callable[[int], PolledClient]]:
    """Makes clients that the server knows."""
    clients: list[PolledClient] = []

    def make(rank: int) -> PolledClient:
        client = PolledClient(f"{LOCAL}:{server.port}", key, rank)
        clients.append(client)
        client.send(RankHeartbeat(-1))
        assert heard(server) == [(rank, RankHeartbeat(-1))]
        return client

    yield make
    for client in clients:
        client.close()


def heard(server: PolledServer, num: int = 1) -> list[tuple[int, WorkerMessage]]:
    """What workers say, until it is so many messages."""
    found: list[tuple[int, WorkerMessage]] = []
    deadline = Deadline(20)
    while len(found) < num and not deadline.expired:
        found += server.poll(deadline.remaining_s)
    return found


def told(client: PolledClient, num: int = 1) -> list[CoordinatorMessage]:
    """What the coordinator says, until it is so many messages."""
    found: list[CoordinatorMessage] = []
    deadline = Deadline(20)
    while len(found) < num and not deadline.expired:
        found += client.poll(deadline.remaining_s)
    return found


Join = Callable[[int], PolledClient]


def test_messages_go_both_ways_to_whom_they_are_meant_for(server: PolledServer, join: Join) -> None:
    clients = [join(rank) for rank in range(3)]
    for rank, client in enumerate(clients):
        client.send(LeaveRound(LeaveReason.SHUTDOWN, str(rank)))
    assert sorted(heard(server, 3), key=lambda pair: pair[0]) == [
        (r, LeaveRound(LeaveReason.SHUTDOWN, str(r))) for r in range(3)
    ]
    for rank in range(3):
        server.send(rank, MissingRanks(0, "w", (rank,)))
    assert [told(client) for client in clients] == [[MissingRanks(0, "w", (rank,))] for rank in range(3)]


def test_many_messages_arrive_all_and_in_order(server: PolledServer, join: Join) -> None:
    client = join(0)
    for number in range(5000):
        client.send(RankHeartbeat(number))
    assert heard(server, 5000) == [(0, RankHeartbeat(number)) for number in range(5000)]
    for number in range(5000):
        server.send(0, RankHeartbeatReply(number, 0))
    assert told(client, 5000) == [RankHeartbeatReply(number, 0) for number in range(5000)]


def test_a_large_message_arrives(server: PolledServer, join: Join) -> None:
    batch = TraceBatch(events=(bytes(8 * 1024 * 1024),) * 2)
    join(0).send(batch)
    assert heard(server) == [(0, batch)]


def test_the_largest_message_allowed_arrives(
    server: PolledServer, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What encryption adds does not count."""
    monkeypatch.setattr(control, "MAX_MESSAGE_BYTES", 1000)
    small = PolledServer(LOCAL, key)
    client = PolledClient(f"{LOCAL}:{small.port}", key, 0)
    message = LeaveRound(
        LeaveReason.SHUTDOWN, "x" * (1000 - len(encode(LeaveRound(LeaveReason.SHUTDOWN, "x" * 300))) + 300)
    )
    assert len(encode(message)) == 1000
    client.send(message)
    assert heard(small) == [(0, message)]
    client.close()
    small.close()


@needs("IPv6")
def test_ipv6_works_too(key: JobKey) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    server = PolledServer("::1", key)
    client = PolledClient(f"[::1]:{server.port}", key, 0)
    client.send(RankHeartbeat(1))
    assert heard(server) == [(0, RankHeartbeat(1))]
    client.close()
    server.close()


def test_a_rank_that_comes_again_replaces_it(server: PolledServer, join: Join) -> None:
    former, latter = join(4), join(4)
    server.send(4, MissingRanks(0, "w", (1,)))
    assert told(latter) == [MissingRanks(0, "w", (1,))]
    assert former.poll(0) == []


def test_what_is_said_to_nobody_is_said_in_vain(server: PolledServer, join: Join) -> None:
    server.send(9, RankLost(rank=1, reason="killed"))
    client = join(1)
    client.close()
    for _ in range(10):
        server.send(1, LeaveConfirmed())
    assert server.poll(0) == []


def test_messages_before_close_are_heard_after_close(server: PolledServer, join: Join) -> None:
    client = join(0)
    client.send(LeaveRound(LeaveReason.SHUTDOWN))
    client.close()
    client.close()
    assert heard(server) == [(0, LeaveRound(LeaveReason.SHUTDOWN))]


def test_messages_before_close_of_the_server_are_heard_too(key: JobKey) -> None:
    server = PolledServer(LOCAL, key)
    client = PolledClient(f"{LOCAL}:{server.port}", key, 0)
    client.send(RankHeartbeat(1))
    heard(server)
    server.send(0, MissingRanks(0, "w", (7,)))
    server.close()
    server.close()
    assert told(client) == [MissingRanks(0, "w", (7,))]
    client.close()


def test_closing_does_not_wait_for_somebody_who_is_gone(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as place_holder:
        port = place_holder.getsockname()[1]
    client = PolledClient(f"{LOCAL}:{port}", key, 0)
    client.send(RankHeartbeat(1))
    start = time.monotonic()
    client.close(flush_s=0.05)
    assert 0.05 <= time.monotonic() - start < 10


def test_an_address_that_cannot_be_listened_on_is_named(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"cannot listen on {LOCAL}:{port} .*another port"):
            PolledServer(LOCAL, key, port=port)
    with pytest.raises(StartFailed, match="is unknown"):
        PolledServer("no-such-host.invalid", key)


def test_an_address_that_is_none_is_named(key: JobKey) -> None:
    with pytest.raises(ValueError, match="host:port"):
        PolledClient("nowhere", key, 0)
    with pytest.raises(StartFailed, match="is unknown"):
        PolledClient("no-such-host.invalid:80", key, 0)


def test_a_message_that_is_too_large_fails_where_it_is_made(
    server: PolledServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = join(0)
    monkeypatch.setattr("ronde.net.messages.MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ProtocolError, match="at most 100"):
        client.send(LeaveRound(LeaveReason.SHUTDOWN, "x" * 100))
    with pytest.raises(ProtocolError, match="at most 100"):
        server.send(0, RankLost(rank=1, reason="x" * 100))
    client.send(RankHeartbeat(2))
    assert heard(server) == [(0, RankHeartbeat(2))]


def test_no_socket_survives_exec(server: PolledServer, join: Join) -> None:
    """ZeroMQ's own descriptors as well as ours."""
    before = {link.name for link in Path("/proc/self/fd").iterdir()}
    join(0)
    for link in Path("/proc/self/fd").iterdir():
        if link.name not in before and link.exists():
            assert not os.get_inheritable(int(link.name)), link.readlink()


def test_messages_that_nobody_takes_wait_in_the_queue(server: PolledServer, join: Join) -> None:
    client = join(0)
    found: list[CoordinatorMessage] = []

    def take_one(message: CoordinatorMessage) -> None:
        found.append(message)
        client.stop_receiving()

    client.stop_receiving()
    for number in range(3):
        server.send(0, RankHeartbeatReply(number, 0))
    for number in range(3):
        client.start_receiving(client.loop, take_one)
        run_for(client.loop, 20, lambda number=number: len(found) > number)  # type: ignore[misc]
        run_for(client.loop, 0, lambda: False)
        assert found == [RankHeartbeatReply(each, 0) for each in range(number + 1)]


def test_a_long_queue_leaves_other_callbacks_their_turn(server: PolledServer, join: Join) -> None:
    client = join(0)
    client.stop_receiving()
    num = 3 * control.MAX_MESSAGES_PER_TURN
    for number in range(num):
        server.send(0, RankHeartbeatReply(number, 0))
    server.close(flush_s=20)  # all are on their way
    found: list[CoordinatorMessage] = []
    seen: list[int] = []

    def look() -> None:
        seen.append(len(found))
        client.loop.call_later(0, look)

    client.start_receiving(client.loop, found.append)
    look()
    run_for(client.loop, 20, lambda: len(found) == num)
    assert len(found) == num
    assert max(after - before for before, after in itertools.pairwise(seen)) <= control.MAX_MESSAGES_PER_TURN
