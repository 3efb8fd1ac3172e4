"""One round: the members that started together, until the last one has left. Without I/O.

It combines the negotiation of named operations, the groups, and the search for operations that have waited too long,
and keeps track of who is still a member.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ronde.coordinator.membership import GroupRegistry, MembershipEnd
from ronde.coordinator.negotiation import Negotiator, Send
from ronde.net.messages import (
    AnnounceOperations,
    ChangeGroups,
    CoordinatorMessage,
    GroupsChanged,
    LeaveReason,
    MissingRanks,
    MissingRanksQuery,
    RankLost,
    RoundStarted,
    StackReply,
    StackRequest,
    StallReport,
    WaitingTooLong,
    WorkerMessage,
)
from ronde.observe.stacks import GONE, RankStack
from ronde.observe.stalls import Stall, StallInspector, WaitingOperation, Whereabouts, describe_silence, describe_stall
from ronde.types import Member

STACK_REPLY_TIMEOUT_S = 1.0
"""How long a missing rank may take to answer a StackRequest."""
MAX_STALLS_CHECKED = 1000
"""Late operations that one check looks at, the oldest of a group first."""
STACK_REPLY_CHECK_NS = 50_000_000
NEVER_NS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    fusion_bytes: int
    stall_s: float
    leave_grace_s: float
    """The others learn this much later that a rank has left: they may still be finishing what it has finished."""
    process_state: Callable[[Member], str] = lambda member: ""
    """State of a member's process; empty if it cannot be seen from the coordinator's host."""
    host_name: Callable[[Member], str] = lambda member: member.host
    """The user's name for a member's host."""


class Round:
    """handle() takes the messages of members; advance() returns what to send, in the order in which things happened."""

    def __init__(
        self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], settings: RoundSettings, now_ns: int
    ) -> None:
        self.members = members
        self.present = set(range(len(members)))
        """Ranks that have neither left nor been lost."""
        self.ended_members: dict[int, MembershipEnd] = {}
        """Former members, in the order in which the others learned of it."""
        self.vanished: set[int] = set()
        """Members that others have waited for too long and whose process is gone. The owner of the round declares them
        lost, unless it learns more about them."""
        self._settings = settings
        self._negotiator = Negotiator(len(members), fusion_bytes=settings.fusion_bytes)
        self._groups = GroupRegistry(len(members), groups)
        for group, ranks in self._groups.items()[1:]:
            self._negotiator.add_group(group, ranks)
        self._stall_inspector = StallInspector(settings.stall_s, reply_timeout_s=STACK_REPLY_TIMEOUT_S)
        self._waits: list[WaitingOperation] = []
        self._late: set[int] = set()
        """Members that others have waited for too long."""
        self._leaving: dict[int, tuple[int, MembershipEnd]] = {}  # with due_ns
        self._sends: list[Send] = []
        self._started_ns = now_ns
        self._stall_check_interval_ns = (
            min(1_000_000_000, max(20_000_000, int(settings.stall_s * 1e8))) if settings.stall_s else NEVER_NS
        )
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        self._num_stalls_queried = 0
        self._missing: dict[int, RankStack] = {}
        """The ranks that the first failed member had waited for, and where they are."""
        self._missing_query_id = 0

    def start(self, number: int) -> None:
        self._send(self.present, RoundStarted(number, self.members))

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
        rank = first[0]
        if self.ended_members[rank].reason is LeaveReason.MISMATCHED:
            ends = sorted(self.ended_members.items())
            disagreeing = [(other, end.line) for other, end in ends if self._has_disagreed(end)]
            return Whereabouts(rank, disagreeing=tuple(self._stack(other, line=line) for other, line in disagreeing))
        return Whereabouts(rank, missing=tuple(self._missing.values())) if self._missing else None

    def _has_disagreed(self, end: MembershipEnd) -> bool:
        """Whether a member left because members disagreed, or because it lost a member that left for that reason."""
        lost = None if end.lost_peer is None else self.ended_members.get(end.lost_peer)
        return LeaveReason.MISMATCHED in (end.reason, None if lost is None else lost.reason)

    def membership_end(self, rank: int) -> MembershipEnd | None:
        """Return how a membership ended, even if the others have not learned of it yet; None while it lasts."""
        return self.ended_members.get(rank) or (self._leaving[rank][1] if rank in self._leaving else None)

    def members_of(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group; empty if there is no such group."""
        return self._groups.members(group)

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Return the ranks that a named operation waits for; empty if it is not pending."""
        return self._negotiator.missing(group, name)

    def handle(self, rank: int, message: WorkerMessage, now_ns: int) -> bool:
        """Take the message of a present member; returns False if it is not a message about a round."""
        if type(message) is AnnounceOperations:
            self._negotiator.announce(rank, message, now_ns)
        elif type(message) is ChangeGroups:
            self._change_groups(self._groups.request_change(rank, message))
        elif type(message) is MissingRanksQuery:
            ranks = self.missing(message.group, message.name)
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
        """A member has left orderly. The others learn of it after leave_grace_s."""
        self.present.discard(rank)
        self._leaving[rank] = (now_ns + int(self._settings.leave_grace_s * 1e9), end)

    def member_lost(self, rank: int, end: MembershipEnd) -> None:
        """A member has died or failed. The others learn of it at once."""
        if self.first_lost is None and end.missing:
            self._query_missing(end.missing)
        self.ended_members.setdefault(rank, end)
        why = end.description
        self.present.discard(rank)
        self._leaving.pop(rank, None)
        self._negotiator.rank_lost(rank, why)
        self._send(self.present, RankLost(rank, why))
        # After RankLost: a rank that waits for a change of groups must know of the loss when the change is refused.
        self._change_groups(self._groups.rank_lost(rank, why))

    def advance(self, now_ns: int) -> list[Send]:
        """Return what to send now. Called when all messages that were there have been handled."""
        if self._leaving:
            for rank, end in [(rank, end) for rank, (due_ns, end) in self._leaving.items() if due_ns <= now_ns]:
                self.member_lost(rank, end)
        if now_ns >= self._next_stall_check_ns:
            self._check_stalls(now_ns)
        if self._num_stalls_queried:
            self._report_stalls(now_ns)
        sends = self._negotiator.take_sends()
        if self._sends:
            sends = [*self._sends, *sends]
            self._sends = []
        if len(self.present) < len(self.members):
            sends = list(self._only_to_present(sends))
        return sends

    def next_due_ns(self, now_ns: int) -> int:
        """Return when advance() has to be called even if no message arrives."""
        reply_ns = now_ns + STACK_REPLY_CHECK_NS if self._num_stalls_queried else NEVER_NS
        return min(self._next_stall_check_ns, reply_ns, *(due_ns for due_ns, _ in self._leaving.values()))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _send(self, ranks: Iterable[int], message: CoordinatorMessage) -> None:
        """Queue a message after what the negotiator has decided so far: operations that run before a loss are
        sent before it."""
        self._sends += self._negotiator.take_sends()
        self._sends.append(Send(tuple(ranks), message))

    def _only_to_present(self, sends: list[Send]) -> Iterator[Send]:
        """Drop the recipients that are not present: one that has left may already be joining the next round."""
        for ranks, message in sends:
            present = tuple(rank for rank in ranks if rank in self.present)
            if present:
                yield Send(present, message)

    def _change_groups(self, changes: Iterable[tuple[int, GroupsChanged]]) -> None:
        done = False
        for rank, changed in changes:
            self._send((rank,), changed)
            if not done and not changed.reason:
                done = True  # every rank gets the same answer
                if changed.removed:
                    self._negotiator.remove_group(changed.id)
                else:
                    self._negotiator.add_group(changed.id, changed.ranks)

    def _query_missing(self, ranks: Iterable[int]) -> None:
        """Ask the ranks that a member has waited for in vain where they are, before the loss ends their own waits."""
        queried = [rank for rank in sorted(set(ranks)) if 0 <= rank < len(self.members)]
        for rank in queried:
            end = self.membership_end(rank)
            state = self._settings.process_state(self.members[rank])
            self._missing[rank] = self._stack(rank, why=end.description if end is not None else describe_silence(state))
        self._missing_query_id = self._stall_inspector.new_query_id()
        self._send(queried, StackRequest(self._missing_query_id))

    def _stack(self, rank: int, *, line: str = "", why: str = "") -> RankStack:
        member = self.members[rank]
        return RankStack(rank=rank, host=self._settings.host_name(member), pid=member.pid, line=line, why=why)

    # --- stalls ----------------------------------------------------------------------------------------------------

    def _on_waiting(self, rank: int, message: WaitingTooLong, now_ns: int) -> None:
        """Keep the report of a member until the next check. Its clock may differ, so the time is limited to what is
        possible."""
        limit_ns = int(self._settings.stall_s * 1e9)
        if not limit_ns:
            return
        since_ns = min(max(message.since_ns, self._started_ns), now_ns - limit_ns)
        missing = tuple(sorted({other for other in message.missing if 0 <= other < len(self.members)}))
        self._waits.append(
            WaitingOperation(
                op=message.op,
                group=message.group,
                since_ns=since_ns,
                missing=missing,
                present=(rank,),
                call=message.call,
            )
        )

    def _check_stalls(self, now_ns: int) -> None:
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        late_ns = now_ns - int(self._settings.stall_s * 1e9)
        named = [
            WaitingOperation(
                op=late.description,
                group=late.group,
                since_ns=late.since_ns,
                missing=late.missing,
                present=late.announced,
            )
            for late in itertools.islice(self._negotiator.pending(late_ns), MAX_STALLS_CHECKED)
        ]
        waits, self._waits = self._waits, []
        self._late.update(rank for wait in (*named, *waits) for rank in wait.missing)
        self._find_vanished()
        for stall in self._stall_inspector.overdue(now_ns, [*named, *waits]):
            self._num_stalls_queried += 1
            self._send(stall.asked_ranks, StackRequest(stall.query_id))

    def _find_vanished(self) -> None:
        """Find late members whose process is gone: their connection stays open if a child process inherited it."""
        self._late &= self.present
        self.vanished = {rank for rank in self._late if self._settings.process_state(self.members[rank]) == GONE}

    def _report_stalls(self, now_ns: int) -> None:
        for stall in self._stall_inspector.take_finished(now_ns):
            self._num_stalls_queried -= 1
            self._send(self.present, self._make_stall_report(stall, now_ns))

    def _make_stall_report(self, stall: Stall, now_ns: int) -> StallReport:
        wait = stall.longest_waiting
        settings = self._settings
        text = describe_stall(
            stall, now_ns, members=self.members, process_state=settings.process_state, host_name=settings.host_name
        )
        return StallReport(wait.op, wait.group, stall.waited_s(now_ns), wait.missing, text)
