"""The wheel as a user gets it: one file for every Python, and no compiler needed to install it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import ROOT, output_of
from tests.limits import BUILD_S, BUILD_TEST_S
from tests.services import needs

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
# A build from source, then an environment with all dependencies per Python.
pytestmark = [pytest.mark.timeout(BUILD_TEST_S), needs("wheel build")]

FIRST_STEPS = """
import numpy as np
import ronde

ronde.init()
print(ronde.__file__)
print(ronde.allreduce(np.ones(3)).tolist())
ronde.shutdown()
"""


def find_python(version: str) -> str | None:
    """An interpreter of this version that can make environments."""
    if version == CURRENT:
        return sys.executable
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    for candidate in (shutil.which(f"python{version}"), *map(str, pyenv)):
        # A version manager's stand-in may be on the PATH without an interpreter behind it.
        if candidate and subprocess.run([candidate, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return candidate
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ("--no-deps", "--no-build-isolation", "--config-settings=build-dir=build/wheel")
    output_of([sys.executable, "-m", "pip", "wheel", "--quiet", *build, "--wheel-dir", folder, ROOT], limit_s=BUILD_S)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A fresh environment of the Python version in the parameter; removed afterwards, being large."""
    python = find_python(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} here")
    folder = tmp_path / "environment"
    output_of([python, "-m", "venv", "--without-pip", folder], cwd=tmp_path, limit_s=BUILD_S)
    yield folder
    shutil.rmtree(folder)


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("ronde", "py3", "none")
    assert platform != "any"


def test_the_wheel_has_the_library_and_the_types_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ronde/__init__.py", "ronde/libronde.so", "ronde/py.typed"} <= set(names)
    libraries = {f"ronde/{each}/libronde_{each}.so" for each in ("jax", "mxnet", "tensorflow")}
    assert libraries <= set(names)
    assert sys.version_info < (3, 11) or "ronde/comm/backends/hot_calls.abi3.so" in names
    uplot = {f"ronde/dash/vendor/uplot/{name}" for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")}
    assert uplot | {"ronde/dash/static/report.js", "ronde/dash/static/report.css"} <= set(names)
    assert [name for name in names if not name.startswith(("ronde/", "ronde-"))] == []


@pytest.mark.parametrize("environment", [CURRENT], indirect=True)
def test_it_can_be_installed_with_mxnet_and_the_numpy_that_mxnet_needs(wheel: Path, environment: Path) -> None:
    """NumPy 1.24 has removed names that MXNet uses, and MXNet does not say so in what it requires."""
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--dry-run")
    printed = output_of([*pip, "--only-binary", ":all:", wheel, "mxnet==1.9.1", "numpy<1.24"], limit_s=BUILD_S)
    would = printed.splitlines()[-1]
    assert would.startswith("Would install") and " mxnet-1.9.1" in would and " numpy-1.23." in would, printed
    assert f" ronde-{wheel.stem.split('-')[1]}" in would


@pytest.mark.parametrize("environment", PYTHONS, indirect=True)
def test_it_installs_without_a_compiler_and_adds_up(wheel: Path, environment: Path, tmp_path: Path) -> None:
    programs = environment / "bin"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RONDE_"))}
    environ["PATH"] = str(programs)  # neither cc nor cmake
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")  # spares making a pip per environment
    install = ("install", "--quiet", "--no-compile", "--only-binary", ":all:", wheel)

    def run(*words: str | Path) -> str:
        return output_of(words, cwd=tmp_path, env=environ, limit_s=BUILD_S)

    run(*pip, *install)
    printed = run(programs / "python", "-c", FIRST_STEPS).splitlines()
    assert Path(printed[0]).is_relative_to(environment)
    assert printed[1] == "[1.0, 1.0, 1.0]"
    assert "bench" in run(programs / "ronde", "--help")
