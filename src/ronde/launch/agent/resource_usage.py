"""Which cores a rank gets. The division is pure; used by the driver for RankOrder.cpus, and by the agent, which lists
the cores of its host so that they can be divided.

What the control groups of this process allow: cores, memory, processes; both versions of control groups. Used by
launch/usage and launch/checkup.

A container sees the whole machine and may use a part of it; only its control groups say how large that is. Every group
above counts, too: the smallest allowance wins.

What the ranks of this host use and may use: processor, memory, GPUs; and whether the host has run out of memory.
Used by launch/agent.

A rank is the leader of its session, so a rank's processes are those of its session: one look at all processes of the
host serves all ranks.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CgroupLimits",
    "GpuMonitor",
    "OomKillCounter",
    "ProcessUsage",
    "UsageSampler",
    "available_cpus",
    "effective_cpu_count",
    "parse_proc_stat",
    "read_cgroup_limits",
    "read_session_usage",
    "sort_by_topology",
]


def available_cpus() -> tuple[int, ...]:
    """The cores this process may use, in the order in which they should be divided."""
    return sort_by_topology(os.sched_getaffinity(0), _socket_and_core)


def sort_by_topology(cpus: Iterable[int], topology_of: Callable[[int], tuple[int, int]]) -> tuple[int, ...]:
    """Threads of one physical core beside each other, and cores of one socket too: Linux numbers the second thread of
    every core after the first threads of all, so that dividing by number would put two ranks on the same cores."""
    return tuple(sorted(cpus, key=lambda cpu: (*topology_of(cpu), cpu)))


def _socket_and_core(cpu: int) -> tuple[int, int]:
    """Socket and physical core of a CPU as Linux numbers it; where it does not tell, each is a core of its own."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


NO_LIMIT_BYTES = 1 << 60
"""How version 1 says that there is no limit: with a number larger than any memory."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """None where there is no limit."""

    cpu_quota: float | None = None
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None
    """Of that memory, what is not in use."""
    max_processes: int | None = None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Look at the control groups."""
    cores: list[float] = []
    memory: list[int] = []
    left: list[int] = []
    processes: list[int] = []
    for group in _cgroup_dirs(root, "cpu"):
        quota = _read_words(group / "cpu.max") or [
            *_read_words(group / "cpu.cfs_quota_us"),
            *_read_words(group / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit():  # else "max", or -1
            cores.append(int(quota[0]) / int(quota[1]))
    for group in _cgroup_dirs(root, "memory"):
        limit = _read_number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _read_number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        if limit is not None and limit < NO_LIMIT_BYTES:
            memory.append(limit)
            left.append(max(0, limit - used))
    for group in _cgroup_dirs(root, "pids"):
        limit = _read_number(group / "pids.max")
        if limit is not None:
            processes.append(limit)
    return CgroupLimits(
        min(cores, default=None), min(memory, default=None), min(left, default=None), min(processes, default=None)
    )


def _cgroup_dirs(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our group and of those above it, which decide about this. Where the paths are those of the host
    and not of our container, what is left is the top."""
    top = root / "sys/fs/cgroup"
    for line in _read_lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            base = top if number == "0" else top / controller
            own = base / path.strip("/") if ".." not in path else base
            yield from (group for group in (own, *own.parents) if group.is_relative_to(base) and group.is_dir())


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # hidden in some containers
        return []


def _read_words(path: Path) -> list[str]:
    return [word for line in _read_lines(path) for word in line.split()]


def _read_number(*paths: Path) -> int | None:
    """What the first of these files says, if it says a number."""
    for path in paths:
        words = _read_words(path)
        if words:
            return int(words[0]) if words[0].isdigit() else None
    return None


_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """By one process, or by several together."""

    cpu_s: float
    """Since its start, with its children that have ended."""
    resident_bytes: int

    def __add__(self, other: ProcessUsage) -> ProcessUsage:
        """Together."""
        return ProcessUsage(self.cpu_s + other.cpu_s, self.resident_bytes + other.resident_bytes)


def parse_proc_stat(text: str) -> tuple[int, ProcessUsage]:
    """The session of a process and what it uses, from its /proc/PID/stat."""
    # Field 2 is the name in brackets, and may itself contain brackets and blanks. These are the fields from 3 on.
    fields = text.rpartition(")")[2].split()
    session = int(fields[3])
    cpu_ticks = sum(int(field) for field in fields[11:15])
    return session, ProcessUsage(cpu_ticks / _TICKS, int(fields[21]) * _PAGE_BYTES)


def read_session_usage() -> dict[int, ProcessUsage]:
    """What the processes of each session use together."""
    found: dict[int, ProcessUsage] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                session, used = parse_proc_stat(Path(entry.path, "stat").read_text(errors="replace"))
            except OSError:  # it ended while we looked
                continue
            found[session] = found[session] + used if session in found else used
    return found


class UsageSampler:
    """Turns processor seconds into shares of a core, between one look and the next."""

    def __init__(self) -> None:
        self._last_cpu_s: dict[int, float] = {}
        self._last_sample_s = 0.0

    def sample(
        self, now_s: float, pids: Mapping[int, int], session_usage: Mapping[int, ProcessUsage]
    ) -> tuple[tuple[int, float, int], ...]:
        """(rank, share of a core, resident bytes) of the ranks with these pids that were there the last time."""
        passed_s = now_s - self._last_sample_s
        rows = []
        for rank, pid in sorted(pids.items()):
            used = session_usage.get(pid)
            if used is not None and pid in self._last_cpu_s and passed_s > 0:
                # A process whose parent ended before it takes its seconds with it.
                share = max(0.0, used.cpu_s - self._last_cpu_s[pid]) / passed_s
                rows.append((rank, share, used.resident_bytes))
        self._last_cpu_s = {pid: session_usage[pid].cpu_s for pid in pids.values() if pid in session_usage}
        self._last_sample_s = now_s
        return tuple(rows)


class GpuMonitor:
    """The NVIDIA GPUs of this host, if there are any and pynvml is installed."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver, no GPU
            return
        self._nvml = nvml

    def sample(self) -> tuple[tuple[float, int], ...]:
        """(share of time busy, bytes used) of each."""
        if self._nvml is None:
            return ()
        nvml = self._nvml
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return tuple(
                (nvml.nvmlDeviceGetUtilizationRates(each).gpu / 100, int(nvml.nvmlDeviceGetMemoryInfo(each).used))
                for each in handles
            )
        except nvml.NVMLError:  # lost, or of a kind that does not tell
            return ()

    def close(self) -> None:
        """Let go of the driver. Idempotent."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


class OomKillCounter:
    """Notices when the kernel killed processes because memory ran out: of our control group, or where it does not tell
    (the group of the whole host), of the host."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = _oom_events_file(root)
        self._count = self._read_count()

    def has_increased(self) -> bool:
        """Whether it has happened since the last call."""
        before, self._count = self._count, self._read_count()
        return self._count > before

    def _read_count(self) -> int:
        try:
            lines = self._file.read_text().splitlines()
        except OSError:  # hidden in some containers
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _oom_events_file(root: Path) -> Path:
    """What cgroup v2 counts includes kills by the whole host."""
    found = [group / "memory.events" for group in _own_cgroup_v2_dirs(root)]
    return found[0] if found and found[0].exists() else root / "proc/vmstat"


def effective_cpu_count(num_cpus: int, root: Path = Path("/")) -> int:
    """How many of these processors our control groups let us use: a container may see 64 and be given 2."""
    quota = read_cgroup_limits(root).cpu_quota
    return max(1, math.ceil(min(num_cpus, num_cpus if quota is None else quota)))


def _own_cgroup_v2_dirs(root: Path) -> list[Path]:
    """Our control group (v2: its line in /proc/self/cgroup begins with 0) and those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # hidden in some containers
        return []
    top = root / "sys/fs/cgroup"
    for line in lines:
        if line.startswith("0::/") and ".." not in line:
            mine = top / line.removeprefix("0::/")
            return [mine, *(above for above in mine.parents if above.is_relative_to(top))]
    return []
