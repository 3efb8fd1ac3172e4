"""One round from the coordinator's side: what its members say goes in, what to tell them comes out. No I/O, no clock.

It puts together who may run what (negotiator), which groups there are (group_book) and who waits too long
(observe.stall), and knows who is still there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ronde.coordinator.membership import GroupRegistry, LeaveReason, MembershipEnd
from ronde.coordinator.negotiation import Negotiator, Send
from ronde.net.messages import (
    AnnounceOperations,
    ChangeGroups,
    CoordinatorMessage,
    GroupsChanged,
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

__all__ = ["Round", "RoundSettings"]

STACK_REPLY_TIMEOUT_S = 1.0
"""How long a missing rank may take to say where it is."""
MAX_STALLS_CHECKED = 1000
"""Late operations looked at in one go, the oldest of a group first."""
NEVER_NS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    """What the settings say about a round."""

    fusion_bytes: int
    stall_s: float
    leave_grace_s: float
    """After a rank has left, the others may take this long to finish what it had finished with them. Only then are
    they told, which ends everything that still waits for it."""
    process_state: Callable[[Member], str] = lambda member: ""
    """What the process of a silent member is doing, as far as it can be seen from here."""
    host_name: Callable[[Member], str] = lambda member: member.host
    """What people call the host of a member."""


class Round:
    """The members that were welcomed together."""

    def __init__(
        self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], settings: RoundSettings, now_ns: int
    ) -> None:
        self.members = members
        self.present = set(range(len(members)))
        """Ranks that have neither left nor been lost."""
        self.ended_members: dict[int, MembershipEnd] = {}
        """Members that are no longer there, in the order in which the others were told."""
        self.vanished: set[int] = set()
        """Members that others wait for too long, and whose process is gone. To be declared lost by whoever serves the
        round, unless that hears more about it."""
        self._settings = settings
        self._negotiator = Negotiator(len(members), fusion_bytes=settings.fusion_bytes)
        self._groups = GroupRegistry(len(members), groups)
        for group, ranks in self._groups.items()[1:]:
            self._negotiator.add_group(group, ranks)
        self._stall_inspector = StallInspector(settings.stall_s, reply_timeout_s=STACK_REPLY_TIMEOUT_S)
        self._waits: list[WaitingOperation] = []
        self._late: set[int] = set()
        """Members that somebody has waited for too long."""
        self._leaving: dict[int, tuple[int, MembershipEnd]] = {}  # with due_ns
        self._sends: list[Send] = []
        self._started_ns = now_ns
        self._stall_check_interval_ns = (
            min(1_000_000_000, max(20_000_000, int(settings.stall_s * 1e8))) if settings.stall_s else NEVER_NS
        )
        self._next_stall_check_ns = now_ns + self._stall_check_interval_ns
        self._num_stalls_queried = 0
        self._missing: dict[int, RankStack] = {}
        """When the first that failed had waited for somebody: where those are, by rank."""
        self._missing_ticket = 0

    def start(self, number: int) -> None:
        """Tell everybody that it begins."""
        self._send(self.present, RoundStarted(number, self.members))

    @property
    def first_lost(self) -> tuple[int, MembershipEnd] | None:
        """The first member that others may have missed, and how it went: who left by shutdown() has told them before."""
        ended = tuple(self.ended_members.items())  # at once: other threads ask, too
        return next(((rank, end) for rank, end in ended if end.reason is not LeaveReason.SHUTDOWN), None)

    def whereabouts(self) -> Whereabouts | None:
        """Where ranks were when the first one failed; None when that was for no operation."""
        first = self.first_lost
        if first is None:
            return None
        rank = first[0]
        if self.ended_members[rank].reason is LeaveReason.MISMATCHED:
            said = {
                rank: gone.line for rank, gone in self.ended_members.items() if gone.reason is LeaveReason.MISMATCHED
            }
            return Whereabouts(rank, disagreeing=tuple(self._stack(rank, line=said[rank]) for rank in sorted(said)))
        return Whereabouts(rank, missing=tuple(self._missing.values())) if self._missing else None

    def membership_end(self, rank: int) -> MembershipEnd | None:
        """How a member has gone, even if the others are not told yet; None while it is there."""
        return self.ended_members.get(rank) or (self._leaving[rank][1] if rank in self._leaving else None)

    def members_of(self, group: int) -> tuple[int, ...]:
        """The ranks of a group; none if there is no such group."""
        return self._groups.members(group)

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Whom a named operation waits for; nobody when it is not under way."""
        return self._negotiator.missing(group, name)

    def handle(self, rank: int, message: WorkerMessage, now_ns: int) -> bool:
        """A present member says something; whether it is something that is said in a round."""
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
            if message.query_id == self._missing_ticket and rank in self._missing and message.line:
                self._missing[rank] = self._stack(rank, line=message.line)
        else:
            return False
        return True

    def member_left(self, rank: int, end: MembershipEnd, now_ns: int) -> None:
        """A member leaves in good order. The others may still be reading the end of what it has finished: only those
        who need it a moment later are told."""
        self.present.discard(rank)
        self._leaving[rank] = (now_ns + int(self._settings.leave_grace_s * 1e9), end)

    def member_lost(self, rank: int, end: MembershipEnd) -> None:
        """A member is gone: everybody is told at once."""
        if self.first_lost is None and end.missing:
            self._ask_missing(end.missing)
        self.ended_members.setdefault(rank, end)
        why = end.description
        self.present.discard(rank)
        self._leaving.pop(rank, None)
        self._negotiator.rank_lost(rank, why)
        self._send(self.present, RankLost(rank, why))
        # After the loss: who hears that a change of groups is refused must know by then that this is the reason.
        self._change_groups(self._groups.rank_lost(rank, why))

    def advance(self, now_ns: int) -> list[Send]:
        """What to send now. Called after everything that was there to hear."""
        if self._leaving:
            for rank, gone in [(rank, gone) for rank, (due_ns, gone) in self._leaving.items() if due_ns <= now_ns]:
                self.member_lost(rank, gone)
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
        """When advance() has to be called even if nothing is heard."""
        ask_ns = now_ns + 50_000_000 if self._num_stalls_queried else NEVER_NS
        return min(self._next_stall_check_ns, ask_ns, *(due_ns for due_ns, _ in self._leaving.values()))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _send(self, ranks: Iterable[int], message: CoordinatorMessage) -> None:
        """In the order in which things happened: what ran before a loss is told before the loss, what failed by it
        is told after."""
        self._sends += self._negotiator.take_sends()
        self._sends.append(Send(tuple(ranks), message))

    def _only_to_present(self, sends: list[Send]) -> Iterator[Send]:
        """A rank that has left may already wait for the next round under the same number."""
        for ranks, message in sends:
            there = tuple(rank for rank in ranks if rank in self.present)
            if there:
                yield Send(there, message)

    def _change_groups(self, changes: Iterable[tuple[int, GroupsChanged]]) -> None:
        done = False
        for rank, changed in changes:
            self._send((rank,), changed)
            if not done and not changed.reason:
                done = True  # the same change is told to every rank
                if changed.removed:
                    self._negotiator.remove_group(changed.id)
                else:
                    self._negotiator.add_group(changed.id, changed.ranks)

    def _ask_missing(self, ranks: Iterable[int]) -> None:
        """Somebody has waited for them in vain: keep where they are. Asked before they hear of the loss, which ends
        what they wait for themselves."""
        asked = [rank for rank in sorted(set(ranks)) if 0 <= rank < len(self.members)]
        for rank in asked:
            gone = self.membership_end(rank)
            state = self._settings.process_state(self.members[rank])
            self._missing[rank] = self._stack(
                rank, why=gone.description if gone is not None else describe_silence(state)
            )
        self._missing_ticket = self._stall_inspector.new_query_id()
        self._send(asked, StackRequest(self._missing_ticket))

    def _stack(self, rank: int, *, line: str = "", why: str = "") -> RankStack:
        member = self.members[rank]
        return RankStack(rank=rank, host=self._settings.host_name(member), pid=member.pid, line=line, why=why)

    # --- stalls ----------------------------------------------------------------------------------------------------

    def _on_waiting(self, rank: int, message: WaitingTooLong, now_ns: int) -> None:
        """The member's clock may be another host's: believe no more than what is possible here."""
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
        self._look_for_vanished()
        for stall in self._stall_inspector.overdue(now_ns, [*named, *waits]):
            self._num_stalls_queried += 1
            self._send(stall.asked_ranks, StackRequest(stall.query_id))

    def _look_for_vanished(self) -> None:
        """The end of its connection should have told; but that stays open when a child of the process inherited it."""
        self._late &= self.present
        self.vanished = {rank for rank in self._late if self._settings.process_state(self.members[rank]) == GONE}

    def _report_stalls(self, now_ns: int) -> None:
        for stall in self._stall_inspector.take_finished(now_ns):
            self._num_stalls_queried -= 1
            self._send(self.present, self._make_stall_report(stall, now_ns))

    def _make_stall_report(self, stall: Stall, now_ns: int) -> StallReport:
        wait = stall.longest_waiting
        rules = self._settings
        text = describe_stall(
            stall, now_ns, members=self.members, process_state=rules.process_state, host_name=rules.host_name
        )
        return StallReport(wait.op, wait.group, stall.waited_s(now_ns), wait.missing, text)
