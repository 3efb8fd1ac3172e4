"""A rank dies, in every way, in the middle of every operation: within a second every other one gets an error that
names it, can leave, and can join a new round. Nobody hangs.

Two moments. *waiting*: the others are known to wait in the operation for the victim, which does not come. *inside*: the
victim itself is in the middle of large operations. All operations of a job are under way at once, each in a group of
its own, so one job serves the tests of all of them, which look at its Outcome.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from ronde.coordinator.server import CoordinatorServer
from ronde.net.keys import JobKey, new_job_key
from ronde.settings import Settings
from tests.jobs.kit import LocalRanks, hosted_by_rank_0, start_ranks
from tests.jobs.scripts.faults import OPERATIONS
from tests.limits import promised_s

SETTINGS = Settings(stall_s=0.0)
TOLD_S = 1.0
"""From the death to the error, on every survivor. Who merely ends its script is missed a moment (LEAVING_S) later."""
LEAVING_S = 1.0

WORDS = {
    "SIGKILL": "killed by signal 9",
    "SIGSTOP, then SIGKILL": "killed by signal 9",
    "sys.exit": "exited without shutdown",
    "os._exit": "exited with code 0",
    "exception": "ArithmeticError: the victim's own mistake",
}
"""The ways to die, and the reason that the others get from the launcher or from the victim itself."""
SAID_ITSELF = {death: WORDS[death] for death in ("sys.exit", "exception")}
WITHOUT_LAUNCHER = {**dict.fromkeys(WORDS, "its process is gone"), **SAID_ITSELF}
"""… when nobody sees how it ended."""
COORDINATOR_GONE = {**dict.fromkeys(WORDS, "it hosted the coordinator, which is gone"), **SAID_ITSELF}
"""… when it hosted the coordinator."""

deaths = pytest.mark.parametrize("death", WORDS)
sizes = pytest.mark.parametrize("size", [2, 4])
moments = pytest.mark.parametrize("moment", ["waiting", "inside"])
operations = pytest.mark.parametrize("operation", OPERATIONS)


@dataclass(frozen=True)
class Outcome:
    """What became of a job in which a rank died."""

    victim: int
    died_at: float
    ended: dict[int, dict[str, Any]]
    """What each survivor reported."""
    rejoined: dict[int, dict[str, Any]]
    """By survivor: how leaving and the fresh job went."""
    second: float
    """How long a second was on this machine, at that time."""

    def check(self, operation: str, why: str) -> None:
        """Every survivor's operation has failed, in time and in the right words."""
        in_time_s = self.second * (TOLD_S + (LEAVING_S if why == WORDS["sys.exit"] else 0.0))
        for rank, message in self.ended.items():
            ended = message["operations"][operation]
            assert (ended["error"], ended["peer"], ended["why"]) == ("PeerLost", self.victim, why), (rank, ended)
            assert ended["at"] - self.died_at < in_time_s, f"rank {rank} after {ended['at'] - self.died_at:.3f} s"

    def check_rejoined(self) -> None:
        """Every survivor has left in time, and its next job has gone well."""
        for rank, rejoined in self.rejoined.items():
            in_time_s = self.second * LEAVING_S
            assert rejoined["leaving_s"] < in_time_s and rejoined["joining_s"] < in_time_s, (rank, rejoined)
            assert rejoined["total"] == 3 * len(self.rejoined)


@functools.cache
def let_a_rank_die(death: str, size: int, moment: str, victim: int, host: str = "launcher") -> Outcome:
    """Let a rank of a job die, and collect what the others report."""
    others = [rank for rank in range(size) if rank != victim]
    with start_ranks("faults", size, settings=SETTINGS) as job:
        settings = {} if host == "launcher" else hosted_by_rank_0()
        job.send(range(size), size=size, victim=victim, moment=moment, settings=settings)
        job.receive_all(range(size) if moment == "inside" else others, "under way")
        died_at = kill(job, victim, death)
        ended = job.receive_all(others, "ended")
        second = promised_s(1.0)
        rejoined = rejoin(job, others)
        codes = job.wait()
        assert [codes[rank] for rank in others] == [0] * len(others), job.printed()
    return Outcome(victim, died_at, ended, rejoined, second)


def kill(job: LocalRanks, victim: int, death: str) -> float:
    """End the victim; when that was."""
    if not death.startswith("SIG"):
        job.send([victim], death=death)
        return float(job.receive(victim, "dying")["at"])
    pid = job.pids[victim]
    if death.startswith("SIGSTOP"):
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at


def rejoin(job: LocalRanks, others: list[int]) -> dict[int, dict[str, Any]]:
    """Let the survivors leave, and be a job of their own."""
    key = new_job_key()
    with closing(CoordinatorServer("127.0.0.1", 0, len(others), JobKey(key), settings=SETTINGS)) as coordinator:
        coordinator.start()
        for index, rank in enumerate(others):
            place = {"rank": index, "size": len(others), "coordinator": coordinator.address, "key": key}
            job.send([rank], settings={**place, "coordinator_hosted": True})
        return job.receive_all(others, "rejoined")


@operations
@moments
@sizes
@deaths
def test_every_survivor_is_told_who_died(death: str, size: int, moment: str, operation: str) -> None:
    let_a_rank_die(death, size, moment, victim=size - 1).check(operation, WORDS[death])


@moments
@sizes
@deaths
def test_survivors_leave_at_once_and_begin_anew(death: str, size: int, moment: str) -> None:
    let_a_rank_die(death, size, moment, victim=size - 1).check_rejoined()


@pytest.mark.parametrize("victim", [0, 1])
@deaths
def test_the_same_goes_without_a_launcher(death: str, victim: int) -> None:
    outcome = let_a_rank_die(death, 3, "waiting", victim, host="rank 0")
    for operation in OPERATIONS:
        outcome.check(operation, (WITHOUT_LAUNCHER if victim else COORDINATOR_GONE)[death])
    outcome.check_rejoined()


@pytest.mark.parametrize("death", [death for death in WORDS if death not in SAID_ITSELF])
def test_ranks_that_wait_for_the_start_are_told_who_will_not_come(death: str) -> None:
    outcome = let_a_rank_die(death, 3, "start", victim=1)
    for rank, ended in outcome.ended.items():
        assert f"rank 1 ended before the round began ({WORDS[death]})" in ended["error"]
        assert ended["at"] - outcome.died_at < outcome.second * TOLD_S, rank
    outcome.check_rejoined()
