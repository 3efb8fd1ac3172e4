"""A rank of tests/jobs/test_timeline.py: steps of some operations each, until the test says stop or a rank is lost."""

from __future__ import annotations

import threading

import numpy as np

import ronde
from tests.jobs.scripts.talk import Talk


def steps(stop: threading.Event) -> None:
    """All ranks take the same number of steps: until one of them has heard that it is enough."""
    gradient, enough, number = np.ones(1 << 20, np.float32), False, 0
    while not enough:
        ronde.allreduce(gradient, name=f"step {number}")
        enough = bool(ronde.allreduce(np.array([stop.is_set()]), op="max")[0])
        number += 1


def main() -> None:
    """Do what the test says."""
    with Talk() as talk:
        ronde.init()
        stop = talk.listen()
        talk.say("running")
        try:
            steps(stop)
        except ronde.PeerLost:
            talk.say("lost")
        ronde.shutdown()


if __name__ == "__main__":
    main()
