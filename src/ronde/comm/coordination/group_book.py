"""The groups of a round, and how they change: every rank asks for the same change, in the same order. Pure; used by
the round."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ronde.comm.coordination.membership import find_group_fault
from ronde.comm.wording import answers
from ronde.net.messages import GroupChanged, GroupWanted

__all__ = ["GroupBook"]


class GroupBook:
    """Which groups there are. Ids are never used again, so that a late message cannot mean another group."""

    def __init__(self, size: int, groups: tuple[tuple[int, ...], ...] = ()) -> None:
        self._size = size
        self._groups = {0: tuple(range(size)), **{index + 1: ranks for index, ranks in enumerate(groups)}}
        self._last_id = len(groups)
        self._wanted: dict[int, deque[GroupWanted]] = {rank: deque() for rank in range(size)}
        self._gone = ""

    def items(self) -> list[tuple[int, tuple[int, ...]]]:
        """Id and ranks of every group, the world first."""
        return list(self._groups.items())

    def members(self, group: int) -> tuple[int, ...]:
        """The ranks of a group; none if there is no such group."""
        return self._groups.get(group, ())

    def want(self, rank: int, wanted: GroupWanted) -> Iterator[tuple[int, GroupChanged]]:
        """A rank asks for a change. When it was the last one to: what to tell each rank."""
        self._wanted[rank].append(wanted)
        if self._gone:
            yield from self._refuse_all(self._gone)
        elif all(self._wanted.values()):
            yield from self._change()

    def lose(self, rank: int, why: str) -> Iterator[tuple[int, GroupChanged]]:
        """A rank is gone: a change needs all ranks, so those who wait for one are told."""
        self._gone = self._gone or f"rank {rank} is gone: {why}"
        yield from self._refuse_all(self._gone)

    def _change(self) -> Iterator[tuple[int, GroupChanged]]:
        asked = {rank: waiting.popleft() for rank, waiting in self._wanted.items()}
        first = asked[0]
        if any(wanted != first for wanted in asked.values()):
            why = f"ranks disagree on the change of groups: {answers({r: self._text(w) for r, w in asked.items()})}"
        else:
            why = self._fault(first)
        if why:
            yield from ((rank, GroupChanged(wanted.ranks, wanted.id, why=why)) for rank, wanted in asked.items())
            return
        if first.id:
            changed = GroupChanged(self._groups.pop(first.id), first.id, removed=True)
        else:
            self._last_id += 1
            self._groups[self._last_id] = first.ranks
            changed = GroupChanged(first.ranks, self._last_id)
        yield from ((rank, changed) for rank in asked)

    def _refuse_all(self, why: str) -> Iterator[tuple[int, GroupChanged]]:
        for rank, waiting in self._wanted.items():
            while waiting:
                wanted = waiting.popleft()
                yield rank, GroupChanged(wanted.ranks, wanted.id, why=why)

    def _fault(self, wanted: GroupWanted) -> str:
        if not wanted.id:
            return find_group_fault(wanted.ranks, self._size)
        return "" if wanted.id in self._groups else f"group {wanted.id} does not exist, or was removed"

    def _text(self, wanted: GroupWanted) -> str:
        return f"removal of group {wanted.id}" if wanted.id else f"a new group of {list(wanted.ranks)}"
