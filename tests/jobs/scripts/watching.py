"""Ranks that take part in operations at different times, and say when: the test knows who waited for whom, and asks the
coordinator for the same.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import ronde
from tests.jobs.scripts.talk import Talk

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
    with Talk() as talk:
        wanted = talk.hear()
        ronde.init()
        x = np.ones(1000, np.float32)
        plan = ronde.plan([ronde.Bucket(1000), ronde.Bucket(1000)])
        talk.say("ready", operations=ronde.metrics().total.operations)
        talk.hear()
        times = []
        for _ in range(wanted["steps"]):
            if talk.rank == wanted["slow"]:
                if wanted.get("hangs"):
                    talk.hear()
                time.sleep(LATE_S)
            times.append(step(wanted["how"], x, plan))
            ronde.mark_step()
        talk.say("done", times=times)
        talk.hear()  # the line where all of them wait
        plan.close()
        ronde.shutdown()


if __name__ == "__main__":
    main()
