"""The agent: starts the ranks of one host, watches them, and reports. In the driver's process for its own machine, in
launch/remote for others."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ronde.errors import StartFailed
from ronde.launch.cores import own_cores
from ronde.launch.guard import Guard
from ronde.launch.loop import Loop, Timer
from ronde.launch.messages import (
    Exited,
    Failed,
    FromAgent,
    FromDriver,
    Hello,
    Input,
    Launch,
    Load,
    Probe,
    Quit,
    RankOrder,
    Resize,
    Signal,
    Started,
)
from ronde.launch.process import NotExecutable
from ronde.launch.rank import Rank
from ronde.launch.usage import Gpus, Meter, Shortage, num_cores, read_sessions
from ronde.launch.verdict import NOT_EXECUTABLE_CODE, NOT_STARTED_CODE
from ronde.net.addresses import candidates, host_identity
from ronde.types import Deadline
from ronde.version import __version__

if TYPE_CHECKING:
    from ronde.launch.probing import Prober

__all__ = ["Agent"]

LOAD_S = 1.0
LOAD_SHARE = 0.02
"""On a host with very many processes, looking at them takes at most this share of the time."""
KILL_S = 10.0
"""A killed process ends at once, unless the kernel is busy for it."""


class Agent:
    """The ranks of this host. Everything happens in the loop's thread; what is to be told goes to `report`."""

    def __init__(
        self, loop: Loop, report: Callable[[FromAgent], None], *, own: Mapping[str, str] | None = None
    ) -> None:
        """`own`: variables that only this host knows, below what each order says."""
        self._loop = loop
        self._tell = report
        self._own = dict(own or {})
        self._ranks: dict[int, Rank] = {}
        self._paused = False
        self._closed = False
        self._guard: Guard | None = None
        self._prober: Prober | None = None
        self._meter = Meter()
        self._gpus: Gpus | None = None
        self._shortage = Shortage()
        self._looking: Timer | None = None
        loop.soon(lambda: self._report(hello()))

    def handle(self, message: FromDriver) -> None:
        """Carry out what the driver wants."""
        if self._closed:
            return
        match message:
            case Launch(orders, call):
                for order in orders:
                    self._launch(msgspec.structs.replace(order, call=call or order.call))
            case Signal(ranks, number):
                for rank in ranks:
                    if rank in self._ranks:
                        self._ranks[rank].signal(number)
            case Input(rank, data) if rank in self._ranks:
                self._ranks[rank].type(data)
            case Resize(rank, rows, columns) if rank in self._ranks:
                self._ranks[rank].resize(rows, columns)
            case Probe():
                self._probe(message)
            case Quit():
                self.close()
            case _:  # for a rank that has ended; or a Beat, which is for launch/remote
                pass

    def pause(self, on: bool) -> None:
        """Stop reading what ranks print, so that they wait; or go on."""
        self._paused = on
        for rank in self._ranks.values():
            rank.pause(on)

    def close(self) -> None:
        """Kill every rank and what it started, and free everything. Nothing is reported any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
        for rank in self._ranks.values():  # all at once, before the wait for each
            rank.kill()
        deadline = Deadline(KILL_S)
        for rank in self._ranks.values():
            rank.close(deadline)
        self._ranks.clear()
        for part in (self._guard, self._prober, self._gpus):
            if part is not None:
                part.close()

    def _report(self, message: FromAgent) -> None:
        if not self._closed:
            self._tell(message)

    # --- ranks -------------------------------------------------------------------------------------------------

    def _launch(self, order: RankOrder) -> None:
        if self._closed:  # by whoever heard of the rank before this one
            return
        if order.rank in self._ranks:
            return self._report(Failed(order.rank, "it still runs; wait for its end before it is started again"))
        if self._prober is not None:  # the ranks take it from here
            self._prober.close()
            self._prober = None
        argv = (sys.executable, *order.argv[1:]) if order.call and order.argv[:1] == ("",) else order.argv
        order = msgspec.structs.replace(order, argv=argv, env={**self._own, **order.env})
        try:
            self._guard = self._guard or Guard()
            rank = Rank(
                order, loop=self._loop, guard=self._guard, report=self._report, over=partial(self._over, order.rank)
            )
        except (StartFailed, OSError) as error:
            code = NOT_EXECUTABLE_CODE if isinstance(error, NotExecutable) else NOT_STARTED_CODE
            return self._report(Failed(order.rank, str(error), code))
        self._ranks[order.rank] = rank
        rank.pause(self._paused)
        self._report(Started(order.rank, rank.pid))
        if self._looking is None:
            self._look_later(0.0)

    def _over(self, number: int, code: int) -> None:
        rank = self._ranks.pop(number)
        self._report(Exited(number, code, note_on(code, killed=rank.killed, short=self._shortage.rose())))

    # --- what they use -----------------------------------------------------------------------------------------

    def _look_later(self, delay_s: float) -> None:
        self._looking = self._loop.at(delay_s, self._look)

    def _look(self) -> None:
        if not self._ranks:
            self._looking = None
            return
        before_s = time.monotonic()
        self._shortage.rose()  # an end by SIGKILL is explained by what happened since about a second
        rows = self._meter.look(before_s, {each: rank.pid for each, rank in self._ranks.items()}, read_sessions())
        self._gpus = self._gpus or Gpus()
        if rows and not self._paused:
            self._report(Load(rows, self._gpus.look()))
        self._look_later(max(LOAD_S, (time.monotonic() - before_s) / LOAD_SHARE))

    # --- the network -------------------------------------------------------------------------------------------

    def _probe(self, order: Probe) -> None:
        if self._prober is None:
            # Here, because it brings ZeroMQ along, and an agent on the only host never needs it.
            from ronde.launch.probing import Prober

            self._prober = Prober(lambda answer: self._loop.soon(lambda: self._report(answer)))
        self._prober.probe(order)


def hello() -> Hello:
    """Who we are."""
    cpus = own_cores()
    return Hello(
        version=__version__,
        python=".".join(map(str, sys.version_info[:3])),
        host=host_identity(),
        pid=os.getpid(),
        num_cores=num_cores(len(cpus)),
        cpus=cpus,
        addresses=candidates(),
    )


def note_on(code: int, *, killed: bool, short: bool) -> str:
    """What else there is to say about the end of a rank: `short`, the kernel has just killed something for want of
    memory; `killed`, it was us who killed the rank."""
    if not short or killed or code == 0:
        return ""
    if code == -signal.SIGKILL:
        return "the host ran out of memory"
    return "the host ran out of memory and the kernel killed a process, perhaps one of this rank's"
