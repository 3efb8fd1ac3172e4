"""Which CPUs the ranks of this host may use, and what they use: CPU time, memory, GPUs.

A rank is the leader of its session, so a rank's processes are those of its session: one look at all processes of the
host serves all ranks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ronde.observe.stacks import split_proc_stat


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
