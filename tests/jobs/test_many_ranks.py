"""Dozens of ranks on this machine: every kind of operation gives the right numbers."""

from __future__ import annotations

import pytest

from ronde.settings import Settings
from tests.jobs.kit import start_ranks
from tests.limits import LONG_S, LONG_TEST_S

NUM_RANKS = 64


@pytest.mark.timeout(LONG_TEST_S)
@pytest.mark.parametrize("num_hosts", [1, 8])
def test_64_ranks_run_operations_of_all_kinds(num_hosts: int) -> None:
    settings = Settings(start_s=LONG_S, operation_s=LONG_S, stall_s=0.0)
    env = {"TEST_NUM_HOSTS": str(num_hosts)}
    with start_ranks("many_ranks", NUM_RANKS, settings=settings, env=env, patience_s=LONG_S) as ranks:
        trained = ranks.receive_all(range(NUM_RANKS), "trained")
        # With those to the coordinator. All pairs of ranks on different hosts would be 56 per channel.
        assert max(message["num_links"] for message in trained.values()) <= (24 if num_hosts > 1 else 4), trained
        ranks.receive_all(range(NUM_RANKS), "done")
        assert ranks.wait() == [0] * NUM_RANKS
