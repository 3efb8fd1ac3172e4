"""A script of ours, started by somebody else: real mpirun and torchrun, variables as srun sets them, plain python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ronde.net.addresses import find_free_ports
from tests.jobs.test_mpi import SMALL_MACHINE, every_mpi
from tests.limits import PATIENCE_S

SCRIPT = Path(__file__).parent / "scripts/two_rounds.py"
SOURCES = Path(__file__).resolve().parents[2] / "src"

STALE = {
    # Of a shell that once was set up for torch, inside of a batch job: none of it is about these ranks.
    **{"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"},
    **{"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-8]"},
}


def run_together(
    folder: Path,
    *commands: Sequence[str],
    variables: Sequence[Mapping[str, str]] = ({},),
    limit_s: float = PATIENCE_S,
) -> None:
    """Run commands at the same time, each with its variables, until all have ended well. Nothing of them stays."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "TF_CONFIG"))}
    own = {"PYTHONPATH": str(SOURCES), "XDG_CONFIG_HOME": str(folder / "config")}
    started = []
    try:
        for number, command in enumerate(commands):
            env = {**clean, **SMALL_MACHINE, **own, **variables[number % len(variables)]}
            with (folder / f"printed-{number}").open("wb") as printed:
                started.append(
                    subprocess.Popen(command, env=env, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
                )
        for number, process in enumerate(started):
            assert process.wait(limit_s) == 0, (folder / f"printed-{number}").read_text(errors="replace")
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def results(folder: Path) -> list[Any]:
    """What the ranks report, in their order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


def together(size: int) -> list[Any]:
    """What ranks of one host find when all is well."""
    total = size * (size + 1) / 2
    return [{"rank": rank, "size": size, "local": [rank, size], "sums": [total, total]} for rank in range(size)]


def test_plain_python_is_a_job_of_one_and_leaves_no_secret(tmp_path: Path) -> None:
    run_together(tmp_path, [sys.executable, str(SCRIPT), str(tmp_path)])
    assert results(tmp_path) == together(1)
    assert not (tmp_path / "config").exists()


def test_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    run_together(tmp_path, [sys.executable, *torchrun, str(SCRIPT), str(tmp_path)])
    assert results(tmp_path) == together(2)


@every_mpi
def test_mpirun_whatever_else_was_inherited(tmp_path: Path, python: Path) -> None:
    command = [str(python.with_name("mpirun")), "-n", "3", str(python), str(SCRIPT), str(tmp_path)]
    run_together(tmp_path, command, variables=[STALE])
    assert results(tmp_path) == together(3)


@every_mpi
def test_two_jobs_of_one_mpi_at_the_same_time_do_not_mix(tmp_path: Path, python: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    # A shell between mpirun and the rank, as in many people's scripts.
    scripts = [f'"{python}" "{SCRIPT}" "{folder}"; exit $?' for folder in folders]
    mpirun = [str(python.with_name("mpirun")), "-n", "2", "sh", "-c"]
    run_together(tmp_path, *[[*mpirun, script] for script in scripts])
    assert [results(folder) for folder in folders] == [together(2), together(2)]


@every_mpi
def test_on_several_hosts_mpi_itself_tells_where_rank_0_is(tmp_path: Path, python: Path) -> None:
    several = ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "MPI_LOCALNRANKS=1"]
    mpirun = [str(python.with_name("mpirun")), "-n", "2"]
    run_together(tmp_path, [*mpirun, *several, str(python), str(SCRIPT), str(tmp_path)])
    assert results(tmp_path) == together(2)
    assert not (tmp_path / "config").exists(), "the key came from rank 0"


def test_variables_of_srun(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_NTASKS": "3", "SLURM_STEP_NODELIST": "n7"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    run_together(tmp_path, *[command] * 3, variables=[{**step, "SLURM_PROCID": str(rank)} for rank in range(3)])
    assert results(tmp_path) == together(3)


def make_tf_configs(**cluster: Sequence[str]) -> list[dict[str, str]]:
    """TF_CONFIG as a user writes it, for every task of the cluster."""
    tasks = [(kind, index) for kind, addresses in cluster.items() for index in range(len(addresses))]
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})} for kind, index in tasks
    ]


def test_a_hand_written_tf_config(tmp_path: Path) -> None:
    port = find_free_ports("127.0.0.1", 1)[0]
    chief, *workers = (f"localhost:{port + number}" for number in range(3))  # one after the other, as people write them
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    run_together(tmp_path, *[command] * 3, variables=make_tf_configs(chief=[chief], worker=workers))
    assert results(tmp_path) == together(3)


def test_a_tf_config_of_one_worker_is_a_job_of_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    run_together(tmp_path, command, variables=make_tf_configs(worker=["localhost:2222"]))
    assert results(tmp_path) == together(1)
    assert not (tmp_path / "config").exists()


def test_ronde_run_counts_more_than_a_launcher_around_it(tmp_path: Path) -> None:
    around = {**STALE, "PMI_RANK": "0", "PMI_SIZE": "9", "SLURM_STEP_ID": "0", "TORCHELASTIC_RUN_ID": "x"}
    around |= {"TF_CONFIG": "nonsense"}
    run = [sys.executable, "-m", "ronde.cli.main", "run", "-np", "2"]
    run_together(tmp_path, [*run, sys.executable, str(SCRIPT), str(tmp_path)], variables=[around])
    assert results(tmp_path) == together(2)
