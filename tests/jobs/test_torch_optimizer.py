"""The distributed optimizer of PyTorch among real processes. Each job runs all of its checks: starting one is dear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from ronde.settings import Settings
from tests.jobs.kit import start_ranks
from tests.jobs.scripts.torch_optimizer import MODULES
from tests.jobs.torch_checks.checks import CHECKS
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S

assert MODULES
pytestmark = pytest.mark.timeout(LONG_TEST_S)  # the first test of a job runs all of its checks

JOBS: dict[str, tuple[int, Mapping[int, Sequence[str]]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks again": (2, {}),
    "2 hosts": (2, {1: ["env", "RONDE_HOST=another"]}),
    "4 ranks": (4, {}),
}
"""How many ranks, and what some of them are started with."""
CURVES = [name for name, check in CHECKS.items() if "1 rank" in check.jobs]


@cache
def results(job: str) -> dict[str, dict[str, Any]]:
    """How the checks of a job ended, on the rank that has more to tell."""
    size, before = JOBS[job]
    wanted = [name for name, check in CHECKS.items() if job in check.jobs]
    settings = Settings(operation_s=OPERATION_S, start_s=OPERATION_S)
    one_thread = {"OMP_NUM_THREADS": "1"}
    with start_ranks(
        "torch_optimizer", size, settings=settings, env=one_thread, prefixes=before, patience_s=LONG_S
    ) as ranks:
        ranks.send(range(size), checks=wanted)
        over = ranks.receive_all(range(size), "over")
        ranks.wait()
    ended: dict[str, dict[str, Any]] = {}
    for name in wanted:
        by_rank = {
            rank: message["results"].get(name, {"failed": "an earlier one failed"}) for rank, message in over.items()
        }
        failed = {rank: each["failed"] for rank, each in by_rank.items() if "failed" in each}
        ended[name] = (
            {"failed": "\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items())} if failed else by_rank[0]
        )
    return ended


@pytest.mark.parametrize(("job", "name"), [(job, name) for job in JOBS for name in CHECKS if job in CHECKS[name].jobs])
def test_among_processes(job: str, name: str) -> None:
    ended = results(job)[name]
    assert "failed" not in ended, ended["failed"]


@pytest.mark.parametrize("name", CURVES)
def test_one_two_and_four_ranks_learn_the_same(name: str) -> None:
    one = results("1 rank")[name]["value"]["losses"]
    rounding = 0.03 if "bfloat16" in name else 1e-5
    for job in ("2 ranks", "4 ranks", "2 hosts"):
        assert results(job)[name]["value"]["losses"] == pytest.approx(one, rel=rounding), job
    assert one[-1] < 0.9 * one[1]


@pytest.mark.parametrize("name", CURVES)
def test_another_run_learns_the_same_bit_by_bit(name: str) -> None:
    assert results("2 ranks")[name]["value"] == results("2 ranks again")[name]["value"]
