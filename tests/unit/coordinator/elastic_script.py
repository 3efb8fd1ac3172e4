"""An elastic job in memory: the coordinator's core, the time, and what every worker was sent."""

from __future__ import annotations

import itertools
from typing import TypeVar

from ronde.coordinator.coordinator import (
    CoordinatorCore,
    MessageReceived,
    ProcessExited,
    RankConnected,
    RankDisconnected,
)
from ronde.coordinator.negotiation import Send
from ronde.coordinator.round_planning import ElasticLimits, Membership
from ronde.coordinator.rounds import MembershipEnd
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    Admission,
    AdmissionStatus,
    CoordinatorMessage,
    JoinRound,
    LeaveReason,
    LeaveRound,
    RankHeartbeat,
    RoundStarted,
    WorkerMessage,
)
from ronde.settings import Settings
from ronde.types import Member

S = 10**9
PORT = 4711
BEAT_S = 1.0

T = TypeVar("T", bound=CoordinatorMessage)


class ElasticScript:
    """Workers are called by their numbers. Those in `alive` send heartbeats while time goes by."""

    def __init__(
        self, start_ranks: int = 2, *, settings: dict[str, float] | None = None, **limits: float | None
    ) -> None:
        self.now_ns = 1000 * S
        self.process_states: dict[int, str] = {}
        """By number, what is seen of a process."""
        self.told: list[Membership] = []
        self.core = CoordinatorCore(
            start_ranks,
            Settings.load(settings or {}, environ={}),
            rounds=None,
            limits=ElasticLimits(**{"start_ranks": start_ranks, **limits}),  # type: ignore[arg-type]
            on_membership=self.told.append,
            process_state=lambda member: self.process_states.get(member.pid, ""),
            new_round_id=itertools.count(500).__next__,
        )
        self.sent: dict[int, list[CoordinatorMessage]] = {}
        self.connections: dict[int, str] = {}
        self.alive: set[int] = set()
        self._attempts = itertools.count()

    @property
    def membership(self) -> Membership:
        return self.told[-1]

    # --- what workers do -------------------------------------------------------------------------------------------

    def ask(self, number: int, *, ready: bool = False, identity: str = "", attempt: str = "") -> Admission:
        attempt = attempt or str(next(self._attempts))
        request = ConnectionRequest(LIVENESS, number, attempt, identity or f"worker{number}", ready=ready)
        return self.core.admit(request, PORT)

    def connect(self, number: int, *, ready: bool = False, identity: str = "") -> str:
        """Be admitted and connected; returns the name of the connection."""
        attempt = str(next(self._attempts))
        admission = self.ask(number, ready=ready, identity=identity, attempt=attempt)
        assert admission.status is AdmissionStatus.ADMITTED, admission
        self.core.handle(RankConnected(number, admission.sender, attempt), self.now_ns)
        self.connections[number] = admission.sender
        self.alive.add(number)
        return admission.sender

    def send(self, number: int, message: WorkerMessage, *, round: int = 0, sender: str = "") -> None:
        sender = sender or self.connections[number]
        self._deliver(self.core.handle(MessageReceived(sender, round, message), self.now_ns))

    def join(
        self,
        number: int,
        *,
        groups: tuple[tuple[int, ...], ...] = (),
        version: int = VERSION,
        equal: dict[str, str] | None = None,
        progress: int = -1,
    ) -> None:
        member = Member(-1, "here", number, "", worker=f"worker{number}")
        self.send(number, JoinRound(version, 0, member, groups, equal or {}, progress=progress))

    def enter(self, *numbers: int, ready: bool = True, progress: int = -1) -> None:
        """Connect and join: newcomers, or survivors that come back."""
        for number in numbers:
            self.connect(number, ready=ready)
            self.join(number, progress=progress)
        self.advance()

    def leave(self, *numbers: int, reason: LeaveReason = LeaveReason.REJOINING, detail: str = "") -> None:
        for number in numbers:
            self.send(number, LeaveRound(reason, detail))
        self.advance()

    def die(self, *numbers: int) -> None:
        """The kernel closes the connection, and the launcher reports the exit."""
        for number in numbers:
            self.disconnect(number)
            self.core.handle(ProcessExited(number, "killed by SIGKILL"), self.now_ns)

    def disconnect(self, number: int, reason: LeaveReason = LeaveReason.PROCESS_GONE) -> None:
        self.alive.discard(number)
        event = RankDisconnected(number, self.connections[number], MembershipEnd(reason))
        self.core.handle(event, self.now_ns)

    # --- what happens ----------------------------------------------------------------------------------------------

    def advance(self, seconds: float = 0.0) -> None:
        """Time goes by: living workers send heartbeats, and the core is called when it says so and at the end."""
        end_ns = self.now_ns + int(seconds * S)
        beat_ns = self.now_ns + int(BEAT_S * S)
        while (due_ns := min(self.core.next_due_ns(self.now_ns), beat_ns)) < end_ns:
            self.now_ns = max(due_ns, self.now_ns + 1)
            if due_ns == beat_ns:
                beat_ns += int(BEAT_S * S)
                for number in sorted(self.alive):
                    self.core.handle(MessageReceived(self.connections[number], 0, RankHeartbeat(0)), self.now_ns)
            self._deliver(self.core.advance(self.now_ns))
        self.now_ns = end_ns
        self._deliver(self.core.advance(self.now_ns))

    def start(self, *numbers: int) -> RoundStarted:
        """The first round, with these workers."""
        self.enter(*numbers, ready=False)
        return self.take_start(*numbers)

    def take_start(self, *numbers: int) -> RoundStarted:
        """The round that has just started with exactly these workers, by rank; all have got the same message."""
        [started] = {self.take(number, RoundStarted) for number in numbers}
        assert [member.worker for member in started.members] == [f"worker{number}" for number in numbers]
        assert [member.rank for member in started.members] == list(range(len(numbers)))
        assert self.membership.members == numbers
        return started

    def take(self, number: int, kind: type[T]) -> T:
        """The oldest message of this kind that the worker got; earlier ones of other kinds are dropped."""
        messages = self.sent.get(number, [])
        while messages:
            message = messages.pop(0)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"worker {number} got no {kind.__name__}")

    def has(self, number: int, kind: type[CoordinatorMessage]) -> bool:
        return any(isinstance(message, kind) for message in self.sent.get(number, []))

    def _deliver(self, sends: list[Send]) -> None:
        for numbers, message in sends:
            for number in numbers:
                self.sent.setdefault(number, []).append(message)
