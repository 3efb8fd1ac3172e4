"""What is asked about a job while it runs: the activity of its ranks, their stacks, and the timeline of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from ronde.coordinator.negotiation import Send
from ronde.coordinator.rounds import NEVER_NS, Round
from ronde.net.messages import (
    ActivityReport,
    JoinRound,
    LeaveReason,
    SetTracing,
    StackReply,
    StackRequest,
    TimelineReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
)
from ronde.observe.activity import ActivityTracker, JobActivity, RankActivity, RankState, find_slowest
from ronde.observe.stacks import RankStack
from ronde.observe.stalls import describe_silence
from ronde.observe.timeline import TimelineWriter
from ronde.types import Member

OnStacks: TypeAlias = "Callable[[tuple[RankStack, ...]], None]"


@dataclass(slots=True)
class _StackQuery:
    """A request to all ranks for their stacks."""

    due_ns: int
    on_done: OnStacks
    queried_ranks: frozenset[int]
    replies: dict[int, StackReply] = field(default_factory=dict)


class JoiningRanks(Protocol):
    """The ranks that are not in the round: PendingRound, or ElasticRounds by the ranks of the newest round."""

    @property
    def size(self) -> int: ...

    @property
    def joins(self) -> Mapping[int, JoinRound]: ...

    @property
    def exit_reasons(self) -> Mapping[int, str]:
        """The ranks whose process has ended, and how."""

    def describe_start(self) -> str:
        """Return what follows the name of a rank that is joining."""


class RankQueries:
    """Answers about all ranks: those of the newest round, those that are joining the next, and those that ended."""

    def __init__(self, joining: JoiningRanks, process_state: Callable[[Member], str]) -> None:
        self.joining = joining
        self._process_state = process_state
        self._round: Round | None = None
        self._activity_tracker = ActivityTracker(joining.size, 0)
        self._stack_queries: dict[int, _StackQuery] = {}
        self._closed = False
        self._last_query_id = 0
        """Below 0: ids above belong to the search for stalled operations."""

    def start_round(self, round: Round, now_ns: int) -> None:
        self._round = round
        self._activity_tracker = ActivityTracker(self.joining.size, now_ns)

    # --- activity --------------------------------------------------------------------------------------------------

    def record_activity(self, rank: int, report: ActivityReport, now_ns: int) -> None:
        assert self._round is not None, "only members of a round report their activity"
        negotiator = self._round.negotiator
        sample, current = report.activity, report.activity.current_operation
        if current is not None and current.named_operation is not None:
            # Only the coordinator knows the ranks that a named operation waits for.
            current = msgspec.structs.replace(current, missing=negotiator.missing(*current.named_operation))
            sample = msgspec.structs.replace(sample, current_operation=current)
        self._activity_tracker.add_sample(rank, sample)
        for arrivals in report.arrivals:
            if negotiator.is_member(arrivals.group, rank):
                members = negotiator.members(arrivals.group)
                self._activity_tracker.stragglers.add(rank, arrivals.channel, members, arrivals.samples, now_ns)
        self._activity_tracker.rank_reported(rank, now_ns)

    def activity(self, now_ns: int) -> JobActivity:
        number = self._round.number if self._round is not None else -1
        if self._round is not None and not self._round.present:
            self._activity_tracker.stragglers.finish()
        starting = self.joining.describe_start()
        ranks = tuple(self._with_state(known, starting) for known in self._activity_tracker.snapshot(now_ns))
        running = {each.rank: each.holding_up for each in ranks if each.state == "running"}
        return JobActivity(size=self.joining.size, round=number, slowest=find_slowest(running), ranks=ranks)

    def _with_state(self, known: RankActivity, starting: str) -> RankActivity:
        rank, held_up_s, holding_up = known.rank, known.held_up_s, known.holding_up
        state, why = self._rank_state(rank, starting)
        if state != "running":  # what it did last is no longer true
            known = RankActivity(rank=rank, state=state, steps=known.steps, held_up_s=held_up_s, holding_up=holding_up)
        member = self._find_member(rank)
        return msgspec.structs.replace(
            known, state=state, why=why, host=member.host, pid=member.pid, worker=member.worker
        )

    # --- stacks ----------------------------------------------------------------------------------------------------

    def start_stack_query(self, due_ns: int, on_done: OnStacks) -> list[Send]:
        """Ask all members for their stacks. on_done is called by one of the methods here: when all have answered, when
        the time is over, or at close()."""
        query = _StackQuery(due_ns, on_done, frozenset(self._round.present if self._round is not None else ()))
        self._last_query_id -= 1
        if not query.queried_ranks or self._closed:
            on_done(self._rank_stacks({}))
            return []
        self._stack_queries[self._last_query_id] = query
        return [Send(tuple(sorted(query.queried_ranks)), StackRequest(self._last_query_id))]

    def add_stack_reply(self, rank: int, reply: StackReply) -> None:
        """Replies to a query that is over are dropped."""
        query = self._stack_queries.get(reply.query_id)
        if query is not None and rank in query.queried_ranks:
            query.replies[rank] = reply
            if len(query.replies) == len(query.queried_ranks):
                self._finish_stack_query(reply.query_id)

    def advance(self, now_ns: int) -> None:
        """End queries whose time is over."""
        for query_id in [query_id for query_id, query in self._stack_queries.items() if query.due_ns <= now_ns]:
            self._finish_stack_query(query_id)

    @property
    def next_due_ns(self) -> int:
        return min((query.due_ns for query in self._stack_queries.values()), default=NEVER_NS)

    def close(self) -> None:
        """Answer all queries with what is there. Later ones are answered at once."""
        self._closed = True
        self.advance(NEVER_NS)

    def _finish_stack_query(self, query_id: int) -> None:
        query = self._stack_queries.pop(query_id)
        query.on_done(self._rank_stacks(query.replies))

    def _rank_stacks(self, replies: Mapping[int, StackReply]) -> tuple[RankStack, ...]:
        stacks, starting = [], self.joining.describe_start()
        for rank in range(self.joining.size):
            member = self._find_member(rank)
            line, stack, why = "", "", ""
            if rank in replies:
                line, stack = replies[rank].line, replies[rank].stack
            else:
                state, why = self._rank_state(rank, starting)
                if state == "running" and self._round is not None:
                    why = describe_silence(self._process_state(self._round.members[rank]))
                elif state == "lost":
                    why = f"is lost: {why}"
            stacks.append(RankStack(rank=rank, host=member.host, pid=member.pid, line=line, stack=stack, why=why))
        return tuple(stacks)

    # --- ranks -----------------------------------------------------------------------------------------------------

    def _rank_state(self, rank: int, starting: str) -> tuple[RankState, str]:
        """Return the state of a rank, and what more is known about it as text for the user. `starting` is that of all
        that are joining."""
        round, joining = self._round, self.joining
        if round is not None and rank in round.present:
            return "running", ""
        if rank in joining.joins:
            return "starting", starting
        end = round.membership_end(rank) if round is not None else None
        if end is not None and not end.reason.is_orderly:
            return "lost", end.description
        if rank in joining.exit_reasons:
            state: RankState = "left" if round is not None else "lost"
            return state, f"its process has ended: {joining.exit_reasons[rank]}"
        if end is not None and end.reason is LeaveReason.SCRIPT_ENDED:
            return "left", "has come to the end of its script"
        if end is not None:
            return "left", end.description.removeprefix("it ")
        return "starting", "has not called ronde.init() yet"

    def _find_member(self, rank: int) -> Member:
        if rank in self.joining.joins:
            return self.joining.joins[rank].member
        return self._round.members[rank] if self._round is not None else Member(rank, "", 0, "")


class TraceCollector:
    """The timeline of all ranks: one file at a time, written because a setting says so, or started by a rank.

    A timeline that a rank has started ends with its round at the latest. To end it, all members are asked for what they
    have recorded; the file is closed, and the rank that ended it gets its answer, when all have sent it or have left.
    """

    def __init__(self, path: str, max_events: int) -> None:
        self._max_events = max_events
        self._spans_rounds = bool(path)
        self._writer = TimelineWriter(path, max_events) if path else None
        self._awaited_ranks: set[int] = set()
        """Ranks whose last events are still to come."""
        self._reply_to: set[int] = set()
        """Ranks that have ended the timeline and wait for the answer."""

    def handle(
        self, rank: int, message: TraceBatch | TimelineRequest | TraceFlushed, present: Collection[int]
    ) -> list[Send]:
        if isinstance(message, TraceBatch):
            if self._writer is not None:
                self._writer.add(message.events, message.dropped)
            return []
        if isinstance(message, TraceFlushed):
            self._awaited_ranks.discard(rank)
            return self.close_if_complete(present)
        return self._start(rank, message, present) if message.path else self._stop(rank, present)

    def close_if_complete(self, present: Collection[int]) -> list[Send]:
        """Close a file that is to be closed, when no present rank has events for it any more."""
        self._awaited_ranks.intersection_update(present)
        return [] if self._awaited_ranks or not self._reply_to else self.close()

    def end_round(self) -> None:
        if not self._spans_rounds:
            self.close()

    def close(self) -> list[Send]:
        """Close the file, if there is one; returns the answers to those who have ended it. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        sends = [Send(tuple(sorted(self._reply_to)), TimelineReply())] if self._reply_to else []
        self._reply_to.clear()
        self._awaited_ranks.clear()
        return sends

    def _start(self, rank: int, request: TimelineRequest, present: Collection[int]) -> list[Send]:
        try:
            writer = TimelineWriter(request.path, self._max_events)
        except ValueError as error:
            return [Send((rank,), TimelineReply(str(error)))]
        sends = self.close()
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
