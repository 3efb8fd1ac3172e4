"""A rank of tests/jobs/test_faults.py: many operations at once, each in a thread and a group of its own, until one rank
dies. The others report how each operation ended, shut down, and take part in a fresh job.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

import ronde
from ronde.comm.buffers import Array
from tests.jobs.scripts.talk import Talk, until

MANY_BYTES = 1 << 28
SOME_BYTES = 1 << 22


def receive(group: ronde.Group, x: Array, victim: int) -> None:
    """Messages from the victim to everybody else."""
    if ronde.rank() != victim:
        group.receive(x, victim)
        return
    for rank in group.ranks:
        if rank != victim:
            group.send(x, rank)


OPERATIONS: dict[str, Callable[[ronde.Group, Array, int], object]] = {
    "allreduce": lambda group, x, victim: group.allreduce(x, out=x),
    "allgather": lambda group, x, victim: group.allgather(x),
    "broadcast": lambda group, x, victim: group.broadcast(x, root=victim, out=x),
    "broadcast to the victim": lambda group, x, victim: group.broadcast(x, root=other_than(victim), out=x),
    "reduce_scatter": lambda group, x, victim: group.reduce_scatter(x),
    "alltoall": lambda group, x, victim: group.alltoall(x),
    "receive": receive,
    "negotiation": lambda group, x, victim: group.allreduce(x, out=x, name="gradient"),
}
"""Everything that a member may be in when another one dies, and a bucket of a plan."""


def other_than(victim: int) -> int:
    """Some other rank."""
    return 0 if victim else 1


class Caller:
    """One operation in a thread: once, or again and again. It ends by its error."""

    def __init__(self, name: str, operate: Callable[[], object], again: bool) -> None:
        self.name = name
        self.num_done = 0
        self.ended: dict[str, object] | None = None
        self._operate = operate
        self._again = again
        self.thread = threading.Thread(target=self._call, name=name, daemon=True)
        self.thread.start()

    def _call(self) -> None:
        try:
            while self._again or not self.num_done:
                self._operate()
                self.num_done += 1
            self.ended = {"error": "none"}
        except Exception as error:
            peer, why = getattr(error, "peer", None), getattr(error, "why", "")
            self.ended = {"error": type(error).__name__, "peer": peer, "why": why, "text": str(error)}
        self.ended["at"] = time.monotonic()


def die(talk: Talk, death: str) -> NoReturn:
    """End this process in one of the ways that need its help."""
    talk.say("dying")
    if death == "os._exit":
        os._exit(0)
    if death == "sys.exit":
        sys.exit(0)
    raise ArithmeticError("the victim's own mistake")


def wait_and_see(callers: list[Caller], victim: int) -> None:
    """Return when everybody but the victim is in every operation."""
    named = ronde.groups()[-1]
    named.barrier(name="heard")  # the coordinator hears things in order: it knows of what was announced before
    for caller, group in zip(callers, ronde.groups()[1:], strict=False):
        lane = group.dispatch.lane
        if caller.name not in ("receive", "negotiation"):
            until(lambda lane=lane: _missing(lane) == (victim,), f"the others in {caller.name}")


def _missing(lane: Any) -> tuple[int, ...] | None:  # noqa: ANN401
    looking = lane.look()
    return None if looking is None else tuple(lane.members[index] for index in looking.missing)


def main() -> None:
    """Do what the test says."""
    talk = Talk()
    wanted = talk.hear()
    size, victim, inside = wanted["size"], wanted["victim"], wanted["inside"]
    everybody, others = range(size), [rank for rank in range(size) if rank != victim]
    ronde.init(groups=[*[everybody] * len(OPERATIONS), others], **wanted["settings"])
    plan = ronde.plan([ronde.Bucket(count=(SOME_BYTES if inside else 4096) // 4)])
    talk.say("ready")
    if not inside and talk.rank == victim:
        die(talk, talk.hear()["death"])
    callers = [Caller("bucket", lambda: plan.run(0), inside)]
    for (name, operate), group in zip(OPERATIONS.items(), ronde.groups()[1:], strict=False):
        num_bytes = 4096 if not inside else MANY_BYTES if name == "allreduce" else SOME_BYTES
        x = np.zeros(num_bytes // 4, np.float32)
        call = lambda operate=operate, group=group, x=x: operate(group, x, victim)  # noqa: E731
        callers.append(Caller(name, call, inside))
    if inside:
        lane = ronde.groups()[1].dispatch.lane
        until(lambda: _missing(lane) == () and all(c.num_done for c in callers[2:]), "everybody inside")
        talk.say("inside")
        if talk.rank == victim:
            die(talk, talk.hear()["death"])
    else:
        wait_and_see(callers[1:], victim)
        talk.say("waiting")
    for caller in callers:
        caller.thread.join()
    talk.say("ended", operations={caller.name: caller.ended for caller in callers})
    begin_anew(talk)


def begin_anew(talk: Talk) -> None:
    """Leave the broken round, and take part in a fresh job of those who are left."""
    wanted = talk.hear()
    began = time.monotonic()
    ronde.shutdown()
    left = time.monotonic()
    ronde.init(**wanted["settings"])
    joined = time.monotonic()
    total = float(ronde.allreduce(np.ones(3)).sum())
    ronde.shutdown()
    talk.say("anew", leaving_s=left - began, joining_s=joined - left, total=total)


if __name__ == "__main__":
    main()
