"""Membership in rounds: how it ends, which ranks have joined the next round, and which groups exist. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ronde.net.messages import VERSION, ChangeGroups, GroupsChanged, JoinRound, LeaveReason, LeaveRound
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import Member, check_group_ranks

__all__ = [
    "GroupRegistry",
    "JoinDecision",
    "LeaveReason",
    "LostPeer",
    "MembershipEnd",
    "PendingRound",
    "find_group_error",
]

MAX_DETAIL_CHARS = 1000
MAX_LINE_CHARS = 400
MAX_GROUPS_CHARS = 400


@dataclass(frozen=True, slots=True)
class MembershipEnd:
    """How a rank's membership ended."""

    reason: LeaveReason
    detail: str = ""
    """More about it, in words for the user."""
    missing: tuple[int, ...] = ()
    """If it timed out: the ranks that it waited for."""
    line: str = ""
    """If it failed: the line of its program."""
    lost_peer: int | None = None
    """If it failed because another rank was gone: that rank."""

    @classmethod
    def from_leave_message(cls, leave: LeaveRound) -> MembershipEnd:
        detail, line = shorten(leave.detail, MAX_DETAIL_CHARS), shorten(leave.line, MAX_LINE_CHARS)
        return cls(leave.reason, detail, leave.missing, line, leave.lost_peer)

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
}


@dataclass(frozen=True, slots=True)
class LostPeer:
    """The rank because of which another one failed, and the error of that other one."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class JoinDecision:
    """Whether the next round starts (with `members`), is refused, or has to wait; and why, in words for the user."""

    reason: str
    members: tuple[Member, ...] | None = None
    refused: bool = False
    exited: tuple[int, ...] = ()
    """The ranks because of whose exit the round is refused."""


@dataclass(slots=True)
class PendingRound:
    """The ranks that have joined the next round."""

    size: int
    start_timeout_s: float
    joins: dict[int, JoinRound] = field(default_factory=dict)
    exit_reasons: dict[int, str] = field(default_factory=dict)
    """Ranks whose process has ended, and how; until another process of the rank connects."""
    withdrawn: dict[int, str] = field(default_factory=dict)
    """Ranks that had joined and left again before the round started."""
    duplicates: set[int] = field(default_factory=set)
    """Ranks that two living processes claim to be."""
    first_join_ns: int = 0
    refusal: JoinDecision | None = None
    """Why the last round was refused. Ranks that join late get the same reason, until a refused one connects again."""
    refused_ranks: set[int] = field(default_factory=set)

    def join(self, rank: int, join: JoinRound, now_ns: int) -> None:
        """A rank asks to be a member. It may ask again while it waits. The late message of a process that has ended is
        ignored: connected() comes before the join of a new process."""
        if rank in self.exit_reasons:
            return
        if not self.joins:
            self.first_join_ns = now_ns
        self.withdrawn.pop(rank, None)
        self.joins[rank] = join

    def connected(self, rank: int) -> None:
        """A process of this rank has connected, whatever became of a former one."""
        self.exit_reasons.pop(rank, None)
        self.withdrawn.pop(rank, None)
        if rank in self.refused_ranks:
            self.refusal = None
            self.refused_ranks.clear()

    def exited(self, rank: int, why: str) -> None:
        """The rank's process has ended: nobody has to wait for it, in this round or a later one."""
        self.joins.pop(rank, None)
        self.exit_reasons[rank] = why

    def withdraw(self, rank: int, why: str) -> None:
        """A rank that had joined has left: this round is refused, the next one may start."""
        if self.joins.pop(rank, None) is not None and self.joins:
            self.withdrawn[rank] = why

    def decide(
        self, now_ns: int, connected: frozenset[int], still_in_round: frozenset[int] = frozenset()
    ) -> JoinDecision | None:
        """Decide whether the round starts, is refused or has to wait; None if nobody has joined.

        It starts when every rank has joined, has an open liveness connection (`connected`), and has left the round
        before: the death of a member without a connection would go unnoticed.
        """
        if not self.joins:
            return None
        refusal = self.refusal or self._find_refusal()
        if refusal is not None:
            return refusal
        ranks = range(self.size)
        missing = [rank for rank in ranks if rank not in self.joins]
        unconnected = [rank for rank in ranks if rank not in connected]
        if missing or still_in_round:
            waiting = f"{format_ranks(missing or still_in_round)} of {self.size}"
            busy = f" ({format_ranks(still_in_round)} still in the round before)" if still_in_round else ""
            late, hint = f"did not join within {{}} s{busy}", "give them more time with start_s (RONDE_START_S)"
        elif unconnected:
            waiting, busy = f"the connection of {format_ranks(unconnected)} of {self.size}", ""
            late, hint = "was not there within {} s", "whether the coordinator's host is overloaded"
        else:
            members = tuple(self.joins[rank].member for rank in ranks)
            return JoinDecision(f"all {self.size} ranks are here", members=members)
        waited_s = (now_ns - self.first_join_ns) / 1e9
        if waited_s < self.start_timeout_s:
            return JoinDecision(f"waiting for {waiting}{busy}")
        return JoinDecision(
            f"{waiting} {late.format(f'{waited_s:.3g}')}; look at their output, or {hint}", refused=True
        )

    def clear(self, decision: JoinDecision) -> tuple[int, ...]:
        """The decision was carried out. Returns the ranks it was about, which are no longer joining."""
        ranks = tuple(sorted(self.joins))
        if decision.refused:
            self.refusal = decision
            self.refused_ranks.update(ranks)
        self.joins.clear()
        self.withdrawn.clear()
        self.duplicates.clear()
        return ranks

    def _find_refusal(self) -> JoinDecision | None:
        """Return the refusal if the round can never start, and None if it can."""
        if self.duplicates:
            return JoinDecision(
                f"two processes say that they are {format_ranks(self.duplicates)}; give each its own RONDE_RANK",
                refused=True,
            )
        ended = {
            rank: f"ended before the round began ({why})"
            for rank, why in {**self.withdrawn, **self.exit_reasons}.items()
            if rank not in self.joins
        }
        if ended:
            return JoinDecision(format_rank_answers(ended, verb=" "), refused=True, exited=tuple(sorted(ended)))
        error = self._find_disagreement()
        return JoinDecision(error, refused=True) if error else None

    def _find_disagreement(self) -> str:
        answers = {
            "the version of the protocol": {rank: str(join.version) for rank, join in self.joins.items()},
            "the number of ranks": {rank: str(join.size) for rank, join in self.joins.items()},
            "the groups to begin with": {rank: _format_groups(join) for rank, join in self.joins.items()},
        }
        for what, answer in answers.items():
            if len(set(answer.values())) > 1:
                return f"ranks disagree on {what}: {format_rank_answers(answer)}"
        errors = (_find_join_error(rank, join, self.size) for rank, join in self.joins.items())
        return next(filter(None, errors), "")


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
        error = find_group_error(ranks, size)
        if error:
            return f"{error}; check the groups given to init()"
    return ""


def _format_groups(join: JoinRound) -> str:
    return shorten(", ".join(_format_rank_list(ranks) for ranks in join.groups) or "none", MAX_GROUPS_CHARS)


def _format_rank_list(ranks: tuple[int, ...]) -> str:
    return shorten(f"[{', '.join(map(str, ranks))}]")


def find_group_error(ranks: tuple[int, ...], size: int) -> str:
    """Return what is wrong with a group of these ranks; empty if nothing is."""
    try:
        checked = check_group_ranks(ranks, size)
    except ValueError as error:
        return shorten(str(error))
    return "" if checked == ranks else f"the ranks of a group must be sorted, got {_format_rank_list(ranks)}"


class GroupRegistry:
    """The groups of a round. A change is made when every rank has asked for the same one, in the same order.

    Ids are never used again, so that a late message cannot mean another group.
    """

    def __init__(self, size: int, groups: tuple[tuple[int, ...], ...] = ()) -> None:
        self._size = size
        self._groups = {0: tuple(range(size)), **{index + 1: ranks for index, ranks in enumerate(groups)}}
        self._last_id = len(groups)
        self._requested: dict[int, deque[ChangeGroups]] = {rank: deque() for rank in range(size)}
        self._lost_reason = ""

    def items(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return id and ranks of every group, the world first."""
        return list(self._groups.items())

    def members(self, group: int) -> tuple[int, ...]:
        """Return the ranks of a group; empty if there is no such group."""
        return self._groups.get(group, ())

    def request_change(self, rank: int, change: ChangeGroups) -> Iterator[tuple[int, GroupsChanged]]:
        """A rank asks for a change. When all ranks have, yields the answer for each."""
        self._requested[rank].append(change)
        if self._lost_reason:
            yield from self._refuse_all(self._lost_reason)
        elif all(self._requested.values()):
            yield from self._apply_change()

    def rank_lost(self, rank: int, why: str) -> Iterator[tuple[int, GroupsChanged]]:
        """A change needs all ranks: yields the refusal for every rank that waits for one."""
        self._lost_reason = self._lost_reason or f"rank {rank} is gone: {why}"
        yield from self._refuse_all(self._lost_reason)

    def _apply_change(self) -> Iterator[tuple[int, GroupsChanged]]:
        changes = {rank: requested.popleft() for rank, requested in self._requested.items()}
        first = changes[0]
        if any(change != first for change in changes.values()):
            answers = format_rank_answers({rank: _describe_change(change) for rank, change in changes.items()})
            error = f"ranks disagree on the change of groups: {answers}"
        else:
            error = self._find_change_error(first)
        if error:
            yield from ((rank, GroupsChanged(each.ranks, each.id, reason=error)) for rank, each in changes.items())
            return
        if first.id:
            changed = GroupsChanged(self._groups.pop(first.id), first.id, removed=True)
        else:
            self._last_id += 1
            self._groups[self._last_id] = first.ranks
            changed = GroupsChanged(first.ranks, self._last_id)
        yield from ((rank, changed) for rank in changes)

    def _refuse_all(self, why: str) -> Iterator[tuple[int, GroupsChanged]]:
        for rank, requested in self._requested.items():
            while requested:
                change = requested.popleft()
                yield rank, GroupsChanged(change.ranks, change.id, reason=why)

    def _find_change_error(self, change: ChangeGroups) -> str:
        if not change.id:
            return find_group_error(change.ranks, self._size)
        return "" if change.id in self._groups else f"group {change.id} does not exist, or was removed"


def _describe_change(change: ChangeGroups) -> str:
    return f"removal of group {change.id}" if change.id else f"a new group of {list(change.ranks)}"
