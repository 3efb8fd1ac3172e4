"""How ranks find each other, with real sockets: ranks are threads here, each with a world of its own."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ronde.comm.joining import join_round
from ronde.comm.world import World
from ronde.errors import PeerLost, StartFailed
from ronde.net.keys import new_job_key
from ronde.settings import Settings


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def start(
    size: int, body: Callable[[World], Any], changes: dict[int, dict[str, Any]] | None = None, *, start_s: float = 10.0
) -> list[Any]:
    """Results or errors of the ranks of one job, rank 0 hosting the coordinator."""
    given = {"coordinator": free_address(), "key": new_job_key(), "start_s": start_s, "shutdown_s": 2.0}
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        mine = Settings(**{**given, "rank": rank, "size": size, **(changes or {}).get(rank, {})})
        try:
            world = World(join_round(mine, (), 0))
            try:
                results[rank] = body(world)
            finally:
                world.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def use(world: World) -> tuple[float, float, int, int]:
    x = np.ones(3)
    by_name, in_order = world.group.allreduce(x, name="x"), world.group.allreduce(x)
    return by_name[0], in_order[0], world.topology.local_rank, world.topology.cross_rank


def test_ranks_meet_at_the_coordinator_of_rank_0() -> None:
    assert start(3, use) == [(3, 3, 0, 0), (3, 3, 1, 0), (3, 3, 2, 0)]


def test_ranks_of_different_hosts_meet_too() -> None:
    hosts = {rank: {"host": f"host-{rank % 2}"} for rank in range(3)}
    assert start(3, use, hosts) == [(3, 3, 0, 0), (3, 3, 0, 1), (3, 3, 1, 0)]


def test_a_job_of_several_needs_to_know_where_and_how() -> None:
    with pytest.raises(ValueError, match=r"a job of 2 ranks needs coordinator \(RONDE_COORDINATOR\)"):
        join_round(Settings(size=2), (), 0)
    with pytest.raises(ValueError, match=r"needs key \(RONDE_KEY\)"):
        join_round(Settings(size=2, coordinator="127.0.0.1:1"), (), 0)


def test_a_coordinator_that_is_not_there_is_told_in_time() -> None:
    settings = Settings(size=2, rank=1, coordinator=free_address(), key=new_job_key(), start_s=0.3)
    with pytest.raises(StartFailed):
        join_round(settings, (), 0)


def test_ranks_that_do_not_come_are_named() -> None:
    settings = Settings(size=3, coordinator=free_address(), key=new_job_key(), start_s=0.5)
    with pytest.raises(StartFailed, match=r"ranks 1.* of 3 did not join"):
        join_round(settings, (), 0)


def test_a_wrong_key_is_told_at_once() -> None:
    results = start(2, use, {1: {"key": new_job_key()}}, start_s=2.0)
    assert all(isinstance(result, StartFailed) for result in results), results
    assert "key" in str(results[1])


def test_ranks_that_disagree_on_the_size_are_all_told() -> None:
    results = start(2, use, {1: {"size": 3}}, start_s=2.0)
    assert [type(result) for result in results] == [StartFailed, StartFailed]
    words = "ranks disagree on the number of ranks|rank 1 was told of 3 ranks, the coordinator of 2"
    assert all(re.search(words, str(result)) for result in results)


def test_who_gives_up_is_named_with_its_reason() -> None:
    def body(world: World) -> str:
        if world.rank == 1:
            world.close(orderly=False, why="ValueError: no more")
            return "left"
        with pytest.raises(PeerLost) as caught:
            world.group.allreduce(np.ones(3))
        return str(caught.value)

    told, left = start(2, body)
    assert left == "left"
    assert "rank 0 lost rank 1" in told and "ValueError: no more" in told
