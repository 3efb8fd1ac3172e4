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
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ronde.coordinator.elastic_rounds import BEGUN_TEXT, STATE_LOST_TEXT, ElasticRounds, refusal
from ronde.coordinator.joining import PendingRound
from ronde.coordinator.negotiation import Send
from ronde.coordinator.queries import OnStacks, RankQueries, TraceCollector
from ronde.coordinator.round_planning import ElasticLimits, Membership, PlanAction, PlanReason, RoundPlan
from ronde.coordinator.rounds import LostPeer, MembershipEnd, Round
from ronde.net.addresses import host_name
from ronde.net.handshake import ConnectionRequest
from ronde.net.messages import (
    LEAVE_GRACE_S,
    LIVENESS,
    ActivityReport,
    Admission,
    AdmissionStatus,
    EndRound,
    FinishConfirmed,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    RefusalKind,
    StackReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
    TrainingFinished,
    WorkerMessage,
)
from ronde.observe.stalls import FailureStacks
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
    """Serves `rounds` rounds of `size` ranks, None for any number of them; or, with `limits`, the rounds of an elastic
    job.

    handle() takes an event, advance() acts on all that were handled; both return what to send. advance() is to be
    called after events, and at next_due_ns(). The ranks of events, requests and sends are the numbers of workers: they
    are the same in a job whose ranks are fixed. Round and queries use the ranks of the round.
    """

    def __init__(
        self,
        size: int,
        settings: Settings,
        *,
        rounds: int | None = 1,
        limits: ElasticLimits | None = None,
        on_membership: Callable[[Membership], None] = lambda membership: None,
        process_state: Callable[[Member], str] = lambda member: "",
        new_round_id: Callable[[], int] = lambda: 1 + secrets.randbits(62),
        reports_losses: bool = True,
    ) -> None:
        self.senders: dict[int, str] = {}
        """By worker, the name of the control connection that is this worker: that of the last process that was admitted
        as it. What is sent to a worker goes there."""
        self.host_names: dict[int, str] = {}
        """By worker, the user's names for the hosts; empty without a launcher."""
        self.lost_peers: dict[int, LostPeer] = {}
        """By rank, those that failed in the newest round because another rank was gone."""
        self._size = size
        self._loss_level = logging.WARNING if reports_losses else logging.INFO
        self._settings = settings
        self._rounds_left = rounds
        self._num_rounds = 0
        self._num_admitted = itertools.count()
        self._workers: dict[str, int] = {}
        """The workers of the senders."""
        self._new_round_id = new_round_id
        self._round: Round | None = None
        self._round_id = 0
        """Of the newest round, also when it is over; 0 before the first."""
        self._failed_round: Round | None = None
        """The newest round that is over and has lost a rank."""
        self._process_state = process_state
        self._pending_round = PendingRound(size, settings.start_s - min(START_MARGIN_S, 0.1 * settings.start_s))
        self._elastic = ElasticRounds(limits, process_state) if limits is not None else None
        self._on_membership = on_membership
        self._membership: Membership | None = None
        """What on_membership was told last."""
        self.queries = RankQueries(self._elastic or self._pending_round, process_state)
        self._trace_collector = TraceCollector(settings.timeline, settings.timeline_events)
        self._connections: dict[int, _Connection] = {}
        self._reported_exits: dict[int, tuple[int, MembershipEnd]] = {}
        """Workers whose end was noticed: when they are declared lost, and for which reason."""
        self._exit_grace_ns = EXIT_REPORT_GRACE_NS if rounds is None else REASON_GRACE_NS
        self._closing = False
        self._logged_reason = ""
        self._change_wanted_in = 0
        """The id of the round whose members know that newcomers wait."""

    @property
    def has_round(self) -> bool:
        return self._round is not None

    @property
    def is_finished(self) -> bool:
        """Whether all rounds were served. A launcher that wants any number of them decides itself."""
        is_over = self._rounds_left == 0 if self._elastic is None else self._elastic.is_over
        return self._rounds_left is not None and is_over and self._round is None

    @property
    def must_tell_end(self) -> bool:
        """Whether the elastic job is finished, and a worker that lost another one at its end has not heard of it."""
        return self._elastic is not None and self._elastic.must_tell_end

    def _newest_failed_round(self) -> Round | None:
        return self._round if self._round is not None and self._round.first_lost is not None else self._failed_round

    @property
    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """The first rank that was lost in the newest round that lost one, and how. Other ranks may have ended before
        it: they learned of the loss while the lost one was still printing its traceback."""
        round = self._newest_failed_round()
        return round.first_lost if round is not None else None

    @property
    def failure_stacks(self) -> FailureStacks | None:
        """Where ranks were when the rank of first_lost failed, if it failed in an operation."""
        round = self._newest_failed_round()
        return round.failure_stacks() if round is not None else None

    def start_stack_query(self, due_ns: int, on_done: OnStacks) -> list[Send]:
        """As RankQueries.start_stack_query."""
        return self._to_workers(self.queries.start_stack_query(due_ns, on_done))

    # --- connections -----------------------------------------------------------------------------------------------

    def admit(self, request: ConnectionRequest, control_port: int) -> Admission:
        """Decide whether a process that has proved the job's key may be the worker that it claims to be. If it may, the
        event RankConnected follows."""
        number = request.rank
        if request.purpose != LIVENESS:
            return refusal(f"the coordinator has no use for {shorten(request.purpose)!r}")
        if not _WORKER.fullmatch(request.worker):
            return refusal(f"{shorten(request.worker)!r} cannot be the identity of a process")
        refused = self._find_refusal(request) if self._elastic is None else self._elastic.find_refusal(request)
        if refused is not None:
            return refused
        former = self._connections.get(number)
        if former is not None and former.attempt != request.detail:
            if former.is_open:
                if self._may_come_later(request):
                    return Admission(AdmissionStatus.RETRY, reason=f"rank {number} of the round before has not left it")
                self._add_duplicate(number)
                return refusal(f"another process already is rank {number} of this job; give each its own RONDE_RANK")
            return Admission(AdmissionStatus.RETRY, reason="the round before is not over")
        if self._closing or (self._rounds_left == 0 and self._elastic is None):
            return Admission(AdmissionStatus.RETRY, reason="the round before is not over")
        if former is not None:  # the same process connects again: the end of its former connection means nothing
            del self._connections[number]
            self._reported_exits.pop(number, None)
        if self._elastic is None:
            self._pending_round.connected(number)
        else:
            self._elastic.admitted(request)
        sender = f"{request.worker}-{next(self._num_admitted)}"
        self._workers.pop(self.senders.get(number, ""), None)
        self._workers[sender] = number
        self.senders[number] = sender
        return Admission(AdmissionStatus.ADMITTED, control_port, sender=sender)

    def _find_refusal(self, request: ConnectionRequest) -> Admission | None:
        if 0 <= request.rank < self._size:
            return None
        return refusal(
            f"there is no rank {request.rank} among the {self._size} of this job; check RONDE_RANK and RONDE_SIZE"
        )

    def _may_come_later(self, request: ConnectionRequest) -> bool:
        """Whether the connection of the worker that it claims to be is about to be closed: by a worker that leaves the
        round, and whose rank it has in the next one; or by itself, as its LeaveRound is on the way."""
        if self._elastic is not None:
            return self._elastic.is_known(request)
        return self._is_member(request.rank) and self._has_left(request.worker)

    def _has_left(self, worker: str) -> bool:
        """Whether the worker has left the round under way: in the next one it may be another rank."""
        round = self._round
        if round is None:
            return False
        return any(each.worker == worker and each.rank not in round.present for each in round.members)

    def _add_duplicate(self, number: int) -> None:
        logger.warning("a second process says that it is rank %d; it was refused", number)
        if self._elastic is None and not self._is_member(number):
            self._pending_round.duplicates.add(number)

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ns: int) -> list[Send]:
        """Take an event; returns what to send at once."""
        if self._elastic is not None:
            self._elastic.tick(now_ns)
        if isinstance(event, MessageReceived):
            return self._handle_message(event, now_ns)
        if isinstance(event, MessagesLost):
            return self._handle_lost_messages(event, now_ns)
        if self._elastic is not None:
            self._elastic.request_plan()
        if isinstance(event, RankConnected):
            if event.rank in self._connections:
                self._add_duplicate(event.rank)
            else:
                self._connections[event.rank] = _Connection(event.connection, event.attempt)
        elif isinstance(event, RankDisconnected):
            connection = self._connections.get(event.rank)
            if connection is not None and connection.name == event.connection:
                connection.is_open = False
                grace_ns = 0 if self._is_final(event.end.reason) else self._exit_grace_ns
                self._reported_exits.setdefault(event.rank, (now_ns + grace_ns, event.end))
        elif self._is_member(event.rank) or self._joining.is_joining(event.rank):
            # The launcher's reason replaces that of a closed connection, unless the rank itself gives one in time.
            end = MembershipEnd(LeaveReason.PROCESS_ENDED, event.how)
            self._reported_exits[event.rank] = (now_ns + REASON_GRACE_NS, end)
        else:
            self._joining.exited(event.rank, event.how)
        return []

    def _is_final(self, reason: LeaveReason) -> bool:
        """Whether no better reason for the end of a liveness connection can be expected: the rank has given it itself,
        or an elastic job, which is to go on at once, has lost a host."""
        is_cut = reason is LeaveReason.UNREACHABLE and self._elastic is not None
        return is_cut or reason in (LeaveReason.MESSAGES_LOST, LeaveReason.FAILED)

    def _handle_message(self, event: MessageReceived, now_ns: int) -> list[Send]:
        message, number = event.message, self._workers.get(event.sender)
        if number is None:  # of a worker that was never admitted, or that another one has replaced
            logger.info("dropped %s of %s, which is no rank any more", type(message).__name__, event.sender)
            return []
        if self._elastic is not None:
            self._elastic.heard(number)
        if event.round and event.round != self._round_id:
            return self._handle_late_message(number, message, now_ns)
        rank = self._rank_of(number)
        if rank is not None:
            round = self._round if self._round is not None and rank in self._round.present else None
            if round is not None and round.handle(rank, message, now_ns):
                return []
            if isinstance(message, ActivityReport) and round is not None:
                self.queries.record_activity(rank, message, now_ns)
                return []
            if isinstance(message, StackReply):
                self.queries.add_stack_reply(rank, message)
                return []
            if isinstance(message, TraceBatch | TimelineRequest | TraceFlushed):
                present = round.present if round is not None else ()
                return self._to_workers(self._trace_collector.handle(rank, message, present))
        if isinstance(message, RankHeartbeat):
            return [Send((number,), RankHeartbeatReply(message.sent_ns, now_ns))]
        if isinstance(message, LeaveRound):
            self._handle_leave(number, message, now_ns)
            return [Send((number,), LeaveConfirmed())]
        if isinstance(message, TrainingFinished) and self._elastic is not None:
            if self._is_member(number):
                self._elastic.training_finished(number)
            return [Send((number,), FinishConfirmed())]
        if isinstance(message, JoinRound) and not self._is_member(number):
            return self._handle_join(number, message, now_ns)
        # It is a late message of a rank that was declared lost.
        logger.info("dropped %s of rank %d, which does not fit its state", type(message).__name__, number)
        return []

    def _handle_late_message(self, number: int, message: WorkerMessage, now_ns: int) -> list[Send]:
        """A message of an earlier round counts for nothing; its sender only must not wait in vain."""
        if isinstance(message, RankHeartbeat):
            return [Send((number,), RankHeartbeatReply(message.sent_ns, now_ns))]
        if isinstance(message, LeaveRound):
            return [Send((number,), LeaveConfirmed())]
        if isinstance(message, TrainingFinished):
            return [Send((number,), FinishConfirmed())]
        logger.info("dropped %s of rank %d of an earlier round", type(message).__name__, number)
        return []

    def _handle_lost_messages(self, event: MessagesLost, now_ns: int) -> list[Send]:
        """A member whose messages were lost cannot go on: others may wait for what it has announced. A rank that joins
        sends its request again and again."""
        number = self._workers.get(event.sender)
        if number is None or not self._is_member(number):
            return []
        lost = format_count(event.num_lost, "message")
        end = MembershipEnd(
            LeaveReason.MESSAGES_LOST, f"its control connection to the coordinator broke, and {lost} to it got lost"
        )
        self._reported_exits[number] = (now_ns, end)
        return [Send((number,), EndRound(f"rank {self._rank_of(number)} cannot go on: {end.description}"))]

    def _handle_join(self, number: int, message: JoinRound, now_ns: int) -> list[Send]:
        if self._elastic is not None:
            refused = self._elastic.join(number, message)
            if refused is None:
                return []
            self._connections.pop(number, None)
            return [Send((number,), refused)]
        if not 0 <= number < self._size:
            return [Send((number,), JoinRefused(f"there is no rank {number} among the {self._size} of this job"))]
        if self._rounds_left == 0:
            return [Send((number,), JoinRefused("the only round of this coordinator has begun without it"))]
        self._pending_round.join(number, message, now_ns)
        return []

    def _handle_leave(self, number: int, leave: LeaveRound, now_ns: int) -> None:
        detail, line = shorten(leave.detail, MAX_DETAIL_CHARS), shorten(leave.line, MAX_LINE_CHARS)
        end = MembershipEnd(leave.reason, detail, leave.missing, line, leave.lost_peer)
        goes_on = end.reason in (
            LeaveReason.REJOINING,
            LeaveReason.FINISHED,
        )  # others may come back, to hear of the end
        if goes_on and self._elastic is None and self._rounds_left is not None:
            self._become_elastic(now_ns)
        rank = self._rank_of(number)
        if end.lost_peer is not None and rank is not None:
            self.lost_peers[rank] = LostPeer(end.lost_peer, end.description)
        self._reported_exits.pop(number, None)
        self._connections.pop(number, None)
        if self._round is not None and rank is not None and rank in self._round.present:
            if end.reason.is_orderly:
                self._round.member_left(rank, end, now_ns)
            else:
                self._round.member_lost(rank, end)
        if self._elastic is None:
            self._pending_round.withdraw(number, detail or "it gave up")
        else:
            if end.reason is LeaveReason.REJOINING and end.missing:
                self._elastic.missed(end.missing, end.description)
            self._elastic.left(number, end.reason, end.description, is_own_error=end.is_own_error)

    def _become_elastic(self, now_ns: int) -> None:
        """The first member of a job with fixed ranks has left its round to be in another one."""
        round, size, settings = self._round, self._size, self._settings
        if round is None:
            return
        limits = ElasticLimits(
            start_ranks=size,
            max_ranks=size,
            timeout_s=settings.elastic_timeout_s,
            suspend_s=settings.suspend_s,
        )
        ends = {rank: end for rank in range(size) if (end := round.membership_end(rank)) is not None}
        lost = {rank: end.description for rank, end in ends.items() if not end.reason.is_orderly}
        self._elastic = ElasticRounds.from_round(limits, self._process_state, round.members, lost, round.present)
        self._elastic.tick(now_ns)
        self.queries.joining = self._elastic

    # --- time ------------------------------------------------------------------------------------------------------

    def advance(self, now_ns: int) -> list[Send]:
        """Act on all events that were handled: what came together may be sent together."""
        sends: list[Send] = []
        if self._reported_exits:
            self._declare_lost(now_ns)
        if self._elastic is not None:
            self._elastic.tick(now_ns)
            sends += self._follow_plans(self._elastic, now_ns)
        elif self._pending_round.joins:
            sends += self._start_round_if_ready(now_ns)
        round = self._round
        if round is not None:
            sends += self._to_workers(round.advance(now_ns))
            for rank in round.vanished & round.present:
                end = MembershipEnd(LeaveReason.PROCESS_GONE)
                self._reported_exits.setdefault(self._worker_of(rank), (now_ns + self._exit_grace_ns, end))
            sends += self._to_workers(self._trace_collector.close_if_complete(round.present))
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
        if self._elastic is not None and not self._elastic.failure:
            due_ns = min(due_ns, self._elastic.next_due_ns)
        elif self._pending_round.joins:
            start_timeout_ns = int(self._pending_round.start_timeout_s * 1e9)
            due_ns = min(due_ns, self._pending_round.first_join_ns + start_timeout_ns)
        return due_ns

    def _declare_lost(self, now_ns: int) -> None:
        for number, end in [(each, end) for each, (due_ns, end) in self._reported_exits.items() if due_ns <= now_ns]:
            del self._reported_exits[number]
            self._connections.pop(number, None)
            is_member = self._is_member(number)
            if is_member or self._joining.is_joining(number):
                self._lose(number, end)

    def _lose(self, number: int, end: MembershipEnd) -> None:
        """A member, or a worker that has joined the next round, is lost."""
        kind = "rank" if self._elastic is None else "worker"
        logger.log(self._loss_level, "%s %d is lost: %s", kind, number, end.description)
        rank = self._rank_of(number) if self._is_member(number) else None
        if self._elastic is not None and end.reason in (LeaveReason.UNREACHABLE, LeaveReason.MESSAGES_LOST):
            self._elastic.cut_off(number, end.description)
        else:
            self._joining.exited(number, end.description)
        if rank is not None and self._round is not None:
            self._round.member_lost(rank, end)

    # --- rounds ----------------------------------------------------------------------------------------------------

    @property
    def _joining(self) -> PendingRound | ElasticRounds:
        return self._elastic if self._elastic is not None else self._pending_round

    def _rank_of(self, number: int) -> int | None:
        """The rank of a worker in the newest round; None for one of an elastic job that was not in it."""
        return number if self._elastic is None else self._elastic.rank_of(number)

    def _worker_of(self, rank: int) -> int:
        """The worker that is this rank of the newest round."""
        return rank if self._elastic is None else self._elastic.members[rank]

    def _to_workers(self, sends: list[Send]) -> list[Send]:
        """The sends of the round with the numbers of workers in place of their ranks."""
        if self._elastic is None:
            return sends
        members = self._elastic.members
        return [Send(tuple(members[rank] for rank in ranks), message) for ranks, message in sends]

    @property
    def _present(self) -> tuple[int, ...]:
        """The workers that are in the round now."""
        return tuple(self._worker_of(rank) for rank in self._round.present) if self._round is not None else ()

    def _is_member(self, number: int) -> bool:
        return self._round is not None and self._rank_of(number) in self._round.present

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
        if self._elastic is not None:
            self._failed_round = None  # the job has got over it
        self._round_id = self._new_round_id()
        workers = self._elastic.members if self._elastic is not None else range(self._size)
        self._round = Round(
            self._num_rounds,
            self._round_id,
            members,
            groups,
            now_ns,
            settings=self._settings,
            process_state=self._process_state,
            host_name=lambda member: self.host_names.get(workers[member.rank]) or host_name(member.host),
            late_s=self._elastic.limits.suspend_s if self._elastic is not None else None,
        )
        self.queries.start_round(self._round, now_ns)
        self._num_rounds += 1
        if self._rounds_left is not None and self._elastic is None:
            self._rounds_left -= 1

    def _end_round(self, round: Round) -> None:
        logger.info("round %d is over", round.number)
        if round.first_lost is not None:
            self._failed_round = round
        self._trace_collector.end_round()
        self._round = None
        self._logged_reason = ""

    # --- the rounds of an elastic job ---------------------------------------------------------------------------------

    def set_num_starting(self, count: int) -> None:
        """So many processes of an elastic job were started and have not asked to be in a round yet."""
        if self._elastic is not None:
            self._elastic.set_num_starting(count)

    def _follow_plans(self, elastic: ElasticRounds, now_ns: int) -> list[Send]:
        """Carry out what the plan of the next round says, until it says nothing more."""
        sends: list[Send] = []
        while elastic.is_plan_due():
            for number in elastic.find_gone():
                elastic.exited(number, MembershipEnd(LeaveReason.PROCESS_GONE).description)
            connected = {number for number, connection in self._connections.items() if connection.is_open}
            late = self._round.late if self._round is not None else frozenset[int]()
            plan = elastic.make_plan(connected, late)
            if plan.describe() != self._logged_reason:
                self._logged_reason = plan.describe()
                logger.info("round %d: %s", self._num_rounds, self._logged_reason)
            sends += self._carry_out(elastic, plan, now_ns)
            self._tell_membership(elastic)
        return sends

    def _carry_out(self, elastic: ElasticRounds, plan: RoundPlan, now_ns: int) -> list[Send]:
        sends: list[Send] = []
        for number in plan.left_behind:
            end = MembershipEnd(LeaveReason.ABSENT if number in plan.absent else LeaveReason.SUSPENDED)
            reason = f"worker {number} was left behind: {end.description}"  # it reads that when it wakes
            message = JoinRefused(reason, RefusalKind.LEFT_BEHIND) if elastic.is_joining(number) else EndRound(reason)
            sends.append(Send((number,), message))
            self._lose(number, end)
            self._connections.pop(number, None)
        if outdated := elastic.outdated:
            sends += self._refuse(elastic, outdated, JoinRefused(STATE_LOST_TEXT, RefusalKind.STATE_LOST))
        if plan.left_behind or outdated:
            return sends  # the next plan is made without them
        match plan.action:
            case PlanAction.START:
                if self._round is not None:
                    self._end_round(self._round)
                self._start_round(elastic.start_round(plan), (), now_ns)
                sends += self._refuse(elastic, elastic.unready, JoinRefused(BEGUN_TEXT, RefusalKind.BEGUN))
            case PlanAction.CHANGE:
                if self._change_wanted_in != self._round_id and self._round is not None:
                    self._change_wanted_in = self._round_id
                    self._round.ask_for_change(plan.describe())
            case PlanAction.FAIL:
                sends += self._refuse(elastic, elastic.joining, JoinRefused(plan.describe()))
            case _ if plan.reason is PlanReason.FINISHED:
                sends += self._refuse(elastic, elastic.joining, JoinRefused(plan.describe(), RefusalKind.FINISHED))
        return sends

    def _refuse(self, elastic: ElasticRounds, numbers: tuple[int, ...], refused: JoinRefused) -> list[Send]:
        for number in numbers:  # each may connect again, and its former connection must not prevent it
            self._connections.pop(number, None)
            elastic.dismiss(number)
        return [Send(numbers, refused)] if numbers else []

    def _tell_membership(self, elastic: ElasticRounds) -> None:
        if elastic.membership != self._membership:
            self._membership = elastic.membership
            self._on_membership(self._membership)

    # --- the end ------------------------------------------------------------------------------------------------------

    def stop_admitting(self) -> None:
        """No further rank is admitted: the coordinator is about to be closed."""
        self._closing = True

    def close(self, reason: str) -> list[Send]:
        """End everything; returns what to send to those who are still there."""
        sends = [Send(self._joining.joining, JoinRefused(reason))]
        if self._present:
            logger.info("the round ends with %s still in it: %s", format_ranks(self._present), reason)
            sends.insert(0, Send(self._present, EndRound(reason)))
        self.queries.close()
        self._trace_collector.close()
        return sends
