"""What the ranks of this host may use and do use: CPUs, memory, GPUs; and whether memory has run out.

A container sees the whole machine and may use a part of it; its control groups (of both versions) say how large that
part is. Every group above counts, too: the smallest limit wins.

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

from ronde.observe.stacks import split_proc_stat

__all__ = [
    "CgroupLimits",
    "GpuMonitor",
    "OomKillCounter",
    "ProcessUsage",
    "UsageSampler",
    "available_cpus",
    "effective_cpu_count",
    "read_cgroup_limits",
    "read_session_usage",
    "sort_by_topology",
]


def available_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may use, in the order in which they should be divided among ranks."""
    return sort_by_topology(os.sched_getaffinity(0), _socket_and_core)


def sort_by_topology(cpus: Iterable[int], topology_of: Callable[[int], tuple[int, int]]) -> tuple[int, ...]:
    """Sort CPUs so that threads of one core, and cores of one socket, are beside each other. Linux numbers the second
    threads of all cores after all first threads, so that dividing by number would put two ranks on the same cores."""
    return tuple(sorted(cpus, key=lambda cpu: (*topology_of(cpu), cpu)))


def _socket_and_core(cpu: int) -> tuple[int, int]:
    """Return the socket and the physical core of a CPU; where Linux does not tell, each CPU is a core of its own."""
    directory = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return int((directory / "physical_package_id").read_text()), int((directory / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a number larger than any memory where there is no limit."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The limits of this process's control groups; None where there is no limit."""

    cpu_quota: float | None = None
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None
    """The part of that memory that is not in use."""
    max_processes: int | None = None


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    quotas: list[float] = []
    memory_limits: list[int] = []
    available: list[int] = []
    process_limits: list[int] = []
    for group in _cgroup_dirs(root, "cpu"):
        quota = _read_words(group / "cpu.max") or [
            *_read_words(group / "cpu.cfs_quota_us"),
            *_read_words(group / "cpu.cfs_period_us"),
        ]
        if len(quota) == 2 and quota[0].isdigit():  # else "max", or -1
            quotas.append(int(quota[0]) / int(quota[1]))
    for group in _cgroup_dirs(root, "memory"):
        limit = _read_number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _read_number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        if limit is not None and limit < NO_LIMIT_BYTES:
            memory_limits.append(limit)
            available.append(max(0, limit - used))
    for group in _cgroup_dirs(root, "pids"):
        limit = _read_number(group / "pids.max")
        if limit is not None:
            process_limits.append(limit)
    return CgroupLimits(
        min(quotas, default=None),
        min(memory_limits, default=None),
        min(available, default=None),
        min(process_limits, default=None),
    )


def effective_cpu_count(num_cpus: int, root: Path = Path("/")) -> int:
    """Return how many of these CPUs the control groups allow to use: a container may see 64 and be given 2."""
    quota = read_cgroup_limits(root).cpu_quota
    return max(1, math.ceil(min(num_cpus, num_cpus if quota is None else quota)))


def _cgroup_dirs(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's group and of those above it that control this. Where the paths are those
    of the host and not of the container, that is the top directory only."""
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
    """Return the number in the first of these files that exists, None if it holds no number."""
    for path in paths:
        words = _read_words(path)
        if words:
            return int(words[0]) if words[0].isdigit() else None
    return None


_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What one process uses, or several together."""

    cpu_s: float
    """CPU time since its start, with its children that have ended."""
    resident_bytes: int

    def __add__(self, other: ProcessUsage) -> ProcessUsage:
        return ProcessUsage(self.cpu_s + other.cpu_s, self.resident_bytes + other.resident_bytes)


def read_session_usage() -> dict[int, ProcessUsage]:
    """Return what the processes of each session of this host use together."""
    usage: dict[int, ProcessUsage] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = split_proc_stat(Path(entry.path, "stat").read_bytes())
            except OSError:  # it has just ended
                continue
            session = int(fields[3])
            used = ProcessUsage(sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE_BYTES)
            usage[session] = usage[session] + used if session in usage else used
    return usage


class UsageSampler:
    """Turns CPU seconds into shares of a core, between one sample and the next."""

    def __init__(self) -> None:
        self._last_cpu_s: dict[int, float] = {}
        self._last_sample_s = 0.0

    def sample(
        self, now_s: float, pids: Mapping[int, int], session_usage: Mapping[int, ProcessUsage]
    ) -> tuple[tuple[int, float, int], ...]:
        """Return (rank, share of a core, resident bytes) of those ranks that were there at the sample before, too."""
        passed_s = now_s - self._last_sample_s
        rows = []
        for rank, pid in sorted(pids.items()):
            used = session_usage.get(pid)
            if used is not None and pid in self._last_cpu_s and passed_s > 0:
                # The seconds of a process whose parent ended before it are in no sum any more.
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
        """Return (share of time busy, bytes used) of each GPU."""
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
        """Idempotent."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


class OomKillCounter:
    """Notices when the kernel has killed processes because memory ran out: in our control group, or where that has no
    count (it is the root group), on the whole host."""

    def __init__(self, root: Path = Path("/")) -> None:
        # What version 2 counts in a group includes kills for want of memory of the whole host.
        own_group = next(_cgroup_dirs(root, "memory"), root)
        events = own_group / "memory.events"
        self._file = events if events.exists() else root / "proc/vmstat"
        self._count = self._read_count()

    def has_increased(self) -> bool:
        """Return whether it has happened since the last call."""
        before, self._count = self._count, self._read_count()
        return self._count > before

    def _read_count(self) -> int:
        return sum(int(line.split()[1]) for line in _read_lines(self._file) if line.startswith("oom_kill "))
