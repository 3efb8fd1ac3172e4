"""What ranks may use and do use, and whether memory ran out: read from files that look like the kernel's."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from ronde.launch.agent.cgroup_limits import CgroupLimits, OomKillCounter, effective_cpu_count, read_cgroup_limits
from ronde.launch.agent.resource_usage import (
    GpuMonitor,
    UsageSampler,
    read_session_usage,
    sort_by_topology,
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_our_own_session_is_found_and_uses_something() -> None:
    cpu_s, resident_bytes = read_session_usage()[os.getsid(0)]
    assert resident_bytes > 1_000_000 and cpu_s > 0


def test_shares_are_those_since_the_last_look() -> None:
    meter = UsageSampler()
    assert meter.sample(10.0, {0: 100, 1: 200}, {100: (5.0, 1), 200: (1.0, 2)}) == ()
    rows = meter.sample(
        12.0,
        {0: 100, 1: 200, 2: 300},
        {100: (9.0, 3), 200: (2.0, 4), 300: (0.0, 5)},
    )
    assert rows == ((0, 2.0, 3), (1, 0.5, 4))


def test_a_rank_that_is_gone_or_whose_children_took_their_seconds_along_is_no_nonsense() -> None:
    meter = UsageSampler()
    meter.sample(0.0, {0: 100, 1: 200}, {100: (5.0, 1), 200: (9.0, 1)})
    assert meter.sample(1.0, {0: 100, 1: 200}, {200: (8.0, 1)}) == ((1, 0.0, 1),)


def test_without_pynvml_or_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("driver not loaded")

    for module in (None, types.SimpleNamespace(NVMLError=RuntimeError, nvmlInit=no_driver)):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert GpuMonitor().sample() == ()


def test_gpus_are_told_in_shares_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    fake = types.SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=50 * handle),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=1000 + handle),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    gpus = GpuMonitor()
    assert gpus.sample() == ((0.0, 1000), (0.5, 1001))
    gpus.close()
    gpus.close()
    assert closed == [True]


def test_a_kill_for_want_of_memory_in_our_group_is_noticed_once(tmp_path: Path) -> None:
    events = "sys/fs/cgroup/job.slice/memory.events"
    write(tmp_path, {"proc/self/cgroup": "4:memory:/old\n0::/job.slice\n", events: "oom 5\noom_kill 2\n"})
    shortage = OomKillCounter(tmp_path)
    assert not shortage.has_increased()
    write(tmp_path, {events: "oom 6\noom_kill 3\noom_group_kill 9\n"})
    assert shortage.has_increased()
    assert not shortage.has_increased()


def test_where_the_group_does_not_tell_the_host_does(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free_pages 1\noom_kill 0\n"})
    shortage = OomKillCounter(tmp_path)
    write(tmp_path, {"proc/vmstat": "nr_free_pages 1\noom_kill 1\n"})
    assert shortage.has_increased()


@pytest.mark.parametrize(("mine", "above", "num"), [("max", "max", 8), ("150000", "max", 2), ("max", "300000", 3)])
def test_a_limit_of_a_container_counts_as_its_number_of_cores(tmp_path: Path, mine: str, above: str, num: int) -> None:
    quotas = {"a/b": mine, "a": above}
    files = {f"sys/fs/cgroup/{group}/cpu.max": f"{quotas[group]} 100000\n" for group in quotas}
    write(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **files})
    assert effective_cpu_count(8, tmp_path) == num


def test_where_nobody_tells_nothing_is_claimed(tmp_path: Path) -> None:
    assert not OomKillCounter(tmp_path).has_increased()
    assert effective_cpu_count(8, tmp_path) == 8


CASES = {
    "no control groups": ({}, CgroupLimits()),
    "version 2, without limits": (
        {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/memory.max": "max\n"},
        CgroupLimits(),
    ),
    "version 2, a limit above counts too": (
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.current": "900\n",
            "sys/fs/cgroup/pod/box/memory.max": "500\n",
            "sys/fs/cgroup/pod/box/memory.current": "200\n",
            "sys/fs/cgroup/pod/box/pids.max": "77\n",
        },
        CgroupLimits(1.5, 500, 100, 77),
    ),
    "version 1, whose paths are the host's": (
        {
            "proc/self/cgroup": "4:memory:/docker/1234\n2:cpu,cpuacct:/docker/1234\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
        },
        CgroupLimits(0.5, 4096, 0),
    ),
    "version 1, without limits": (
        {
            "proc/self/cgroup": "4:memory:/\n2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        CgroupLimits(),
    ),
}


@pytest.mark.parametrize(("files", "limits"), CASES.values(), ids=CASES)
def test_the_smallest_limits_wins(tmp_path: Path, files: dict[str, str], limits: CgroupLimits) -> None:
    write(tmp_path, files)
    assert read_cgroup_limits(tmp_path) == limits


def test_threads_of_one_core_are_beside_each_other(tmp_path: Path) -> None:
    for cpu in range(8):  # four cores of two threads, on two sockets: 0 and 4 are one core
        ids = {"physical_package_id": f"{cpu % 4 // 2}\n", "core_id": f"{cpu % 4}\n"}
        write(tmp_path, {f"cpu{cpu}/topology/{name}": text for name, text in ids.items()})
    assert sort_by_topology(range(8), tmp_path) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert sort_by_topology([3, 1], tmp_path / "nowhere") == (1, 3)
