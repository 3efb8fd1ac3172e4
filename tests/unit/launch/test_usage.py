"""What ranks use, and whether memory ran out: read from files that look like the kernel's."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from ronde.launch.agent.resource_usage import (
    GpuMonitor,
    OomKillCounter,
    ProcessUsage,
    UsageSampler,
    effective_cpu_count,
    parse_proc_stat,
    read_session_usage,
)

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def stat(name: str, session: int, *ticks: int, pages: int) -> str:
    fields = ["S", "1", "1", str(session), *"0 -1 0 0 0 0 0".split(), *map(str, ticks), *"20 0 1 0 5 999".split()]
    return f"42 ({name}) {' '.join([*fields, str(pages), '0'])}\n"


@pytest.mark.parametrize("name", ["python", "a b) S (c", "((", ")"])
def test_a_line_of_the_kernel_is_read_whatever_the_name(name: str) -> None:
    text = stat(name, 7, TICKS, 2 * TICKS, 3 * TICKS, 4 * TICKS, pages=5)
    assert parse_proc_stat(text) == (7, ProcessUsage(10.0, 5 * PAGE))


def test_our_own_session_is_found_and_uses_something() -> None:
    found = read_session_usage()[os.getsid(0)]
    assert found.resident_bytes > 1_000_000 and found.cpu_s > 0


def test_shares_are_those_since_the_last_look() -> None:
    meter = UsageSampler()
    assert meter.sample(10.0, {0: 100, 1: 200}, {100: ProcessUsage(5.0, 1), 200: ProcessUsage(1.0, 2)}) == ()
    rows = meter.sample(
        12.0,
        {0: 100, 1: 200, 2: 300},
        {100: ProcessUsage(9.0, 3), 200: ProcessUsage(2.0, 4), 300: ProcessUsage(0.0, 5)},
    )
    assert rows == ((0, 2.0, 3), (1, 0.5, 4))


def test_a_rank_that_is_gone_or_whose_children_took_their_seconds_along_is_no_nonsense() -> None:
    meter = UsageSampler()
    meter.sample(0.0, {0: 100, 1: 200}, {100: ProcessUsage(5.0, 1), 200: ProcessUsage(9.0, 1)})
    assert meter.sample(1.0, {0: 100, 1: 200}, {200: ProcessUsage(8.0, 1)}) == ((1, 0.0, 1),)


def test_without_pynvml_or_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMonitor().sample() == ()
    fake = types.SimpleNamespace(NVMLError=RuntimeError)

    def no_driver() -> None:
        raise RuntimeError("driver not loaded")

    fake.nvmlInit = no_driver
    monkeypatch.setitem(sys.modules, "pynvml", fake)
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
    group = tmp_path / "sys/fs/cgroup/job.slice"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/job.slice\n")
    events = group / "memory.events"
    events.write_text("oom 5\noom_kill 2\noom_group_kill 9\n")
    shortage = OomKillCounter(tmp_path)
    assert not shortage.has_increased()
    events.write_text("oom 6\noom_kill 3\noom_group_kill 9\n")
    assert shortage.has_increased()
    assert not shortage.has_increased()


def test_where_the_group_does_not_tell_the_host_does(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 0\n")
    shortage = OomKillCounter(tmp_path)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 1\n")
    assert shortage.has_increased()


@pytest.mark.parametrize(("mine", "above", "num"), [("max", "max", 8), ("150000", "max", 2), ("max", "300000", 3)])
def test_a_limit_of_a_container_counts_as_its_number_of_cores(tmp_path: Path, mine: str, above: str, num: int) -> None:
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    (group / "cpu.max").write_text(f"{mine} 100000\n")
    (group.parent / "cpu.max").write_text(f"{above} 100000\n")
    assert effective_cpu_count(8, tmp_path) == num


def test_where_nobody_tells_nothing_is_claimed(tmp_path: Path) -> None:
    assert not OomKillCounter(tmp_path).has_increased()
    assert effective_cpu_count(8, tmp_path) == 8
