"""A rank of tests/jobs/test_timeline.py: steps of some operations each, until the test says stop or a rank is lost."""

from __future__ import annotations

import threading

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket


def steps(stop: threading.Event) -> None:
    """All ranks take the same number of steps: until one of them has heard that it is enough."""
    gradient, enough, number = np.ones(1 << 20, np.float32), False, 0
    while not enough:
        ronde.allreduce(gradient, name=f"step {number}")
        enough = bool(ronde.allreduce(np.array([stop.is_set()]), op="max")[0])
        number += 1


def main() -> None:
    """Do what the test says."""
    with ControlSocket() as test:
        ronde.init()
        stop = test.next_message()
        test.send("running")
        try:
            steps(stop)
        except ronde.PeerLost:
            test.send("lost")
        ronde.shutdown()


if __name__ == "__main__":
    main()
