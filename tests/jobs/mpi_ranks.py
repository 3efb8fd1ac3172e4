"""What each rank of tests/jobs/test_mpi.py does under mpiexec, in environments that hold an MPI library and no pytest.

`python -m tests.jobs.mpi_ranks PROGRAM`, where PROGRAM is one of

    cases FOLDER        every case of tests/jobs/mpi_cases.py
    behaviours FOLDER   every behaviour of tests/conformance that makes sense on so many ranks
    collectives         every public function once, in two rounds
    fails               the last rank fails while the others wait for it; they exit with 0 when they are told why
    killed N            rank N is killed
    differs NAME VALUE  the last rank has another value of a setting; every rank prints its error

The first two write FOLDER/rank-N.json: {case: "" or what went wrong}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import ronde
from ronde.comm.backends.mpi.backend import MpiBackend, settings_from_mpi
from ronde.comm.backends.mpi.failure_detection import wait_all
from ronde.comm.joining import join_round
from ronde.comm.world import World
from ronde.errors import RoundEnded, StartFailed
from ronde.net.messages import LeaveReason
from ronde.settings import Settings
from ronde.types import Deadline
from tests.conformance.cases import Case, all_cases
from tests.jobs.mpi_cases import CASES, topology
from tests.jobs.scripts.collectives import use_every_collective
from tests.limits import OPERATION_S

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
SETTINGS = Settings(backend="mpi", operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0, shutdown_s=2.0)

# --- cases -----------------------------------------------------------------------------------------------------------


def run_all(folder: str, functions: dict[str, Callable[[], None]]) -> None:
    """Run one after the other, whatever the one before came to."""
    results: dict[str, str] = {}
    for name, function in functions.items():
        try:
            function()
            results[name] = ""
        except Exception:  # the edge of the process: the test shows it
            results[name] = traceback.format_exc()
        Path(folder, f"rank-{RANK}.json").write_text(json.dumps(results))


def begin_together(fine: bool = True) -> bool:
    """Wait until all ranks are here; returns whether all of them are fine."""
    deadline = Deadline(2 * OPERATION_S)
    state = np.array([fine])

    def check() -> None:
        assert not deadline.expired, "some rank is stuck in the case before"

    wait_all([MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, state, MPI.LAND)], check)
    return bool(state[0])


def expect_no_threads() -> None:
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ronde")]
    assert not left, f"threads are left: {left}"


def run_case(body: Callable[[MpiBackend], None]) -> None:
    begin_together()
    backend = MpiBackend(topology(), Settings(backend="mpi", start_s=OPERATION_S))
    try:
        body(backend)
    finally:
        backend.close()
    expect_no_threads()


class Behaviours:
    """Runs behaviours in one world after the other: a new one only when the one before cannot be used any more."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._num_rounds = 0

    def run(self, case: Case) -> None:
        if not begin_together(self._world is not None):
            self.close()
        try:
            if self._world is None:
                self._num_rounds += 1
                self._world = World(join_round(settings_from_mpi(SETTINGS), (), self._num_rounds - 1))
            case.body(self._world)
            if case.spoils:
                self.close()
        except Exception as error:
            self.close(LeaveReason.FAILED, f"the test failed here: {error}")
            raise

    def close(self, reason: LeaveReason = LeaveReason.SHUTDOWN, why: str = "") -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close(reason, why)
        expect_no_threads()


def cases(folder: str) -> None:
    run_all(folder, {name: lambda body=body: run_case(body) for name, body in CASES.items()})  # type: ignore[misc]


def behaviours(folder: str) -> None:
    runner = Behaviours()
    wanted = [case for case in all_cases().values() if SIZE in case.sizes]
    run_all(folder, {case.name: lambda case=case: runner.run(case) for case in wanted})  # type: ignore[misc]
    runner.close()


# --- the public functions --------------------------------------------------------------------------------------------


def collectives() -> None:
    """Two rounds in one process: what the first leaves must not disturb the second."""
    for _ in range(2):
        ronde.init(start_s=OPERATION_S, operation_s=OPERATION_S)
        use_every_collective()
        ronde.shutdown()


def fails() -> None:
    end_rank(SIZE - 1, fail)


def killed(victim: str) -> None:
    end_rank(int(victim), lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail() -> None:
    raise ArithmeticError("the last rank gives up")


def end_rank(victim: int, end: Callable[[], None]) -> None:
    """End one rank; the others wait for it, and print why the wait ended."""
    ronde.init(start_s=OPERATION_S, operation_s=OPERATION_S)
    if victim == RANK:
        end()
    try:
        ronde.allreduce(np.ones(3))
    except RoundEnded as error:
        os.write(2, f"told: {error}\n".encode())  # as one piece: all ranks write to one file
    else:
        raise AssertionError("nothing ended the wait")
    ronde.shutdown()


def differs(name: str, value: str) -> None:
    if RANK == SIZE - 1:
        os.environ[f"RONDE_{name.upper()}"] = value
    try:
        ronde.init(start_s=OPERATION_S)
    except StartFailed as error:
        os.write(2, f"rank {RANK} was told: {error}\n".encode())
    else:
        raise AssertionError("it has joined")


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (cases, behaviours, collectives, fails, killed, differs)
}

if __name__ == "__main__":
    assert SIZE > 1, "start me with mpiexec -n 2 or more"
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
