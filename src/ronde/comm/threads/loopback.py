"""A coordinator without a wire, in the process of its ranks: for a job of one, and for ranks that are threads.

It is the same Round as everywhere, so named operations, groups and stall reports work as they do between processes.
There is no thread: whoever says something, or waits for something to be said, moves it on.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from ronde.comm.coordination.membership import Departure, How
from ronde.comm.coordination.negotiator import Send
from ronde.comm.coordination.round import Round, RoundRules
from ronde.comm.coordination.tracing import Tracing
from ronde.net.messages import (
    LEAVING_S,
    Beat,
    BeatBack,
    Bye,
    FromCoordinator,
    FromWorker,
    Leave,
    TraceBatch,
    TraceOver,
    TraceWanted,
)
from ronde.settings import Settings
from ronde.types import Member

__all__ = ["Loopback", "LoopbackClient"]


class Loopback:
    """The coordinator of the ranks in this process."""

    def __init__(self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], settings: Settings) -> None:
        leaving_s = min(LEAVING_S, settings.shutdown_s)
        rules = RoundRules(fusion_bytes=settings.fusion_bytes, stall_s=settings.stall_s, leaving_s=leaving_s)
        self._changed = threading.Condition()
        self._round = Round(members, groups, rules, time.monotonic_ns())
        self._inboxes: list[deque[FromCoordinator]] = [deque() for _ in members]
        self._woken: set[int] = set()
        self._tracing = Tracing(settings.timeline, settings.timeline_events)

    def client(self, rank: int) -> LoopbackClient:
        """A rank's way here."""
        return LoopbackClient(self, rank)

    def lost(self, rank: int, why: str) -> None:
        """A rank is gone, without a word."""
        with self._changed:
            if rank in self._round.present:
                self._round.lose(rank, Departure(How.PROCESS_ENDED, why))
            self._advance()

    def hear(self, rank: int, message: FromWorker) -> None:
        """A rank says something."""
        with self._changed:
            now_ns = time.monotonic_ns()
            if isinstance(message, Beat):
                self._inboxes[rank].append(BeatBack(message.sent_ns, now_ns))
            elif isinstance(message, TraceBatch | TraceWanted | TraceOver):
                self._tell(self._tracing.hear(rank, message, self._round.present))
            elif isinstance(message, Leave):
                self._leave(rank, message, now_ns)
            elif rank in self._round.present:
                self._round.hear(rank, message, now_ns)
            self._advance()

    def fetch(self, rank: int, timeout_s: float) -> list[FromCoordinator]:
        """What was said to a rank; waits for it, at most timeout_s, or until it is woken."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            inbox = self._inboxes[rank]
            while not inbox and rank not in self._woken:
                now_ns = time.monotonic_ns()
                left_s = min(deadline - now_ns / 1e9, (self._round.due_ns(now_ns) - now_ns) / 1e9)
                if not self._changed.wait(max(0.0, left_s)):
                    self._advance()
                    if time.monotonic() >= deadline:
                        break
            self._woken.discard(rank)
            found = list(inbox)
            inbox.clear()
            return found

    def wake(self, rank: int) -> None:
        """Let fetch() return early."""
        with self._changed:
            self._woken.add(rank)
            self._changed.notify_all()

    def _leave(self, rank: int, message: Leave, now_ns: int) -> None:
        if rank in self._round.present:
            departure = Departure.of_leave(message)
            if departure.is_loss:
                self._round.lose(rank, departure)
            else:
                self._round.leave(rank, departure, now_ns)
        self._inboxes[rank].append(Bye())
        if not self._round.present:
            self._tracing.close()

    def _advance(self) -> None:
        self._tell(self._round.advance(time.monotonic_ns()))
        self._tell(self._tracing.settle(self._round.present))
        self._changed.notify_all()

    def _tell(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            for rank in ranks:
                self._inboxes[rank].append(message)


class LoopbackClient:
    """What net.control.ControlClient is between processes."""

    def __init__(self, loopback: Loopback, rank: int) -> None:
        self._loopback = loopback
        self._rank = rank

    def send(self, message: FromWorker) -> None:
        """Say something."""
        self._loopback.hear(self._rank, message)

    def poll(self, timeout_s: float) -> list[FromCoordinator]:
        """What was said, oldest first."""
        return self._loopback.fetch(self._rank, timeout_s)

    def unwatch(self, fd: int) -> None:
        """Nothing is watched."""

    def readable(self) -> set[int]:
        """No descriptors."""
        return set()

    def wake(self) -> None:
        """End a poll early."""
        self._loopback.wake(self._rank)

    def close(self) -> None:
        """Nothing is held."""
