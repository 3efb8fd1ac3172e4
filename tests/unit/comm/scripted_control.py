"""A coordinator that the test plays, and an engine in front of it. For the tests of the engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ronde.comm.engine import Engine
from ronde.comm.lane import Lane
from ronde.comm.named import Named
from ronde.comm.operations import ReduceOne
from ronde.comm.presence import Presence
from ronde.comm.signature import Forms, Options
from ronde.comm.threads.backend import Hub, ThreadsBackend
from ronde.comm.work import NamedWork
from ronde.net.messages import (
    FromCoordinator,
    FromWorker,
)
from ronde.observe.recorder import Recorder
from ronde.types import DType, Kind
from tests.unit.comm.scripted_channel import ScriptedChannel

M = TypeVar("M")


class ScriptedControl:
    """The coordinator is the test: it says things and waits for what the engine says."""

    def __init__(self) -> None:
        self.said: list[FromWorker] = []
        self.num_wakes = 0
        self.hung_up = False
        self._inbox: deque[FromCoordinator] = deque()
        self._changed = threading.Condition()
        self._woken = False

    def tell(self, *messages: FromCoordinator) -> None:
        with self._changed:
            self._inbox.extend(messages)
            self._changed.notify_all()

    def hang_up(self) -> None:
        with self._changed:
            self.hung_up = True
            self._changed.notify_all()

    def expect(self, kind: type[M], which: Callable[[M], bool] = lambda message: True) -> M:
        """Wait until the engine has said something of this kind; hear it once."""
        with self._changed:

            def found() -> M | None:
                return next((m for m in self.said if isinstance(m, kind) and which(m)), None)

            assert self._changed.wait_for(lambda: found() is not None, 10), f"no {kind.__name__} among {self.said}"
            message = found()
            assert message is not None
            self.said.remove(message)  # type: ignore[arg-type]  # it came from there
            return message

    # --- the engine's side -----------------------------------------------------------------------------------------

    def send(self, message: FromWorker) -> None:
        with self._changed:
            self.said.append(message)
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[FromCoordinator]:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._woken or self.hung_up, timeout_s)
            self._woken = False
            found = list(self._inbox)
            self._inbox.clear()
            return found

    def unwatch(self, fd: int) -> None:
        self.hung_up = False

    def readable(self) -> set[int]:
        return {7} if self.hung_up else set()

    def wake(self) -> None:
        with self._changed:
            self.num_wakes += 1
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        pass


class Stage:
    """An engine with one group of three ranks on a scripted channel."""

    def __init__(self, coordinator_rank: int = -1, *, watched: bool = False) -> None:
        self.control = ScriptedControl()
        self.recorder = Recorder(0)
        self.presence = Presence(0, 3, ThreadsBackend(Hub()))
        self.engine = Engine(
            self.control,
            self.presence,
            self.recorder,
            lifeline=7,
            coordinator_rank=coordinator_rank,
            watched=watched,
        )
        self.channel = ScriptedChannel(members=(0, 1, 2))
        lane = Lane(self.channel, 0, self.recorder, 10.0)
        self.presence.adopt(lane)
        self.named = Named(0, lane, Forms(), self.engine.board)
        self.presence.add_named(self.named)
        self.forms = Forms()
        self.engine.start()

    def announce(self, name: str, count: int = 3) -> NamedWork:
        form = self.forms.find(Kind.ALLREDUCE, DType.FLOAT32, ((count,),), Options())
        x = np.ones(count, np.float32)
        work = NamedWork(ReduceOne(form, x, x), 0, name, self.engine.board, 10.0)
        self.engine.announce(self.named, work)
        return work

    def finish(self, *works: NamedWork) -> None:
        for ticket in self.channel.tickets:
            ticket.end()
        for work in works:
            work.wait()
