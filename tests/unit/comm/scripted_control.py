"""A coordinator that the test plays, and an engine in front of it. For the tests of the engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ronde.comm.call import CallOptions, get_signature
from ronde.comm.channel import Channel
from ronde.comm.control_thread import ControlThread
from ronde.comm.named_operations import NamedOperations, OpenChannels
from ronde.comm.operations import SingleArrayAllreduceOperation
from ronde.comm.work import Work
from ronde.net.messages import (
    CoordinatorMessage,
    WorkerMessage,
)
from ronde.observe.recorder import Recorder
from ronde.settings import Settings
from ronde.types import DType, OperationKind
from tests.conformance.threads_backend import ThreadsBackend, ThreadsHub
from tests.unit.comm.scripted_channel import ScriptedChannel

M = TypeVar("M")


class ScriptedControl:
    """The coordinator is the test: it says things and waits for what the engine says."""

    def __init__(self) -> None:
        self.said: list[WorkerMessage] = []
        self.num_wakes = 0
        self.hung_up = False
        self._inbox: deque[CoordinatorMessage] = deque()
        self._changed = threading.Condition()
        self._woken = False

    def tell(self, *messages: CoordinatorMessage) -> None:
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

    def send(self, message: WorkerMessage) -> None:
        with self._changed:
            self.said.append(message)
            self._changed.notify_all()

    def poll(self, timeout_s: float) -> list[CoordinatorMessage]:
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

    def notify(self) -> None:
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
        self.presence = OpenChannels(0, 3, ThreadsBackend(ThreadsHub()), self.recorder, Settings())
        self.engine = ControlThread(
            self.control,
            self.presence,
            self.recorder,
            liveness_fd=7,
            coordinator_rank=coordinator_rank,
            report_activity=watched,
        )
        self.channel = ScriptedChannel(members=(0, 1, 2))
        lane = Channel(self.channel, 0, self.recorder, 10.0)
        self.presence.add(lane)
        self.named = NamedOperations(0, lane, self.engine.waits)
        self.presence.add_named_operations(self.named)
        self.engine.start()

    def announce(self, name: str, count: int = 3) -> Work:
        signature = get_signature(OperationKind.ALLREDUCE, DType.FLOAT32, ((count,),), CallOptions())
        x = np.ones(count, np.float32)
        return self.named.announce(SingleArrayAllreduceOperation(signature, x, x, name), 10.0)

    def finish(self, *works: Work) -> None:
        for ticket in self.channel.running_calls:
            ticket.end()
        for work in works:
            work.wait()
