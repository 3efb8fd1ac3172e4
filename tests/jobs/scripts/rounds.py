"""A rank of tests/jobs/test_rounds.py: one round after the other in one process, and what the process holds between."""

from __future__ import annotations

import gc
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import ronde
from tests.jobs.scripts.collectives import use_every_collective
from tests.jobs.scripts.control import ControlSocket


def held() -> dict[str, Any]:
    """What this process holds right now."""
    gc.collect()
    files = Counter(_kind(link) for link in Path("/proc/self/fd").iterdir())
    threads = Counter(filter(None, map(_thread_name, Path("/proc/self/task").iterdir())))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "files": dict(files),
        "threads": dict(threads),
        "shared": [line for line in maps if "memfd" in line],
        "num_maps": len(maps),
        "rss_bytes": psutil.Process().memory_info().rss,
    }


def _kind(link: Path) -> str:
    try:
        return str(link.readlink()).split(":")[0]
    except OSError:  # the descriptor of this very listing
        return "listing"


def _thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it ended while we looked
        return ""


def held_in_the_end() -> dict[str, Any]:
    """What this process holds in each of several looks: a thread that was joined may still be on its way out."""
    looks = []
    for _ in range(10):
        looks.append(held())
        time.sleep(0.05)
    return min(looks, key=lambda look: (sum(look["threads"].values()), sum(look["files"].values())))


def main() -> None:
    """As many rounds as the test wants."""
    with ControlSocket() as test:
        wanted = test.receive()
        kept, took = [], []
        for number in range(wanted["rounds"]):
            began = time.monotonic()
            ronde.init(groups=[[0, 1]], **wanted["settings"])
            use_every_collective()
            assert ronde.groups()[1].allreduce(np.ones(2)).tolist() == [2, 2]
            ronde.shutdown()
            took.append(time.monotonic() - began)
            if number + 1 in wanted["look_after"]:
                kept.append(held_in_the_end())
        test.send("over", held=kept, took=took)


if __name__ == "__main__":
    main()
