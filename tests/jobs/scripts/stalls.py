"""A rank of tests/jobs/test_stalls.py: one rank does not come, the others wait for it in one operation after the other,
each until it is reported. Then the late one comes, and all is well.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ronde
from ronde.observe.events import StallReported
from tests.jobs.scripts.control import ControlSocket, until

ONES = np.ones(3, np.float32)


def asleep(released: threading.Event) -> None:
    """Where a late rank waits for something else."""
    while not released.is_set():
        time.sleep(0.01)  # the line where it is asleep


def busy(released: threading.Event) -> None:
    """Where a late rank computes."""
    while not released.is_set():  # the line where it is busy
        pass


def operations(plan: ronde.Plan) -> list[Callable[[], ronde.Work]]:
    """In program order, by name, planned, and by a name that repeats."""
    return [
        lambda: ronde.allreduce(ONES, wait=False),
        lambda: ronde.allreduce(ONES, name="gradient", wait=False),
        lambda: plan.start(0),
        lambda: ronde.allreduce(ONES, name="repeated", wait=False),
    ]


def reports() -> list[StallReported]:
    """The stalls that were reported to this rank."""
    return [event for event in ronde.events() if isinstance(event, StallReported)]


def has_heard(num_reports: int) -> bool:
    """Whether there are so many."""
    return len(reports()) >= num_reports


def facts(event: StallReported) -> dict[str, Any]:
    return {
        "op": event.op,
        "group": event.group,
        "since": event.at_ns / 1e9 - event.waited_s,
        "waited_s": event.waited_s,
        "missing": list(event.missing),
        "report": event.report,
    }


def be_late(test: ControlSocket, how: Callable[[threading.Event], None], plan: ronde.Plan) -> None:
    """Do not come until the test says so."""
    released = test.next_message()
    test.send("late")
    how(released)
    for start in operations(plan):
        start().wait()


def wait_for_late(test: ControlSocket, plan: ronde.Plan) -> None:
    """Start one operation after the other, and wait for reports, as the test says."""
    works, began = [], []
    while wanted := test.receive():
        if "start" in wanted:
            began.append(time.monotonic())
            works.append(operations(plan)[wanted["start"]]())
        else:
            num_wanted: int = wanted["reports"]
            until(functools.partial(has_heard, num_wanted), f"{num_wanted} reports")
        test.send("done")
    totals = [float(work.wait().sum()) for work in works]
    test.send("over", began=began, totals=totals, reports=[facts(event) for event in reports()])


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        ronde.init(**wanted["settings"])
        plan = ronde.plan([ronde.Bucket(count=3)])
        plan.arrays[0][:] = 1.0
        for _ in range(3):  # then it is announced in shared memory
            ronde.allreduce(ONES, name="repeated")
        ronde.barrier()
        if test.rank == wanted["late"]:
            be_late(test, {"asleep": asleep, "busy": busy}[wanted["how"]], plan)
        else:
            wait_for_late(test, plan)
        ronde.shutdown()


if __name__ == "__main__":
    main()
