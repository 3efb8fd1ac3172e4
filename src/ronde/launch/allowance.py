"""What the control groups of this process allow: cores, memory, processes; both versions of control groups. Used by
launch/usage and launch/checkup.

A container sees the whole machine and may use a part of it; only its control groups say how large that is. Every group
above counts, too: the smallest allowance wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Allowance", "read_allowance"]

NO_LIMIT_BYTES = 1 << 60
"""How version 1 says that there is no limit: with a number larger than any memory."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """None where there is no limit."""

    cores: float | None = None
    memory_bytes: int | None = None
    left_bytes: int | None = None
    """Of that memory, what is not in use."""
    processes: int | None = None


def read_allowance(root: Path = Path("/")) -> Allowance:
    """Look at the control groups."""
    cores: list[float] = []
    memory: list[int] = []
    left: list[int] = []
    processes: list[int] = []
    for group in _groups(root, "cpu"):
        quota = _words(group / "cpu.max") or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
        if len(quota) == 2 and quota[0].isdigit():  # else "max", or -1
            cores.append(int(quota[0]) / int(quota[1]))
    for group in _groups(root, "memory"):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        if limit is not None and limit < NO_LIMIT_BYTES:
            memory.append(limit)
            left.append(max(0, limit - used))
    for group in _groups(root, "pids"):
        limit = _number(group / "pids.max")
        if limit is not None:
            processes.append(limit)
    return Allowance(
        min(cores, default=None), min(memory, default=None), min(left, default=None), min(processes, default=None)
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our group and of those above it, which decide about this. Where the paths are those of the host
    and not of our container, what is left is the top."""
    top = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            base = top if number == "0" else top / controller
            own = base / path.strip("/") if ".." not in path else base
            yield from (group for group in (own, *own.parents) if group.is_relative_to(base) and group.is_dir())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # hidden in some containers
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _number(*paths: Path) -> int | None:
    """What the first of these files says, if it says a number."""
    for path in paths:
        words = _words(path)
        if words:
            return int(words[0]) if words[0].isdigit() else None
    return None
