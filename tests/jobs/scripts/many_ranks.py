"""A rank of tests/jobs/test_many_ranks.py: collectives of all kinds in a job of dozens of ranks, then a report."""

from __future__ import annotations

import os

import numpy as np
import psutil

import ronde
from tests.jobs.scripts.control import ControlSocket
from tests.jobs.scripts.links import run_plan


def run_operations(rank: int, size: int) -> None:
    everybody = np.arange(size)
    for num in (1, 1000, 300_000):
        total = ronde.allreduce(np.full(num, rank, np.float32))
        assert (total == everybody.sum()).all(), num
    assert ronde.allgather(np.array([rank])).tolist() == everybody.tolist()
    assert ronde.broadcast(np.array([rank * 7]), root=size - 1).tolist() == [(size - 1) * 7]
    assert ronde.reduce_scatter(np.ones(size)).tolist() == [size]
    received, _ = ronde.alltoall(np.full(size, rank))
    assert received.tolist() == everybody.tolist()
    works = [ronde.allreduce(np.array([index]), name=f"metric {index}", wait=False) for index in range(20)]
    assert [int(work.wait()[0]) for work in works] == [index * size for index in range(20)]
    ronde.barrier()


def num_links() -> int:
    """Established TCP connections of this process."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process().net_connections("tcp"))


if __name__ == "__main__":
    with ControlSocket() as test:
        hosts = int(os.environ["TEST_NUM_HOSTS"])
        ronde.init(host=f"host-{test.rank * hosts // int(os.environ['RONDE_SIZE'])}" if hosts > 1 else "")
        run_plan()
        test.send("trained", num_links=num_links())
        run_operations(ronde.rank(), ronde.size())
        test.send("done")
        ronde.shutdown()
