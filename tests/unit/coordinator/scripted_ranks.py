"""A coordinator and ranks that a test works by hand, over real sockets in one process."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TypeVar

from ronde.comm.joining import connect_to_coordinator
from ronde.coordinator.server import CoordinatorServer
from ronde.net.addresses import host_identity
from ronde.net.keys import JobKey, new_job_key
from ronde.net.messages import (
    VERSION,
    AnnounceOperations,
    CoordinatorMessage,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    OperationRequest,
    RankHeartbeat,
    RankHeartbeatReply,
    RoundStarted,
    WorkerMessage,
)
from ronde.observe.stacks import pid_namespace
from ronde.settings import Settings
from ronde.types import Deadline, DType, Member, OperationKind
from tests.unit.net.polled import PolledClient

KEY = JobKey(new_job_key())
PATIENCE_S = 20.0

T = TypeVar("T", bound=CoordinatorMessage)


class Rank:
    """A rank whose messages the test sends itself. What it receives is kept until the test asks for it."""

    def __init__(self, coordinator: CoordinatorServer, rank: int, *, round: int = 0) -> None:
        self.rank = rank
        deadline = Deadline(PATIENCE_S)
        self.line, control = connect_to_coordinator(
            coordinator.address, KEY, rank, round=round, deadline=deadline, heartbeat_s=10.0
        )
        self.control = PolledClient(control, KEY, rank)
        self._received: list[CoordinatorMessage] = []

    def send(self, message: WorkerMessage) -> None:
        self.control.send(message)

    def join(self, size: int, groups: tuple[tuple[int, ...], ...] = (), *, pid: int = 0) -> None:
        """Ask to be in the round, as this process or another."""
        member = Member(self.rank, host_identity(), pid or os.getpid(), f"socket{self.rank}")
        self.send(JoinRound(VERSION, 0, size, member, groups, pid_namespace()))

    def receive(self, kind: type[T]) -> T:
        """The next message of this kind; those of other kinds stay."""
        deadline = Deadline(PATIENCE_S)
        while not deadline.expired:
            for message in self._received:
                if isinstance(message, kind):
                    self._received.remove(message)
                    return message
            self._received += self.control.poll(deadline.remaining_s)
        raise AssertionError(f"rank {self.rank} did not receive {kind.__name__}, but {self._received}")

    def has_received(self, kind: type[CoordinatorMessage]) -> bool:
        """Whether such a message was sent to it before now: the reply to a heartbeat comes after all earlier ones."""
        self.send(RankHeartbeat(0))
        self.receive(RankHeartbeatReply)
        return any(isinstance(message, kind) for message in self._received)

    def die(self) -> None:
        """Close the connections without LeaveRound, as the kernel does for a killed process."""
        self.control.close(0)
        self.line.close()

    def leave(self) -> None:
        self.send(LeaveRound(LeaveReason.SHUTDOWN))
        self.receive(LeaveConfirmed)
        self.die()


class Job:
    """A coordinator and its ranks; all are closed at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.coordinator: CoordinatorServer

    def start(
        self, size: int, *, rounds: int | None = 1, host_names: tuple[str, ...] = (), **settings: float | str
    ) -> CoordinatorServer:
        made = Settings.load({"shutdown_s": 0.2, **settings}, environ={})
        self.coordinator = CoordinatorServer("127.0.0.1", 0, size, KEY, settings=made, rounds=rounds)
        self._stack.callback(self.coordinator.close)
        self.coordinator.start(host_names)
        return self.coordinator

    def connect(self, rank: int, **how: int) -> Rank:
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
        ranks = [self.connect(rank) for rank in range(size)]
        for rank in ranks:
            rank.join(size, groups)
        for rank in ranks:
            rank.receive(RoundStarted)
        return ranks


def allreduce(name: str, shape: tuple[int, ...] = (4,), group: int = 0) -> AnnounceOperations:
    return AnnounceOperations((OperationRequest(group, name, OperationKind.ALLREDUCE, DType.FLOAT32, (shape,)),))
