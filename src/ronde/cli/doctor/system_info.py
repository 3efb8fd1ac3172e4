"""What `ronde doctor` finds out about a host: versions, cores, memory, limits, and which frameworks and data planes are
usable. collect_system_info() is called in a rank on each host.

Frameworks and data planes are imported in processes of their own with a deadline, since a broken install may print,
hang or crash. `ronde bench` finds MPI libraries in the same way.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
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

from ronde.exit_codes import describe_exit_code
from ronde.launch.agent.cgroup_limits import read_cgroup_limits
from ronde.net.shared_memory import create_shared_memory
from ronde.text import shorten
from ronde.types import Deadline
from ronde.version import __version__

Availability: TypeAlias = Literal["usable", "missing", "broken"]


class ComponentStatus(msgspec.Struct, frozen=True):
    """Whether a framework or a data plane can be used."""

    name: str
    state: Availability
    """Missing: not installed. Broken: installed, and cannot be used."""
    version: str = ""
    note: str = ""
    """Why it is not usable; or something else worth knowing."""


FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet", "jax")
BACKENDS = ("native", "mpi", "nccl")
LIBRARIES = ("numpy", "pyzmq", "msgspec", "psutil", "cloudpickle")
IMPORT_TIMEOUT_S = 60.0
"""For all imports together; the first one after the start of a host reads gigabytes from its disk."""
SHARED_MEMORY_TEST_BYTES = 64 * 1024 * 1024
"""So much shared memory is allocated as a test; less where there is little."""
MISSING_EXIT_CODE = 77
OUTPUT_TAIL_BYTES = 65536
"""So much of what a process printed is searched for its last line."""

# The last line that each of these prints is the version and a note, with a tab between them.
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
    """Check them side by side, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        return tuple(pool.map(partial(check_component, deadline=deadline), names))


def check_component(name: str, deadline: Deadline, python: str = sys.executable) -> ComponentStatus:
    """Import it in a new process of this Python. (For `mpi`, that may be any that has mpi4py.)"""
    if name == "nccl":
        has_gpu = Path("/dev/nvidia0").exists()
        why = "this version of ronde has no nccl backend" if has_gpu else "this host has no NVIDIA GPU"
        return ComponentStatus("nccl", "missing", note=why)
    # Files, not pipes: a process that it started and left behind would keep a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                (python, "-c", _PROGRAMS.get(name, _FRAMEWORK_PROGRAM), name),
                cwd="/",  # Python looks for modules there first, and the user's files may have any name
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
        out_line, err_line = _last_line(out), _last_line(err)
    if done.returncode == MISSING_EXIT_CODE:
        return ComponentStatus(name, "missing", note=err_line or "not installed")
    if done.returncode == 0 and "\t" in out_line:
        version, _, note = out_line.partition("\t")
        return ComponentStatus(name, "usable", version, note)
    reason = shorten(err_line, 300) if done.returncode > 0 else ""
    return ComponentStatus(name, "broken", note=reason or describe_exit_code(done.returncode))


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read()[-OUTPUT_TAIL_BYTES:].decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")


class SystemInfo(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    """The host's own name."""
    ronde: str
    python: str
    executable: str
    system: str
    """Kernel and architecture."""
    cpu: str
    libraries: dict[str, str]
    """Versions of the libraries that ronde needs."""
    cores: CpuInfo
    memory: MemoryInfo
    shared_memory: SharedMemoryInfo
    limits: ResourceLimits
    backends: tuple[ComponentStatus, ...]
    frameworks: tuple[ComponentStatus, ...]


class CpuInfo(msgspec.Struct, frozen=True):
    total: int
    allowed: int
    """The cores that this process may run on."""
    quota: float | None = None
    """How many cores the container may keep busy; None: no limit."""


class MemoryInfo(msgspec.Struct, frozen=True):
    """The memory of the host, in bytes."""

    total: int
    available: int
    """What a process can allocate without swapping and within the limit."""
    limit: int | None = None
    """The limit of the container; None: no limit."""


class SharedMemoryInfo(msgspec.Struct, frozen=True):
    """ronde uses anonymous shared memory (memfd), which only the memory limits. Other programs use /dev/shm, which is
    often small in containers."""

    works: bool
    why: str = ""
    """Why it does not work; empty if it does."""
    dev_shm_bytes: int = 0


class ResourceLimits(msgspec.Struct, frozen=True):
    """Limits of this process or its user; None: no limit."""

    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    """Memory that may be locked, as RDMA needs."""


def collect_system_info() -> SystemInfo:
    """Facts about this host. Takes as long as importing the frameworks does, IMPORT_TIMEOUT_S at most."""
    components = {each.name: each for each in check_components((*BACKENDS, *FRAMEWORKS), Deadline(IMPORT_TIMEOUT_S))}
    cgroup_limits = read_cgroup_limits()
    memory = psutil.virtual_memory()
    available = memory.available
    if cgroup_limits.memory_available_bytes is not None:
        available = min(available, cgroup_limits.memory_available_bytes)
    cpuinfo = None
    with contextlib.suppress(OSError):  # a sandbox may hide it
        cpuinfo = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    max_processes = (_soft_limit(resource.RLIMIT_NPROC), cgroup_limits.max_processes)
    return SystemInfo(
        node=platform.node(),
        ronde=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpuinfo[1].strip() if cpuinfo else platform.processor() or platform.machine(),
        libraries={name: _package_version(name) for name in LIBRARIES},
        cores=CpuInfo(os.cpu_count() or 1, len(os.sched_getaffinity(0)), cgroup_limits.cpu_quota),
        memory=MemoryInfo(memory.total, available, cgroup_limits.memory_limit_bytes),
        shared_memory=_check_shared_memory(min(SHARED_MEMORY_TEST_BYTES, max(1, available // 4))),
        limits=ResourceLimits(
            _soft_limit(resource.RLIMIT_NOFILE),
            min((number for number in max_processes if number is not None), default=None),
            _soft_limit(resource.RLIMIT_MEMLOCK),
        ),
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


def _soft_limit(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a copy without its metadata
        return "?"
