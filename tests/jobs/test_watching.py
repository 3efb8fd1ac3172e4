"""A running job is watched: who holds up the others, and where all of them are."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ronde.coordinator.queries import OnStacks
from ronde.launch.driver.monitor import (
    JobStatus,
    MonitorServer,
    RankStatus,
    find_job,
    make_job_status,
    query_stacks,
    query_status,
)
from ronde.observe.activity import JobActivity
from ronde.observe.stacks import RankStack, group_stacks
from ronde.observe.stragglers import attribute_waits
from ronde.types import Deadline
from tests.jobs.kit import LocalRanks, start_ranks
from tests.jobs.scripts import watching
from tests.limits import PATIENCE_S, promised_s
from tests.local_job import collect_stacks

SIZE = 3
SLOW = 2
STEPS = 12
WAITING = "# the line where all of them wait"
CLOSE_S = 0.25
"""On a machine that is busy with other things, threads come later to an operation than the script has told them to."""

Times = list[tuple[int, int]]


def all_waiting(take: Callable[[], tuple[RankStack, ...]]) -> tuple[RankStack, ...]:
    """The stacks, as soon as every rank has come from telling the test to waiting for it."""
    deadline = Deadline(PATIENCE_S)
    while True:
        stacks = take()
        if deadline.expired or all(WAITING in each.stack for each in stacks):
            return stacks
        time.sleep(0.02)


def expected_s(times: dict[int, Times]) -> list[float]:
    """Per rank, how long the others waited for it, from when each says that it came and was blocked."""
    total = [0.0] * SIZE
    for each in zip(*times.values(), strict=True):
        ready = max(came for came, _ in each)
        blocked = [(began, ready) for _, began in each]
        for rank, waited_ns in attribute_waits({rank: came for rank, (came, _) in enumerate(each)}, blocked).items():
            total[rank] += waited_ns / 1e9
    return total


def finish(job: LocalRanks) -> None:
    job.send(job.pids)
    assert set(job.wait()) == {0}, job.printed()


def until(job: LocalRanks, condition: Callable[[JobActivity], bool]) -> JobActivity:
    """The activity as soon as they fulfil the condition: ranks tell once per second."""
    deadline = Deadline(PATIENCE_S)
    while not condition(activity := job.coordinator.activity()):
        assert not deadline.expired, activity
        time.sleep(0.02)
    return activity


@pytest.mark.parametrize("how", ["ordered", "named", "planned"])
def test_the_rank_that_computes_longer_is_named_with_the_time_it_cost(how: str) -> None:
    with start_ranks("watching", SIZE) as job:
        job.send(range(SIZE), steps=STEPS, slow=SLOW, how=how)
        begun = {rank: message["operations"] for rank, message in job.receive_all(range(SIZE), "ready").items()}
        before = until(job, lambda activity: all(rank.operations >= begun[rank.rank] for rank in activity.ranks))
        job.send(range(SIZE))
        times = {rank: message["times"] for rank, message in job.receive_all(range(SIZE), "done").items()}
        expected = expected_s(times)
        assert expected[SLOW] > 2 * STEPS * (watching.LATE_S - watching.OVERLAP_S) * 0.9 / promised_s(1.0)
        activity = until(job, lambda activity: all(rank.steps == STEPS for rank in activity.ranks))
        finish(job)
        after = job.coordinator.activity()
        found = [rank.held_up_s - was.held_up_s for rank, was in zip(after.ranks, before.ranks, strict=True)]
    for rank in range(SIZE):
        assert found[rank] == pytest.approx(expected[rank], rel=0.25, abs=promised_s(CLOSE_S)), (found, expected)
    assert activity.slowest == SLOW
    slow, *others = sorted(activity.ranks, key=lambda rank: rank.rank != SLOW)
    assert all(rank.waiting is not None and slow.waiting is not None for rank in others)
    assert all((rank.waiting or 0) > 2 * (slow.waiting or 0) for rank in others), activity


@pytest.mark.parametrize("how", ["ordered", "named", "planned"])
def test_a_job_that_hangs_shows_on_whom(how: str) -> None:
    with start_ranks("watching", SIZE) as job:
        job.send(range(SIZE), steps=1, slow=SLOW, how=how, hangs=True)
        job.receive_all(range(SIZE), "ready")
        job.send(range(SIZE))
        activity = until(job, lambda activity: activity.slowest is not None)
        others = [rank for rank in activity.ranks if rank.doing]
        assert activity.slowest == SLOW and others
        for rank in others:
            assert rank.rank != SLOW and f" for rank {SLOW} in " in rank.doing
        job.send([SLOW])
        job.receive_all(range(SIZE), "done")
        finish(job)


def test_a_job_tells_others_of_itself() -> None:
    with start_ranks("watching", SIZE) as job:
        began = time.monotonic()

        def status() -> JobStatus:
            facts = {
                rank: RankStatus(rank=rank, state="running", host="here", pid=job.pids[rank]) for rank in range(SIZE)
            }
            activity = job.coordinator.activity()
            return make_job_status("watched", ["python"], activity, facts, time.monotonic() - began)

        folder = Path(job.env["TEST_SOCKET"]).parent

        def stacks(limit_s: float, on_done: OnStacks) -> None:
            job.coordinator.request_stacks(Deadline(limit_s), on_done)

        with MonitorServer("watched", status, stacks, thread=job.coordinator.thread, jobs_dir=folder):
            found = find_job("watched", folder)
            before = query_stacks(found)
            assert {stack.why for stack in before} == {"has not called ronde.init() yet"}
            job.send(range(SIZE), steps=5, slow=SLOW, how="ordered")
            job.receive_all(range(SIZE), "ready")
            job.send(range(SIZE))
            job.receive_all(range(SIZE), "done")
            until(job, lambda activity: all(rank.steps == 5 for rank in activity.ranks))
            status_now = query_status(found)
            assert [(rank.state, rank.host, rank.steps) for rank in status_now.ranks] == [("running", "here", 5)] * SIZE
            ((ranks, stack),) = group_stacks(all_waiting(lambda: query_stacks(found)))
            assert ranks == tuple(range(SIZE))
            assert stack.line.startswith("control.py:") and WAITING in stack.stack
        finish(job)


def test_a_job_of_one_rank_is_watched_too() -> None:
    with start_ranks("watching", 1) as job:
        job.send([0], steps=5, slow=SLOW, how="ordered")
        job.receive(0, "ready")
        job.send([0])
        job.receive(0, "done")
        activity = until(job, lambda activity: activity.ranks[0].steps == 5)
        assert activity.ranks[0].state == "running"
        (stack,) = all_waiting(lambda: collect_stacks(job.coordinator, Deadline(PATIENCE_S)))
        assert WAITING in stack.stack
        finish(job)
