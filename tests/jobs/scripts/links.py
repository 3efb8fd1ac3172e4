"""A rank of tests/jobs/test_links.py: it thinks that it is on one of several hosts, does what the test says, and counts
its TCP connections with other ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

import ronde
from ronde.comm.world import current_world
from tests.jobs.scripts.control import ControlSocket


def run_plan() -> None:
    """What training with one optimizer does in two steps."""
    rank, size = ronde.rank(), ronde.size()
    plan = ronde.plan([ronde.Bucket(300_000, op="sum"), ronde.Bucket(7, op="sum")])
    for step in range(2):
        for index, array in enumerate(plan.arrays):
            array[:] = rank + step
            plan.run(index)
            assert (array == size * (size - 1) // 2 + size * step).all()


def close_plan() -> None:
    plan = ronde.plan([ronde.Bucket(300_000, op="sum")])
    plan.run(0)
    plan.close()


ACTIONS: dict[str, Callable[[], object]] = {
    "init only": lambda: None,
    "plan": run_plan,
    "close plan": close_plan,
    "small": lambda: ronde.allreduce(np.ones(4, np.float32)),
    "large": lambda: ronde.allreduce(np.ones(1_000_000, np.float32)),
    "all to all": lambda: ronde.alltoall(np.arange(ronde.size())),
}


def count_links() -> dict[str, int]:
    """Connections with each other rank. They are known by their listeners: one end of a link has that address."""
    listeners = {
        int(address.rpartition(":")[2]): member.rank
        for member in current_world().joined_round.topology.members
        for address in member.tcp_addresses
    }
    counts: dict[str, int] = {"opened": 0, "accepted": 0}
    for each in psutil.Process().net_connections("tcp"):
        if each.status == psutil.CONN_ESTABLISHED:
            counts["opened"] += listeners.get(each.raddr.port, ronde.rank()) != ronde.rank()
            counts["accepted"] += listeners.get(each.laddr.port) == ronde.rank()
    return counts


def count_files() -> int:
    return psutil.Process().num_fds()


def fork_child(signum: int, frame: object) -> None:
    """A child that lives until the test ends it, and takes part in nothing."""
    if os.fork() == 0:
        signal.pause()
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGUSR1, lambda signum, frame: ronde.shutdown())
    signal.signal(signal.SIGUSR2, fork_child)
    num_hosts = int(os.environ["TEST_NUM_HOSTS"])
    with ControlSocket() as test:
        more: dict[str, Any] = {"operation_s": 1.0} if os.environ["TEST_IMPATIENT"] == str(test.rank) else {}
        ronde.init(host=f"host-{test.rank * num_hosts // int(os.environ['RONDE_SIZE'])}", **more)
        test.send("joined", **count_links())
        while (action := test.receive()["action"]) != "leave":
            test.send("started")
            try:
                ACTIONS[action]()
            except (ronde.RondeError, KeyboardInterrupt) as error:
                missing = list(getattr(error, "missing", ()))
                test.send("failed", error=type(error).__name__, text=str(error), missing=missing)
            else:
                ronde.barrier()
                test.send("done", files=count_files(), **count_links())
        ronde.shutdown()
        test.send("left")


if __name__ == "__main__":
    main()
