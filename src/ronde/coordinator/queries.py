"""What can be seen of the members from where the coordinator is, beyond what they say. Used by the coordinator.

What may be asked about a job while it runs: how its ranks are, and where their programs are. For the coordinator's
thread; other threads ask through the coordinator.

The timeline of all ranks on the coordinator's side: one file at a time, begun and ended by any rank, or written from
the start because a setting says so. For the coordinator's thread.

One that a rank has begun ends with its round at the latest. To end it, everybody is asked for what was recorded; the
file is closed, and whoever wanted that is told, when all have sent it or are gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from ronde.coordinator.membership import LeaveReason, PendingRound
from ronde.coordinator.negotiation import Send
from ronde.coordinator.rounds import Round
from ronde.net.addresses import host_identity, host_name
from ronde.net.messages import (
    ActivityReport,
    JoinRound,
    SetTracing,
    StackReply,
    TimelineReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
)
from ronde.observe.activity import ActivitySample, ActivityTracker, JobActivity, RankActivity, RankState, find_slowest
from ronde.observe.stacks import RankStack, pid_namespace, process_state
from ronde.observe.stalls import describe_silence
from ronde.observe.timeline import TimelineWriter
from ronde.text import format_ranks
from ronde.types import Member

__all__ = ["MemberInspector", "RankQueries", "StackCollection", "TraceCollector"]


class MemberInspector:
    """Of one coordinator."""

    def __init__(self) -> None:
        self.host_names: Sequence[str] = ()
        """By rank, what the launcher's user calls the hosts; empty without a launcher."""
        self._visible: frozenset[Member] = frozenset()
        """Members whose process can be seen from here."""

    def begin(self, joins: Iterable[JoinRound]) -> None:
        """A round begins with these. A process of another host, or of another container here, cannot be seen: its
        id may be anybody's here."""
        here, namespace = host_identity(), pid_namespace()
        self._visible = frozenset(
            join.member for join in joins if join.member.host == here and join.pid_namespace == namespace != ""
        )

    def host_name(self, member: Member) -> str:
        """What people call its host."""
        return self.host_names[member.rank] if self.host_names else host_name(member.host)

    def process_state(self, member: Member) -> str:
        """What its process is doing, or "" if it cannot be seen from here."""
        return process_state(member.pid) if member in self._visible else ""


class StackCollection:
    """One question to all ranks for their stacks. Made in any thread; `over` is set when all have answered."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.query_id = 0
        """Below 0: those above belong to the stall watch."""
        self.queried_ranks: set[int] = set()
        self.replies: dict[int, StackReply] = {}


class RankQueries:
    """The newest round, as those see it who look at the job from outside."""

    def __init__(self, size: int, process_state: Callable[[Member], str]) -> None:
        self._size = size
        self._process_state = process_state
        """What the process of a silent member is doing, as far as it can be seen from here."""
        self._round: Round | None = None
        self._round_number = -1
        self._activity_tracker = ActivityTracker(size, 0)
        self._stack_collections: dict[int, StackCollection] = {}
        self._last_query_id = 0

    def start_round(self, round: Round, number: int, now_ns: int) -> None:
        """A round begins, and all sums anew."""
        self._round, self._round_number = round, number
        self._activity_tracker = ActivityTracker(self._size, now_ns)

    def record_activity(self, rank: int, report: ActivityReport, now_ns: int) -> None:
        """A member tells how it is."""
        assert self._round is not None, "only members of a round tell how they are"
        self._activity_tracker.add_sample(rank, self._with_missing(report.activity))
        for visits in report.arrivals:
            members = self._round.members_of(visits.group)
            if rank in members:
                self._activity_tracker.add_arrivals(rank, visits.channel, members, visits.samples, now_ns)
        self._activity_tracker.rank_reported(rank, now_ns)

    def _with_missing(self, sample: ActivitySample) -> ActivitySample:
        """Whom the rank waits for in a named operation."""
        doing = sample.current_operation
        if doing is None or doing.named_operation is None or self._round is None:
            return sample
        missing = self._round.missing(*doing.named_operation)
        return msgspec.structs.replace(sample, current_operation=msgspec.structs.replace(doing, missing=missing))

    def activity(self, pending_round: PendingRound, now_ns: int) -> JobActivity:
        """How all ranks are."""
        if self._round is not None and not self._round.present:
            self._activity_tracker.finish()
        ranks = tuple(self._with_state(known, pending_round) for known in self._activity_tracker.snapshot(now_ns))
        running = {each.rank: each.holding_up for each in ranks if each.state == "running"}
        return JobActivity(size=self._size, round=self._round_number, slowest=find_slowest(running), ranks=ranks)

    def _with_state(self, known: RankActivity, pending_round: PendingRound) -> RankActivity:
        rank, member = known.rank, self._member(known.rank, pending_round)
        state, why = self._rank_state(rank, pending_round)
        if state != "running":  # what it did lately is no longer true
            held_up_s, holding_up = known.held_up_s, known.holding_up
            known = RankActivity(rank=rank, state=state, steps=known.steps, held_up_s=held_up_s, holding_up=holding_up)
        host, pid = (member.host, member.pid) if member is not None else ("", 0)
        return msgspec.structs.replace(known, state=state, why=why, host=host, pid=pid)

    # --- stacks ----------------------------------------------------------------------------------------------------

    def begin_stack_query(self, collection: StackCollection) -> tuple[int, ...]:
        """Whom to ask for their stack, under the poll's ticket."""
        self._last_query_id -= 1
        collection.query_id = self._last_query_id
        collection.queried_ranks = set(self._round.present) if self._round is not None else set()
        self._stack_collections[collection.query_id] = collection
        if not collection.queried_ranks:
            collection.done.set()
        return tuple(sorted(collection.queried_ranks))

    def add_stack_reply(self, rank: int, reply: StackReply) -> None:
        """A rank says where it is. Answers nobody waits for any more are dropped."""
        poll = self._stack_collections.get(reply.query_id)
        if poll is not None and rank in poll.queried_ranks:
            poll.replies[rank] = reply
            if len(poll.replies) == len(poll.queried_ranks):
                poll.done.set()

    def end_stack_query(self, collection: StackCollection, pending_round: PendingRound) -> tuple[RankStack, ...]:
        """What was answered, and words for those that did not."""
        self._stack_collections.pop(collection.query_id, None)
        return tuple(self._rank_stack(rank, collection.replies, pending_round) for rank in range(self._size))

    def close(self) -> None:
        """Nobody answers any more: who waits for answers need not."""
        for poll in self._stack_collections.values():
            poll.done.set()

    def _rank_stack(self, rank: int, replies: Mapping[int, StackReply], pending_round: PendingRound) -> RankStack:
        member = self._member(rank, pending_round)
        host, pid = (member.host, member.pid) if member is not None else ("", 0)
        reply = replies.get(rank)
        if reply is not None:
            return RankStack(rank=rank, host=host, pid=pid, line=reply.line, stack=reply.stack)
        state, why = self._rank_state(rank, pending_round)
        if state == "running" and member is not None:
            why = describe_silence(self._process_state(member))
        elif state == "lost":
            why = f"is lost: {why}"
        return RankStack(rank=rank, host=host, pid=pid, why=why)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _rank_state(self, rank: int, pending_round: PendingRound) -> tuple[RankState, str]:
        """What has become of a rank, and more about it in words."""
        round = self._round
        if round is not None and rank in round.present:
            return "running", ""
        if rank in pending_round.joins:
            missing = [other for other in range(self._size) if other not in pending_round.joins]
            waits = f", which waits for {format_ranks(missing)}" if missing else ""
            return "starting", f"is in init(){waits}"
        departure = round.membership_end(rank) if round is not None else None
        if departure is not None and departure.is_loss:
            return "lost", departure.description
        if rank in pending_round.exit_reasons:
            return (
                "left" if round is not None else "lost"
            ), f"its process has ended: {pending_round.exit_reasons[rank]}"
        if departure is not None and departure.reason is LeaveReason.SCRIPT_ENDED:
            return "left", "has come to the end of its script"
        if round is not None:
            return "left", "has left the round by shutdown()"
        return "starting", "has not called ronde.init() yet"

    def _member(self, rank: int, pending_round: PendingRound) -> Member | None:
        if rank in pending_round.joins:
            return pending_round.joins[rank].member
        return self._round.members[rank] if self._round is not None else None


class TraceCollector:
    """The file, if there is one, and who still has to send something for it."""

    def __init__(self, path: str, max_events: int) -> None:
        self._max_events = max_events
        self._spans_rounds = bool(path)
        """Whether it goes on over rounds."""
        self._writer = TimelineWriter(path, max_events) if path else None
        self._awaited_ranks: set[int] = set()
        """Ranks whose last events are still to come."""
        self._reply_to: set[int] = set()
        """Ranks that want to hear when it has ended."""

    def handle(
        self, rank: int, message: TraceBatch | TimelineRequest | TraceFlushed, present: Collection[int]
    ) -> list[Send]:
        """A rank says something about it; what to tell whom."""
        if isinstance(message, TraceBatch):
            if self._writer is not None:
                self._writer.add(message.events, message.dropped)
            return []
        if isinstance(message, TraceFlushed):
            self._awaited_ranks.discard(rank)
            return self.close_if_complete(present)
        return self._start(rank, message, present) if message.path else self._stop(rank, present)

    def close_if_complete(self, present: Collection[int]) -> list[Send]:
        """Close a file that is to be closed, when nobody who is there owes anything for it."""
        self._awaited_ranks.intersection_update(present)
        return [] if self._awaited_ranks or not self._reply_to else self._close_file()

    def end_round(self) -> None:
        """Nobody is there any more."""
        if not self._spans_rounds:
            self._close_file()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._close_file()

    def _start(self, rank: int, request: TimelineRequest, present: Collection[int]) -> list[Send]:
        try:
            writer = TimelineWriter(request.path, self._max_events)
        except ValueError as error:
            return [Send((rank,), TimelineReply(str(error)))]
        sends = self._close_file()
        self._writer, self._spans_rounds = writer, False
        sends.append(Send(tuple(present), SetTracing(True, request.horovod, request.batch_markers)))
        sends.append(Send((rank,), TimelineReply()))
        return sends

    def _stop(self, rank: int, present: Collection[int]) -> list[Send]:
        if self._writer is None:
            return [Send((rank,), TimelineReply())]
        self._reply_to.add(rank)
        if self._awaited_ranks:
            return []
        self._awaited_ranks = set(present)
        return [Send(tuple(present), SetTracing(False))]

    def _close_file(self) -> list[Send]:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        told = [Send(tuple(sorted(self._reply_to)), TimelineReply())] if self._reply_to else []
        self._reply_to.clear()
        self._awaited_ranks.clear()
        return told
