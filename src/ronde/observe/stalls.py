"""Which operations wait too long, and what the ranks they wait for are doing. The coordinator runs it; pure.

    at every tick       for stall in inspector.overdue(now_ns, operations):
                            send StackRequest(stall.query_id) to each of stall.asked_ranks
    on a StackReply     inspector.add_reply(query_id, rank, line)
    at every tick       for stall in inspector.take_finished(now_ns): log describe_stall(stall, now_ns, …)

All times are on the clock of the coordinator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ronde.observe.stacks import RankStack
from ronde.text import format_ranks, shorten
from ronde.types import Member

MAX_SHOWN = 16
"""Ranks and operations named one by one in a report; the others are counted."""
MAX_REMEMBERED = 4096
"""Reported operations that are remembered: the memory of a long job is bounded."""


class WaitingOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation in which members wait for others, as the coordinator or one of the members sees it."""

    op: str
    """Such as `allreduce 'grad.3' sum float32[1024]`."""
    group: int
    since_ns: int
    missing: tuple[int, ...]
    present: tuple[int, ...] = ()
    call: str = ""
    """Distinguishes it from a later operation of the same name; empty when nothing does."""


@dataclass(slots=True)
class Stall:
    """Operations that became overdue together, and the replies of the ranks they wait for."""

    query_id: int
    operations: tuple[WaitingOperation, ...]
    """The operations of one group that wait for the same ranks; the one that has waited longest first."""
    asked_ns: int
    lines: dict[int, str] = dataclasses.field(default_factory=dict)
    """By rank, the line of its program that it has reported."""

    @property
    def longest_waiting(self) -> WaitingOperation:
        return self.operations[0]

    @property
    def asked_ranks(self) -> tuple[int, ...]:
        return self.longest_waiting.missing[:MAX_SHOWN]

    def waited_s(self, now_ns: int) -> float:
        return (now_ns - self.longest_waiting.since_ns) / 1e9


@dataclass(frozen=True, slots=True)
class FailureStacks:
    """Where ranks were when a round failed, for the report of the job."""

    first: int
    """The rank that failed first."""
    missing: tuple[RankStack, ...] = ()
    """If an operation timed out there: the ranks for which it waited."""
    disagreeing: tuple[RankStack, ...] = ()
    """If the members of an operation had asked for different things: all that reported it."""


class StallInspector:
    """Finds each operation once, when it has waited for timeout_s. The same operation of a later step is another one.
    A timeout of 0 turns it off."""

    def __init__(self, timeout_s: float, *, reply_timeout_s: float = 2.0) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._reply_timeout_ns = int(reply_timeout_s * 1e9)
        self._reported: dict[tuple[int, str, str], int] = {}
        self._open: dict[int, Stall] = {}
        self._last_query_id = 0

    def new_query_id(self) -> int:
        self._last_query_id += 1
        return self._last_query_id

    def overdue(self, now_ns: int, operations: Iterable[WaitingOperation]) -> list[Stall]:
        """Return the operations that have become overdue since the last call."""
        if self._timeout_ns <= 0:
            return []
        by_missing: dict[tuple[int, tuple[int, ...]], list[WaitingOperation]] = {}
        for operation in _merge_reports(operations):
            key = (operation.group, operation.op, operation.call)
            reported_ns = self._reported.get(key)
            # Without its call, an operation is another one if it began after the report of one of the same name.
            is_new = reported_ns is None or (not operation.call and operation.since_ns > reported_ns)
            if is_new and now_ns - operation.since_ns >= self._timeout_ns:
                by_missing.setdefault((operation.group, operation.missing), []).append(operation)
                self._reported.pop(key, None)  # to the end of the order
                self._reported[key] = now_ns
                if len(self._reported) > MAX_REMEMBERED:
                    del self._reported[next(iter(self._reported))]
        stalls = []
        for same in by_missing.values():
            stall = Stall(self.new_query_id(), tuple(sorted(same, key=lambda each: each.since_ns)), now_ns)
            self._open[stall.query_id] = stall
            stalls.append(stall)
        return stalls

    def add_reply(self, query_id: int, rank: int, line: str) -> None:
        """Add the line at which a rank is. Replies that come too late are dropped."""
        stall = self._open.get(query_id)
        if stall is not None and rank in stall.asked_ranks:
            stall.lines[rank] = line

    def take_finished(self, now_ns: int) -> list[Stall]:
        """Return the stalls whose ranks have all replied, or have had the time to."""
        finished = [
            stall
            for stall in self._open.values()
            if len(stall.lines) == len(stall.asked_ranks) or now_ns - stall.asked_ns >= self._reply_timeout_ns
        ]
        for stall in finished:
            del self._open[stall.query_id]
        return finished


def describe_stall(
    stall: Stall,
    now_ns: int,
    *,
    members: Sequence[Member],
    process_state: Callable[[Member], str] = lambda member: "",
    host_name: Callable[[Member], str] = lambda member: member.host,
) -> str:
    """Return a report with a line per missing rank. `process_state` returns the state of a member that does not reply,
    or "" if it is not known; `host_name` returns what people call its host."""
    operation = stall.longest_waiting
    missing, present = operation.missing, operation.present
    named = ", ".join(f"rank {rank}" for rank in missing) if len(missing) <= 4 else format_ranks(missing)
    there = f" ({format_ranks(present)} {'is' if len(present) == 1 else 'are'} there)" if present else ""
    lines = [
        f"{shorten(operation.op)} (group {operation.group}) has waited {stall.waited_s(now_ns):.1f} s "
        f"for {named}{there}"
    ]
    by_rank = {member.rank: member for member in members}
    for rank in stall.asked_ranks:
        member, line = by_rank.get(rank), stall.lines.get(rank)
        if member is None:
            lines.append(f"  rank {rank} is not a member of this round")
            continue
        where = f"is at {shorten(line, 400)}" if line else "answers, but cannot say where it is"
        if line is None:
            where = describe_silence(process_state(member))
        lines.append(f"  rank {rank} on host {shorten(host_name(member))}, pid {member.pid}, {where}")
    if len(missing) > len(stall.asked_ranks):
        lines.append(f"  and {len(missing) - len(stall.asked_ranks)} more ranks, not asked")
    others = stall.operations[1:]
    if others:
        named = ", ".join(shorten(other.op) for other in others[:MAX_SHOWN])
        more = f" and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else ""
        lines.append(f"  for the same ranks {'waits' if len(others) == 1 else 'wait'} also {named}{more}")
    return "\n".join(lines)


def _merge_reports(reports: Iterable[WaitingOperation]) -> list[WaitingOperation]:
    """Return one report per operation. Members report at different moments: who waits in it is not missing."""
    by_key: dict[tuple[int, str, str], list[WaitingOperation]] = {}
    for report in reports:
        by_key.setdefault((report.group, report.op, report.call), []).append(report)
    merged: list[WaitingOperation] = []
    for same in by_key.values():
        if len(same) == 1:  # of thousands of ranks perhaps, so its sets are not made
            merged += same if same[0].missing else ()
            continue
        present = {rank for report in same for rank in report.present}
        missing = {rank for report in same for rank in report.missing} - present
        if missing:
            merged.append(
                msgspec.structs.replace(
                    same[0],
                    since_ns=min(report.since_ns for report in same),
                    missing=tuple(sorted(missing)),
                    present=tuple(sorted(present)),
                )
            )
    return merged


def describe_silence(state: str) -> str:
    """Return what follows the name of a rank that does not reply. The state is "" if it is not known."""
    return "does not answer" + (f"; its process is {state}" if state else "")
