"""hvd among two real processes, started by horovodrun. One job runs all checks: starting one is dear."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest

from tests.commands import PROGRAMS, run_command
from tests.compat.checks import CHECKS
from tests.limits import LONG_S, LONG_TEST_S

NUM_RANKS = 2

pytestmark = pytest.mark.timeout(LONG_TEST_S)
# the first test waits for the job


@cache
def traces() -> dict[str, list[str]]:
    """By check and rank: what went wrong."""
    start = (str(PROGRAMS / "horovodrun"), "-np", str(NUM_RANKS), sys.executable)
    done = run_command([*start, "-m", "tests.compat.checks"], limit_s=LONG_S)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        label, _, said = line.partition(":")
        if label.endswith("<stdout>") and said.startswith("{"):
            told = json.loads(said)
            found.setdefault(told["check"], []).append(told["trace"])
    found["the end"] = ["" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stderr}"]
    return found


@pytest.mark.parametrize("name", [*CHECKS])
def test_on_two_ranks(name: str) -> None:
    told = traces().get(name, [])
    assert not any(told), "\n".join(told)
    assert len(told) == NUM_RANKS, f"not run to its end:\n{traces()['the end'][0]}"


def test_the_job_ends_well() -> None:
    assert traces()["the end"] == [""]
