"""What there is to know about a host before a job runs on it: versions, cores, memory, limits, and what is usable.
examine() looks at the host it is called on; `ronde doctor` calls it as a rank on each.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from pathlib import Path

import msgspec
import psutil

from ronde.launch.allowance import read_allowance
from ronde.launch.components import BACKENDS, FRAMEWORKS, Component, try_all
from ronde.net.descriptors import make_memory
from ronde.types import Deadline
from ronde.version import __version__

__all__ = ["IMPORT_S", "Cores", "Facts", "Limits", "Memory", "SharedMemory", "examine"]

IMPORT_S = 60.0
"""For all imports together; the first one after the start of a host reads gigabytes from its disk."""
LIBRARIES = ("numpy", "pyzmq", "msgspec", "psutil", "cloudpickle")
TRIAL_BYTES = 64 * 1024 * 1024
"""So much shared memory is asked for, to see that it works; less where there is little."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
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
    cores: Cores
    memory: Memory
    shared_memory: SharedMemory
    limits: Limits
    backends: tuple[Component, ...]
    frameworks: tuple[Component, ...]


class Cores(msgspec.Struct, frozen=True):
    """How many cores there are."""

    total: int
    allowed: int
    """Those that this user's processes may run on."""
    quota: float | None = None
    """How many a container may keep busy; None: all."""


class Memory(msgspec.Struct, frozen=True):
    """In bytes."""

    total: int
    available: int
    """Without swapping, and within the limit."""
    limit: int | None = None
    """A container's; None: all."""


class SharedMemory(msgspec.Struct, frozen=True):
    """ronde's is anonymous (memfd): its only limit is the memory. Other programs' is /dev/shm, which containers often
    make small."""

    works: bool
    why: str = ""
    """It does not."""
    dev_shm_bytes: int = 0
    """Size of /dev/shm."""


class Limits(msgspec.Struct, frozen=True):
    """Per process or user; None: no limit."""

    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    """Memory that may be locked, as RDMA does."""


def examine() -> Facts:
    """Look at this host. Takes as long as it takes to import the frameworks, and IMPORT_S at most."""
    components = {each.name: each for each in try_all((*BACKENDS, *FRAMEWORKS), Deadline(IMPORT_S))}
    allowance = read_allowance()
    memory = psutil.virtual_memory()
    available = min(memory.available, memory.available if allowance.left_bytes is None else allowance.left_bytes)
    return Facts(
        node=platform.node(),
        ronde=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_model(),
        libraries={name: _version(name) for name in LIBRARIES},
        cores=Cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)), allowance.cores),
        memory=Memory(memory.total, available, allowance.memory_bytes),
        shared_memory=_try_shared_memory(min(TRIAL_BYTES, max(1, available // 4))),
        limits=_limits(allowance.processes),
        backends=tuple(components[name] for name in BACKENDS),
        frameworks=tuple(components[name] for name in FRAMEWORKS),
    )


def _try_shared_memory(num_bytes: int) -> SharedMemory:
    shm = Path("/dev/shm")
    size = shutil.disk_usage(shm).total if shm.is_dir() else 0
    try:
        fd = make_memory("ronde doctor", num_bytes)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        return SharedMemory(False, f"{num_bytes} bytes of it: {error.strerror}", size)
    return SharedMemory(True, "", size)


def _limits(most_processes: int | None) -> Limits:
    processes = [number for number in (_soft(resource.RLIMIT_NPROC), most_processes) if number is not None]
    return Limits(_soft(resource.RLIMIT_NOFILE), min(processes, default=None), _soft(resource.RLIMIT_MEMLOCK))


def _soft(kind: int) -> int | None:
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a copy without its metadata
        return "?"
