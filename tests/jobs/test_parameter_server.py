"""Parameter servers in real processes that are killed and stopped: every sample is in the weights exactly once."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from ronde.settings import Settings
from tests.commands import PROGRAMS, ROOT, run_command
from tests.jobs.kit import LocalRanks, script, start_ranks
from tests.limits import PATIENCE_S, promised_s

SETTINGS = Settings(stall_s=0.0)
NUM_SAMPLES = 24_000
"""Of float64, so that the tensors of the script are several parts, on all servers."""


def begin(ranks: LocalRanks, servers: list[int], workers: list[int], **wanted: Any) -> None:
    defaults = {"num_samples": NUM_SAMPLES, "batch": 400, "epochs": 1, "mode": "async"}
    for rank in {*servers, *workers}:
        ranks.send([rank], **{**defaults, "servers": servers, "workers": workers, **wanted})


def check_trained(ranks: LocalRanks, workers: list[int]) -> dict[int, dict[str, Any]]:
    trained = ranks.receive_all(workers, "trained")
    assert all(report["exact"] for report in trained.values()), trained
    return trained


@pytest.mark.parametrize("mode", ["bounded", "dynamic", "async"])
def test_all_ranks_are_servers_and_workers_and_use_every_sample_once(mode: str) -> None:
    everyone = [0, 1, 2]
    with start_ranks("parameter_server", 3, settings=SETTINGS) as ranks:
        begin(ranks, everyone, everyone, mode=mode, epochs=2)
        trained = check_trained(ranks, everyone)
        assert sum(report["steps"] for report in trained.values()) == 2 * NUM_SAMPLES // 400
        ranks.send(everyone)
        ranks.receive_all(everyone, "closed")
        assert ranks.wait() == [0, 0, 0]


def run_with_a_victim(servers: list[int], workers: list[int], victim: int, after: int, mode: str) -> None:
    everyone = sorted({*servers, *workers})
    survivors = [rank for rank in everyone if rank != victim]
    with start_ranks("parameter_server", len(everyone), settings=SETTINGS) as ranks:
        begin(ranks, servers, workers, victim=victim, after=after, mode=mode)
        trained = check_trained(ranks, [rank for rank in survivors if rank in workers])
        ranks.send(survivors)
        ranks.receive_all(survivors, "closed")
        codes = ranks.wait()
        assert codes[victim] == -signal.SIGKILL and all(codes[rank] == 0 for rank in survivors)
        for report in trained.values():
            assert victim not in report["servers"]


MOMENTS = random.Random(14).sample(range(3, 160), 6)
"""How many messages a victim sends before it dies. A push is about a dozen, of a worker and of a server."""


@pytest.mark.parametrize("after", MOMENTS)
def test_a_server_killed_at_any_moment_loses_no_update(after: int) -> None:
    run_with_a_victim([2, 3, 4], [0, 1], 2 + after % 3, after, ["async", "bounded"][after % 2])


@pytest.mark.parametrize("after", MOMENTS[:3])
def test_a_rank_killed_that_is_server_and_worker_costs_its_unfinished_step_only(after: int) -> None:
    run_with_a_victim([0, 1, 2], [0, 1, 2], after % 3, after, "async")


@pytest.mark.parametrize("after", MOMENTS[3:5])
def test_a_worker_killed_at_any_moment_costs_its_unfinished_step_only(after: int) -> None:
    run_with_a_victim([2, 3], [0, 1, 4], 4, after, "bounded")


@pytest.mark.parametrize("victim", [2, 3])
def test_a_killed_server_is_replaced_within_a_second(victim: int) -> None:
    workers, survivors = [0, 1], [rank for rank in range(5) if rank != victim]
    with start_ranks("parameter_server", 5, settings=SETTINGS) as ranks:
        begin(ranks, [2, 3, 4], workers, report_at=5)
        ranks.receive_all(workers, "training")
        os.kill(ranks.pids[victim], signal.SIGKILL)
        ranks.send(workers)
        trained = check_trained(ranks, workers)
        assert max(report["longest_s"] for report in trained.values()) < promised_s(1.0)
        ranks.send(survivors)
        ranks.receive_all(survivors, "closed")


@pytest.mark.parametrize("victim", [2, 3])
def test_a_server_that_was_stopped_is_refused_when_it_wakes(victim: int) -> None:
    workers, everyone = [0, 1], range(5)
    with start_ranks("parameter_server", 5, settings=SETTINGS) as ranks:
        begin(ranks, [2, 3, 4], workers, report_at=5, suspect_s=promised_s(1.0))
        ranks.receive_all(workers, "training")
        os.kill(ranks.pids[victim], signal.SIGSTOP)
        ranks.send(workers)
        trained = check_trained(ranks, workers)
        os.kill(ranks.pids[victim], signal.SIGCONT)
        ranks.send(everyone)
        closed = ranks.receive_all(everyone, "closed")
        assert ranks.wait() == [0] * 5
    for report in (*trained.values(), *closed.values()):
        assert victim not in report["servers"]


def test_an_elastic_job_of_ronde_run_goes_on_when_a_rank_is_killed() -> None:
    """What is started in the place of the lost one trains with the others, unless training is over before it comes."""
    command = [str(PROGRAMS / "ronde"), "run", "-np", "3", "--min-np", "1", *script("parameter_server_run")]
    done = run_command(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 is lost: killed by signal 9 (SIGKILL)" in done.stderr
    assert done.stdout.count("exact: True") >= 1 and "exact: False" not in done.stdout
    assert "round 1" not in done.stderr
