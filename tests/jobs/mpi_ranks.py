"""What each rank of tests/jobs/test_mpi.py does under mpiexec: every case in turn, results to a file per rank.

Runs where there is no pytest: in the small environments that hold an MPI library. `python -m tests.jobs.mpi_ranks
FOLDER` writes FOLDER/rank-N.json: {case: "" or what went wrong}.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

from ronde.comm.backends.mpi.backend import MpiBackend
from ronde.comm.backends.mpi.requests import wait_all
from ronde.settings import Settings
from ronde.types import Deadline
from tests.jobs import mpi_order_cases, mpi_result_cases  # noqa: F401  # they fill CASES
from tests.jobs.mpi_kit import (
    CASES,
    LONG_S,
    RANK,
    SIZE,
    topology,
)


def meet() -> None:
    """Cases begin together, whatever the one before came to."""
    deadline = Deadline(LONG_S)

    def check() -> None:
        assert not deadline.expired, "some rank is stuck in the case before"

    wait_all([MPI.COMM_WORLD.Ibarrier()], check)


def outcome(function: Callable[[MpiBackend], None]) -> str:
    try:
        backend = MpiBackend(topology(), Settings(backend="mpi", start_s=LONG_S))
        try:
            function(backend)
        finally:
            backend.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ronde")]
        assert not left, f"threads are left: {left}"
    except Exception:  # the edge of the process: the test shows it
        return traceback.format_exc()
    return ""


def main(folder: Path) -> None:
    results: dict[str, str] = {}
    for name, function in CASES.items():
        meet()
        results[name] = outcome(function)
        (folder / f"rank-{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    assert SIZE > 1, "start me with mpiexec -n 2 or more"
    main(Path(sys.argv[1]))
