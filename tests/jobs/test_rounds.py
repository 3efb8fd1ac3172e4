"""init, collectives, shutdown, two hundred times in one pair of processes: nothing of a round stays behind."""

from __future__ import annotations

import statistics

import pytest

from tests.jobs.kit import hosted_by_rank_0, start_ranks
from tests.limits import promised_s

ROUNDS = 200
SETTLED = 20
"""After so many rounds every allocator has what it needs."""
GROWTH_BYTES = 4 << 20
ROUND_S = 0.5
"""Of init, collectives and shutdown together; about 0.04 s on a machine of 2 cores."""


@pytest.mark.parametrize("host", ["launcher", "rank 0"])
def test_nothing_of_a_round_stays_behind(host: str, caplog: pytest.LogCaptureFixture) -> None:
    with start_ranks("rounds", 2) as job:
        settings = {} if host == "launcher" else hosted_by_rank_0()
        job.send((0, 1), rounds=ROUNDS, look_after=[1, SETTLED, ROUNDS], settings=settings)
        over = job.receive_all((0, 1), "over")
        assert job.wait() == [0, 0], job.printed()
        assert caplog.text + job.output(0) + job.output(1) == "", "when all is well, nobody complains"
    for rank, message in over.items():
        first, settled, last = message["held"]
        for what in ("files", "threads", "shared"):
            assert last[what] == first[what], (rank, what)
        assert last["shared"] == []
        assert last["num_maps"] <= settled["num_maps"] + 2, rank
        growth = last["rss_bytes"] - settled["rss_bytes"]
        assert growth < GROWTH_BYTES, f"rank {rank} grew by {growth} bytes in {ROUNDS - SETTLED} rounds"
    assert statistics.median(over[0]["took"]) < promised_s(ROUND_S)
