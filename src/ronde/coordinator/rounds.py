"""Rounds: which ranks have joined the next one, and what happens in one until its last member has left. Without I/O.

PendingRound decides whether the next round starts, is refused or has to wait. Round combines the negotiation of named
operations, changes of groups, and the search for operations that have waited too long.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from ronde.coordinator.negotiation import Negotiator, Send
from ronde.net.messages import (
    LEAVE_GRACE_S,
    VERSION,
    AbortChannel,
    AnnounceOperations,
    CanShareIds,
    ChangeGroups,
    ChannelAborted,
    CoordinatorMessage,
    GroupsChanged,
    JoinRound,
    LeaveReason,
    MissingRanks,
    MissingRanksQuery,
    RankLost,
    RanksLost,
    RoundStarted,
    StackReply,
    StackRequest,
    StallReport,
    WaitingTooLong,
    WorkerMessage,
)
from ronde.observe.stacks import GONE, RankStack
from ronde.observe.stalls import StallInspector, WaitingOperation, Whereabouts, describe_silence, describe_stall
from ronde.settings import Settings, describe_settings
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import Member, check_group_ranks

STACK_REPLY_TIMEOUT_S = 1.0
"""How long a missing rank may take to answer a StackRequest."""
MAX_STALLS_CHECKED = 1000
"""Late operations that one check looks at, the oldest of a group first."""
STACK_REPLY_CHECK_NS = 50_000_000
NEVER_NS = 1 << 62
MAX_PROMPT_NOTICES = 256
"""In a round of more members, only the first loss is reported to them at once, and then all losses of some time: each
one makes others fail, and a message to each member about each other one would be millions."""
LOSS_NOTICE_INTERVAL_NS = 20_000
"""That time, for each member."""
MAX_VALUE_CHARS = 400
MAX_NAMED_RANKS = 16
"""Of ranks that have not joined yet; when there are more, only their number is shown until the time is over."""


@dataclass(frozen=True, slots=True)
class MembershipEnd:
    """How a rank's membership ended."""

    reason: LeaveReason
    detail: str = ""
    """What is known beyond the reason, as text for the user."""
    missing: tuple[int, ...] = ()
    """If it timed out: the ranks that it waited for."""
    line: str = ""
    """If it failed: the line of its program."""
    lost_peer: int | None = None
    """If it failed because another rank was gone: that rank."""

    @property
    def description(self) -> str:
        """For errors and reports. The rank is the subject."""
        return self.detail or _LEAVE_REASON_TEXTS[self.reason]


_LEAVE_REASON_TEXTS = {
    LeaveReason.SHUTDOWN: "it has left the round by shutdown()",
    LeaveReason.SCRIPT_ENDED: "exited without shutdown",
    LeaveReason.FAILED: "it gave up",
    LeaveReason.TIMED_OUT: "an operation ran out of time",
    LeaveReason.MISMATCHED: "ranks disagreed on an operation",
    LeaveReason.PROCESS_ENDED: "its process has ended",
    LeaveReason.PROCESS_GONE: "its process is gone",
    LeaveReason.UNREACHABLE: "its host cannot be reached",
    LeaveReason.MESSAGES_LOST: "messages between it and the coordinator got lost",
}


@dataclass(frozen=True, slots=True)
class LostPeer:
    """The rank because of which another one failed, and the error of that other one."""

    rank: int
    error: str


# --- the next round --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinDecision:
    """Whether the next round starts (with `members`), is refused, or has to wait; and why, as text for the user."""

    reason: str
    members: tuple[Member, ...] | None = None
    refused: bool = False
    exited: tuple[int, ...] = ()
    """The ranks because of whose exit the round is refused."""


@dataclass(slots=True)
class PendingRound:
    """The ranks that have joined the next round."""

    size: int
    start_timeout_s: float
    joins: dict[int, JoinRound] = field(default_factory=dict)
    exit_reasons: dict[int, str] = field(default_factory=dict)
    """Ranks whose process has ended, and how; until another process of the rank connects."""
    withdrawn: dict[int, str] = field(default_factory=dict)
    """Ranks that had joined and left again before the round started."""
    duplicates: set[int] = field(default_factory=set)
    """Ranks that two living processes claim to be."""
    first_join_ns: int = 0
    may_differ: bool = False
    """Whether a rank has joined since all were compared, with something else than another one."""
    may_be_invalid: bool = False
    """Whether a rank has joined that has not been found to be like a valid one."""
    refusal: JoinDecision | None = None
    """Why the last round was refused. Ranks that join late get the same reason, until a refused one connects again."""
    refused_ranks: set[int] = field(default_factory=set)

    def join(self, rank: int, join: JoinRound, now_ns: int) -> None:
        """A rank asks to be a member. It may ask again while it waits. The late message of a process that has ended is
        ignored: connected() comes before the join of a new process."""
        if rank in self.exit_reasons:
            return
        if not self.joins:
            self.first_join_ns = now_ns
        self.withdrawn.pop(rank, None)
        # Every rank is compared with one other: with thousands of them all values are looked at only to report them.
        other = next(iter(self.joins.values()), None)
        is_alike = other is not None and _are_alike(join, other)
        self.may_differ = self.may_differ or (other is not None and not is_alike)
        self.may_be_invalid = self.may_be_invalid or not is_alike or join.member.rank != rank
        self.joins[rank] = join

    def connected(self, rank: int) -> None:
        """A process of this rank has connected, whatever became of a former one."""
        self.exit_reasons.pop(rank, None)
        self.withdrawn.pop(rank, None)
        if rank in self.refused_ranks:
            self.refusal = None
            self.refused_ranks.clear()

    def exited(self, rank: int, why: str) -> None:
        """The rank's process has ended: nobody has to wait for it, in this round or a later one."""
        self.joins.pop(rank, None)
        self.exit_reasons[rank] = why

    def withdraw(self, rank: int, why: str) -> None:
        """A rank that had joined has left: this round is refused, the next one may start."""
        if self.joins.pop(rank, None) is not None and self.joins:
            self.withdrawn[rank] = why

    @property
    def num_missing(self) -> int:
        return self.size - len(self.joins)

    def decide(self, now_ns: int, connected: Set[int], still_in_round: Set[int] = frozenset()) -> JoinDecision:
        """Decide whether the round starts, is refused or has to wait. At least one rank has joined.

        It starts when every rank has joined, has an open liveness connection (`connected`, which counts only then), and
        has left the round before: the death of a member without a connection would go unnoticed. Called after every
        event, so as long as many ranks are missing it looks at none of them.
        """
        refusal = self.refusal or self._find_refusal()
        if refusal is not None:
            return refusal
        waited_s = (now_ns - self.first_join_ns) / 1e9
        is_late = waited_s >= self.start_timeout_s
        if self.num_missing > MAX_NAMED_RANKS and not is_late:
            return JoinDecision(f"waiting for {self.num_missing} of {self.size} ranks")
        ranks = range(self.size)
        missing = [rank for rank in ranks if rank not in self.joins]
        unconnected = [rank for rank in ranks if rank not in connected]
        difference = self._find_difference()
        if difference and not missing:  # all can be told: a coordinator in rank 0 ends with the refusal
            return JoinDecision(difference, refused=True)
        if missing or still_in_round:
            waiting = f"{format_ranks(missing or still_in_round)} of {self.size}"
            busy = f" ({format_ranks(still_in_round)} still in the round before)" if still_in_round else ""
            late, hint = f"did not join within {{}} s{busy}", "give them more time with start_s (RONDE_START_S)"
        elif unconnected:
            waiting, busy = f"the connection of {format_ranks(unconnected)} of {self.size}", ""
            late, hint = "was not there within {} s", "whether the coordinator's host is overloaded"
        else:
            members = tuple(self.joins[rank].member for rank in ranks)
            return JoinDecision(f"all {self.size} ranks are here", members=members)
        if not is_late:
            return JoinDecision(f"waiting for {waiting}{busy}")
        too_late = f"{waiting} {late.format(f'{waited_s:.3g}')}; look at their output, or {hint}"
        return JoinDecision(difference or too_late, refused=True)

    def clear(self, decision: JoinDecision) -> tuple[int, ...]:
        """The decision was carried out. Returns the ranks it was about, which are no longer joining."""
        ranks = tuple(sorted(self.joins))
        if decision.refused:
            self.refusal = decision
            self.refused_ranks.update(ranks)
        self.joins.clear()
        self.withdrawn.clear()
        self.duplicates.clear()
        self.may_differ = self.may_be_invalid = False
        return ranks

    def _find_refusal(self) -> JoinDecision | None:
        """Return the refusal if the round can never start, and None if it can."""
        if self.duplicates:
            who = format_ranks(self.duplicates)
            return JoinDecision(f"two processes say that they are {who}; give each its own RONDE_RANK", refused=True)
        ended = {
            rank: f"ended before the round began ({why})"
            for rank, why in {**self.withdrawn, **self.exit_reasons}.items()
            if rank not in self.joins
        }
        if ended:
            return JoinDecision(format_rank_answers(ended, verb=" "), refused=True, exited=tuple(sorted(ended)))
        if not self.may_be_invalid:
            return None
        errors = (_find_join_error(rank, join, self.size) for rank, join in self.joins.items())
        found = next((error for error in errors if error), None)
        self.may_be_invalid = found is not None
        return JoinDecision(self._find_difference() or found, refused=True) if found else None

    def _find_difference(self) -> str:
        """Return the first thing that must be equal on all ranks and is not, with what each has; empty if all are."""
        if not self.may_differ:
            return ""
        joins = self.joins.items()
        same_ronde = "install the same ronde on all hosts"
        compared: list[tuple[str, dict[int, str], str]] = [  # what, by rank its value, what to do
            ("the version of the protocol", {rank: str(join.version) for rank, join in joins}, same_ronde),
            ("the number of ranks", {rank: str(join.size) for rank, join in joins}, "check RONDE_SIZE"),
            (
                "the groups to begin with",
                {rank: ", ".join(map(_format_rank_list, join.groups)) or "none" for rank, join in joins},
                "check the groups given to init()",
            ),
        ]
        variables = {setting.name: setting.env for setting in describe_settings()}
        for name in dict.fromkeys(name for _, join in joins for name in join.must_be_equal):
            values = {rank: join.must_be_equal.get(name, "nothing") or "empty" for rank, join in joins}
            hint = f"give all ranks the same {variables[name]}" if name in variables else same_ronde
            compared.append((shorten(name), values, hint))
        for what, values, hint in compared:
            if len(set(values.values())) > 1:
                shown = {rank: shorten(value, MAX_VALUE_CHARS) for rank, value in values.items()}
                return f"ranks disagree on {what}: {format_rank_answers(shown)}; {hint}"
        self.may_differ = False
        return ""


def _are_alike(join: JoinRound, other: JoinRound) -> bool:
    """Return whether two ranks give the same for all that must be equal."""
    return (join.version, join.size, join.groups) == (other.version, other.size, other.groups) and (
        join.must_be_equal == other.must_be_equal
    )


def _find_join_error(rank: int, join: JoinRound, size: int) -> str:
    if join.version != VERSION:
        return (
            f"rank {rank} speaks version {join.version} of the protocol, the coordinator {VERSION}; install one ronde"
        )
    if join.size != size:
        return f"rank {rank} has a job of {join.size} ranks, the coordinator one of {size}; check RONDE_SIZE"
    if join.member.rank != rank:
        return f"the process that connected as rank {rank} says it is rank {join.member.rank}"
    errors = (_find_group_error(ranks, size) for ranks in join.groups)
    return next((f"{error}; check the groups given to init()" for error in errors if error), "")


def _find_group_error(ranks: tuple[int, ...], size: int) -> str:
    try:
        checked = check_group_ranks(ranks, size)
    except ValueError as error:
        return shorten(str(error))
    return "" if checked == ranks else f"the ranks of a group must be sorted, got {_format_rank_list(ranks)}"


def _format_rank_list(ranks: tuple[int, ...]) -> str:
    return shorten(f"[{', '.join(map(str, ranks))}]")


# --- a round ---------------------------------------------------------------------------------------------------


class Round:
    """handle() takes the messages of members; advance() returns what to send, in the order in which things happened."""

    def __init__(
        self,
        number: int,
        id: int,
        members: tuple[Member, ...],
        groups: tuple[tuple[int, ...], ...],
        now_ns: int,
        *,
        settings: Settings,
        process_state: Callable[[Member], str],
        host_name: Callable[[Member], str],
    ) -> None:
        self.number = number
        self.members = members
        self.present = set(range(len(members)))
        """Ranks that have neither left nor been lost."""
        self.ended_members: dict[int, MembershipEnd] = {}
        """Former members, in the order in which the others learned of it."""
        self.vanished: set[int] = set()
        """Members that others have waited for too long and whose process is gone. The owner of the round declares them
        lost, unless it learns more about them."""
        self._process_state = process_state
        self._host_name = host_name
        self.negotiator = Negotiator(len(members), fusion_bytes=settings.fusion_bytes)
        for ranks in groups:
            self.negotiator.add_group(ranks)
        self._group_changes: dict[int, deque[ChangeGroups]] = {}
        """By rank, the changes that it has asked for and others have not yet."""
        self._aborted_channels: set[str] = set()
        self._loss = ""
        """Why no change of groups can be made any more: a rank is lost."""
        self._losses: list[tuple[int, str]] = []
        """Later losses, which are to be reported together at _next_notice_ns."""
        self._next_notice_ns = 0
        is_large = len(members) > MAX_PROMPT_NOTICES
        self._notice_interval_ns = LOSS_NOTICE_INTERVAL_NS * len(members) if is_large else 0
        self._leave_grace_ns = int(min(LEAVE_GRACE_S, settings.shutdown_s) * 1e9)
        """The others learn this much later that a rank has left: they may still be finishing what it has finished."""
        self._leaving: dict[int, tuple[int, MembershipEnd]] = {}  # with due_ns
        self._sends = [Send(tuple(self.present), RoundStarted(id, members))]
        self._started_ns = now_ns
        self._stall_ns = int(settings.stall_s * 1e9)
        self._stall_inspector = StallInspector(settings.stall_s, reply_timeout_s=STACK_REPLY_TIMEOUT_S)
        self._stall_check_interval_ns = (
            min(1_000_000_000, max(20_000_000, self._stall_ns // 10)) if self._stall_ns else NEVER_NS
        )
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        self._num_stalls_queried = 0
        self._waits: list[WaitingOperation] = []
        self._late: set[int] = set()
        """Members that others have waited for too long."""
        self._missing: dict[int, RankStack] = {}
        """The ranks that the first failed member had waited for, and where they are."""
        self._missing_query_id = 0

    @property
    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """The first member that was lost or whose script ended without shutdown()."""
        ends = self.ended_members.items()
        return next(((rank, end) for rank, end in ends if end.reason is not LeaveReason.SHUTDOWN), None)

    def whereabouts(self) -> Whereabouts | None:
        """Return where ranks were when the first one failed; None if it did not fail in an operation."""
        first = self.first_lost
        if first is None:
            return None
        if first[1].reason is LeaveReason.MISMATCHED:
            ends = self.ended_members
            mismatched = {rank for rank, end in ends.items() if end.reason is LeaveReason.MISMATCHED}
            disagreeing = (rank for rank in sorted(ends) if mismatched & {rank, ends[rank].lost_peer})
            return Whereabouts(first[0], disagreeing=tuple(self._stack(r, line=ends[r].line) for r in disagreeing))
        return Whereabouts(first[0], missing=tuple(self._missing.values())) if self._missing else None

    def membership_end(self, rank: int) -> MembershipEnd | None:
        """Return how a membership ended, even if the others have not learned of it yet; None while it lasts."""
        return self.ended_members.get(rank) or (self._leaving[rank][1] if rank in self._leaving else None)

    def handle(self, rank: int, message: WorkerMessage, now_ns: int) -> bool:
        """Take the message of a present member; returns False if it is not a message about a round."""
        if type(message) is AnnounceOperations:
            self.negotiator.announce(rank, message, now_ns)
        elif type(message) is CanShareIds:
            self.negotiator.share_ids(rank, message.group)
        elif type(message) is ChangeGroups:
            self._group_changes.setdefault(rank, deque()).append(message)
            if self._loss:
                self._refuse_group_changes()
            elif len(self._group_changes) == len(self.members):
                self._change_groups()
        elif type(message) is AbortChannel:
            if message.channel not in self._aborted_channels:  # one report is enough for all
                self._aborted_channels.add(message.channel)
                abort = ChannelAborted(message.channel, message.status, message.rank, message.error, message.reason)
                self._send(self.present - {rank}, abort)
        elif type(message) is MissingRanksQuery:
            ranks = self.negotiator.missing(message.group, message.name)
            self._send((rank,), MissingRanks(message.group, message.name, ranks))
        elif type(message) is WaitingTooLong:
            self._on_waiting(rank, message, now_ns)
        elif type(message) is StackReply and message.query_id > 0:
            self._stall_inspector.add_reply(message.query_id, rank, message.line)
            if message.query_id == self._missing_query_id and rank in self._missing and message.line:
                self._missing[rank] = self._stack(rank, line=message.line)
        else:
            return False
        return True

    def member_left(self, rank: int, end: MembershipEnd, now_ns: int) -> None:
        """A member has left orderly. The others learn of it after a moment."""
        self.present.discard(rank)
        self._leaving[rank] = (now_ns + self._leave_grace_ns, end)

    def member_lost(self, rank: int, end: MembershipEnd) -> None:
        """A member has died or failed. The others learn of it at once; of those that follow, in a large round, soon."""
        if end.missing and self.first_lost is None:
            self._query_missing(end.missing)
        self.ended_members.setdefault(rank, end)
        why = end.description
        self.present.discard(rank)
        self._leaving.pop(rank, None)
        self.negotiator.rank_lost(rank, why)
        if self._loss and self._notice_interval_ns:
            self._losses.append((rank, why))
        else:
            self._send(self.present, RankLost(rank, why))
        # After RankLost: a rank that waits for a change of groups must know of the loss when the change is refused.
        self._loss = self._loss or f"rank {rank} is gone: {why}"
        self._refuse_group_changes()

    def advance(self, now_ns: int) -> list[Send]:
        """Return what to send now. Called when all messages that were there have been handled."""
        if self._leaving:
            for rank, end in [(rank, end) for rank, (due_ns, end) in self._leaving.items() if due_ns <= now_ns]:
                self.member_lost(rank, end)
        if self._losses and now_ns >= self._next_notice_ns:
            self._send(self.present, RanksLost(tuple(self._losses)))
            self._losses.clear()
            self._next_notice_ns = now_ns + self._notice_interval_ns
        if now_ns >= self._next_stall_check_ns:
            self._check_stalls(now_ns)
        if self._num_stalls_queried:
            self._report_stalls(now_ns)
        sends = self.negotiator.take_sends()
        if self._sends:
            sends = [*self._sends, *sends]
            self._sends = []
        if len(self.present) < len(self.members):  # one that has left may already be joining the next round
            to_present = ((tuple(rank for rank in ranks if rank in self.present), message) for ranks, message in sends)
            sends = [Send(ranks, message) for ranks, message in to_present if ranks]
        return sends

    def next_due_ns(self, now_ns: int) -> int:
        """Return when advance() has to be called even if no message arrives."""
        reply_ns = now_ns + STACK_REPLY_CHECK_NS if self._num_stalls_queried else NEVER_NS
        notice_ns = self._next_notice_ns if self._losses else NEVER_NS
        return min(self._next_stall_check_ns, reply_ns, notice_ns, *(due_ns for due_ns, _ in self._leaving.values()))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _send(self, ranks: Iterable[int], message: CoordinatorMessage) -> None:
        """Queue a message after what the negotiator has decided so far: operations that run before a loss are
        sent before it."""
        self._sends += self.negotiator.take_sends()
        self._sends.append(Send(tuple(ranks), message))

    def _change_groups(self) -> None:
        """Make the change that all ranks have asked for, or refuse it to all."""
        ranks = range(len(self.members))
        changes = [self._group_changes[rank].popleft() for rank in ranks]
        self._group_changes = {rank: rest for rank, rest in self._group_changes.items() if rest}
        first = changes[0]
        error = ""
        if any(change != first for change in changes):
            answers = {
                rank: f"removal of group {change.id}" if change.id else f"a new group of {list(change.ranks)}"
                for rank, change in enumerate(changes)
            }
            error = f"ranks disagree on the change of groups: {format_rank_answers(answers)}"
        elif not first.id:
            error = _find_group_error(first.ranks, len(self.members))
        elif not self.negotiator.members(first.id):
            error = f"group {first.id} does not exist, or was removed"
        if error:
            for rank, change in enumerate(changes):
                self._send((rank,), GroupsChanged(change.ranks, change.id, reason=error))
        elif first.id:
            members = self.negotiator.remove_group(first.id)
            self._send(ranks, GroupsChanged(members, first.id, removed=True))
        else:
            self._send(ranks, GroupsChanged(first.ranks, self.negotiator.add_group(first.ranks)))

    def _refuse_group_changes(self) -> None:
        for rank, requested in sorted(self._group_changes.items()):
            for change in requested:
                self._send((rank,), GroupsChanged(change.ranks, change.id, reason=self._loss))
        self._group_changes.clear()

    def _query_missing(self, ranks: Iterable[int]) -> None:
        """Ask the ranks that a member has waited for in vain where they are, before the loss ends their own waits."""
        queried = [rank for rank in sorted(set(ranks)) if 0 <= rank < len(self.members)]
        for rank in queried:
            end = self.membership_end(rank)
            silence = describe_silence(self._process_state(self.members[rank]))
            self._missing[rank] = self._stack(rank, why=end.description if end is not None else silence)
        self._missing_query_id = self._stall_inspector.new_query_id()
        self._send(queried, StackRequest(self._missing_query_id))

    def _stack(self, rank: int, *, line: str = "", why: str = "") -> RankStack:
        member = self.members[rank]
        return RankStack(rank=rank, host=self._host_name(member), pid=member.pid, line=line, why=why)

    # --- stalls ----------------------------------------------------------------------------------------------------

    def _on_waiting(self, rank: int, message: WaitingTooLong, now_ns: int) -> None:
        """Keep the report of a member until the next check. Its clock may differ, so the time is limited to what is
        possible."""
        if self._stall_ns:
            since_ns = min(max(message.since_ns, self._started_ns), now_ns - self._stall_ns)
            ranks = range(len(self.members))
            missing = tuple(sorted({other for other in message.missing if other in ranks}))
            present = tuple(sorted({rank, *(other for other in message.present if other in ranks)}))
            op, group, call = message.op, message.group, message.call
            wait = WaitingOperation(op=op, group=group, since_ns=since_ns, missing=missing, present=present, call=call)
            self._waits.append(wait)

    def _check_stalls(self, now_ns: int) -> None:
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        named = itertools.islice(self.negotiator.pending(now_ns - self._stall_ns), MAX_STALLS_CHECKED)
        waits = [*named, *self._waits]
        self._waits.clear()
        for missing in {id(wait.missing): wait.missing for wait in waits}.values():  # many wait for the same ranks
            self._late.update(missing)
        self._late &= self.present
        # The connection of a process that is gone stays open if a child process has inherited it.
        self.vanished = {rank for rank in self._late if self._process_state(self.members[rank]) == GONE}
        for stall in self._stall_inspector.overdue(now_ns, waits):
            self._num_stalls_queried += 1
            self._send(stall.asked_ranks, StackRequest(stall.query_id))

    def _report_stalls(self, now_ns: int) -> None:
        for stall in self._stall_inspector.take_finished(now_ns):
            self._num_stalls_queried -= 1
            text = describe_stall(
                stall,
                now_ns,
                members=self.members,
                process_state=self._process_state,
                host_name=self._host_name,
            )
            wait = stall.longest_waiting
            self._send(self.present, StallReport(wait.op, wait.group, stall.waited_s(now_ns), wait.missing, text))
