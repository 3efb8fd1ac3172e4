from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ronde.errors import ProtocolError, StartFailed
from ronde.net import control
from ronde.net.control import ControlClient, ControlServer
from ronde.net.keys import JobKey
from ronde.net.messages import (
    CoordinatorMessage,
    LeaveConfirmed,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    TraceBatch,
    WorkerMessage,
    encode,
)
from ronde.types import Deadline
from tests.services import needs

LOCAL = "127.0.0.1"


@pytest.fixture
def join(server: ControlServer, key: JobKey) -> Iterator[Callable[[int], ControlClient]]:
    """Makes clients that the server knows."""
    clients: list[ControlClient] = []

    def make(rank: int) -> ControlClient:
        client = ControlClient(f"{LOCAL}:{server.port}", key, rank)
        clients.append(client)
        client.send(RankHeartbeat(-1))
        assert heard(server) == [(rank, RankHeartbeat(-1))]
        return client

    yield make
    for client in clients:
        client.close()


def heard(server: ControlServer, num: int = 1) -> list[tuple[int, WorkerMessage]]:
    """What workers say, until it is so many messages."""
    found: list[tuple[int, WorkerMessage]] = []
    deadline = Deadline(20)
    while len(found) < num and not deadline.expired:
        found += server.poll(deadline.remaining_s)
    return found


def told(client: ControlClient, num: int = 1) -> list[CoordinatorMessage]:
    """What the coordinator says, until it is so many messages."""
    found: list[CoordinatorMessage] = []
    deadline = Deadline(20)
    while len(found) < num and not deadline.expired:
        found += client.poll(deadline.remaining_s)
    return found


Join = Callable[[int], ControlClient]


def test_messages_go_both_ways_to_whom_they_are_meant_for(server: ControlServer, join: Join) -> None:
    clients = [join(rank) for rank in range(3)]
    for rank, client in enumerate(clients):
        client.send(LeaveRound(orderly=True, reason=str(rank)))
    assert sorted(heard(server, 3), key=lambda pair: pair[0]) == [
        (r, LeaveRound(orderly=True, reason=str(r))) for r in range(3)
    ]
    for rank in range(3):
        server.send(rank, LeaveConfirmed(last=rank))
    assert [told(client) for client in clients] == [[LeaveConfirmed(last=rank)] for rank in range(3)]


def test_many_messages_arrive_all_and_in_order(server: ControlServer, join: Join) -> None:
    client = join(0)
    for number in range(5000):
        client.send(RankHeartbeat(number))
    assert heard(server, 5000) == [(0, RankHeartbeat(number)) for number in range(5000)]
    for number in range(5000):
        server.send(0, RankHeartbeatReply(number, 0))
    assert told(client, 5000) == [RankHeartbeatReply(number, 0) for number in range(5000)]


def test_a_large_message_arrives(server: ControlServer, join: Join) -> None:
    batch = TraceBatch(events=(bytes(8 * 1024 * 1024),) * 2)
    join(0).send(batch)
    assert heard(server) == [(0, batch)]


def test_the_largest_message_allowed_arrives(
    server: ControlServer, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What encryption adds does not count."""
    monkeypatch.setattr(control, "MAX_MESSAGE_BYTES", 1000)
    small = ControlServer(LOCAL, key)
    client = ControlClient(f"{LOCAL}:{small.port}", key, 0)
    message = LeaveRound(
        orderly=True, reason="x" * (1000 - len(encode(LeaveRound(orderly=True, reason="x" * 300))) + 300)
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
    server = ControlServer("::1", key)
    client = ControlClient(f"[::1]:{server.port}", key, 0)
    client.send(RankHeartbeat(1))
    assert heard(server) == [(0, RankHeartbeat(1))]
    client.close()
    server.close()


def test_poll_returns_after_its_time(server: ControlServer, join: Join) -> None:
    client = join(0)
    start = time.monotonic()
    assert server.poll(0.01) == []
    assert client.poll(0.01) == []
    assert server.poll(0) == []
    assert server.poll(-1) == []
    assert 0.02 <= time.monotonic() - start < 10


def test_wake_ends_a_poll_from_another_thread(server: ControlServer, join: Join) -> None:
    client = join(0)
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        server_poll, client_poll = pool.submit(server.poll, 60), pool.submit(client.poll, 60)
        server.notify()
        client.notify()
        assert server_poll.result(20) == []
        assert client_poll.result(20) == []
    server.notify()
    server.notify()
    assert server.poll(60) == []
    assert time.monotonic() - start < 20
    assert server.poll(0.01) == [], "several rings count as one"


def test_a_watched_file_ends_a_poll_and_is_named(server: ControlServer, join: Join) -> None:
    client = join(0)
    for end in (server, client):
        here, there = socket.socketpair()
        other, silent = socket.socketpair()
        with here, there, other, silent:
            end.watch(here.fileno())
            end.watch(other.fileno())
            end.poll(0)
            assert end.readable() == set()
            there.close()
            end.poll(60)
            assert end.readable() == {here.fileno()}
            end.unwatch(here.fileno())
            end.poll(0)
            assert end.readable() == set()
            end.unwatch(other.fileno())


def test_a_rank_that_comes_again_takes_its_place(server: ControlServer, join: Join) -> None:
    former, latter = join(4), join(4)
    server.send(4, LeaveConfirmed(last=1))
    assert told(latter) == [LeaveConfirmed(last=1)]
    assert former.poll(0) == []


def test_what_is_said_to_nobody_is_said_in_vain(server: ControlServer, join: Join) -> None:
    server.send(9, RankLost(rank=1, reason="killed"))
    client = join(1)
    client.close()
    for _ in range(10):
        server.send(1, LeaveConfirmed())
    assert server.poll(0) == []


def test_a_forgotten_rank_hears_nothing_until_it_speaks(server: ControlServer, join: Join) -> None:
    client = join(2)
    server.drop_rank(2)
    server.send(2, LeaveConfirmed(last=1))
    client.send(RankHeartbeat(1))
    assert heard(server) == [(2, RankHeartbeat(1))]
    server.send(2, LeaveConfirmed(last=2))
    assert told(client) == [LeaveConfirmed(last=2)]


def test_last_words_are_heard_after_close(server: ControlServer, join: Join) -> None:
    client = join(0)
    client.send(LeaveRound(orderly=True))
    client.close()
    client.close()
    assert heard(server) == [(0, LeaveRound(orderly=True))]


def test_last_words_of_the_server_are_heard_too(key: JobKey) -> None:
    server = ControlServer(LOCAL, key)
    client = ControlClient(f"{LOCAL}:{server.port}", key, 0)
    client.send(RankHeartbeat(1))
    heard(server)
    server.send(0, LeaveConfirmed(last=7))
    server.close()
    server.close()
    assert told(client) == [LeaveConfirmed(last=7)]
    client.close()


def test_closing_does_not_wait_for_somebody_who_is_gone(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as place_holder:
        port = place_holder.getsockname()[1]
    client = ControlClient(f"{LOCAL}:{port}", key, 0)
    client.send(RankHeartbeat(1))
    start = time.monotonic()
    client.close(flush_s=0.05)
    assert 0.05 <= time.monotonic() - start < 10


def test_wake_after_close_harms_nobody(key: JobKey) -> None:
    server = ControlServer(LOCAL, key)
    with ThreadPoolExecutor(3) as pool:
        rings = [pool.submit(server.notify) for _ in range(300)]
        server.close()
        for ring in rings:
            ring.result(20)
    server.notify()


def test_an_address_that_cannot_be_listened_on_is_named(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"cannot listen on {LOCAL}:{port} .*another port"):
            ControlServer(LOCAL, key, port=port)
    with pytest.raises(StartFailed, match="is unknown"):
        ControlServer("no-such-host.invalid", key)


def test_an_address_that_is_none_is_named(key: JobKey) -> None:
    with pytest.raises(ValueError, match="host:port"):
        ControlClient("nowhere", key, 0)
    with pytest.raises(StartFailed, match="is unknown"):
        ControlClient("no-such-host.invalid:80", key, 0)


def test_a_message_that_is_too_large_fails_where_it_is_made(
    server: ControlServer, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = join(0)
    monkeypatch.setattr("ronde.net.messages.MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ProtocolError, match="at most 100"):
        client.send(LeaveRound(orderly=True, reason="x" * 100))
    with pytest.raises(ProtocolError, match="at most 100"):
        server.send(0, RankLost(rank=1, reason="x" * 100))
    client.send(RankHeartbeat(2))
    assert heard(server) == [(0, RankHeartbeat(2))]


def test_no_socket_survives_exec(server: ControlServer, join: Join) -> None:
    """ZeroMQ's own descriptors as well as ours."""
    before = {link.name for link in Path("/proc/self/fd").iterdir()}
    join(0)
    for link in Path("/proc/self/fd").iterdir():
        if link.name not in before and link.exists():
            assert not os.get_inheritable(int(link.name)), link.readlink()
