"""Runs one function on several ranks at once, and reports which rank failed and how. Used by all tests with ranks."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeAlias

from ronde.comm.backends.base import Backend
from ronde.comm.control_thread import JoinedRound
from ronde.comm.joining import Groups
from ronde.comm.world import World
from ronde.coordinator.inprocess import InProcessCoordinator
from ronde.net.messages import LeaveReason
from ronde.settings import Settings
from ronde.types import Member, Topology
from tests.conformance.threads_backend import ThreadsBackend
from tests.limits import OPERATION_S, RANK_S

Body: TypeAlias = Callable[[World], Any]

QUICK = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0)
"""What hangs should not hang for long."""


class RanksFailed(AssertionError):
    """What went wrong, rank by rank."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failures.items())))


def run_threads(
    size: int,
    body: Body,
    *,
    groups: Groups = (),
    settings: Settings = QUICK,
    make_backend: Callable[[ThreadsBackend], Backend] = lambda shared: shared,
) -> list[Any]:
    """Run the body in a world per rank; what each returned. Each rank has a backend of its own if one is made."""
    rounds = join_in_process(size, groups, settings)
    for joined_round in rounds:
        assert isinstance(joined_round.backend, ThreadsBackend)
        joined_round.backend = make_backend(joined_round.backend)
    results: list[Any] = [None] * size
    failures: dict[int, str] = {}

    def one(rank: int) -> None:
        try:
            world = World(rounds[rank], groups)
            try:
                results[rank] = body(world)
            except BaseException as error:
                world.close(LeaveReason.FAILED, f"the test failed here: {error}")
                raise
            world.close()
        except BaseException:
            failures[rank] = traceback.format_exc()

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RANK_S)
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            failures.setdefault(rank, "it hangs")
    if failures:
        raise RanksFailed(failures)
    return results


def join_in_process(size: int, groups: Groups, settings: Settings) -> list[JoinedRound]:
    """What joining gives to ranks that are threads: one coordinator and one backend for all of them."""
    given = [settings.replace(rank=rank, size=size) for rank in range(size)]
    members = tuple(Member(rank, "here", 1, "") for rank in range(size))
    coordinator, backend = InProcessCoordinator(members, groups, given[0]), ThreadsBackend()
    return [
        JoinedRound(given[rank], Topology(members, rank), coordinator.client(rank), backend) for rank in range(size)
    ]
