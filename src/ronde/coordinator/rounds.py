"""A round: what happens from its start until its last member has left. Without I/O.

It combines the negotiation of named operations, changes of groups, and the search for operations that have waited too
long. joining decides when a round starts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ronde.coordinator.joining import find_group_error
from ronde.coordinator.negotiation import Negotiator, Send
from ronde.net.messages import (
    LEAVE_GRACE_S,
    AbortChannel,
    AnnounceOperations,
    CanShareIds,
    ChangeGroups,
    ChannelAborted,
    CoordinatorMessage,
    GroupsChanged,
    LeaveReason,
    MissingRanks,
    MissingRanksQuery,
    ProposeValue,
    RankLost,
    RanksLost,
    RefuseOperation,
    RoundChangeWanted,
    RoundStarted,
    StackReply,
    StackRequest,
    StallReport,
    ValueDecided,
    WaitingTooLong,
    WorkerMessage,
)
from ronde.observe.stacks import GONE, RankStack
from ronde.observe.stalls import FailureStacks, StallInspector, WaitingOperation, describe_silence, describe_stall
from ronde.settings import Settings
from ronde.text import escape_surrogates, format_rank_answers
from ronde.types import Member

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
    def is_own_error(self) -> bool:
        """Whether an exception of its script has ended it, and not the loss of another rank."""
        return self.reason is LeaveReason.FAILED and self.lost_peer is None

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
    LeaveReason.REJOINING: "it has left for the next round",
    LeaveReason.PREEMPTED: "it was told to go, and has left in good order",
    LeaveReason.FINISHED: "it has finished the job",
    LeaveReason.SUSPENDED: "it was silent for too long and was left behind",
    LeaveReason.ABSENT: "it did not come back from a round that was over, and was left behind",
}


_GOOD_ENDS = (LeaveReason.SHUTDOWN, LeaveReason.REJOINING, LeaveReason.PREEMPTED, LeaveReason.FINISHED)


@dataclass(frozen=True, slots=True)
class LostPeer:
    """The rank because of which another one failed, and the error of that other one."""

    rank: int
    error: str


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
        late_s: float | None = None,
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
        self.late: set[int] = set()
        """Members that others have waited for too long at some time: for late_s, or stall_s if that is less."""
        self._process_state = process_state
        self._host_name = host_name
        self.negotiator = Negotiator(len(members), fusion_bytes=settings.fusion_bytes)
        for ranks in groups:
            self.negotiator.add_group(ranks)
        self._group_changes: dict[int, deque[ChangeGroups]] = {}
        """By rank, the changes that it has asked for and others have not yet."""
        self._aborted_channels: set[str] = set()
        self._decided: dict[str, bytes] = {}
        """By key, the value that was proposed first."""
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
        self._sends = [Send(tuple(self.present), RoundStarted(id, members, escape_surrogates(settings.timeline)))]
        self._started_ns = now_ns
        late_limits_s = [limit_s for limit_s in (settings.stall_s, late_s) if limit_s]
        self._late_ns = int(min(late_limits_s) * 1e9) if late_limits_s else 0
        self._stall_inspector = StallInspector(settings.stall_s, reply_timeout_s=STACK_REPLY_TIMEOUT_S)
        self._stall_check_interval_ns = (
            min(1_000_000_000, max(20_000_000, self._late_ns // 10)) if self._late_ns else NEVER_NS
        )
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        self._num_stalls_queried = 0
        self._waits: list[WaitingOperation] = []
        self._missing: dict[int, RankStack] = {}
        """The ranks that the first failed member had waited for, and where they are."""
        self._missing_query_id = 0

    @property
    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """The first member that was lost or whose script ended without shutdown()."""
        ends = self.ended_members.items()
        return next(((rank, end) for rank, end in ends if end.reason not in _GOOD_ENDS), None)

    def failure_stacks(self) -> FailureStacks | None:
        """Return where ranks were when the first one failed; None if it did not fail in an operation."""
        first = self.first_lost
        if first is None:
            return None
        if first[1].reason is LeaveReason.MISMATCHED:
            ends = self.ended_members
            mismatched = {rank for rank, end in ends.items() if end.reason is LeaveReason.MISMATCHED}
            disagreeing = (rank for rank in sorted(ends) if mismatched & {rank, ends[rank].lost_peer})
            return FailureStacks(first[0], disagreeing=tuple(self._stack(r, line=ends[r].line) for r in disagreeing))
        return FailureStacks(first[0], missing=tuple(self._missing.values())) if self._missing else None

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
                abort = ChannelAborted(
                    message.channel, message.status, message.rank, message.error, message.reason, reporter=rank
                )
                self._send(self.present - {rank}, abort)
        elif type(message) is RefuseOperation:
            self.negotiator.refuse(rank, message)
        elif type(message) is MissingRanksQuery:
            ranks = self.negotiator.missing(message.group, message.name)
            self._send((rank,), MissingRanks(message.group, message.name, ranks))
        elif type(message) is ProposeValue:
            value = self._decided.setdefault(message.key, message.value)
            self._send((rank,), ValueDecided(message.key, value))
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
        self.negotiator.rank_lost(rank)
        if self._loss and self._notice_interval_ns:
            self._losses.append((rank, why))
        else:
            self._send(self.present, RankLost(rank, why))
        # After RankLost: a rank that waits for a change of groups must know of the loss when the change is refused.
        self._loss = self._loss or f"rank {rank} is gone: {why}"
        self._refuse_group_changes()

    def ask_for_change(self, reason: str) -> None:
        """Newcomers wait. The members hear of it behind RoundStarted."""
        self._send(self.present, RoundChangeWanted(reason))

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
            error = find_group_error(first.ranks, len(self.members))
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
        if self._late_ns:
            since_ns = min(max(message.since_ns, self._started_ns), now_ns - self._late_ns)
            ranks = range(len(self.members))
            missing = tuple(sorted({other for other in message.missing if other in ranks}))
            present = tuple(sorted({rank, *(other for other in message.present if other in ranks)}))
            op, group, call = message.op, message.group, message.call
            wait = WaitingOperation(op=op, group=group, since_ns=since_ns, missing=missing, present=present, call=call)
            self._waits.append(wait)

    def _check_stalls(self, now_ns: int) -> None:
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        named = itertools.islice(self.negotiator.pending(now_ns - self._late_ns), MAX_STALLS_CHECKED)
        waits = [*named, *self._waits]
        self._waits.clear()
        for missing in {id(wait.missing): wait.missing for wait in waits}.values():  # many wait for the same ranks
            self.late.update(missing)
        self.late &= self.present
        # The connection of a process that is gone stays open if a child process has inherited it.
        self.vanished = {rank for rank in self.late if self._process_state(self.members[rank]) == GONE}
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
