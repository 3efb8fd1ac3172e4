"""The behaviours of tests/conformance, run by every rank of tests/jobs/test_mpi.py under mpiexec.

`python -m tests.jobs.mpi_conformance FOLDER` writes FOLDER/rank-N.json: {behaviour: "" or what went wrong}.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ronde.comm.backends.mpi.backend import settings_from_mpi
from ronde.comm.backends.mpi.requests import wait_all as wait_for
from ronde.comm.joining import join_round
from ronde.comm.world import World
from ronde.settings import Settings
from ronde.types import Deadline
from tests.conformance.cases import Case, all_cases
from tests.limits import OPERATION_S

SETTINGS = Settings(backend="mpi", operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0, shutdown_s=2.0)


def meet(fine: bool) -> bool:
    """Behaviours begin together, whatever the one before came to. Whether all ranks are fine."""
    deadline = Deadline(2 * OPERATION_S)
    state = np.array([fine])

    def check() -> None:
        assert not deadline.expired, "some rank is stuck in the behaviour before"

    wait_for([MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, state, MPI.LAND)], check)
    return bool(state[0])


class Worlds:
    """One world after the other: a new one only when the one before was spoiled, for starting takes time."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._num_rounds = 0

    def outcome(self, case: Case) -> str:
        """What went wrong, or nothing."""
        try:
            if not meet(self._world is not None):
                self.close()
            if self._world is None:
                self._num_rounds += 1
                self._world = World(join_round(settings_from_mpi(SETTINGS), (), self._num_rounds - 1))
            case.body(self._world)
            if case.spoils:
                self.close()
        except Exception as error:  # the edge of the process: the test shows it
            failed = traceback.format_exc()
            self.close(orderly=False, why=f"the test failed here: {error}")
            return failed
        return ""

    def close(self, orderly: bool = True, why: str = "") -> None:
        """End the round; nothing of it may be left."""
        world, self._world = self._world, None
        if world is not None:
            world.close(orderly, why)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ronde")]
        assert not left, f"threads are left: {left}"


def main(folder: Path) -> None:
    """Run what makes sense on so many ranks."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    results: dict[str, str] = {}
    worlds = Worlds()
    for case in all_cases().values():
        if size in case.sizes:
            results[case.name] = worlds.outcome(case)
            (folder / f"rank-{rank}.json").write_text(json.dumps(results))
    worlds.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
