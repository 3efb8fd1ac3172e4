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
from tests.jobs.scripts.control import ControlSocket


def collectives() -> None:
    """Some of everything, and all of it right."""
    rank, size = ronde.rank(), ronde.size()
    x = np.full(1000, rank + 1.0, np.float32)
    for _ in range(4):
        assert ronde.allreduce(x)[0] == 3
    for name in ("a", "b", "a"):
        assert ronde.allreduce(x, name=name)[0] == 3
    works = [ronde.allreduce(x, name=f"many {number}", wait=False) for number in range(3)]
    assert all(work.wait()[0] == 3 for work in works)
    assert ronde.allreduce([x, x], op="max")[1][0] == 2
    assert ronde.allgather(np.arange(rank + 1)).tolist() == [0, 0, 1]
    assert ronde.broadcast(x, root=1)[0] == 2
    assert ronde.reduce_scatter(np.ones((size, 2))).tolist() == [[2.0, 2.0]]
    assert ronde.alltoall(np.full(size, rank))[0].tolist() == [0, 1]
    assert ronde.objects.allgather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    if rank == 0:
        ronde.send(x, 1)
    else:
        assert ronde.receive(x, 0)[0] == 1
    group = ronde.add_group([0, 1])
    assert group.allreduce(np.ones(2), name="a").tolist() == [2, 2]
    ronde.remove_group(group)
    assert ronde.groups()[1].allreduce(np.ones(2)).tolist() == [2, 2]
    with ronde.plan([ronde.Bucket(count=1000), ronde.Bucket(count=10, op="sum")]) as plan:
        plan.arrays[0][:] = rank
        assert plan.run(0)[0] == 0.5
        plan.start(1).wait()
    ronde.barrier(name="end")


def held() -> dict[str, Any]:
    """What this process holds right now."""
    gc.collect()
    files = Counter(_kind(link) for link in Path("/proc/self/fd").iterdir())
    threads = Counter((task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
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


def main() -> None:
    """As many rounds as the test wants."""
    with ControlSocket() as test:
        wanted = test.receive()
        kept, took = [], []
        for number in range(wanted["rounds"]):
            began = time.monotonic()
            ronde.init(groups=[[0, 1]], **wanted["settings"])
            collectives()
            ronde.shutdown()
            took.append(time.monotonic() - began)
            if number + 1 in wanted["look_after"]:
                kept.append(held())
        test.send("over", held=kept, took=took)


if __name__ == "__main__":
    main()
