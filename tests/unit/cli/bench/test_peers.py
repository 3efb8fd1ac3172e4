"""Peers that are there are found; for those that are not, the user learns why and what to do."""

from __future__ import annotations

import importlib.util
import shutil
import stat
import sys
from pathlib import Path

import pytest

from ronde.cli.bench.peers import MeasuredLibrary, find_peers
from ronde.cli.doctor.system_info import MISSING_EXIT_CODE


def fake_python(directory: Path, output: str, code: int = 0, *, mpiexec: bool = True) -> str:
    """An environment whose Python prints the library it has, or why it has none."""
    output = output if code else f"4.1\t{output}"
    directory.mkdir()
    for name in ("python", "mpiexec") if mpiexec else ("python",):
        program = directory / name
        program.write_text(f"#!/bin/sh\necho '{output}' {'>&2' if code else ''}\nexit {code}\n")
        program.chmod(stat.S_IRWXU)
    return str(directory / "python")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An own environment with neither PyTorch nor MPI."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "own", "mpi4py finds nothing", MISSING_EXIT_CODE))
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.usefixtures("bare")
def test_what_is_missing_is_only_noted_when_nobody_asked_for_it() -> None:
    notes = [
        "gloo is left out: PyTorch is not installed",
        f"mpi is left out: {sys.executable}: mpi4py finds nothing",
        "hvd is left out: ronde-horovod or PyTorch is not installed",
    ]
    assert find_peers(None) == ([], notes)


def test_the_reason_is_what_mpi4py_says_and_no_line_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py/__init__.py").write_text("class rc: pass")
    (tmp_path / "mpi4py/MPI.py").write_text(
        "errors = ['cannot load', 'no libmpi.so']\nraise RuntimeError('\\n'.join(errors))"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"python.*: mpi4py finds no MPI library \(no libmpi.so\); to get it: "):
        find_peers("mpi")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("wanted", "how"),
    [("gloo", "pip install torch"), ("hvd", "compat/horovod"), ("mpi", "--mpi-python"), ("mpich", "mpich")],
)
def test_what_is_missing_is_an_error_when_asked_for_and_says_how_to_get_it(wanted: str, how: str) -> None:
    with pytest.raises(ValueError, match=how):
        find_peers(wanted)


@pytest.mark.usefixtures("bare")
def test_every_named_environment_is_a_peer_called_by_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ompi = fake_python(Path("a"), "Open MPI v5.0.11")  # a path may be relative
    mpich = fake_python(tmp_path / "b", "MPICH Version: 5.0.2")
    again = fake_python(tmp_path / "c", "MPICH Version: 4.0")
    peers, notes = find_peers("mpi", [ompi, mpich, again])
    assert ([peer.name for peer in peers], notes) == (["openmpi", "mpich", "mpich-2"], [])
    assert peers[0] == MeasuredLibrary("openmpi", "mpi", "a/python", "a/mpiexec")
    assert [peer.name for peer in find_peers("none,openmpi", [ompi, mpich])[0]] == ["openmpi"]


@pytest.mark.usefixtures("bare")
def test_a_named_environment_without_a_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a/python: ImportError: libmpi\.so"):
        find_peers(None, [fake_python(tmp_path / "a", "ImportError: libmpi.so", 1)])
    with pytest.raises(ValueError, match="nowhere: Python cannot be started: No such file"):
        find_peers(None, [str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="no mpiexec beside"):
        find_peers(None, [fake_python(tmp_path / "b", "MPICH Version: 5.0.2", mpiexec=False)])
