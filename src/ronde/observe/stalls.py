"""Which operations wait too long, and what the ranks they wait for are doing. Pure; run by the coordinator.

    every tick         for stall in watch.due(now_ns, waits): send StackQuery(stall.ticket) to each of stall.asked
    on a StackReply    watch.answer(ticket, rank, line)
    every tick         for stall in watch.finished(now_ns): log report(stall, now_ns, …)

All times are on one clock, the coordinator's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ronde.observe.stacks import RankStack
from ronde.text import format_ranks, shorten
from ronde.types import Member

__all__ = ["Stall", "StallInspector", "WaitingOperation", "Whereabouts", "describe_silence", "describe_stall"]

MAX_SHOWN = 16
"""Ranks and operations named one by one in a report; the others are counted."""
MAX_REMEMBERED = 4096
"""Reported operations that are remembered, so that a job of many days does not grow."""


class WaitingOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation in which some members wait for others, as the coordinator or one of the members sees it."""

    op: str
    """In words, such as `allreduce 'grad.3' sum float32[1024]`."""
    group: int
    since_ns: int
    missing: tuple[int, ...]
    present: tuple[int, ...] = ()
    call: str = ""
    """What tells it from a later operation of the same name; empty when nothing does."""

    @property
    def key(self) -> tuple[int, str, str]:
        """The same for all who wait in it."""
        return self.group, self.op, self.call


@dataclass(slots=True)
class Stall:
    """Operations that became late together, and what the ranks they wait for have answered."""

    query_id: int
    operations: tuple[WaitingOperation, ...]
    """Those of one group that miss the same ranks; the one that has waited longest first."""
    asked_ns: int
    lines: dict[int, str] = dataclasses.field(default_factory=dict)
    """Per rank, the line it is at."""

    @property
    def longest_waiting(self) -> WaitingOperation:
        """The one that has waited longest."""
        return self.operations[0]

    @property
    def asked_ranks(self) -> tuple[int, ...]:
        """The ranks to ask where they are."""
        return self.longest_waiting.missing[:MAX_SHOWN]

    def waited_s(self, now_ns: int) -> float:
        """How long the first has waited."""
        return (now_ns - self.longest_waiting.since_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where ranks were when a round failed: for the summary of the job."""

    first: int
    """The rank that failed first."""
    missing: tuple[RankStack, ...] = ()
    """If an operation ran out of time there: the ranks that it waited for."""
    disagreeing: tuple[RankStack, ...] = ()
    """If the members of an operation had asked for different things: all that said so."""


class StallInspector:
    """Reports each operation once: when it has waited for limit_s. The same operation of a later step counts anew."""

    def __init__(self, timeout_s: float, *, reply_timeout_s: float = 2.0) -> None:
        self._timeout_ns = int(timeout_s * 1e9)
        self._reply_timeout_ns = int(reply_timeout_s * 1e9)
        self._reported: dict[tuple[int, str, str], int] = {}
        self._open: dict[int, Stall] = {}
        self._last_query_id = 0

    def new_ticket(self) -> int:
        """For a question that no stall asks."""
        self._last_query_id += 1
        return self._last_query_id

    def overdue(self, now_ns: int, operations: Iterable[WaitingOperation]) -> list[Stall]:
        """The operations that have become late since the last call. A limit of 0 turns the watch off."""
        if self._timeout_ns <= 0:
            return []
        together: dict[tuple[int, tuple[int, ...]], list[WaitingOperation]] = {}
        for wait in _merge_reports(operations):
            if now_ns - wait.since_ns >= self._timeout_ns and self._is_new(wait):
                self._remember(wait, now_ns)
                together.setdefault((wait.group, wait.missing), []).append(wait)
        return [self._open_stall(group_of, now_ns) for group_of in together.values()]

    def add_reply(self, query_id: int, rank: int, line: str) -> None:
        """A rank says where it is. Answers nobody waits for any more are dropped."""
        stall = self._open.get(query_id)
        if stall is not None and rank in stall.asked_ranks:
            stall.lines[rank] = line

    def take_finished(self, now_ns: int) -> list[Stall]:
        """The stalls whose ranks have all answered, or had the time to."""
        done = [
            stall
            for stall in self._open.values()
            if len(stall.lines) == len(stall.asked_ranks) or now_ns - stall.asked_ns >= self._reply_timeout_ns
        ]
        for stall in done:
            del self._open[stall.query_id]
        return done

    def _is_new(self, wait: WaitingOperation) -> bool:
        reported_ns = self._reported.get(wait.key)
        if reported_ns is None or wait.call:
            return reported_ns is None
        # Without its call, an operation that began after the report of one of its name is the next of them. The one
        # that was reported is meant by all who waited in it by then.
        return wait.since_ns > reported_ns

    def _remember(self, wait: WaitingOperation, now_ns: int) -> None:
        self._reported.pop(wait.key, None)  # to the end of the order
        self._reported[wait.key] = now_ns
        if len(self._reported) > MAX_REMEMBERED:
            del self._reported[next(iter(self._reported))]

    def _open_stall(self, waits: list[WaitingOperation], now_ns: int) -> Stall:
        stall = Stall(self.new_ticket(), tuple(sorted(waits, key=lambda wait: wait.since_ns)), now_ns)
        self._open[stall.query_id] = stall
        return stall


def describe_stall(
    stall: Stall,
    now_ns: int,
    *,
    members: Sequence[Member],
    process_state: Callable[[Member], str] = lambda member: "",
    host_name: Callable[[Member], str] = lambda member: member.host,
) -> str:
    """The stall in words, a line per missing rank. `state` tells what the process of a silent member is doing, or ""
    if that cannot be known from here; `host_name` what people call its host."""
    wait = stall.longest_waiting
    there = f" ({format_ranks(wait.present)} {'is' if len(wait.present) == 1 else 'are'} there)" if wait.present else ""
    lines = [
        f"{shorten(wait.op)} (group {wait.group}) has waited {stall.waited_s(now_ns):.1f} s "
        f"for {_format_missing(wait.missing)}{there}"
    ]
    by_rank = {member.rank: member for member in members}
    for rank in stall.asked_ranks:
        member = by_rank.get(rank)
        if member is None:
            lines.append(f"  rank {rank} is not a member of this round")
        else:
            where = _describe_member(member, stall.lines.get(rank), process_state)
            lines.append(f"  rank {rank} on host {shorten(host_name(member))}, pid {member.pid}, {where}")
    if len(wait.missing) > len(stall.asked_ranks):
        lines.append(f"  and {len(wait.missing) - len(stall.asked_ranks)} more ranks, not asked")
    others = stall.operations[1:]
    if others:
        named = ", ".join(shorten(other.op) for other in others[:MAX_SHOWN])
        more = f" and {len(others) - MAX_SHOWN} more" if len(others) > MAX_SHOWN else ""
        lines.append(f"  for the same ranks {'waits' if len(others) == 1 else 'wait'} also {named}{more}")
    return "\n".join(lines)


def _merge_reports(waits: Iterable[WaitingOperation]) -> list[WaitingOperation]:
    """One Wait per operation. Members report at different moments: who waits there himself is not missing."""
    reports: dict[tuple[int, str, str], list[WaitingOperation]] = {}
    for wait in waits:
        reports.setdefault(wait.key, []).append(wait)
    merged = []
    for (group, op, call), same in reports.items():
        present = {rank for wait in same for rank in wait.present}
        missing = {rank for wait in same for rank in wait.missing} - present
        if missing:
            since_ns = min(wait.since_ns for wait in same)
            merged.append(
                WaitingOperation(
                    op=op,
                    group=group,
                    since_ns=since_ns,
                    missing=_sorted(missing),
                    present=_sorted(present),
                    call=call,
                )
            )
    return merged


def _sorted(ranks: set[int]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _format_missing(ranks: tuple[int, ...]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks) if len(ranks) <= 4 else format_ranks(ranks)


def _describe_member(member: Member, line: str | None, state: Callable[[Member], str]) -> str:
    if line:
        return f"is at {shorten(line, 400)}"
    if line is not None:
        return "answers, but cannot say where it is"
    return describe_silence(state(member))


def describe_silence(state: str) -> str:
    """Words that follow the name of a rank that does not say where it is. The state is "" if it is not known."""
    return "does not answer" + (f"; its process is {state}" if state else "")
