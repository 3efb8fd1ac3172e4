"""The coordinator without sockets, threads and clock: events in, messages out.

It forms rounds of the ranks that join, routes what their members send, and decides who is lost. The server carries it
out over the network, InProcessCoordinator inside one process.

A worker is a process, and a rank is its place in one round. A worker is seen through two things: its messages, and its
liveness connection, a socket that the kernel closes when the process dies. When it is admitted as a rank, its control
connection gets a name, and from then on the rank is this connection alone: messages of any other are late, and dropped.
Whether a second process may be the same rank is decided by the liveness connection: as long as the former one is open
the second is refused; once it is closed the second has to retry until the rank is declared lost.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ronde.coordinator.negotiation import Send
from ronde.coordinator.queries import RankQueries, TraceCollector
from ronde.coordinator.rounds import LostPeer, MembershipEnd, PendingRound, Round
from ronde.net.addresses import host_name
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    LEAVE_GRACE_S,
    LIVENESS,
    ActivityReport,
    Admission,
    AdmissionStatus,
    EndRound,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    StackReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
    WorkerMessage,
)
from ronde.observe.stalls import Whereabouts
from ronde.settings import Settings
from ronde.text import format_count, format_ranks, shorten
from ronde.types import Member

# When a rank is declared lost after its end was noticed. Each wait is for a better reason, so they are in this order.
REASON_GRACE_NS = 100_000_000
"""The wait for the message in which the rank itself gives the reason."""
EXIT_REPORT_GRACE_NS = 200_000_000
"""The wait for the launcher's report of how the process ended, if there is a launcher."""
assert REASON_GRACE_NS < EXIT_REPORT_GRACE_NS < LEAVE_GRACE_S * 1e9

MAX_WAIT_NS = 60 * 10**9
START_MARGIN_S = 1.0
"""The wait for all ranks ends this much before the ranks' own (or a tenth of it), so that they get the reason."""
MAX_DETAIL_CHARS = 1000
MAX_LINE_CHARS = 400

_WORKER = re.compile("[0-9a-z]{1,32}")

logger = logging.getLogger("ronde.coordinator")


class MessageReceived(NamedTuple):
    sender: str
    """The name of the control connection that it came over: that of an Admission."""
    round: int
    """The id of the round that the sender is in; 0 if it knows of none yet."""
    message: WorkerMessage


class RankConnected(NamedTuple):
    """An admitted process has its liveness connection, whose end will be reported as RankDisconnected."""

    rank: int
    connection: str
    """The name of its control connection, as in its Admission."""
    attempt: str
    """The same for all connections that a process opens in one attempt to join."""


class RankDisconnected(NamedTuple):
    rank: int
    connection: str
    end: MembershipEnd


class MessagesLost(NamedTuple):
    """So many messages over a control connection were lost, as it was broken in between."""

    sender: str
    num_lost: int


class ProcessExited(NamedTuple):
    """The launcher reports that a rank's process has ended, and how."""

    rank: int
    how: str


Event: TypeAlias = MessageReceived | MessagesLost | RankConnected | RankDisconnected | ProcessExited


@dataclass(slots=True)
class _Connection:
    name: str
    attempt: str
    is_open: bool = True


class CoordinatorCore:
    """Serves `rounds` rounds of `size` ranks; None for any number of them.

    handle() takes an event, advance() acts on all that were handled; both return what to send. advance() is to be
    called after events, and at next_due_ns().
    """

    def __init__(
        self,
        size: int,
        settings: Settings,
        *,
        rounds: int | None = 1,
        process_state: Callable[[Member], str] = lambda member: "",
        new_round_id: Callable[[], int] = lambda: 1 + secrets.randbits(62),
    ) -> None:
        self.senders: dict[int, str] = {}
        """By rank, the name of the control connection that is this rank: that of the last worker that was admitted as
        it. What is sent to a rank goes there."""
        self.host_names: Sequence[str] = ()
        """By rank, the user's names for the hosts; empty without a launcher."""
        self.lost_peers: dict[int, LostPeer] = {}
        """By rank, those that failed in the newest round because another rank was gone."""
        self._size = size
        self._settings = settings
        self._rounds_left = rounds
        self._num_rounds = 0
        self._num_admitted = itertools.count()
        self._ranks: dict[str, int] = {}
        """The ranks of the senders."""
        self._new_round_id = new_round_id
        self._round: Round | None = None
        self._round_id = 0
        """Of the newest round, also when it is over; 0 before the first."""
        self._failed_round: Round | None = None
        """The newest round that is over and has lost a rank."""
        self._process_state = process_state
        self._pending_round = PendingRound(size, settings.start_s - min(START_MARGIN_S, 0.1 * settings.start_s))
        self.queries = RankQueries(self._pending_round, process_state)
        self._trace_collector = TraceCollector(settings.timeline, settings.timeline_events)
        self._connections: dict[int, _Connection] = {}
        self._reported_exits: dict[int, tuple[int, MembershipEnd]] = {}
        """Ranks whose end was noticed: when they are declared lost, and for which reason."""
        self._exit_grace_ns = EXIT_REPORT_GRACE_NS if rounds is None else REASON_GRACE_NS
        self._closing = False
        self._logged_reason = ""

    @property
    def has_round(self) -> bool:
        return self._round is not None

    @property
    def is_finished(self) -> bool:
        """Whether all rounds were served."""
        return self._rounds_left == 0 and self._round is None

    def _newest_failed_round(self) -> Round | None:
        return self._round if self._round is not None and self._round.first_lost is not None else self._failed_round

    @property
    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """The first rank that was lost in the newest round that lost one, and how. Other ranks may have ended before
        it: they learned of the loss while the lost one was still printing its traceback."""
        round = self._newest_failed_round()
        return round.first_lost if round is not None else None

    @property
    def whereabouts(self) -> Whereabouts | None:
        """Where ranks were when the rank of first_lost failed, if it failed in an operation."""
        round = self._newest_failed_round()
        return round.whereabouts() if round is not None else None

    # --- connections -----------------------------------------------------------------------------------------------

    def admit(self, request: ConnectionRequest, control_port: int) -> Admission:
        """Decide whether a process that has proved the job's key may be the rank that it claims to be. If it may, the
        event RankConnected follows."""
        rank = request.rank
        if request.purpose != LIVENESS:
            return _refusal(f"the coordinator has no use for {shorten(request.purpose)!r}")
        if not 0 <= rank < self._size:
            return _refusal(
                f"there is no rank {rank} among the {self._size} of this job; check RONDE_RANK and RONDE_SIZE"
            )
        if not _WORKER.fullmatch(request.worker):
            return _refusal(f"{shorten(request.worker)!r} cannot be the identity of a process")
        former = self._connections.get(rank)
        if former is not None and former.attempt != request.detail:
            if former.is_open:
                if self._is_member(rank) and self._has_left(request.worker):
                    return Admission(AdmissionStatus.RETRY, reason=f"rank {rank} of the round before has not left it")
                self._add_duplicate(rank)
                return _refusal(f"another process already is rank {rank} of this job; give each its own RONDE_RANK")
            return Admission(AdmissionStatus.RETRY, reason="the round before is not over")
        if self._rounds_left == 0 or self._closing:
            return Admission(AdmissionStatus.RETRY, reason="the round before is not over")
        if former is not None:  # the same process connects again: the end of its former connection means nothing
            del self._connections[rank]
            self._reported_exits.pop(rank, None)
        self._pending_round.connected(rank)
        sender = f"{request.worker}-{next(self._num_admitted)}"
        self._ranks.pop(self.senders.get(rank, ""), None)
        self._ranks[sender] = rank
        self.senders[rank] = sender
        return Admission(AdmissionStatus.ADMITTED, control_port, sender=sender)

    def _has_left(self, worker: str) -> bool:
        """Whether the worker has left the round under way: in the next one it may be another rank."""
        round = self._round
        if round is None:
            return False
        return any(each.worker == worker and each.rank not in round.present for each in round.members)

    def _add_duplicate(self, rank: int) -> None:
        logger.warning("a second process says that it is rank %d; it was refused", rank)
        if not self._is_member(rank):
            self._pending_round.duplicates.add(rank)

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Send]:
        """Take an event; returns what to send at once."""
        if isinstance(event, MessageReceived):
            return self._handle_message(event, now_ns)
        if isinstance(event, MessagesLost):
            return self._handle_lost_messages(event, now_ns)
        if isinstance(event, RankConnected):
            if event.rank in self._connections:
                self._add_duplicate(event.rank)
            else:
                self._connections[event.rank] = _Connection(event.connection, event.attempt)
        elif isinstance(event, RankDisconnected):
            connection = self._connections.get(event.rank)
            if connection is not None and connection.name == event.connection:
                connection.is_open = False
                has_reason = event.end.reason is LeaveReason.MESSAGES_LOST  # the rank itself has given it
                grace_ns = 0 if has_reason else self._exit_grace_ns
                self._reported_exits.setdefault(event.rank, (now_ns + grace_ns, event.end))
        elif event.rank in self._pending_round.joins or self._is_member(event.rank):
            # The launcher's reason replaces that of a closed connection, unless the rank itself gives one in time.
            end = MembershipEnd(LeaveReason.PROCESS_ENDED, event.how)
            self._reported_exits[event.rank] = (now_ns + REASON_GRACE_NS, end)
        else:
            self._pending_round.exited(event.rank, event.how)
        return []

    def _handle_message(self, event: MessageReceived, now_ns: int) -> list[Send]:
        message, rank = event.message, self._ranks.get(event.sender)
        if rank is None:  # of a worker that was never admitted, or that another one has replaced
            logger.info("dropped %s of %s, which is no rank any more", type(message).__name__, event.sender)
            return []
        if event.round and event.round != self._round_id:
            return self._handle_late_message(rank, message, now_ns)
        round = self._round if self._is_member(rank) else None
        if round is not None and round.handle(rank, message, now_ns):
            return []
        if isinstance(message, RankHeartbeat):
            return [Send((rank,), RankHeartbeatReply(message.sent_ns, now_ns))]
        if isinstance(message, ActivityReport) and round is not None:
            self.queries.record_activity(rank, message, now_ns)
        elif isinstance(message, StackReply):
            self.queries.add_stack_reply(rank, message)
        elif isinstance(message, TraceBatch | TimelineRequest | TraceFlushed):
            return self._trace_collector.handle(rank, message, round.present if round is not None else ())
        elif isinstance(message, LeaveRound):
            self._handle_leave(rank, message, now_ns)
            return [Send((rank,), LeaveConfirmed())]
        elif isinstance(message, JoinRound) and round is None:
            return self._handle_join(rank, message, now_ns)
        else:  # a late message of a rank that was declared lost
            logger.info("dropped %s of rank %d, which does not fit its state", type(message).__name__, rank)
        return []

    def _handle_late_message(self, rank: int, message: WorkerMessage, now_ns: int) -> list[Send]:
        """A message of an earlier round counts for nothing; its sender only must not wait in vain."""
        if isinstance(message, RankHeartbeat):
            return [Send((rank,), RankHeartbeatReply(message.sent_ns, now_ns))]
        if isinstance(message, LeaveRound):
            return [Send((rank,), LeaveConfirmed())]
        logger.info("dropped %s of rank %d of an earlier round", type(message).__name__, rank)
        return []

    def _handle_lost_messages(self, event: MessagesLost, now_ns: int) -> list[Send]:
        """A member whose messages were lost cannot go on: others may wait for what it has announced. A rank that joins
        sends its request again and again."""
        rank = self._ranks.get(event.sender)
        if rank is None or not self._is_member(rank):
            return []
        lost = format_count(event.num_lost, "message")
        end = MembershipEnd(
            LeaveReason.MESSAGES_LOST, f"its control connection to the coordinator broke, and {lost} to it got lost"
        )
        self._reported_exits[rank] = (now_ns, end)
        return [Send((rank,), EndRound(f"rank {rank} cannot go on: {end.description}"))]

    def _handle_join(self, rank: int, message: JoinRound, now_ns: int) -> list[Send]:
        if not 0 <= rank < self._size:
            return [Send((rank,), JoinRefused(f"there is no rank {rank} among the {self._size} of this job"))]
        if self._rounds_left == 0:
            return [Send((rank,), JoinRefused("the only round of this coordinator has begun without it"))]
        self._pending_round.join(rank, message, now_ns)
        return []

    def _handle_leave(self, rank: int, leave: LeaveRound, now_ns: int) -> None:
        detail, line = shorten(leave.detail, MAX_DETAIL_CHARS), shorten(leave.line, MAX_LINE_CHARS)
        end = MembershipEnd(leave.reason, detail, leave.missing, line, leave.lost_peer)
        if end.lost_peer is not None:
            self.lost_peers[rank] = LostPeer(end.lost_peer, end.description)
        self._reported_exits.pop(rank, None)
        self._connections.pop(rank, None)
        if self._round is not None and rank in self._round.present:
            if end.reason.is_orderly:
                self._round.member_left(rank, end, now_ns)
            else:
                self._round.member_lost(rank, end)
        self._pending_round.withdraw(rank, detail or "it gave up")

    # --- time ------------------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> list[Send]:
        """Act on all events that were handled: what came together may be sent together."""
        sends: list[Send] = []
        if self._reported_exits:
            self._declare_lost(now_ns)
        if self._pending_round.joins:
            sends += self._start_round_if_ready(now_ns)
        round = self._round
        if round is not None:
            sends += round.advance(now_ns)
            for rank in round.vanished & round.present:
                end = MembershipEnd(LeaveReason.PROCESS_GONE)
                self._reported_exits.setdefault(rank, (now_ns + self._exit_grace_ns, end))
            sends += self._trace_collector.close_if_complete(round.present)
            if not round.present:
                self._end_round(round)
        self.queries.advance(now_ns)
        return sends

    def next_due_ns(self, now_ns: int) -> int:
        """Return when advance() has to be called even if nothing happens, MAX_WAIT_NS from now at the latest."""
        due_ns = min(now_ns + MAX_WAIT_NS, self.queries.next_due_ns)
        if self._round is not None:
            due_ns = min(due_ns, self._round.next_due_ns(now_ns))
        if self._reported_exits:
            due_ns = min(due_ns, *(reported_ns for reported_ns, _ in self._reported_exits.values()))
        if self._pending_round.joins:
            start_timeout_ns = int(self._pending_round.start_timeout_s * 1e9)
            due_ns = min(due_ns, self._pending_round.first_join_ns + start_timeout_ns)
        return due_ns

    def _declare_lost(self, now_ns: int) -> None:
        for rank, end in [(rank, end) for rank, (due_ns, end) in self._reported_exits.items() if due_ns <= now_ns]:
            del self._reported_exits[rank]
            self._connections.pop(rank, None)
            is_member = self._is_member(rank)
            if is_member or rank in self._pending_round.joins:
                logger.warning("rank %d is lost: %s", rank, end.description)
                self._pending_round.exited(rank, end.description)
            if is_member and self._round is not None:
                self._round.member_lost(rank, end)

    # --- rounds ----------------------------------------------------------------------------------------------------

    @property
    def _present(self) -> Sequence[int]:
        return tuple(self._round.present) if self._round is not None else ()

    def _is_member(self, rank: int) -> bool:
        return self._round is not None and rank in self._round.present

    def _start_round_if_ready(self, now_ns: int) -> list[Send]:
        connected = set()
        if not self._pending_round.num_missing:
            connected = {rank for rank, connection in self._connections.items() if connection.is_open}
        present = self._round.present if self._round is not None else frozenset[int]()
        decision = self._pending_round.decide(now_ns, connected, present)
        if decision.reason != self._logged_reason:
            self._logged_reason = decision.reason
            logger.info("round %d: %s", self._num_rounds, decision.reason)
        if decision.members is not None:
            if self._round is not None:
                self._end_round(self._round)
            groups = self._pending_round.joins[0].groups
            self._pending_round.clear(decision)
            self._start_round(decision.members, groups, now_ns)
        elif decision.refused:
            refused = self._pending_round.clear(decision)
            for rank in refused:  # each may connect again, and its former connection must not prevent it
                self._connections.pop(rank, None)
                if decision.exited:
                    self.lost_peers[rank] = LostPeer(decision.exited[0], f"StartFailed: {decision.reason}")
            return [Send(refused, JoinRefused(decision.reason))]
        return []

    def _start_round(self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], now_ns: int) -> None:
        self.lost_peers.clear()
        self._round_id = self._new_round_id()
        self._round = Round(
            self._num_rounds,
            self._round_id,
            members,
            groups,
            now_ns,
            settings=self._settings,
            process_state=self._process_state,
            host_name=lambda member: self.host_names[member.rank] if self.host_names else host_name(member.host),
        )
        self.queries.start_round(self._round, now_ns)
        self._num_rounds += 1
        if self._rounds_left is not None:
            self._rounds_left -= 1

    def _end_round(self, round: Round) -> None:
        logger.info("round %d is over", round.number)
        if round.first_lost is not None:
            self._failed_round = round
        self._trace_collector.end_round()
        self._round = None
        self._logged_reason = ""

    def stop_admitting(self) -> None:
        """No further rank is admitted: the coordinator is about to be closed."""
        self._closing = True

    def close(self, reason: str) -> list[Send]:
        """End everything; returns what to send to those who are still there."""
        sends = [Send(tuple(self._pending_round.joins), JoinRefused(reason))]
        if self._present:
            logger.info("the round ends with %s still in it: %s", format_ranks(self._present), reason)
            sends.insert(0, Send(tuple(self._present), EndRound(reason)))
        self.queries.close()
        self._trace_collector.close()
        return sends


def _refusal(reason: str) -> Admission:
    return Admission(AdmissionStatus.REFUSED, reason=reason)
