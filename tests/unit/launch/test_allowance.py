"""What control groups allow, read from trees as both of their versions make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ronde.launch.agent.resource_usage import CgroupLimits, read_cgroup_limits

CASES = {
    "no control groups": ({}, CgroupLimits()),
    "version 2, without limits": (
        {
            "proc/self/cgroup": "0::/user\n",
            "sys/fs/cgroup/user/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/memory.max": "max\n",
            "sys/fs/cgroup/user/pids.max": "max\n",
        },
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


@pytest.mark.parametrize(("files", "allowance"), CASES.values(), ids=CASES)
def test_the_smallest_allowance_wins(tmp_path: Path, files: dict[str, str], allowance: CgroupLimits) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_cgroup_limits(tmp_path) == allowance
