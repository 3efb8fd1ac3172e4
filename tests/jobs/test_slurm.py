"""Elastic training under a real srun: survivors go on, until rank 0 is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.jobs.kit import ROOT, script
from tests.jobs.slurm import SlurmNode, needs_slurm
from tests.jobs.test_run_elastic import environment

pytestmark = needs_slurm
NUM_RANKS = 4
SRUN = ["-n", str(NUM_RANKS), "--kill-on-bad-exit=0", "--chdir", str(ROOT)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmNode]:
    with SlurmNode(NUM_RANKS) as node:
        yield node


def test_the_others_go_on_when_a_rank_is_killed(slurm: SlurmNode) -> None:
    done = slurm.srun([*SRUN, *script("elastic_run")], environment([("rank 3", 12, "kill")]))
    # srun passes on what tasks write, which need not be whole lines.
    ended = re.findall(r"done as rank \d of \[[\d, ]*\]", done.stdout)
    assert sorted(ended) == [f"done as rank {rank} of [4, 3]" for rank in range(3)], done
    assert "rank 3 is lost" in done.stderr
    assert done.returncode != 0, "srun tells that a task was killed"


def test_the_loss_of_rank_0_ends_the_others_with_a_clear_error(slurm: SlurmNode) -> None:
    done = slurm.srun([*SRUN, *script("elastic_run")], environment([("rank 0", 12, "kill")]))
    assert done.returncode != 0 and "done as" not in done.stdout, done
    assert done.stderr.count("rank 0 is lost, and it hosted the coordinator of this job") >= NUM_RANKS - 1, done
