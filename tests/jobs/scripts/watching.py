"""Ranks that take part in operations at different times, and say when: the test knows who waited for whom, and asks the
coordinator for the same.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ronde
from tests.jobs.scripts.control import ControlSocket

LATE_S = 0.15
"""How much longer the slow rank computes in each step: much more than a busy machine delays the others."""
OVERLAP_S = 0.005
"""How long a rank computes while its buckets travel."""


def step(how: str, x: np.ndarray[Any, Any], plan: ronde.Plan) -> tuple[int, int]:
    """One operation in this way: when this rank came to it, and when its caller began to wait."""
    came = time.monotonic_ns()
    if how == "ordered":
        ronde.allreduce(x)
    elif how == "named":
        ronde.allreduce(x, name="gradient")
    else:
        works = [plan.start(index) for index in range(2)]
        time.sleep(OVERLAP_S)
        blocked = time.monotonic_ns()
        for work in works:
            work.wait()
        return came, blocked
    return came, came


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        ronde.init()
        x = np.ones(1000, np.float32)
        plan = ronde.plan([ronde.Bucket(1000), ronde.Bucket(1000)])
        test.send("ready", operations=ronde.metrics().total.operations)
        test.receive()
        times = []
        for _ in range(wanted["steps"]):
            if test.rank == wanted["slow"]:
                if wanted.get("hangs"):
                    test.receive()
                time.sleep(LATE_S)
            times.append(step(wanted["how"], x, plan))
            ronde.mark_step()
        test.send("done", times=times)
        test.receive()  # the line where all of them wait
        plan.close()
        ronde.shutdown()


if __name__ == "__main__":
    main()
