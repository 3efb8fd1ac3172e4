"""Elastic jobs of real processes, started by horovodrun and horovod.run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import horovod
from tests.commands import PROGRAMS, ROOT, run_command
from tests.limits import LONG_S, LONG_TEST_S

pytestmark = pytest.mark.timeout(LONG_TEST_S)
SCRIPT = ROOT / "tests/compat/scripts/elastic_weight.py"


class ElasticJob:
    """A job of the script elastic_weight, and what its processes wrote."""

    def __init__(self, log: Path, plan: list[list[object]], *flags: str) -> None:
        command: list[str | Path] = [PROGRAMS / "horovodrun", *flags, sys.executable, SCRIPT, log, json.dumps(plan)]
        self.done: subprocess.CompletedProcess[str] = run_command(command, limit_s=LONG_S)
        self.said = f"exit code {self.done.returncode}\n{self.done.stdout}\n{self.done.stderr}"
        lines = log.read_text().splitlines() if log.exists() else []
        self.events: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def of(self, event: str, worker: int, *fields: str) -> list[tuple[Any, ...]]:
        """These fields of a worker's events of one kind."""
        mine = [each for each in self.events if (each["event"], each["worker"]) == (event, worker)]
        return [tuple(each[field] for field in fields) for each in mine]


def discovery(tmp_path: Path, hosts: str) -> tuple[str, ...]:
    """Flags for a script that prints the hosts in a file, which the processes may change."""
    (tmp_path / "log.hosts").write_text(hosts)
    script = tmp_path / "discover.sh"
    script.write_text(f"cat {tmp_path}/log.hosts\n")  # without #!, as Horovod allows
    script.chmod(0o755)
    return ("--host-discovery-script", str(script))


def test_a_killed_process_costs_the_batches_since_the_commit_and_is_replaced(tmp_path: Path) -> None:
    plan: list[list[object]] = [["kill", 5, 1], ["wait", 8, 2]]
    job = ElasticJob(tmp_path / "log", plan, "-np", "2", "--min-np", "1", "--max-np", "2")
    assert job.done.returncode == 0, job.said
    trains = job.of("train", 0, "size", "batch", "weight")
    assert trains[0] == (2, 0, 0.0)
    assert all(batch == -weight and batch % 2 == 0 for _, batch, weight in trains)
    assert (1, 4, -4.0) in trains or (2, 4, -4.0) in trains, "the last commit was that of batch 4"
    assert job.of("reset", 0, "size")[0] in [(1,), (2,)]
    assert job.of("end", 0, "rank", "size", "weight") == [(0, 2, -10.0)]
    newest = max(each["worker"] for each in job.events)
    assert newest > 1
    assert job.of("end", newest, "rank", "size", "weight") == [(1, 2, -10.0)]
    assert job.of("train", newest, "batch")[-1][0] in (4, 6, 8), "it has taken the state of the other one"


def test_processes_come_with_their_slots_and_go_with_them(tmp_path: Path) -> None:
    plan: list[list[object]] = [
        *(["hosts", 2, "localhost:3"], ["wait", 2, 3]),
        *(["hosts", 6, "localhost:1"], ["wait", 6, 1]),
    ]
    flags = (*discovery(tmp_path, "localhost:2"), "--reset-limit", "0")  # nothing is lost
    job = ElasticJob(tmp_path / "log", plan, "-np", "2", "--min-np", "1", "--max-np", "3", *flags)
    assert job.done.returncode == 0, job.said
    sizes = [size for size, _ in job.of("train", 0, "size", "batch")]
    assert (sizes[0], max(sizes), sizes[-1]) == (2, 3, 1)
    assert all(batch in (0, 2, 6) for _, batch in job.of("train", 0, "size", "batch")), "nothing is done again"
    assert job.of("end", 0, "rank", "size") == [(0, 1)]
    assert not job.of("end", 1, "rank"), "it has left"


def test_a_job_waits_for_enough_slots(tmp_path: Path) -> None:
    flags = discovery(tmp_path, "")
    script = tmp_path / "discover.sh"
    script.write_text(f"echo >> {tmp_path}/calls; [ $(wc -l < {tmp_path}/calls) -lt 3 ] || echo localhost:2\n")
    job = ElasticJob(tmp_path / "log", [], "-np", "2", *flags)
    assert job.done.returncode == 0, job.said
    assert [job.of("end", worker, "size") for worker in (0, 1)] == [[(2,)], [(2,)]]


@pytest.mark.parametrize(
    ("flags", "loss", "reason"),
    [
        (("--min-np", "2", "--reset-limit", "0"), ["kill", 3, 1], "the reset limit"),
        (("--min-np", "1"), ["raise", 3, 0, 1], "ValueError: as planned"),
    ],
    ids=["too often", "all by themselves"],
)
def test_a_job_that_cannot_go_on_fails(flags: tuple[str, ...], loss: list[object], reason: str, tmp_path: Path) -> None:
    job = ElasticJob(tmp_path / "log", [loss], "-np", "2", *flags)
    assert job.done.returncode != 0
    assert reason in job.done.stderr, job.said
    assert not any(each["event"] == "end" for each in job.events)


def test_a_job_whose_first_discovery_fails_ends_at_once(tmp_path: Path) -> None:
    flags = ("--host-discovery-script", str(tmp_path / "nothing.sh"))
    job = ElasticJob(tmp_path / "log", [], "-np", "2", "--min-np", "1", *flags)
    assert job.done.returncode != 0
    assert "nothing.sh" in job.done.stderr
    assert not job.events


def test_a_function_runs_in_an_elastic_job(tmp_path: Path) -> None:
    def place() -> tuple[int, int]:
        import horovod.torch as hvd

        hvd.init()
        return hvd.rank(), hvd.size()

    results = horovod.run(place, num_proc=2, min_num_proc=2, max_num_proc=2, hosts="localhost:4")
    assert results == [(0, 2), (1, 2)]
