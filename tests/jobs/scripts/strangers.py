"""A rank of tests/jobs/test_strangers.py: steps that use every way between the ranks, until the test says stop."""

from __future__ import annotations

import threading

import numpy as np

import ronde
from ronde.comm.world import current_world
from tests.jobs.scripts.control import ControlSocket


def step(stop: threading.Event) -> bool:
    """New connections, named operations, and some in order, all of them right; whether it was the last."""
    ones, size = np.ones(1000, np.float32), ronde.size()
    group = ronde.add_group(range(size))
    assert (group.allreduce(ones, name="named") == size).all()
    ronde.remove_group(group)
    assert (ronde.allreduce(ones) == size).all()
    return bool(ronde.allreduce(np.array([stop.is_set()]), op="max")[0])


def main() -> None:
    """Do what the test says."""
    with ControlSocket() as test:
        ronde.init()
        stop = test.next_message()
        me = current_world().topology.members[test.rank]
        test.send("doors", unix=[me.unix_socket], tcp=list(me.tcp_addresses))
        num_steps = 1
        while not step(stop):
            num_steps += 1
        ronde.shutdown()
        test.send("over", num_steps=num_steps)


if __name__ == "__main__":
    main()
