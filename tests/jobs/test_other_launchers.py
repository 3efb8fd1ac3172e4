"""A script of ours, started by somebody else: real mpirun and torchrun, variables as srun sets them, plain python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tests.jobs.test_mpi import SMALL_MACHINE, every_mpi
from tests.limits import PATIENCE_S

SCRIPT = Path(__file__).parent / "scripts/two_rounds.py"
SOURCES = Path(__file__).resolve().parents[2] / "src"

STALE = {
    # Of a shell that once was set up for torch, inside of a batch job: none of it is about these ranks.
    **{"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"},
    **{"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-8]"},
}


class Started:
    """Commands that run at the same time; each gets PATIENCE_S, and nothing of them stays."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def __enter__(self) -> Started:
        return self

    def add(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start one more."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RONDE_")}
        own = {"PYTHONPATH": str(SOURCES), "XDG_CONFIG_HOME": str(self._folder / "config")}
        printed = self._opened.enter_context((self._folder / f"printed-{len(self._running)}").open("w+b"))
        process = subprocess.Popen(
            command,
            env={**clean, **SMALL_MACHINE, **own, **(variables or {})},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.append((process, printed))

    def wait(self) -> str:
        """Wait until all have ended well; what they printed."""
        for process, printed in self._running:
            code = process.wait(PATIENCE_S)
            assert code == 0, Path(printed.name).read_text(errors="replace")
        return "".join(Path(printed.name).read_text(errors="replace") for _process, printed in self._running)

    def __exit__(self, *_: object) -> None:
        for process, _printed in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._opened.close()


def results(folder: Path) -> list[Any]:
    """What the ranks report, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def together(size: int) -> list[Any]:
    """What ranks of one host find when all is well."""
    total = size * (size + 1) / 2
    return [{"rank": rank, "size": size, "local": [rank, size], "sums": [total, total]} for rank in range(size)]


def test_plain_python_is_a_job_of_one_and_leaves_no_secret(tmp_path: Path) -> None:
    with Started(tmp_path) as started:
        started.add([sys.executable, str(SCRIPT), str(tmp_path)])
        started.wait()
    assert results(tmp_path) == together(1)
    assert not (tmp_path / "config").exists()


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    with Started(tmp_path) as started:
        started.add([sys.executable, *torchrun, str(SCRIPT), str(tmp_path)])
        started.wait()
    assert results(tmp_path) == together(2)


@every_mpi
def test_mpirun_whatever_else_was_inherited(tmp_path: Path, python: Path) -> None:
    command = [str(python.with_name("mpirun")), "-n", "3", str(python), str(SCRIPT), str(tmp_path)]
    with Started(tmp_path) as started:
        started.add(command, STALE)
        started.wait()
    assert results(tmp_path) == together(3)


@every_mpi
def test_two_jobs_of_one_mpi_at_the_same_time_do_not_mix(tmp_path: Path, python: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    with Started(tmp_path) as started:
        for folder in folders:
            folder.mkdir()
            # A shell between mpirun and the rank, as in many people's scripts.
            script = f'"{python}" "{SCRIPT}" "{folder}"; exit $?'
            started.add([str(python.with_name("mpirun")), "-n", "2", "sh", "-c", script])
        started.wait()
    assert [results(folder) for folder in folders] == [together(2), together(2)]


@every_mpi
def test_on_several_hosts_mpi_itself_tells_where_rank_0_is(tmp_path: Path, python: Path) -> None:
    several = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "MPI_LOCALNRANKS=1"]
    with Started(tmp_path) as started:
        started.add([str(python.with_name("mpirun")), "-n", "2", *several, str(python), str(SCRIPT), str(tmp_path)])
        started.wait()
    assert results(tmp_path) == together(2)
    assert not (tmp_path / "config").exists(), "the key came from rank 0"


def test_variables_of_srun(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1"}
    with Started(tmp_path) as started:
        for rank in range(3):
            command = [sys.executable, str(SCRIPT), str(tmp_path)]
            started.add(command, {**step, "SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "n7", "SLURM_PROCID": str(rank)})
        started.wait()
    assert results(tmp_path) == together(3)


def test_ronde_run_counts_more_than_a_launcher_around_it(tmp_path: Path) -> None:
    around = {**STALE, "PMI_RANK": "0", "PMI_SIZE": "9", "SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "x"}
    run = [sys.executable, "-m", "ronde.cli.main", "run", "-np", "2"]
    with Started(tmp_path) as started:
        started.add([*run, sys.executable, str(SCRIPT), str(tmp_path)], around)
        started.wait()
    assert results(tmp_path) == together(2)
