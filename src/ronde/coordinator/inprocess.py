"""A coordinator without a wire, in the process of its ranks: for a job of one, and for ranks that are threads.

It is the same Round as everywhere, so named operations, groups and stall reports work as they do between processes.
There is no thread: whoever says something, or waits for something to be said, moves it on.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from ronde.coordinator.membership import LeaveReason, MembershipEnd
from ronde.coordinator.negotiation import Send
from ronde.coordinator.queries import TraceCollector
from ronde.coordinator.rounds import Round, RoundSettings
from ronde.net.messages import (
    LEAVE_GRACE_S,
    CoordinatorMessage,
    LeaveConfirmed,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
    WorkerMessage,
)
from ronde.settings import Settings
from ronde.types import Member

__all__ = ["InProcessControlClient", "InProcessCoordinator"]


class InProcessCoordinator:
    """The coordinator of the ranks in this process."""

    def __init__(self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], settings: Settings) -> None:
        leaving_s = min(LEAVE_GRACE_S, settings.shutdown_s)
        rules = RoundSettings(fusion_bytes=settings.fusion_bytes, stall_s=settings.stall_s, leave_grace_s=leaving_s)
        self._changed = threading.Condition()
        self._round = Round(members, groups, rules, time.monotonic_ns())
        self._inboxes: list[deque[CoordinatorMessage]] = [deque() for _ in members]
        self._notified: set[int] = set()
        self._tracing = TraceCollector(settings.timeline, settings.timeline_events)

    def client(self, rank: int) -> InProcessControlClient:
        """A rank's way here."""
        return InProcessControlClient(self, rank)

    def rank_lost(self, rank: int, why: str) -> None:
        """A rank is gone, without a word."""
        with self._changed:
            if rank in self._round.present:
                self._round.member_lost(rank, MembershipEnd(LeaveReason.PROCESS_ENDED, why))
            self._advance()

    def handle(self, rank: int, message: WorkerMessage) -> None:
        """A rank says something."""
        with self._changed:
            now_ns = time.monotonic_ns()
            if isinstance(message, RankHeartbeat):
                self._inboxes[rank].append(RankHeartbeatReply(message.sent_ns, now_ns))
            elif isinstance(message, TraceBatch | TimelineRequest | TraceFlushed):
                self._send(self._tracing.handle(rank, message, self._round.present))
            elif isinstance(message, LeaveRound):
                self._leave(rank, message, now_ns)
            elif rank in self._round.present:
                self._round.handle(rank, message, now_ns)
            self._advance()

    def poll(self, rank: int, timeout_s: float) -> list[CoordinatorMessage]:
        """What was said to a rank; waits for it, at most timeout_s, or until it is woken."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            inbox = self._inboxes[rank]
            while not inbox and rank not in self._notified:
                now_ns = time.monotonic_ns()
                left_s = min(deadline - now_ns / 1e9, (self._round.next_due_ns(now_ns) - now_ns) / 1e9)
                if not self._changed.wait(max(0.0, left_s)):
                    self._advance()
                    if time.monotonic() >= deadline:
                        break
            self._notified.discard(rank)
            found = list(inbox)
            inbox.clear()
            return found

    def notify(self, rank: int) -> None:
        """Let fetch() return early."""
        with self._changed:
            self._notified.add(rank)
            self._changed.notify_all()

    def _leave(self, rank: int, message: LeaveRound, now_ns: int) -> None:
        if rank in self._round.present:
            departure = MembershipEnd.from_leave_message(message)
            if departure.is_loss:
                self._round.member_lost(rank, departure)
            else:
                self._round.member_left(rank, departure, now_ns)
        self._inboxes[rank].append(LeaveConfirmed())
        if not self._round.present:
            self._tracing.close()

    def _advance(self) -> None:
        self._send(self._round.advance(time.monotonic_ns()))
        self._send(self._tracing.close_if_complete(self._round.present))
        self._changed.notify_all()

    def _send(self, sends: list[Send]) -> None:
        for ranks, message in sends:
            for rank in ranks:
                self._inboxes[rank].append(message)


class InProcessControlClient:
    """What net.control.ControlClient is between processes."""

    def __init__(self, coordinator: InProcessCoordinator, rank: int) -> None:
        self._coordinator = coordinator
        self._rank = rank

    def send(self, message: WorkerMessage) -> None:
        """Say something."""
        self._coordinator.handle(self._rank, message)

    def poll(self, timeout_s: float) -> list[CoordinatorMessage]:
        """What was said, oldest first."""
        return self._coordinator.poll(self._rank, timeout_s)

    def unwatch(self, fd: int) -> None:
        """Nothing is watched."""

    def readable(self) -> set[int]:
        """No descriptors."""
        return set()

    def notify(self) -> None:
        """End a poll early."""
        self._coordinator.notify(self._rank)

    def close(self) -> None:
        """Nothing is held."""
