"""Which frameworks are usable: what an import elsewhere means, and that a bad one holds up nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ronde.cli.doctor.system_info import (
    MISSING_EXIT_CODE,
    Availability,
    ComponentStatus,
    check_component,
    check_components,
    parse_check_result,
)
from ronde.types import Deadline


@pytest.mark.parametrize(
    ("code", "out", "err", "state", "words"),
    [
        (0, "2.1\tavx2 kernels", "a warning", "usable", ("2.1", "avx2 kernels")),
        (0, "2.1\t", "", "usable", ("2.1", "")),
        (MISSING_EXIT_CODE, "", "", "missing", ("", "not installed")),
        (MISSING_EXIT_CODE, "", "mpi4py is not installed", "missing", ("", "mpi4py is not installed")),
        (1, "", "ImportError: libcudart.so.12", "broken", ("", "ImportError: libcudart.so.12")),
        (3, "", "", "broken", ("", "exited with code 3")),
        (-4, "", "something before", "broken", ("", "killed by signal 4 (SIGILL)")),
        (0, "it printed, and exited", "", "broken", ("", "exited with code 0")),
    ],
)
def test_how_an_import_ended_says_what_the_component_is_good_for(
    code: int, out: str, err: str, state: Availability, words: tuple[str, str]
) -> None:
    assert parse_check_result("jax", code, out, err) == ComponentStatus("jax", state, *words)


def test_bad_installs_are_told_with_their_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "jax": "print('hello')\nraise ImportError('no libtpu.so\\n\\nsee the manual')",
        "keras": "import tensorflow_of_nowhere",
        "mxnet": "import os; os.kill(os.getpid(), 11)",
        "tensorflow": "__version__ = '9.9'\nprint('a banner')\nimport atexit; atexit.register(lambda: None)",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {
        each.name: each for each in check_components(("jax", "keras", "mxnet", "tensorflow", "nowhere"), Deadline(30))
    }
    assert found["jax"] == ComponentStatus("jax", "broken", note="see the manual")
    assert found["keras"].note == "ModuleNotFoundError: No module named 'tensorflow_of_nowhere'"
    assert found["mxnet"].note == "killed by signal 11 (SIGSEGV)"
    assert (found["tensorflow"].state, found["tensorflow"].version) == ("usable", "9.9")
    assert found["nowhere"] == ComponentStatus("nowhere", "missing", note="not installed")


def test_an_import_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jax.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start_s = time.monotonic()
    assert check_component("jax", Deadline(0.3)).note == "it could not be imported within 0.3 s"
    assert time.monotonic() - start_s < 20


def test_the_native_library_says_which_kernels_it_uses() -> None:
    native = check_component("native", Deadline(30))
    assert native.state == "usable" and native.note.endswith(" kernels")
