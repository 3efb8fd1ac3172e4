"""The coordinator inside the process of its ranks: for a job of one rank, and for tests whose ranks are threads.

It runs the same CoordinatorCore as the server, without sockets and thread: the loops of the ranks' control threads keep
it going.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ronde.coordinator.coordinator import CoordinatorCore, Event, MessageReceived, ProcessExited, RankConnected
from ronde.coordinator.negotiation import Send
from ronde.net.event_loop import EventLoop, Timer
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import LIVENESS, VERSION, CoordinatorMessage, JoinRound, RoundStarted, WorkerMessage
from ronde.settings import Settings
from ronde.types import Member


class InProcessCoordinator:
    """The coordinator of a round whose members are all in this process. The round has started."""

    def __init__(self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], settings: Settings) -> None:
        self._lock = threading.RLock()  # reentrant: a reply may lead to the next message
        self._core = CoordinatorCore(len(members), settings)
        self._clients: list[InProcessControlClient] = []
        for member in members:
            request = ConnectionRequest(LIVENESS, member.rank, worker=member.worker or "inprocess")
            sender = self._core.admit(request, 0).sender
            self._clients.append(InProcessControlClient(self, sender))
            self._core.handle(RankConnected(member.rank, sender, ""), 0)
            join = JoinRound(VERSION, len(members), member, groups)
            self._core.handle(MessageReceived(sender, 0, join), time.monotonic_ns())
        self._deliver(self._core.advance(time.monotonic_ns()))

    def client(self, rank: int) -> InProcessControlClient:
        return self._clients[rank]

    def rank_lost(self, rank: int, why: str) -> None:
        """The thread of a rank has ended without leaving. For tests."""
        self.handle(ProcessExited(rank, why))

    def handle(self, event: Event) -> None:
        with self._lock:
            self._deliver(self._core.handle(event, time.monotonic_ns()))
            self.advance()

    def advance(self) -> None:
        with self._lock:
            now_ns = time.monotonic_ns()
            self._deliver(self._core.advance(now_ns))
            if not self._core.has_round:
                self._core.close("")
            for client in self._clients:
                client.set_due(self._core.next_due_ns(now_ns) / 1e9)

    def _deliver(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            if type(message) is not RoundStarted:  # they know
                for rank in ranks:
                    self._clients[rank].deliver(message)


class InProcessControlClient:
    """The ControlConnection of a rank whose coordinator is in this process, in place of net.control.ControlClient."""

    def __init__(self, coordinator: InProcessCoordinator, sender: str) -> None:
        self._coordinator = coordinator
        self._sender = sender
        self._inbox: deque[CoordinatorMessage] = deque()
        self._loop: EventLoop | None = None
        self._on_message: Callable[[CoordinatorMessage], None] | None = None
        self._due_s = float("inf")
        self._timer: Timer | None = None
        self._scheduled = False

    def start_receiving(
        self, loop: EventLoop, on_message: Callable[[CoordinatorMessage], None], on_lost: Callable[[str], None]
    ) -> None:
        self._loop, self._on_message = loop, on_message  # nothing can be lost on the way
        self._schedule()

    def send(self, message: WorkerMessage) -> None:
        self._coordinator.handle(MessageReceived(self._sender, 0, message))

    def close(self) -> None:
        self._loop = None

    def deliver(self, message: CoordinatorMessage) -> None:
        self._inbox.append(message)
        self._schedule()

    def set_due(self, due_s: float) -> None:
        """The coordinator has to be advanced at this time."""
        is_earlier = due_s < self._due_s
        self._due_s = due_s
        if is_earlier:
            self._schedule()

    def _schedule(self) -> None:
        loop = self._loop
        if loop is not None and not self._scheduled:
            self._scheduled = True
            loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        """In the loop: hand on the messages, and wait for the next time the coordinator has to be advanced."""
        self._scheduled = False
        while self._inbox and self._on_message is not None:
            self._on_message(self._inbox.popleft())
        if self._loop is None:
            return
        if self._timer is None or not self._timer.pending or self._timer.due_s > self._due_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(self._due_s - time.monotonic(), self._on_due)

    def _on_due(self) -> None:
        self._due_s = float("inf")
        self._coordinator.advance()
