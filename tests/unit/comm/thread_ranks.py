"""Ranks of one job as threads, with real sockets; rank 0 hosts the coordinator."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from ronde.comm.joining import join_round
from ronde.comm.world import World
from ronde.net.keys import new_job_key
from ronde.settings import Settings

KEY = new_job_key()


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def run_ranks(
    size: int,
    body: Callable[[World], Any],
    changes: Callable[[int], dict[str, Any]] = lambda rank: {},
    *,
    coordinator: str = "",
    start_s: float = 10.0,
) -> list[Any]:
    """Results or errors of the ranks of one job, rank 0 hosting the coordinator."""
    given = {"coordinator": coordinator or free_address(), "key": KEY, "start_s": start_s, "shutdown_s": 2.0}
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            world = World(join_round(Settings(**{**given, "rank": rank, "size": size, **changes(rank)}), (), 0))
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
