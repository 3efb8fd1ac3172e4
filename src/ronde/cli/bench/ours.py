"""How ranks that use ronde are started: as a local job, its coordinator in this process. Used by command.py, peers.py
and train_kits.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.cli.bench.crew import RANK_PROGRAM
from ronde.cli.bench.measure import COMPATIBLE, OURS
from ronde.cli.bench.processes import Outputs
from ronde.launch.local import LocalJob, start_local
from ronde.settings import Settings
from ronde.types import Deadline

__all__ = ["HorovodKit", "Job", "RondeKit", "start_job"]


class Job:
    """A local job as crews see processes."""

    def __init__(self, job: LocalJob, outputs: Outputs) -> None:
        self._job = job
        self._outputs = outputs

    def ended(self) -> str:
        """Empty while a rank runs: when one ends too early, the coordinator tells the others, and they end too."""
        try:
            codes = self._job.wait(Deadline(0))
        except TimeoutError:
            return ""
        return f"all ranks ended with exit codes {codes}"

    def tail(self) -> str:
        """The last lines that they wrote."""
        return self._outputs.tail()

    def wait(self, deadline: Deadline) -> None:
        """Until all have ended, or the deadline."""
        try:
            self._job.wait(deadline)
        except TimeoutError:
            return

    def close(self) -> None:
        """End those still running, and the coordinator."""
        self._job.close()
        self._outputs.close()


@dataclass(frozen=True)
class RondeKit:
    """ronde as it is installed beside this command."""

    name: str = OURS

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many", "many-25MB")

    def start(self, directory: Path, size: int) -> Job:
        """One process per rank."""
        return start_job((sys.executable, RANK_PROGRAM, "ronde", str(directory)), size)


@dataclass(frozen=True)
class HorovodKit:
    """Horovod's interface, as the compatibility package beside this command has it over ronde."""

    name: str = COMPATIBLE

    @property
    def many_paths(self) -> tuple[str, ...]:
        """The ways to reduce many arrays."""
        return ("many",)

    def start(self, directory: Path, size: int) -> Job:
        """One process per rank."""
        return start_job((sys.executable, RANK_PROGRAM, "hvd", str(directory)), size)


def start_job(program: Sequence[str], size: int) -> Job:
    """Start a program as a job of so many ranks, with one thread each."""
    outputs = Outputs(size)
    try:
        env = {"OMP_NUM_THREADS": "1"}
        return Job(start_local(program, size, env=env, settings=Settings.load(), stdout=outputs.files), outputs)
    except BaseException:
        outputs.close()
        raise
