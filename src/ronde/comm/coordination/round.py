"""One round from the coordinator's side: what its members say goes in, what to tell them comes out. No I/O, no clock.

It puts together who may run what (negotiator), which groups there are (group_book) and who waits too long
(observe.stall), and knows who is still there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ronde.comm.coordination.group_book import GroupBook
from ronde.comm.coordination.membership import Departure, How
from ronde.comm.coordination.negotiator import Negotiator, Send
from ronde.net.messages import (
    Announce,
    FromCoordinator,
    FromWorker,
    GroupChanged,
    GroupWanted,
    Lost,
    Missing,
    MissingWanted,
    StackQuery,
    StackReply,
    Stalled,
    Waiting,
    Welcome,
)
from ronde.observe.stacks import GONE, RankStack
from ronde.observe.stall import Stall, StallWatch, Wait, Whereabouts, describe_silence, report
from ronde.types import Member

__all__ = ["Round", "RoundRules"]

ANSWER_S = 1.0
"""How long a missing rank may take to say where it is."""
MOST_LATE = 1000
"""Late operations looked at in one go, the oldest of a group first."""
NEVER_NS = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRules:
    """What the settings say about a round."""

    fusion_bytes: int
    stall_s: float
    leaving_s: float
    """After a rank has left, the others may take this long to finish what it had finished with them. Only then are
    they told, which ends everything that still waits for it."""
    state: Callable[[Member], str] = lambda member: ""
    """What the process of a silent member is doing, as far as it can be seen from here."""
    host_name: Callable[[Member], str] = lambda member: member.host
    """What people call the host of a member."""


class Round:
    """The members that were welcomed together."""

    def __init__(
        self, members: tuple[Member, ...], groups: tuple[tuple[int, ...], ...], rules: RoundRules, now_ns: int
    ) -> None:
        self.members = members
        self.present = set(range(len(members)))
        """Ranks that have neither left nor been lost."""
        self.departures: dict[int, Departure] = {}
        """Members that are no longer there, in the order in which the others were told."""
        self.vanished: set[int] = set()
        """Members that others wait for too long, and whose process is gone. To be declared lost by whoever serves the
        round, unless that hears more about it."""
        self._rules = rules
        self._negotiator = Negotiator(len(members), fusion_bytes=rules.fusion_bytes)
        self._book = GroupBook(len(members), groups)
        for group, ranks in self._book.items()[1:]:
            self._negotiator.add_group(group, ranks)
        self._watch = StallWatch(rules.stall_s, patience_s=ANSWER_S)
        self._waits: list[Wait] = []
        self._late: set[int] = set()
        """Members that somebody has waited for too long."""
        self._leaving: dict[int, tuple[int, Departure]] = {}  # with due_ns
        self._out: list[Send] = []
        self._began_ns = now_ns
        self._look_ns = min(1_000_000_000, max(20_000_000, int(rules.stall_s * 1e8))) if rules.stall_s else NEVER_NS
        self._next_look_ns = now_ns + self._look_ns
        self._num_asked = 0
        self._missing: dict[int, RankStack] = {}
        """When the first that failed had waited for somebody: where those are, by rank."""
        self._missing_ticket = 0

    def welcome(self, number: int) -> None:
        """Tell everybody that it begins."""
        self._tell(self.present, Welcome(number, self.members))

    @property
    def first_lost(self) -> tuple[int, str] | None:
        """The first member that others may have missed, and why: who left by shutdown() has told them before."""
        departures = tuple(self.departures.items())  # at once: other threads ask, too
        missed = ((rank, gone.words) for rank, gone in departures if gone.how is not How.SHUTDOWN)
        return next(missed, None)

    def whereabouts(self) -> Whereabouts | None:
        """Where ranks were when the first one failed; None when that was for no operation."""
        first = self.first_lost
        if first is None:
            return None
        rank = first[0]
        if self.departures[rank].how is How.MISMATCHED:
            said = {rank: gone.line for rank, gone in self.departures.items() if gone.how is How.MISMATCHED}
            return Whereabouts(rank, disagreeing=tuple(self._stack(rank, line=said[rank]) for rank in sorted(said)))
        return Whereabouts(rank, missing=tuple(self._missing.values())) if self._missing else None

    def departure(self, rank: int) -> Departure | None:
        """How a member has gone, even if the others are not told yet; None while it is there."""
        return self.departures.get(rank) or (self._leaving[rank][1] if rank in self._leaving else None)

    def members_of(self, group: int) -> tuple[int, ...]:
        """The ranks of a group; none if there is no such group."""
        return self._book.members(group)

    def missing(self, group: int, name: str) -> tuple[int, ...]:
        """Whom a named operation waits for; nobody when it is not under way."""
        return self._negotiator.missing(group, name)

    def hear(self, rank: int, message: FromWorker, now_ns: int) -> bool:
        """A present member says something; whether it is something that is said in a round."""
        if type(message) is Announce:
            self._negotiator.feed(rank, message, now_ns)
        elif type(message) is GroupWanted:
            self._change_groups(self._book.want(rank, message))
        elif type(message) is MissingWanted:
            ranks = self.missing(message.group, message.name)
            self._tell((rank,), Missing(message.group, message.name, ranks))
        elif type(message) is Waiting:
            self._hear_waiting(rank, message, now_ns)
        elif type(message) is StackReply and message.ticket > 0:
            self._watch.answer(message.ticket, rank, message.line)
            if message.ticket == self._missing_ticket and rank in self._missing and message.line:
                self._missing[rank] = self._stack(rank, line=message.line)
        else:
            return False
        return True

    def leave(self, rank: int, departure: Departure, now_ns: int) -> None:
        """A member leaves in good order. The others may still be reading the end of what it has finished: only those
        who need it a moment later are told."""
        self.present.discard(rank)
        self._leaving[rank] = (now_ns + int(self._rules.leaving_s * 1e9), departure)

    def lose(self, rank: int, departure: Departure) -> None:
        """A member is gone: everybody is told at once."""
        if self.first_lost is None and departure.missing:
            self._ask_missing(departure.missing)
        self.departures.setdefault(rank, departure)
        why = departure.words
        self.present.discard(rank)
        self._leaving.pop(rank, None)
        self._negotiator.lose(rank, why)
        self._tell(self.present, Lost(rank, why))
        # After the loss: who hears that a change of groups is refused must know by then that this is the reason.
        self._change_groups(self._book.lose(rank, why))

    def advance(self, now_ns: int) -> list[Send]:
        """What to send now. Called after everything that was there to hear."""
        if self._leaving:
            for rank, gone in [(rank, gone) for rank, (due_ns, gone) in self._leaving.items() if due_ns <= now_ns]:
                self.lose(rank, gone)
        if now_ns >= self._next_look_ns:
            self._look_for_stalls(now_ns)
        if self._num_asked:
            self._report_stalls(now_ns)
        sends = self._negotiator.flush()
        if self._out:
            sends = [*self._out, *sends]
            self._out = []
        if len(self.present) < len(self.members):
            sends = list(self._to_present(sends))
        return sends

    def due_ns(self, now_ns: int) -> int:
        """When advance() has to be called even if nothing is heard."""
        ask_ns = now_ns + 50_000_000 if self._num_asked else NEVER_NS
        return min(self._next_look_ns, ask_ns, *(due_ns for due_ns, _ in self._leaving.values()))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _tell(self, ranks: Iterable[int], message: FromCoordinator) -> None:
        """In the order in which things happened: what ran before a loss is told before the loss, what failed by it
        is told after."""
        self._out += self._negotiator.flush()
        self._out.append(Send(tuple(ranks), message))

    def _to_present(self, sends: list[Send]) -> Iterator[Send]:
        """A rank that has left may already wait for the next round under the same number."""
        for ranks, message in sends:
            there = tuple(rank for rank in ranks if rank in self.present)
            if there:
                yield Send(there, message)

    def _change_groups(self, changes: Iterable[tuple[int, GroupChanged]]) -> None:
        done = False
        for rank, changed in changes:
            self._tell((rank,), changed)
            if not done and not changed.why:
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
            gone = self.departure(rank)
            state = self._rules.state(self.members[rank])
            self._missing[rank] = self._stack(rank, why=gone.words if gone is not None else describe_silence(state))
        self._missing_ticket = self._watch.new_ticket()
        self._tell(asked, StackQuery(self._missing_ticket))

    def _stack(self, rank: int, *, line: str = "", why: str = "") -> RankStack:
        member = self.members[rank]
        return RankStack(rank=rank, host=self._rules.host_name(member), pid=member.pid, line=line, why=why)

    # --- stalls ----------------------------------------------------------------------------------------------------

    def _hear_waiting(self, rank: int, message: Waiting, now_ns: int) -> None:
        """The member's clock may be another host's: believe no more than what is possible here."""
        limit_ns = int(self._rules.stall_s * 1e9)
        if not limit_ns:
            return
        since_ns = min(max(message.since_ns, self._began_ns), now_ns - limit_ns)
        missing = tuple(sorted({other for other in message.missing if 0 <= other < len(self.members)}))
        self._waits.append(
            Wait(
                op=message.op,
                group=message.group,
                since_ns=since_ns,
                missing=missing,
                present=(rank,),
                call=message.call,
            )
        )

    def _look_for_stalls(self, now_ns: int) -> None:
        self._next_look_ns = now_ns + self._look_ns
        late_ns = now_ns - int(self._rules.stall_s * 1e9)
        named = [
            Wait(op=late.text, group=late.group, since_ns=late.since_ns, missing=late.missing, present=late.announced)
            for late in itertools.islice(self._negotiator.pending(late_ns), MOST_LATE)
        ]
        waits, self._waits = self._waits, []
        self._late.update(rank for wait in (*named, *waits) for rank in wait.missing)
        self._look_for_vanished()
        for stall in self._watch.due(now_ns, [*named, *waits]):
            self._num_asked += 1
            self._tell(stall.asked, StackQuery(stall.ticket))

    def _look_for_vanished(self) -> None:
        """The end of its connection should have told; but that stays open when a child of the process inherited it."""
        self._late &= self.present
        self.vanished = {rank for rank in self._late if self._rules.state(self.members[rank]) == GONE}

    def _report_stalls(self, now_ns: int) -> None:
        for stall in self._watch.finished(now_ns):
            self._num_asked -= 1
            self._tell(self.present, self._stalled(stall, now_ns))

    def _stalled(self, stall: Stall, now_ns: int) -> Stalled:
        wait = stall.wait
        rules = self._rules
        text = report(stall, now_ns, members=self.members, state=rules.state, host_name=rules.host_name)
        return Stalled(wait.op, wait.group, stall.waited_s(now_ns), wait.missing, text)
