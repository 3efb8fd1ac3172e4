"""Which frameworks and data planes are usable on this host, and why not. Each is tried in a process of its own, with a
deadline: a broken install may print, hang or crash. Used by launch/checkup and, for MPI, by `ronde bench`.

What there is to know about a host before a job runs on it: versions, cores, memory, limits, and what is usable.
examine() looks at the host it is called on; `ronde doctor` calls it as a rank on each.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Literal, TypeAlias

import msgspec
import psutil

from ronde.launch.agent.resource_usage import read_cgroup_limits
from ronde.net.descriptors import create_shared_memory
from ronde.text import describe_exit_code, shorten
from ronde.types import Deadline
from ronde.version import __version__

__all__ = [
    "Availability",
    "BACKENDS",
    "ComponentStatus",
    "CpuInfo",
    "FRAMEWORKS",
    "IMPORT_TIMEOUT_S",
    "MemoryInfo",
    "ResourceLimits",
    "SharedMemoryInfo",
    "SystemInfo",
    "check_component",
    "check_components",
    "collect_system_info",
    "parse_check_result",
]

Availability: TypeAlias = Literal["usable", "missing", "broken"]


class ComponentStatus(msgspec.Struct, frozen=True):
    """A framework, or a data plane."""

    name: str
    state: Availability
    """Missing: not there, as many will want it. Broken: there, and of no use."""
    version: str = ""
    note: str = ""
    """Why not; or what else is worth knowing."""


FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet", "jax")
BACKENDS = ("native", "mpi", "nccl")

MISSING_EXIT_CODE = 77
OUTPUT_TAIL_BYTES = 65536
"""The end of what a process printed has the reason."""

# Each prints, as the last thing, a line of version and note, with a tab between them.
_FRAMEWORK_PROGRAM = f"""
import importlib, importlib.util, sys
name = sys.argv[1]
try:
    version = getattr(importlib.import_module(name), "__version__", "")
except ModuleNotFoundError as error:
    if error.name == name:
        sys.exit({MISSING_EXIT_CODE})
    raise
note = "no ronde." + name + " yet; its own scripts start under `ronde run`"
if importlib.util.find_spec("ronde." + name):
    importlib.import_module("ronde." + name)
    note = ""
print("\\n" + version + "\\t" + note)
"""
_NATIVE_PROGRAM = """
from ronde.comm.backends.native_library import load_library
found = load_library()
print("\\n" + found.rd_version().decode() + "\\t" + found.rd_cpu().decode() + " kernels")
"""
_MPI_PROGRAM = f"""
import sys
try:
    import mpi4py
except ModuleNotFoundError:
    print("mpi4py is not installed", file=sys.stderr)
    sys.exit({MISSING_EXIT_CODE})
mpi4py.rc.initialize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print("mpi4py finds no MPI library (" + str(error).splitlines()[-1] + ")", file=sys.stderr)
    sys.exit({MISSING_EXIT_CODE})
library = MPI.Get_library_version().splitlines()[0].split(",")[0].rstrip("\\0")
print("\\n" + mpi4py.__version__ + "\\t" + " ".join(library.split()))
"""
_PROGRAMS = {"native": _NATIVE_PROGRAM, "mpi": _MPI_PROGRAM}


def check_components(names: tuple[str, ...], deadline: Deadline) -> tuple[ComponentStatus, ...]:
    """All of them, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        return tuple(pool.map(partial(check_component, deadline=deadline), names))


def check_component(name: str, deadline: Deadline, python: str = sys.executable) -> ComponentStatus:
    """Import it in a process of this Python; any that has mpi4py will do for `mpi`."""
    if name == "nccl":
        return _check_nccl(Path("/dev/nvidia0").exists())
    # Files, not pipes: what it started and left behind would hold those open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                (python, "-c", _PROGRAMS.get(name, _FRAMEWORK_PROGRAM), name),
                cwd="/",  # Python looks there first, and the user's files may have any name
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=max(0.001, deadline.remaining_s),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ComponentStatus(name, "broken", note=f"it could not be imported within {deadline.timeout_s:g} s")
        except OSError as error:
            return ComponentStatus(name, "broken", note=f"Python cannot be started: {error.strerror}")
        return parse_check_result(name, done.returncode, _last_line(out), _last_line(err))


def parse_check_result(name: str, exit_code: int, out: str, err: str) -> ComponentStatus:
    """What the end of such a process means: its exit code, and the last lines that it printed."""
    if exit_code == MISSING_EXIT_CODE:
        return ComponentStatus(name, "missing", note=err or "not installed")
    if exit_code == 0 and "\t" in out:
        version, _, note = out.partition("\t")
        return ComponentStatus(name, "usable", version, note)
    return ComponentStatus(
        name, "broken", note=shorten(err, 300) if err and exit_code > 0 else describe_exit_code(exit_code)
    )


def _check_nccl(has_gpu: bool) -> ComponentStatus:
    why = "this version of ronde has no nccl backend" if has_gpu else "this host has no NVIDIA GPU"
    return ComponentStatus("nccl", "missing", note=why)


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read()[-OUTPUT_TAIL_BYTES:].decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


IMPORT_TIMEOUT_S = 60.0
"""For all imports together; the first one after the start of a host reads gigabytes from its disk."""
LIBRARIES = ("numpy", "pyzmq", "msgspec", "psutil", "cloudpickle")
SHARED_MEMORY_TEST_BYTES = 64 * 1024 * 1024
"""So much shared memory is asked for, to see that it works; less where there is little."""


class SystemInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on a host."""

    node: str
    """What it calls itself."""
    ronde: str
    python: str
    executable: str
    """Path of that Python."""
    system: str
    """Kernel and architecture."""
    cpu: str
    """Model."""
    libraries: dict[str, str]
    """Versions of what ronde itself needs."""
    cores: CpuInfo
    memory: MemoryInfo
    shared_memory: SharedMemoryInfo
    limits: ResourceLimits
    backends: tuple[ComponentStatus, ...]
    frameworks: tuple[ComponentStatus, ...]


class CpuInfo(msgspec.Struct, frozen=True):
    """How many cores there are."""

    total: int
    allowed: int
    """Those that this user's processes may run on."""
    quota: float | None = None
    """How many a container may keep busy; None: all."""


class MemoryInfo(msgspec.Struct, frozen=True):
    """In bytes."""

    total: int
    available: int
    """Without swapping, and within the limit."""
    limit: int | None = None
    """A container's; None: all."""


class SharedMemoryInfo(msgspec.Struct, frozen=True):
    """ronde's is anonymous (memfd): its only limit is the memory. Other programs' is /dev/shm, which containers often
    make small."""

    works: bool
    why: str = ""
    """It does not."""
    dev_shm_bytes: int = 0
    """Size of /dev/shm."""


class ResourceLimits(msgspec.Struct, frozen=True):
    """Per process or user; None: no limit."""

    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    """Memory that may be locked, as RDMA does."""


def collect_system_info() -> SystemInfo:
    """Look at this host. Takes as long as it takes to import the frameworks, and IMPORT_S at most."""
    components = {each.name: each for each in check_components((*BACKENDS, *FRAMEWORKS), Deadline(IMPORT_TIMEOUT_S))}
    allowance = read_cgroup_limits()
    memory = psutil.virtual_memory()
    available = min(
        memory.available,
        memory.available if allowance.memory_available_bytes is None else allowance.memory_available_bytes,
    )
    return SystemInfo(
        node=platform.node(),
        ronde=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        libraries={name: _package_version(name) for name in LIBRARIES},
        cores=CpuInfo(os.cpu_count() or 1, len(os.sched_getaffinity(0)), allowance.cpu_quota),
        memory=MemoryInfo(memory.total, available, allowance.memory_limit_bytes),
        shared_memory=_check_shared_memory(min(SHARED_MEMORY_TEST_BYTES, max(1, available // 4))),
        limits=_read_limits(allowance.max_processes),
        backends=tuple(components[name] for name in BACKENDS),
        frameworks=tuple(components[name] for name in FRAMEWORKS),
    )


def _check_shared_memory(num_bytes: int) -> SharedMemoryInfo:
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    try:
        fd = create_shared_memory("ronde doctor", num_bytes)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        return SharedMemoryInfo(False, f"{num_bytes} bytes of it: {error.strerror}", size)
    return SharedMemoryInfo(True, "", size)


def _read_limits(max_processes: int | None) -> ResourceLimits:
    processes = [number for number in (_soft_limit(resource.RLIMIT_NPROC), max_processes) if number is not None]
    return ResourceLimits(
        _soft_limit(resource.RLIMIT_NOFILE), min(processes, default=None), _soft_limit(resource.RLIMIT_MEMLOCK)
    )


def _soft_limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a copy without its metadata
        return "?"
