"""Which frameworks and data planes are usable on this host, and why not. Each is tried in a process of its own, with a
deadline: a broken install may print, hang or crash. Used by launch/checkup and, for MPI, by `ronde bench`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Literal, TypeAlias

import msgspec

from ronde.launch.verdict import describe_code
from ronde.observe.events import shorten
from ronde.types import Deadline

__all__ = ["BACKENDS", "FRAMEWORKS", "Component", "State", "judge_import", "try_all", "try_component"]

State: TypeAlias = Literal["usable", "missing", "broken"]


class Component(msgspec.Struct, frozen=True):
    """A framework, or a data plane."""

    name: str
    state: State
    """Missing: not there, as many will want it. Broken: there, and of no use."""
    version: str = ""
    note: str = ""
    """Why not; or what else is worth knowing."""


FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet", "jax")
BACKENDS = ("native", "mpi", "nccl")

MISSING_CODE = 77
SAID_BYTES = 65536
"""The end of what a process printed has the reason."""

# Each prints, as the last thing, a line of version and note, with a tab between them.
_FRAMEWORK = f"""
import importlib, importlib.util, sys
name = sys.argv[1]
try:
    version = getattr(importlib.import_module(name), "__version__", "")
except ModuleNotFoundError as error:
    if error.name == name:
        sys.exit({MISSING_CODE})
    raise
note = "no ronde." + name + " yet; its own scripts start under `ronde run`"
if importlib.util.find_spec("ronde." + name):
    importlib.import_module("ronde." + name)
    note = ""
print("\\n" + version + "\\t" + note)
"""
_NATIVE = """
from ronde.comm._native import library
found = library()
print("\\n" + found.rd_version().decode() + "\\t" + found.rd_cpu().decode() + " kernels")
"""
_MPI = f"""
import sys
try:
    import mpi4py
except ModuleNotFoundError:
    print("mpi4py is not installed", file=sys.stderr)
    sys.exit({MISSING_CODE})
mpi4py.rc.initialize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print("mpi4py finds no MPI library (" + str(error).splitlines()[-1] + ")", file=sys.stderr)
    sys.exit({MISSING_CODE})
library = MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\\0")
print("\\n" + mpi4py.__version__ + "\\t" + " ".join(library.split()))
"""
_PROGRAMS = {"native": _NATIVE, "mpi": _MPI}


def try_all(names: tuple[str, ...], deadline: Deadline) -> tuple[Component, ...]:
    """All of them, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        return tuple(pool.map(partial(try_component, deadline=deadline), names))


def try_component(name: str, deadline: Deadline, python: str = sys.executable) -> Component:
    """Import it in a process of this Python; any that has mpi4py will do for `mpi`."""
    if name == "nccl":
        return _nccl(Path("/dev/nvidia0").exists())
    # Files, not pipes: what it started and left behind would hold those open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                (python, "-c", _PROGRAMS.get(name, _FRAMEWORK), name),
                cwd="/",  # Python looks there first, and the user's files may have any name
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=max(0.001, deadline.left_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Component(name, "broken", note=f"it could not be imported within {deadline.seconds:g} s")
        except OSError as error:
            return Component(name, "broken", note=f"Python cannot be started: {error.strerror}")
        return judge_import(name, done.returncode, _last_line(out), _last_line(err))


def judge_import(name: str, code: int, out: str, err: str) -> Component:
    """What the end of such a process means: its exit code, and the last lines that it printed."""
    if code == MISSING_CODE:
        return Component(name, "missing", note=err or "not installed")
    if code == 0 and "\t" in out:
        version, _, note = out.partition("\t")
        return Component(name, "usable", version, note)
    return Component(name, "broken", note=shorten(err, 300) if err and code > 0 else describe_code(code))


def _nccl(has_gpu: bool) -> Component:
    why = "this version of ronde has no nccl backend" if has_gpu else "this host has no NVIDIA GPU"
    return Component("nccl", "missing", note=why)


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read()[-SAID_BYTES:].decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
