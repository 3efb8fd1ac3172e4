"""Meeting at the first free port of a range: real sockets, ranks are threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from ronde.comm.joining import expand_port_range, find_coordinator, host_coordinator, join_round
from ronde.comm.world import World
from ronde.errors import StartFailed
from ronde.net.keys import JobKey, new_job_key
from ronde.settings import Settings
from ronde.types import Deadline

KEY = new_job_key()


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ["a:1"]),
        ("a:7-9", ["a:7", "a:8", "a:9"]),
        ("a:7-7", ["a:7"]),
        ("my-host-2:7", ["my-host-2:7"]),
        ("my-host:7-8", ["my-host:7", "my-host:8"]),
        ("[::1]:7-8", ["[::1]:7", "[::1]:8"]),
        ("[fe80::1%eth-0]:7", ["[fe80::1%eth-0]:7"]),
    ],
)
def test_a_range_stands_for_its_ports(text: str, addresses: list[str]) -> None:
    assert expand_port_range(text) == addresses


@pytest.mark.parametrize("text", ["a:9-7", "a:1-5000", "a:7-x", "a:x-7", "a:7-", "a-b", "a:70000-70001", "a:-7"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        expand_port_range(text)


@pytest.fixture
def taken() -> Iterator[tuple[int, ExitStack]]:
    """The first of a few ports in a row, itself taken by somebody who never answers."""
    with ExitStack() as opened:
        sock = opened.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1], opened


def make(rank: int, first: int, **changes: object) -> Settings:
    given = {"rank": rank, "size": 2, "coordinator": f"127.0.0.1:{first}-{min(first + 9, 65535)}", "key": KEY}
    return Settings(**{**given, "start_s": 10.0, **changes})  # type: ignore[arg-type]


def test_rank_0_takes_the_first_free_port_and_the_others_find_it(taken: tuple[int, ExitStack]) -> None:
    sums: list[float] = []

    def one(rank: int) -> None:
        world = World(join_round(make(rank, taken[0]), (), 0))
        sums.append(float(world.group.allreduce(np.ones(1))[0]))
        world.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sums == [2.0, 2.0]


def test_the_coordinator_of_another_job_is_passed_by(taken: tuple[int, ExitStack]) -> None:
    settings = make(0, taken[0])
    other = host_coordinator(settings, JobKey(new_job_key()))
    mine = host_coordinator(settings, JobKey(KEY))
    try:
        assert other.address != mine.address
        line, control = find_coordinator(settings.coordinator, settings, JobKey(KEY), round=0, deadline=Deadline(10))
        line.close()
        assert control.startswith("127.0.0.1:")
    finally:
        mine.close()
        other.close()


def test_when_nobody_is_there_the_range_is_named_in_time() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # nobody listens
        first = sock.getsockname()[1]
        settings = make(1, first, coordinator=f"127.0.0.1:{first}-{first}", start_s=0.2)
        wide = make(1, first, start_s=0.2)
        for one in (settings, wide):
            with pytest.raises(StartFailed) as caught:
                join_round(one, (), 0)
            assert f"127.0.0.1:{first}" in str(caught.value)
    assert "did not find the coordinator of rank 0" in str(caught.value)


def test_a_wrong_key_everywhere_is_told_with_the_way_out(taken: tuple[int, ExitStack]) -> None:
    other = host_coordinator(make(0, taken[0]), JobKey(new_job_key()))
    try:
        settings = make(1, taken[0] + 1, start_s=0.3)
        with pytest.raises(StartFailed, match=r"refused the job's key.*the same RONDE_KEY, or a home directory"):
            join_round(settings, (), 0)
    finally:
        other.close()


def test_who_was_there_is_told_even_if_it_has_gone_since(taken: tuple[int, ExitStack]) -> None:
    other = host_coordinator(make(0, taken[0]), JobKey(new_job_key()))
    told: list[str] = []

    def search() -> None:
        with pytest.raises(StartFailed) as caught:
            join_round(make(1, taken[0] + 1, start_s=1.0), (), 0)
        told.append(str(caught.value))

    thread = threading.Thread(target=search)
    thread.start()
    while not other._listener.num_refused and thread.is_alive():
        pass
    other.close()
    thread.join()
    assert "refused the job's key" in told[0]


def test_a_range_without_a_free_port_is_told(taken: tuple[int, ExitStack]) -> None:
    with pytest.raises(StartFailed, match="cannot listen on"):
        host_coordinator(make(0, taken[0], coordinator=f"127.0.0.1:{taken[0]}-{taken[0]}"), JobKey(KEY))


def test_an_unknown_name_is_told_at_once() -> None:
    settings = make(1, 1, coordinator="no-such-host.invalid:7-9", start_s=30.0)
    deadline = Deadline(30)
    with pytest.raises(StartFailed, match="unknown"):
        find_coordinator(settings.coordinator, settings, JobKey(KEY), round=0, deadline=deadline)
    assert deadline.remaining_s > 20


def test_the_address_for_other_ranks_can_be_chosen() -> None:
    seen: dict[int, tuple[str, ...]] = {}

    def one(rank: int) -> None:
        changes = {"address": f"127.0.0.{rank + 2}", "coordinator": address}
        world = World(join_round(make(rank, 1, **changes), (), 0))
        seen[rank] = tuple(member.tcp_addresses[0].rpartition(":")[0] for member in world.topology.members)
        world.close()

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {0: ("127.0.0.2", "127.0.0.3"), 1: ("127.0.0.2", "127.0.0.3")}
