"""Which CPUs the ranks of this host may use, and what they use: CPU time, memory, GPUs.

A rank is the leader of its session, so a rank's processes are those of its session: one look at all processes of the
host serves all ranks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ronde.observe.stacks import split_proc_stat

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def sort_by_topology(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> tuple[int, ...]:
    """Sort CPUs so that threads of one core, and cores of one socket, are beside each other. Linux numbers the second
    threads of all cores after all first threads, so that dividing by number would put two ranks on the same cores."""

    def socket_and_core(cpu: int) -> tuple[int, int, int]:
        topology = root / f"cpu{cpu}/topology"
        try:
            socket, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
            return int(socket), int(core), cpu
        except (OSError, ValueError):  # where Linux does not tell, each CPU is a core of its own
            return 0, cpu, cpu

    return tuple(sorted(cpus, key=socket_and_core))


def read_session_usage() -> dict[int, tuple[float, int]]:
    """Return the CPU seconds (with those of children that have ended) and the resident bytes of each session."""
    usage: dict[int, tuple[float, int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = split_proc_stat(Path(entry.path, "stat").read_bytes())
            except OSError:  # it has just ended
                continue
            cpu_s, resident_bytes = usage.get(session := int(fields[3]), (0.0, 0))
            usage[session] = (
                cpu_s + sum(map(int, fields[11:15])) / _TICKS,
                resident_bytes + int(fields[21]) * _PAGE_BYTES,
            )
    return usage


class UsageSampler:
    """Turns CPU seconds into shares of a core, between one sample and the next."""

    def __init__(self) -> None:
        self._last_cpu_s: dict[int, float] = {}
        self._last_sample_s = 0.0

    def sample(
        self, now_s: float, pids: Mapping[int, int], session_usage: Mapping[int, tuple[float, int]]
    ) -> tuple[tuple[int, float, int], ...]:
        """Return (rank, share of a core, resident bytes) of those ranks that were there at the sample before, too."""
        passed_s = now_s - self._last_sample_s
        rows = []
        for rank, pid in sorted(pids.items()):
            if pid in session_usage and pid in self._last_cpu_s and passed_s > 0:
                cpu_s, resident_bytes = session_usage[pid]
                # The seconds of a process whose parent ended before it are in no sum any more.
                rows.append((rank, max(0.0, cpu_s - self._last_cpu_s[pid]) / passed_s, resident_bytes))
        self._last_cpu_s = {pid: session_usage[pid][0] for pid in pids.values() if pid in session_usage}
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
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
