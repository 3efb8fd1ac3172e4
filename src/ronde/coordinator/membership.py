"""How the membership of a rank in a round ends, and which groups exist. Without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ronde.net.messages import ChangeGroups, GroupsChanged, LeaveReason, LeaveRound
from ronde.text import format_rank_answers, shorten
from ronde.types import check_group_ranks

__all__ = [
    "GroupRegistry",
    "LeaveReason",
    "LostPeer",
    "MembershipEnd",
    "find_group_error",
    "format_rank_list",
]

MAX_DETAIL_CHARS = 1000
MAX_LINE_CHARS = 400


@dataclass(frozen=True, slots=True)
class MembershipEnd:
    """How a rank's membership ended."""

    reason: LeaveReason
    detail: str = ""
    """What is known beyond the reason, as text for the user."""
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


def format_rank_list(ranks: tuple[int, ...]) -> str:
    return shorten(f"[{', '.join(map(str, ranks))}]")


def find_group_error(ranks: tuple[int, ...], size: int) -> str:
    """Return what is wrong with a group of these ranks; empty if nothing is."""
    try:
        checked = check_group_ranks(ranks, size)
    except ValueError as error:
        return shorten(str(error))
    return "" if checked == ranks else f"the ranks of a group must be sorted, got {format_rank_list(ranks)}"


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
