"""What the ranks of this host use and may use: processor, memory, GPUs; and whether the host has run out of memory.
Used by launch/agent.

A rank is the leader of its session, so a rank's processes are those of its session: one look at all processes of the
host serves all ranks.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.launch.allowance import read_allowance

__all__ = ["Gpus", "Meter", "Shortage", "Used", "num_cores", "parse_stat", "read_sessions"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Used:
    """By one process, or by several together."""

    cpu_s: float
    """Since its start, with its children that have ended."""
    resident_bytes: int

    def __add__(self, other: Used) -> Used:
        """Together."""
        return Used(self.cpu_s + other.cpu_s, self.resident_bytes + other.resident_bytes)


def parse_stat(text: str) -> tuple[int, Used]:
    """The session of a process and what it uses, from its /proc/PID/stat."""
    # Field 2 is the name in brackets, and may itself contain brackets and blanks. These are the fields from 3 on.
    fields = text.rpartition(")")[2].split()
    session = int(fields[3])
    cpu_ticks = sum(int(field) for field in fields[11:15])
    return session, Used(cpu_ticks / _TICKS, int(fields[21]) * _PAGE_BYTES)


def read_sessions() -> dict[int, Used]:
    """What the processes of each session use together."""
    found: dict[int, Used] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                session, used = parse_stat(Path(entry.path, "stat").read_text(errors="replace"))
            except OSError:  # it ended while we looked
                continue
            found[session] = found[session] + used if session in found else used
    return found


class Meter:
    """Turns processor seconds into shares of a core, between one look and the next."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self._at_s = 0.0

    def look(
        self, now_s: float, pids: Mapping[int, int], sessions: Mapping[int, Used]
    ) -> tuple[tuple[int, float, int], ...]:
        """(rank, share of a core, resident bytes) of the ranks with these pids that were there the last time."""
        passed_s = now_s - self._at_s
        rows = []
        for rank, pid in sorted(pids.items()):
            used = sessions.get(pid)
            if used is not None and pid in self._before and passed_s > 0:
                # A process whose parent ended before it takes its seconds with it.
                share = max(0.0, used.cpu_s - self._before[pid]) / passed_s
                rows.append((rank, share, used.resident_bytes))
        self._before = {pid: sessions[pid].cpu_s for pid in pids.values() if pid in sessions}
        self._at_s = now_s
        return tuple(rows)


class Gpus:
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

    def look(self) -> tuple[tuple[float, int], ...]:
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


class Shortage:
    """Notices when the kernel killed processes because memory ran out: of our control group, or where it does not tell
    (the group of the whole host), of the host."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = _events_file(root)
        self._count = self._read()

    def rose(self) -> bool:
        """Whether it has happened since the last call."""
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        try:
            lines = self._file.read_text().splitlines()
        except OSError:  # hidden in some containers
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _events_file(root: Path) -> Path:
    """What cgroup v2 counts includes kills by the whole host."""
    found = [group / "memory.events" for group in _groups(root)]
    return found[0] if found and found[0].exists() else root / "proc/vmstat"


def num_cores(num_cpus: int, root: Path = Path("/")) -> int:
    """How many of these processors our control groups let us use: a container may see 64 and be given 2."""
    quota = read_allowance(root).cores
    return max(1, math.ceil(min(num_cpus, num_cpus if quota is None else quota)))


def _groups(root: Path) -> list[Path]:
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
