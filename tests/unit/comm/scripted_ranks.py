"""A coordinator and ranks that a test works by hand, over real sockets in one process."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TypeVar

from ronde.comm.coordination.coordinator import Coordinator
from ronde.comm.coordination.greeting import call_coordinator
from ronde.net.addresses import host_identity
from ronde.net.control import ControlClient
from ronde.net.keys import JobKey, new_key
from ronde.net.messages import (
    VERSION,
    Announce,
    Beat,
    BeatBack,
    Bye,
    FromCoordinator,
    FromWorker,
    Join,
    Leave,
    Request,
    Welcome,
)
from ronde.observe.stacks import pid_namespace
from ronde.settings import Settings
from ronde.types import Deadline, DType, Kind, Member

KEY = JobKey(new_key())
PATIENCE_S = 20.0

T = TypeVar("T", bound=FromCoordinator)


class Rank:
    """One rank, worked by hand: what it hears is kept until the test asks for it."""

    def __init__(self, coordinator: Coordinator, rank: int, *, round: int = 0) -> None:
        self.rank = rank
        deadline = Deadline(PATIENCE_S)
        self.line, control = call_coordinator(
            coordinator.address, KEY, rank, round=round, deadline=deadline, heartbeat_s=10.0
        )
        self.control = ControlClient(control, KEY, rank)
        self._heard: list[FromCoordinator] = []

    def say(self, message: FromWorker) -> None:
        self.control.send(message)

    def join(self, size: int, groups: tuple[tuple[int, ...], ...] = (), *, pid: int = 0) -> None:
        """Ask to be in the round, as this process or another."""
        member = Member(self.rank, host_identity(), pid or os.getpid(), f"door{self.rank}")
        self.say(Join(VERSION, 0, size, member, groups, pid_namespace()))

    def hear(self, kind: type[T]) -> T:
        """The next message of this kind; those of other kinds stay."""
        deadline = Deadline(PATIENCE_S)
        while not deadline.passed:
            for message in self._heard:
                if isinstance(message, kind):
                    self._heard.remove(message)
                    return message
            self._heard += self.control.poll(deadline.left_s)
        raise AssertionError(f"rank {self.rank} did not hear {kind.__name__}, but {self._heard}")

    def has_heard(self, kind: type[FromCoordinator]) -> bool:
        """After a question and its answer, everything said before has come."""
        self.say(Beat(0))
        self.hear(BeatBack)
        return any(isinstance(message, kind) for message in self._heard)

    def die(self) -> None:
        """As a killed process does: without a word."""
        self.control.close(0)
        self.line.close()

    def leave(self) -> None:
        self.say(Leave(orderly=True))
        self.hear(Bye)
        self.die()


class Job:
    """A coordinator and its ranks; all are closed at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.coordinator: Coordinator

    def start(
        self, size: int, *, rounds: int | None = 1, host_names: tuple[str, ...] = (), **settings: float | str
    ) -> Coordinator:
        made = Settings.load({"shutdown_s": 0.2, **settings}, environ={})
        self.coordinator = Coordinator("127.0.0.1", 0, size, KEY, settings=made, rounds=rounds)
        self._stack.callback(self.coordinator.close)
        self.coordinator.start(host_names)
        return self.coordinator

    def come(self, rank: int, **how: int) -> Rank:
        made = Rank(self.coordinator, rank, **how)
        self._stack.callback(made.die)
        return made

    def gather(
        self,
        size: int,
        *,
        rounds: int | None = 1,
        groups: tuple[tuple[int, ...], ...] = (),
        host_names: tuple[str, ...] = (),
        **settings: float | str,
    ) -> list[Rank]:
        """A round that has begun."""
        self.start(size, rounds=rounds, host_names=host_names, **settings)
        return self.join(size, groups)

    def join(self, size: int, groups: tuple[tuple[int, ...], ...] = ()) -> list[Rank]:
        ranks = [self.come(rank) for rank in range(size)]
        for rank in ranks:
            rank.join(size, groups)
        for rank in ranks:
            rank.hear(Welcome)
        return ranks


def allreduce(name: str, shape: tuple[int, ...] = (4,), group: int = 0) -> Announce:
    return Announce((Request(group, name, Kind.ALLREDUCE, DType.FLOAT32, (shape,)),))
