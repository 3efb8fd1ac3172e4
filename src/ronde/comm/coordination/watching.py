"""What may be asked about a job while it runs: how its ranks are, and where their programs are. For the coordinator's
thread; other threads ask through the coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec

from ronde.comm.coordination.membership import Gathering, How
from ronde.comm.coordination.round import Round
from ronde.net.messages import StackReply, Vitals
from ronde.observe.events import name_ranks
from ronde.observe.stacks import RankStack
from ronde.observe.stall import describe_silence
from ronde.observe.vitals import JobVitals, RankState, RankVitals, Reading, VitalsBook, slowest_of
from ronde.types import Member

__all__ = ["StackPoll", "Watching"]


class StackPoll:
    """One question to all ranks for their stacks. Made in any thread; `over` is set when all have answered."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.ticket = 0
        """Below 0: those above belong to the stall watch."""
        self.asked: set[int] = set()
        self.replies: dict[int, StackReply] = {}


class Watching:
    """The newest round, as those see it who look at the job from outside."""

    def __init__(self, size: int, state: Callable[[Member], str]) -> None:
        self._size = size
        self._state = state
        """What the process of a silent member is doing, as far as it can be seen from here."""
        self._round: Round | None = None
        self._number = -1
        self._book = VitalsBook(size, 0)
        self._polls: dict[int, StackPoll] = {}
        self._last_ticket = 0

    def begin(self, round: Round, number: int, now_ns: int) -> None:
        """A round begins, and all sums anew."""
        self._round, self._number = round, number
        self._book = VitalsBook(self._size, now_ns)

    def note(self, rank: int, vitals: Vitals, now_ns: int) -> None:
        """A member tells how it is."""
        assert self._round is not None, "only members of a round tell how they are"
        self._book.note(rank, self._with_missing(vitals.reading))
        for visits in vitals.visits:
            members = self._round.members_of(visits.group)
            if rank in members:
                self._book.note_arrivals(rank, visits.channel, members, visits.notes, now_ns)
        self._book.heard(rank, now_ns)

    def _with_missing(self, reading: Reading) -> Reading:
        """Whom the rank waits for in a named operation."""
        doing = reading.doing
        if doing is None or doing.named is None or self._round is None:
            return reading
        missing = self._round.missing(*doing.named)
        return msgspec.structs.replace(reading, doing=msgspec.structs.replace(doing, missing=missing))

    def vitals(self, gathering: Gathering, now_ns: int) -> JobVitals:
        """How all ranks are."""
        if self._round is not None and not self._round.present:
            self._book.finish()
        ranks = tuple(self._complete(known, gathering) for known in self._book.describe(now_ns))
        running = {each.rank: each.holding_up for each in ranks if each.state == "running"}
        return JobVitals(size=self._size, round=self._number, slowest=slowest_of(running), ranks=ranks)

    def _complete(self, known: RankVitals, gathering: Gathering) -> RankVitals:
        rank, member = known.rank, self._member(known.rank, gathering)
        state, why = self._fate(rank, gathering)
        if state != "running":  # what it did lately is no longer true
            held_up_s, holding_up = known.held_up_s, known.holding_up
            known = RankVitals(rank=rank, state=state, steps=known.steps, held_up_s=held_up_s, holding_up=holding_up)
        host, pid = (member.host, member.pid) if member is not None else ("", 0)
        return msgspec.structs.replace(known, state=state, why=why, host=host, pid=pid)

    # --- stacks ----------------------------------------------------------------------------------------------------

    def begin_poll(self, poll: StackPoll) -> tuple[int, ...]:
        """Whom to ask for their stack, under the poll's ticket."""
        self._last_ticket -= 1
        poll.ticket = self._last_ticket
        poll.asked = set(self._round.present) if self._round is not None else set()
        self._polls[poll.ticket] = poll
        if not poll.asked:
            poll.over.set()
        return tuple(sorted(poll.asked))

    def answer(self, rank: int, reply: StackReply) -> None:
        """A rank says where it is. Answers nobody waits for any more are dropped."""
        poll = self._polls.get(reply.ticket)
        if poll is not None and rank in poll.asked:
            poll.replies[rank] = reply
            if len(poll.replies) == len(poll.asked):
                poll.over.set()

    def end_poll(self, poll: StackPoll, gathering: Gathering) -> tuple[RankStack, ...]:
        """What was answered, and words for those that did not."""
        self._polls.pop(poll.ticket, None)
        return tuple(self._stack(rank, poll.replies, gathering) for rank in range(self._size))

    def close(self) -> None:
        """Nobody answers any more: who waits for answers need not."""
        for poll in self._polls.values():
            poll.over.set()

    def _stack(self, rank: int, replies: Mapping[int, StackReply], gathering: Gathering) -> RankStack:
        member = self._member(rank, gathering)
        host, pid = (member.host, member.pid) if member is not None else ("", 0)
        reply = replies.get(rank)
        if reply is not None:
            return RankStack(rank=rank, host=host, pid=pid, line=reply.line, stack=reply.stack)
        state, why = self._fate(rank, gathering)
        if state == "running" and member is not None:
            why = describe_silence(self._state(member))
        elif state == "lost":
            why = f"is lost: {why}"
        return RankStack(rank=rank, host=host, pid=pid, why=why)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _fate(self, rank: int, gathering: Gathering) -> tuple[RankState, str]:
        """What has become of a rank, and more about it in words."""
        round = self._round
        if round is not None and rank in round.present:
            return "running", ""
        if rank in gathering.joins:
            missing = [other for other in range(self._size) if other not in gathering.joins]
            waits = f", which waits for {name_ranks(missing)}" if missing else ""
            return "starting", f"is in init(){waits}"
        departure = round.departure(rank) if round is not None else None
        if departure is not None and departure.is_loss:
            return "lost", departure.words
        if rank in gathering.gone:
            return ("left" if round is not None else "lost"), f"its process has ended: {gathering.gone[rank]}"
        if departure is not None and departure.how is How.SCRIPT_ENDED:
            return "left", "has come to the end of its script"
        if round is not None:
            return "left", "has left the round by shutdown()"
        return "starting", "has not called ronde.init() yet"

    def _member(self, rank: int, gathering: Gathering) -> Member | None:
        if rank in gathering.joins:
            return gathering.joins[rank].member
        return self._round.members[rank] if self._round is not None else None
