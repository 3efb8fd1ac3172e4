"""A rank that takes steps until the test sends something or a rank is lost. TEST_STEPS says what steps:

connections   new connections, named operations and some in order, all of them right; the addresses are reported first
logging       the same, and all there is to log is logged
timeline      a large named allreduce
"""

from __future__ import annotations

import logging
import os
import threading

import numpy as np

import ronde
from ronde.comm.world import current_world
from ronde.settings import Settings
from tests.jobs.scripts.control import ControlSocket


def use_every_connection(number: int) -> None:
    ones, size = np.ones(1000, np.float32), ronde.size()
    group = ronde.add_group(range(size))
    assert (group.allreduce(ones, name="named") == size).all()
    ronde.remove_group(group)
    assert (ronde.allreduce(ones) == size).all()


def reduce_a_gradient(number: int) -> None:
    ronde.allreduce(np.ones(1 << 20, np.float32), name=f"step {number}")


def take_steps(kind: str, stop: threading.Event) -> int:
    """The number of steps, which is the same on all ranks: until one of them has seen `stop`."""
    step = reduce_a_gradient if kind == "timeline" else use_every_connection
    number, stopped = 0, False
    while not stopped:
        step(number)
        stopped = bool(ronde.allreduce(np.array([stop.is_set()]), op="max")[0])
        number += 1
    return number


def main(kind: str) -> None:
    if kind == "logging":
        logging.basicConfig(level=logging.DEBUG)
        logging.debug("these are the settings: %s", Settings.load({}, os.environ))
    with ControlSocket() as test:
        ronde.init()
        stop = test.next_message()
        me = current_world().topology.members[test.rank]
        test.send("running", unix=[me.unix_socket], tcp=list(me.tcp_addresses))
        try:
            num_steps = take_steps(kind, stop)
        except ronde.PeerLost:
            test.send("lost")
            ronde.shutdown()
        else:
            ronde.shutdown()
            test.send("over", num_steps=num_steps)


if __name__ == "__main__":
    main(os.environ["TEST_STEPS"])
