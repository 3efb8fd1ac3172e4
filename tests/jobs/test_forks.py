"""A forked child of a rank knows which rank that is and takes part in nothing. The rank and its peers do not notice the
child, neither what it tries nor how it ends."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ronde.settings import Settings
from tests.jobs.kit import hosted_by_rank_0, start_ranks
from tests.limits import LONG_S, LONG_TEST_S, promised_s

SETTINGS = Settings(stall_s=0.0)
NOTICED_S = 1.0
HOSTS = {"one host": ["here", "here"], "two hosts": ["here", "there"]}


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("ending", ["end of the script", "shutdown", "os._exit"])
def test_a_child_is_refused_and_its_parent_is_untouched(ending: str, hosts: str) -> None:
    with start_ranks("forks", 2, settings=SETTINGS) as job:
        for rank, host in enumerate(HOSTS[hosts]):
            job.send([rank], ending=ending, settings={"host": host})
        child = job.receive(0, "forked")
        for name, error in child["errors"].items():
            assert f"({child['pid']}) is a forked child of process {job.pids[0]}" in error, (name, error)
            assert "spawn" in error, (name, error)
        assert child["initialized"] and child["operations"] >= 1
        assert child["place"] == ([0, 2, 0, 1, 0] if hosts == "one host" else [0, 2, 0, 2, 0])
        job.send([1])
        for sums in job.receive_all([0, 1], "sums").values():
            assert sums["sums"] == [[2, 2, 2], [2, 2, 2], [2, 2, 2, 2], [2, 2, 2], [2, 2, 2], [2, 2, 2]]
        assert job.wait() == [0, 0]


def test_what_came_by_a_mailbox_stays_as_it_is_in_a_child() -> None:
    with start_ranks("forks", 2, settings=SETTINGS) as job:
        job.send([0, 1], keep=True)
        assert job.receive(0, "kept")["values"] == [2.0]
        assert job.wait() == [0, 0]


@pytest.mark.timeout(LONG_TEST_S)
def test_a_child_that_trains_on_is_refused_and_its_parent_has_the_right_gradients() -> None:
    with start_ranks("forks", 2, settings=SETTINGS, patience_s=LONG_S) as job:
        job.send([0, 1], train=True)
        child = job.receive(0, "forked")
        assert f"is a forked child of process {job.pids[0]}" in child["error"]
        assert child["kept"] == [1.5, 1.5, 1.5]
        for trained in job.receive_all([0, 1], "trained").values():
            assert trained["gradients"] == [[1.5, 1.5, 1.5], [2.5, 2.5, 2.5]]
        assert job.wait() == [0, 0]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.timeout(LONG_TEST_S)
def test_a_killed_rank_with_the_workers_of_a_loader_is_noticed_within_a_second(victim: int) -> None:
    """Nobody but the ranks is there: rank 0 hosts the coordinator, as under torchrun."""
    with start_ranks("forks", 3, settings=SETTINGS, patience_s=LONG_S) as job:
        settings = hosted_by_rank_0()
        for rank in range(3):  # rank 2 has the others at the other end of TCP connections
            job.send([rank], victim=victim, settings={**settings, "host": "there" if rank == 2 else "here"})
        others = [rank for rank in range(3) if rank != victim]
        job.receive_all(others, "waits")
        items = job.receive(victim, "loaded")["items"]
        assert len({pid for pid, *_ in items} - {job.pids[victim]}) == 2
        assert {tuple(place) for _, *place in items} == {(victim, victim, 2)}
        killed_at = time.monotonic()
        os.kill(job.pids[victim], signal.SIGKILL)
        for lost in job.receive_all(others, "lost").values():
            assert lost["peer"] == victim
            assert lost["at"] - killed_at < promised_s(NOTICED_S)
        codes = job.wait()
        assert [codes[rank] for rank in others] == [0, 0], job.printed()
