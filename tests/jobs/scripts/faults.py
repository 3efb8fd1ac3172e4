"""A rank of tests/jobs/test_faults.py: many operations at once, each in a thread and a group of its own, until one rank
dies. The others report how each operation ended, leave, and take part in a fresh job.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import ronde
from ronde.comm.buffers import Array
from ronde.comm.channel import Channel
from tests.jobs.scripts.control import ControlSocket, until

FEW, SOME, MANY = 3 << 10, 3 << 18, 1 << 26
"""Numbers of four bytes in an operation that waits, in one that is under way, and in a large allreduce. The first two
can be shared out among 2, 3 and 4 ranks."""

Operate = Callable[[ronde.Group, Array, int], object]


def pass_on(group: ronde.Group, x: Array, victim: int) -> None:
    """Messages from the victim to everybody else."""
    if ronde.rank() != victim:
        group.receive(x, victim)
        return
    for rank in group.ranks:
        if rank != victim:
            group.send(x, rank)


IN_ORDER: dict[str, Operate] = {
    "allreduce": lambda group, x, victim: group.allreduce(x, out=x),
    "allgather": lambda group, x, victim: group.allgather(x),
    "broadcast": lambda group, x, victim: group.broadcast(x, root=victim, out=x),
    "broadcast to the victim": lambda group, x, victim: group.broadcast(x, root=0 if victim else 1, out=x),
    "reduce_scatter": lambda group, x, victim: group.reduce_scatter(x),
    "alltoall": lambda group, x, victim: group.alltoall(x),
}
OTHERS = ("negotiation", "message", "bucket", "change of groups")
OPERATIONS = (*IN_ORDER, *OTHERS)
"""Everything that a member may be in when another one dies."""


class Caller:
    """One operation in a thread: once, or again and again until it fails."""

    def __init__(self, operate: Callable[[], object], again: bool) -> None:
        self.num_done = 0
        self.ended: dict[str, object] = {}
        self._operate = operate
        self._again = again
        # A daemon: a process that ends does not wait for what it is in the middle of.
        self.thread = threading.Thread(target=self._call, daemon=True)
        self.thread.start()

    def _call(self) -> None:
        try:
            while self._again or not self.num_done:
                self._operate()
                self.num_done += 1
            ended: dict[str, object] = {"error": "none"}
        except Exception as error:
            ended = {"error": type(error).__name__, "text": str(error)}
            ended.update({name: getattr(error, name, None) for name in ("peer", "why")})
        self.ended = {**ended, "at": time.monotonic()}


class Rank:
    """One rank's part in the job."""

    def __init__(self, test: ControlSocket, wanted: dict[str, Any]) -> None:
        self._test = test
        self._victim: int = wanted["victim"]
        self._is_victim = test.rank == self._victim
        self._inside = wanted["moment"] == "inside"
        everybody = range(wanted["size"])
        self._others = [rank for rank in everybody if rank != self._victim]
        ronde.init(groups=[self._others, *[everybody] * (len(IN_ORDER) + 2)], **wanted["settings"])
        self._plan = ronde.plan([ronde.Bucket(count=self._count(SOME))])
        ronde.barrier()

    def run(self) -> None:
        """Be in every operation, until they fail."""
        if self._is_victim and not self._inside:
            die(self._test)
        callers = {name: Caller(operate, again=self._inside) for name, operate in self._operations()}
        if self._inside:
            channel = self._group("allreduce").ordered_channel
            rest = [caller for name, caller in callers.items() if name != "allreduce"]
            self._until(
                lambda: missing(channel) == () and all(each.num_done for each in rest), "everybody inside", callers
            )
        else:
            # The coordinator handles messages in order: after this barrier it has handled what was announced before.
            ronde.groups()[1].barrier(name="handled")
            for name in IN_ORDER:
                channel = self._group(name).ordered_channel
                self._until(functools.partial(self._misses_victim, channel), f"all but the victim in {name}", callers)
        self._test.send("under way")
        if self._is_victim:
            die(self._test)
        for caller in callers.values():
            caller.thread.join()
        self._test.send("ended", operations={name: caller.ended for name, caller in callers.items()})

    def _operations(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for name, operate in IN_ORDER.items():
            x = np.zeros(self._count(MANY if name == "allreduce" else SOME), np.float32)
            yield name, functools.partial(operate, self._group(name), x, self._victim)
        x, named = np.zeros(self._count(SOME), np.float32), self._group("negotiation")
        if self._inside:
            yield "negotiation", lambda: named.allreduce(x, name="gradient")
        else:
            yield "negotiation", named.allreduce(x, name="gradient", wait=False).wait
        yield "message", functools.partial(pass_on, self._group("message"), np.zeros_like(x), self._victim)
        yield "bucket", functools.partial(self._plan.run, 0)
        yield "change of groups", lambda: ronde.remove_group(ronde.add_group(self._others))

    def _group(self, name: str) -> ronde.Group:
        return ronde.groups()[2 + OPERATIONS.index(name)]

    def _count(self, count: int) -> int:
        return count if self._inside else FEW

    def _until(self, condition: Callable[[], bool], what: str, callers: dict[str, Caller]) -> None:
        """Wait for it, as long as nothing has ended too early."""

        def check() -> bool:
            early = {name: caller.ended for name, caller in callers.items() if caller.ended}
            assert not early, early
            return condition()

        until(check, what)

    def _misses_victim(self, channel: Channel) -> bool:
        return missing(channel) == (self._victim,)


def die(test: ControlSocket) -> NoReturn:
    """In one of the ways that need our help; or by the signal that comes instead of an order."""
    death = test.receive()["death"]
    test.send("dying")
    if death == "os._exit":
        os._exit(0)
    if death == "sys.exit":
        sys.exit(0)
    raise ArithmeticError("the victim's own mistake")


def missing(channel: Channel) -> tuple[int, ...] | None:
    """Whom the operation under way waits for; None when there is none."""
    looking = channel.current_call()
    return None if looking is None else tuple(channel.members[index] for index in looking.missing)


def fail_to_start(test: ControlSocket, wanted: dict[str, Any]) -> None:
    """The victim ends before it joins: the others get an error that names it."""
    if test.rank == wanted["victim"]:
        die(test)
    test.send("under way")
    try:
        ronde.init(**wanted["settings"])
    except ronde.StartFailed as error:
        test.send("ended", error=str(error))


def rejoin(test: ControlSocket) -> None:
    """Leave the broken round, and take part in a fresh job of those who are left."""
    wanted = test.receive()
    began = time.monotonic()
    ronde.shutdown()
    left = time.monotonic()
    ronde.init(**wanted["settings"])
    joined = time.monotonic()
    total = float(ronde.allreduce(np.ones(3)).sum())
    ronde.shutdown()
    test.send("rejoined", leaving_s=left - began, joining_s=joined - left, total=total)


def main() -> None:
    with ControlSocket() as test:
        wanted = test.receive()
        if wanted["moment"] == "start":
            fail_to_start(test, wanted)
        else:
            Rank(test, wanted).run()
        rejoin(test)


if __name__ == "__main__":
    main()
