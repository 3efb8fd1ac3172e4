"""Workers and ranks: a process keeps its identity, its rank is that of one round, and what comes late from an earlier
round is never taken for something of the present one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ronde.coordinator.server import CoordinatorServer
from ronde.net.keys import JobKey, new_job_key
from ronde.settings import Settings
from ronde.types import Deadline
from tests.jobs.kit import ControlledRanks, hosted_by_rank_0, start_ranks
from tests.limits import PATIENCE_S

KEY = new_job_key()


@contextmanager
def hosting(host: str, size: int) -> Iterator[dict[str, object]]:
    """The settings of ranks whose coordinator is in this process, or a thread of rank 0."""
    common = {"size": size, "key": KEY, "start_s": PATIENCE_S, "operation_s": PATIENCE_S}
    if host == "rank 0":
        yield {**common, **hosted_by_rank_0()}
        return
    coordinator = CoordinatorServer("127.0.0.1", 0, size, JobKey(KEY), settings=Settings(), rounds=None)
    coordinator.start()
    try:
        yield {**common, "coordinator": coordinator.address, "coordinator_hosted": True}
    finally:
        coordinator.close()


def start_round(
    job: ControlledRanks, order: tuple[int, ...], settings: dict[str, object], leaving: tuple[int, ...] = ()
) -> dict[int, dict[str, Any]]:
    """Process order[rank] becomes the rank. Nobody waits until all of those that leave the round before have left."""
    job.send(leaving, do="shutdown")
    for rank, process in enumerate(order):
        job.send([process], do="init", settings={**settings, "rank": rank})
    job.receive_all(leaving, "out")
    return job.receive_all(order, "in")


def check_round(job: ControlledRanks, order: tuple[int, ...]) -> None:
    job.send(order, do="use")
    for process, used in job.receive_all(order, "used").items():
        before = order[order.index(process) - 1]
        assert used["numbers"] == [list(order)] * 3
        assert used["before"] == before


@pytest.mark.parametrize("host", ["launcher", "rank 0"])
def test_ranks_may_be_others_in_the_next_round(host: str) -> None:
    with start_ranks("workers", 2) as job, hosting(host, 2) as settings:
        rounds, identities = set(), set()
        leaving: tuple[int, ...] = ()
        for order in ((0, 1), (1, 0), (1, 0), (0, 1), (1, 0), (0, 1)):
            joined = start_round(job, order, settings, leaving)
            assert [joined[process]["rank"] for process in order] == [0, 1]
            identities.add(tuple(joined[process]["worker"] for process in (0, 1)))
            (round,) = {facts["round"] for facts in joined.values()}
            rounds.add(round)
            check_round(job, order)
            leaving = order
        assert len(rounds) == 6 and len(identities) == 1 and len(set(identities.pop())) == 2
        job.send((0, 1), do="stop")
        assert job.wait() == [0, 0], job.printed()


def test_a_process_that_speaks_after_its_round_ended_is_heard_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Process 1 was rank 1; process 2 is rank 1 now."""
    caplog.set_level(logging.INFO, "ronde.coordinator")
    with start_ranks("workers", 3) as job, hosting("launcher", 2) as settings:
        former = start_round(job, (0, 1), settings)
        check_round(job, (0, 1))
        present = start_round(job, (0, 2), settings, leaving=(0, 1))
        assert former[1]["worker"] != present[2]["worker"] and former[0]["worker"] == present[0]["worker"]
        listeners = [present[process]["listener"] for process in (0, 2)]
        job.send([1], do="speak late", key=KEY, control=present[0]["control"], listeners=listeners)
        for answer in job.receive(1, "spoke")["answers"]:
            assert "in another round of the job; the round of this rank is over" in answer
        deadline = Deadline(PATIENCE_S)
        while f"dropped LeaveRound of {former[1]['name']}" not in caplog.text:
            assert not deadline.expired
        check_round(job, (0, 2))
        job.send((0, 2), do="shutdown")
        job.receive_all((0, 2), "out")
        job.send((0, 1, 2), do="stop")
        assert job.wait() == [0, 0, 0], job.printed()
