"""A training run whose rank 0 is killed while it writes a checkpoint goes on, with another number of ranks, from the
checkpoint before, and uses every sample exactly once, although loaders had fetched further ahead.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from ronde.settings import Settings
from tests.jobs.kit import start_ranks
from tests.limits import LONG_S, LONG_TEST_S

pytestmark = pytest.mark.timeout(LONG_TEST_S)

SETTINGS = Settings(stall_s=0.0)
NUM_SAMPLES = 52
"""16 of them in 4 steps of 2 ranks with 2 each, 36 in 6 steps of 3 ranks."""


def test_a_run_that_died_in_a_checkpoint_goes_on_exactly_with_more_ranks(tmp_path: Path) -> None:
    with start_ranks("torch_parts", 2, settings=SETTINGS, patience_s=LONG_S) as job:
        job.send((0, 1), path=str(tmp_path), num_samples=NUM_SAMPLES, die_at=4)
        first = job.receive_all((0, 1), "trained")
        assert job.receive(1, "lost")["peer"] == 0
        codes = job.wait()
    assert codes[0] == -9 and all(message["step"] == 4 for message in first.values())
    left = {path.name for path in tmp_path.iterdir()}
    assert ".unfinished-step-000000000005.data" in left, "rank 0 died in the middle of it"
    assert "step-000000000005.json" not in left

    ranks = (0, 1, 2)
    with start_ranks("torch_parts", 3, settings=SETTINGS, patience_s=LONG_S) as job:
        job.send(ranks, path=str(tmp_path), num_samples=NUM_SAMPLES, die_at=None)
        second = job.receive_all(ranks, "trained")
        over = job.receive_all(ranks, "over")
        assert job.wait() == [0, 0, 0], job.printed()
    for message in second.values():
        assert (message["restored"], message["step"], message["epoch"]) == (4, 10, 1)
    used = chain(*(message["used"] for message in (*first.values(), *second.values())))
    assert sorted(used) == list(range(NUM_SAMPLES))
    assert over[0]["weights"] == over[1]["weights"] == over[2]["weights"]
    assert over[0]["metrics"] == {"samples": 12.0}
