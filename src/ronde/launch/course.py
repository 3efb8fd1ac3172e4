"""A job from the start of its ranks to the end of the last one. Hears what agents report, shows what ranks print, and
ends those that others have to be ended for. Used by the driver; everything happens in its loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ronde.launch.ending import Ending, On, Stage
from ronde.launch.job import Job
from ronde.launch.keyboard import Keyboard
from ronde.launch.loop import Loop, Timer
from ronde.launch.messages import (
    Exited,
    Failed,
    FromAgent,
    FromDriver,
    Input,
    Load,
    Output,
    Resize,
    Result,
    Signal,
    Started,
)
from ronde.launch.output.labels import label_width
from ronde.launch.output.screen import Screen
from ronde.launch.placement import Seat, hosts_or_here
from ronde.launch.ssh import Trouble
from ronde.launch.status import RankFacts
from ronde.launch.verdict import LOST_CODE, End, Stop
from ronde.observe.events import name_ranks

__all__ = ["Agents", "Course"]

PIPE_CODE = 141
"""As a shell has it for a program whose output nobody reads any more (SIGPIPE)."""
UNWRITABLE_CODE = 1
"""As programs have it that cannot write their output, to a full disk for example."""


class Agents(Protocol):
    """The part of the crew that is needed here."""

    def send(self, orders: Mapping[int, FromDriver]) -> None:
        """To the agent of each host its message."""

    def pause(self, on: bool) -> None:
        """Leave what agents say where it is, or go on."""


class Course:
    """Which ranks run, how the others have ended, and what is being done about it."""

    def __init__(
        self,
        loop: Loop,
        job: Job,
        seats: Sequence[Seat],
        *,
        agents: Agents,
        screen: Screen,
        lost: Callable[[int, str], None],
    ) -> None:
        """`lost` is told of every rank that has ended, and how."""
        self._loop = loop
        self._job = job
        self._agents = agents
        self._screen = screen
        self._lost = lost
        self._hosts = hosts_or_here(job.hosts, job.num_ranks)
        self._place = {seat.rank: seat.host_index for seat in seats}
        self._running = set(self._place)
        self._ending = Ending(grace_s=job.grace_s, terminate_s=job.terminate_s)
        self._ordered = False
        """Whether ranks were told to end."""
        self._timer: Timer | None = None
        self._tick: Timer | None = None
        self._touched = False
        """Whether the screen was given something in this turn."""
        self._paused = False
        self._keyboard: Keyboard | None = None
        self.ends: list[End] = []
        """In the order in which they came."""
        self.results: dict[int, bytes] = {}
        self.facts = [RankFacts(host=self._host(seat.rank), local_rank=seat.local_rank) for seat in seats]
        """By rank; others may read it in their threads."""
        self.stop: Stop | None = None
        """Who ended the job from outside, if anybody did."""

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return not self._running or self._ending.stage is Stage.GIVEN_UP

    # --- from outside ------------------------------------------------------------------------------------------

    def end(self, stop: Stop, on: On) -> None:
        """Somebody wants the job to end."""
        self.stop = self.stop or stop
        self._advance(on)

    def note(self, text: str) -> None:
        """A line of the driver itself."""
        self._screen.note(text)
        self._tick_soon()

    def resize(self) -> None:
        """The terminal of the driver has another size now; so have those that stand for it."""
        rank = self._job.debug_rank or 0
        if os.isatty(1):
            columns, rows = os.get_terminal_size(1)
            columns -= 0 if rank == self._job.debug_rank else label_width(len(self._place))
            if rows > 0 and columns > 0:  # some terminals do not know their size
                self._agents.send({self._place[rank]: Resize(rank, rows, columns)})

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
        for timer in (self._timer, self._tick):
            if timer is not None:
                timer.cancel()
        if self._keyboard is not None:
            self._keyboard.close()

    # --- from agents -------------------------------------------------------------------------------------------

    def hear(self, index: int, message: FromAgent) -> None:
        """What the agent of a host reports."""
        match message:
            case Output(rank, stream, data):
                self._screen.output(rank, stream, data)
                self._tick_soon()
            case Exited(rank, code, note):
                self._ended(End(rank, self._host(rank), code, note=note, ordered=self._ordered))
            case Failed(rank, why, code) if rank >= 0:
                how = f"could not be started: {why}"
                self._ended(End(rank, self._host(rank), code, how, ordered=self._ordered))
            case Failed(_, why, _):
                self.note(f"host {self._hosts[index].name}: {why}")
            case Started(rank, pid):
                self._learn(rank, pid=pid)
                self._started(rank)
            case Result(rank, data):
                self.results[rank] = data
            case Load(ranks, gpus):
                for rank, cpu, memory_bytes in ranks:
                    self._learn(rank, cpu=cpu, memory_bytes=memory_bytes)
                    if gpus:  # as most scripts choose theirs
                        busy, gpu_bytes = gpus[self.facts[rank].local_rank % len(gpus)]
                        self._learn(rank, gpu=busy, gpu_bytes=gpu_bytes)
            case _:  # late answers to questions of before
                pass

    def lose(self, index: int, trouble: Trouble) -> None:
        """The connection to a host has ended, and so have its ranks: the agent there kills them."""
        how = f"ended when the connection to it was lost ({trouble.said or trouble.why})"
        for rank in sorted(self._running):
            if self._place[rank] == index:
                self._ended(End(rank, self._host(rank), LOST_CODE, how, ordered=self._ordered))

    def _learn(self, rank: int, **facts: float) -> None:
        self.facts[rank] = replace(self.facts[rank], **facts)  # type: ignore[arg-type]  # ints are ints

    def _host(self, rank: int) -> str:
        return self._hosts[self._place[rank]].name

    def _started(self, rank: int) -> None:
        if rank == self._job.debug_rank:
            place = self._place[rank]
            self._keyboard = Keyboard(self._loop, lambda data: self._agents.send({place: Input(rank, data)}))
        if rank == (self._job.debug_rank or 0):
            self.resize()

    def _ended(self, end: End) -> None:
        if end.rank not in self._running:
            return
        self._running.discard(end.rank)
        self.ends.append(end)
        self._learn(end.rank, exit_code=end.code)
        self._lost(end.rank, end.words)
        self._screen.ended(end.rank)
        self._tick_soon()
        if end.rank == self._job.debug_rank and self._keyboard is not None:
            self._keyboard.close()
        if end.code != 0:
            self._advance(On.FAILED)

    # --- the end -----------------------------------------------------------------------------------------------

    def _advance(self, on: On) -> None:
        step = self._ending.on(on)
        if step is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        if step.limit_s is not None:
            self._timer = self._loop.at(step.limit_s, lambda: self._advance(On.TIME))
        if step.signal is not None:
            self._ordered = True
            self._say(step.stage, on)
            self._signal(step.signal)

    def _signal(self, number: int) -> None:
        ranks: dict[int, list[int]] = {}
        for rank in sorted(self._running):
            ranks.setdefault(self._place[rank], []).append(rank)
        self._agents.send({index: Signal(tuple(of_host), number) for index, of_host in ranks.items()})

    def _say(self, stage: Stage, on: On) -> None:
        """Whoever waits wants to know for what; whoever has left does not."""
        if not self._running or (self.stop is not None and not self.stop.why):
            return
        who = name_ranks(self._running)
        if stage is Stage.INTERRUPT:
            self.note(f"Ctrl-C: {who} may end; press it again to kill")
        elif stage is Stage.KILL:
            self.note(f"killing {who}")
        elif on is On.TIME and self.stop is None:
            self.note(f"ending {who}, still running {self._job.grace_s:g} s after the first failure")
        else:
            self.note(f"ending {who}")

    # --- the screen --------------------------------------------------------------------------------------------

    def _tick_soon(self) -> None:
        """At the end of this turn: what came together is shown together."""
        if not self._touched:
            self._touched = True
            self._loop.at(0.0, self._show)

    def _show(self) -> None:
        self._touched = False
        if self._tick is not None:
            self._tick.cancel()
        now_s = time.monotonic()
        due_s = self._screen.tick(now_s)
        self._tick = None if due_s is None else self._loop.at(due_s - now_s, self._show)
        full = self._screen.full()
        if full != self._paused:
            self._paused = full
            self._agents.pause(full)
        gone = self._screen.gone()
        if gone is not None and self.stop is None:
            self.end(Stop(PIPE_CODE, "") if gone.unread else Stop(UNWRITABLE_CODE, gone.why), On.STOP)
