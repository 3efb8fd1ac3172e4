"""Who is in the next round, or why it cannot begin yet. Decisions only; carried out by the coordinator.

The groups of a round, and how they change: every rank asks for the same change, in the same order. Pure; used by
the round.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ronde.net.messages import VERSION, ChangeGroups, Failure, GroupsChanged, JoinRound, LeaveRound
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import Member, check_group_ranks

__all__ = [
    "GroupRegistry",
    "JoinDecision",
    "LeaveReason",
    "LostPeer",
    "MembershipEnd",
    "PendingRound",
    "decide_round",
    "find_group_error",
]


class LeaveReason(enum.Enum):
    """How a rank has gone."""

    SHUTDOWN = enum.auto()
    """It has left by shutdown()."""
    SCRIPT_ENDED = enum.auto()
    """Its script came to its end without shutdown(). Most scripts do."""
    FAILED = enum.auto()
    """It said itself what ended it: an exception, a start that failed."""
    TIMED_OUT = enum.auto()
    """It said that an operation ran out of time."""
    MISMATCHED = enum.auto()
    """It said that the members of an operation asked for different things."""
    PROCESS_ENDED = enum.auto()
    """Whoever started its process says how that ended."""
    PROCESS_GONE = enum.auto()
    """Its process is no more, and nobody said why."""
    UNREACHABLE = enum.auto()
    """The network to its host is cut."""


@dataclass(frozen=True, slots=True)
class MembershipEnd:
    """That a rank has gone, and how; `detail` is for people."""

    reason: LeaveReason
    detail: str = ""
    missing: tuple[int, ...] = ()
    """If it timed out: the ranks that it waited for."""
    line: str = ""
    """If it failed: the line of its program."""
    lost_peer: int | None = None
    """If it failed because another rank was gone: that rank."""

    @classmethod
    def from_leave_message(cls, leave: LeaveRound) -> MembershipEnd:
        """What the rank says itself."""
        detail = shorten(leave.reason, 1000)
        if leave.orderly:
            return cls(LeaveReason.SCRIPT_ENDED if detail else LeaveReason.SHUTDOWN, detail)
        return cls(_FAILURES[leave.failure], detail, leave.missing, shorten(leave.line, 400), leave.lost_peer)

    @property
    def is_loss(self) -> bool:
        """Whether it went before it had come to its end."""
        return self.reason not in (LeaveReason.SHUTDOWN, LeaveReason.SCRIPT_ENDED)

    @property
    def description(self) -> str:
        """For errors and reports; the rank is their subject."""
        return self.detail or _LEAVE_REASON_TEXTS[self.reason]


_FAILURES = {
    Failure.OTHER: LeaveReason.FAILED,
    Failure.TIMEOUT: LeaveReason.TIMED_OUT,
    Failure.MISMATCH: LeaveReason.MISMATCHED,
}
_LEAVE_REASON_TEXTS = {
    LeaveReason.SHUTDOWN: "it has left the round by shutdown()",
    LeaveReason.SCRIPT_ENDED: "exited without shutdown",
    LeaveReason.FAILED: "it gave up",
    LeaveReason.TIMED_OUT: "an operation ran out of time",
    LeaveReason.MISMATCHED: "ranks disagreed on an operation",
    LeaveReason.PROCESS_ENDED: "its process has ended",
    LeaveReason.PROCESS_GONE: "its process is gone",
    LeaveReason.UNREACHABLE: "its host cannot be reached",
}


@dataclass(frozen=True, slots=True)
class LostPeer:
    """The rank for whose exit another one failed, and the error of that other one."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class JoinDecision:
    """What becomes of those who have joined so far: a round, a refusal, or more waiting; and why."""

    reason: str
    members: tuple[Member, ...] | None = None
    refused: bool = False
    exited: tuple[int, ...] = ()
    """Ranks for whose exit the round is refused."""


@dataclass(frozen=True, slots=True)
class JoinView:
    """All that the decision depends on."""

    size: int
    joins: Mapping[int, JoinRound]
    exited: Mapping[int, str]
    """Ranks that will not come, and why."""
    duplicates: frozenset[int]
    """Ranks that two living processes claim to be."""
    watched: frozenset[int]
    """Ranks with an open connection to the coordinator, whose death would be noticed."""
    still_in_round: frozenset[int]
    """Ranks that are still in the round before."""
    waited_s: float
    """Since the first joined."""


def decide_round(view: JoinView, start_timeout_s: float) -> JoinDecision:
    """Whether the round begins, is refused to all, or has to wait. It begins when every rank has joined, is watched,
    and has left the round before: a member that nobody watches could die without the others hearing of it."""
    fault = _find_refusal_reason(view)
    if fault:
        exited = () if view.duplicates else tuple(sorted(view.exited.keys() - view.joins.keys()))
        return JoinDecision(fault, refused=True, exited=exited)
    missing = [rank for rank in range(view.size) if rank not in view.joins]
    unwatched = [rank for rank in range(view.size) if rank in view.joins and rank not in view.watched]
    if not missing and not unwatched and not view.still_in_round:
        members = tuple(view.joins[rank].member for rank in range(view.size))
        return JoinDecision(f"all {view.size} ranks are here", members=members)
    if not missing and not view.still_in_round:
        waiting = f"the connection of {format_ranks(unwatched)} of {view.size}"
        if view.waited_s < start_timeout_s:
            return JoinDecision(f"waiting for {waiting}")
        return JoinDecision(
            f"{waiting} was not there within {view.waited_s:.3g} s; look at their output, or whether the coordinator's "
            "host is overloaded",
            refused=True,
        )
    waiting = f"{format_ranks(missing or view.still_in_round)} of {view.size}"
    busy = f" ({format_ranks(view.still_in_round)} still in the round before)" if view.still_in_round else ""
    if view.waited_s < start_timeout_s:
        return JoinDecision(f"waiting for {waiting}{busy}")
    return JoinDecision(
        f"{waiting} did not join within {view.waited_s:.3g} s{busy}; "
        "look at their output, or give them more time with start_s (RONDE_START_S)",
        refused=True,
    )


def find_group_error(ranks: tuple[int, ...], size: int) -> str:
    """What is wrong with a group of these ranks, or nothing."""
    try:
        checked = check_group_ranks(ranks, size)
    except ValueError as error:
        return shorten(str(error))
    return "" if checked == ranks else f"the ranks of a group must be sorted, got {_format_rank_list(ranks)}"


def _find_refusal_reason(view: JoinView) -> str:
    """Why no round can come of this, however long one waits."""
    if view.duplicates:
        return f"two processes say that they are {format_ranks(view.duplicates)}; give each its own RONDE_RANK"
    ended = {
        rank: f"ended before the round began ({why})" for rank, why in view.exited.items() if rank not in view.joins
    }
    if ended:
        return format_rank_answers(ended, verb=" ")
    said = {
        "the version of the protocol": {rank: str(join.version) for rank, join in view.joins.items()},
        "the number of ranks": {rank: str(join.size) for rank, join in view.joins.items()},
        "the groups to begin with": {rank: _format_groups(join) for rank, join in view.joins.items()},
    }
    for what, answer in said.items():
        if len(set(answer.values())) > 1:
            return f"ranks disagree on {what}: {format_rank_answers(answer)}"
    for rank, join in view.joins.items():
        fault = _find_join_error(rank, join, view.size)
        if fault:
            return fault
    return ""


def _find_join_error(rank: int, join: JoinRound, size: int) -> str:
    if join.version != VERSION:
        return (
            f"rank {rank} speaks version {join.version} of the protocol, the coordinator {VERSION}; install one ronde"
        )
    if join.size != size:
        return f"rank {rank} was told of {join.size} ranks, the coordinator of {size}; check RONDE_SIZE"
    if join.member.rank != rank:
        return f"the process that connected as rank {rank} says it is rank {join.member.rank}"
    for ranks in join.groups:
        fault = find_group_error(ranks, size)
        if fault:
            return f"{fault}; check the groups given to init()"
    return ""


def _format_groups(join: JoinRound) -> str:
    return shorten(", ".join(_format_rank_list(ranks) for ranks in join.groups) or "none", 400)


def _format_rank_list(ranks: tuple[int, ...]) -> str:
    return shorten(f"[{', '.join(map(str, ranks))}]")


@dataclass(slots=True)
class PendingRound:
    """Who has come for the next round. What happens goes in; `decide` says what to do about it."""

    size: int
    start_timeout_s: float
    joins: dict[int, JoinRound] = field(default_factory=dict)
    exit_reasons: dict[int, str] = field(default_factory=dict)
    """Ranks whose process has ended, and how; until another one comes."""
    withdrawn: dict[int, str] = field(default_factory=dict)
    """Ranks that had joined and, still alive, went away again."""
    duplicates: set[int] = field(default_factory=set)
    first_join_ns: int = 0
    refusal: JoinDecision | None = None
    """Why the last round was refused; told to those who come late to it, until one of the refused tries anew."""
    refused_ranks: set[int] = field(default_factory=set)

    def join(self, rank: int, join: JoinRound, now_ns: int) -> None:
        """A rank wants to be in. It may say so again while it waits. Nothing is made of it when the rank's process has
        ended since: come() stands before the join of a new one."""
        if rank in self.exit_reasons:
            return
        if not self.joins:
            self.first_join_ns = now_ns
        self.withdrawn.pop(rank, None)
        self.joins[rank] = join

    def connected(self, rank: int) -> None:
        """A process of this rank has connected: whatever was before, it is here; one that was refused tries anew."""
        self.exit_reasons.pop(rank, None)
        self.withdrawn.pop(rank, None)
        if rank in self.refused_ranks:
            self.refusal = None
            self.refused_ranks.clear()

    def exited(self, rank: int, why: str) -> None:
        """The rank's process has ended: nobody needs to wait for it, in this gathering or a later one."""
        self.joins.pop(rank, None)
        self.exit_reasons[rank] = why

    def withdraw(self, rank: int, why: str) -> None:
        """A rank that had joined does not want to any more: this gathering fails, the next may go well."""
        if self.joins.pop(rank, None) is not None and self.joins:
            self.withdrawn[rank] = why

    def duplicate(self, rank: int) -> None:
        """A second living process says it is this rank."""
        self.duplicates.add(rank)

    def decide(
        self, now_ns: int, watched: frozenset[int], still_in_round: frozenset[int] = frozenset()
    ) -> JoinDecision | None:
        """What becomes of those who have joined; None when nobody has."""
        if not self.joins:
            return None
        if self.refusal is not None:
            return self.refusal
        waited_s = (now_ns - self.first_join_ns) / 1e9
        gone = {**self.withdrawn, **self.exit_reasons}
        view = JoinView(self.size, self.joins, gone, frozenset(self.duplicates), watched, still_in_round, waited_s)
        return decide_round(view, self.start_timeout_s)

    def clear(self, decision: JoinDecision) -> tuple[int, ...]:
        """The decision was carried out: nobody waits any more. Returns those whom it concerned."""
        concerned = tuple(sorted(self.joins))
        if decision.refused:
            self.refusal = decision
            self.refused_ranks.update(concerned)
        self.joins.clear()
        self.withdrawn.clear()
        self.duplicates.clear()
        return concerned


class GroupRegistry:
    """Which groups there are. Ids are never used again, so that a late message cannot mean another group."""

    def __init__(self, size: int, groups: tuple[tuple[int, ...], ...] = ()) -> None:
        self._size = size
        self._groups = {0: tuple(range(size)), **{index + 1: ranks for index, ranks in enumerate(groups)}}
        self._last_id = len(groups)
        self._requested: dict[int, deque[ChangeGroups]] = {rank: deque() for rank in range(size)}
        self._lost_reason = ""

    def items(self) -> list[tuple[int, tuple[int, ...]]]:
        """Id and ranks of every group, the world first."""
        return list(self._groups.items())

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group; none if there is no such group."""
        return self._groups.get(group, ())

    def request_change(self, rank: int, change: ChangeGroups) -> Iterator[tuple[int, GroupsChanged]]:
        """A rank asks for a change. When it was the last one to: what to tell each rank."""
        self._requested[rank].append(change)
        if self._lost_reason:
            yield from self._refuse_all(self._lost_reason)
        elif all(self._requested.values()):
            yield from self._apply_change()

    def rank_lost(self, rank: int, why: str) -> Iterator[tuple[int, GroupsChanged]]:
        """A rank is gone: a change needs all ranks, so those who wait for one are told."""
        self._lost_reason = self._lost_reason or f"rank {rank} is gone: {why}"
        yield from self._refuse_all(self._lost_reason)

    def _apply_change(self) -> Iterator[tuple[int, GroupsChanged]]:
        asked = {rank: waiting.popleft() for rank, waiting in self._requested.items()}
        first = asked[0]
        if any(wanted != first for wanted in asked.values()):
            why = f"ranks disagree on the change of groups: {format_rank_answers({r: self._describe_change(w) for r, w in asked.items()})}"
        else:
            why = self._find_change_error(first)
        if why:
            yield from ((rank, GroupsChanged(wanted.ranks, wanted.id, reason=why)) for rank, wanted in asked.items())
            return
        if first.id:
            changed = GroupsChanged(self._groups.pop(first.id), first.id, removed=True)
        else:
            self._last_id += 1
            self._groups[self._last_id] = first.ranks
            changed = GroupsChanged(first.ranks, self._last_id)
        yield from ((rank, changed) for rank in asked)

    def _refuse_all(self, why: str) -> Iterator[tuple[int, GroupsChanged]]:
        for rank, waiting in self._requested.items():
            while waiting:
                wanted = waiting.popleft()
                yield rank, GroupsChanged(wanted.ranks, wanted.id, reason=why)

    def _find_change_error(self, change: ChangeGroups) -> str:
        if not change.id:
            return find_group_error(change.ranks, self._size)
        return "" if change.id in self._groups else f"group {change.id} does not exist, or was removed"

    def _describe_change(self, change: ChangeGroups) -> str:
        return f"removal of group {change.id}" if change.id else f"a new group of {list(change.ranks)}"
