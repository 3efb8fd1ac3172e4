"""The limits that control groups set for this process (the CPU quota of a container, …), and kills for want of memory.

A container sees the whole machine and may use a part of it; its control groups (of both versions) say how large that
part is. Every group above counts, too: the smallest limit wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    quotas, memory_limits, available, process_limits = [], [], [], []
    for group in _cgroup_dirs(root, "cpu"):
        quota = _read_words(group / "cpu.max", group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
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


def _read_words(*paths: Path) -> list[str]:
    """Return the words in those of these files that exist: the two versions name their files differently."""
    return [word for path in paths for line in _read_lines(path) for word in line.split()]


def _read_number(*paths: Path) -> int | None:
    words = _read_words(*paths)
    return int(words[0]) if words and words[0].isdigit() else None


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
