"""Process sets: some of the ranks, which run collectives among themselves. Each is a group of ronde's.

All framework modules of a process share one table of process sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import ronde
from horovod.common.exceptions import translate_errors


class ProcessSet:
    """Some ranks. It can be used when it was given to hvd.init() or hvd.add_process_set() on all ranks."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:  # an mpi4py communicator
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm)
        wrong = [rank for rank in ranks if not isinstance(rank, int)]
        if wrong:
            raise ValueError(f"a ProcessSet is made of whole numbers, got {wrong[0]!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Number of members; None before the set is in use."""
        return None if self.process_set_id is None else process_set_table.group(self.process_set_id).size

    def rank(self) -> int | None:
        """This process's number among the members; None before the set is in use."""
        if self.process_set_id is None:
            return None
        group = process_set_table.group(self.process_set_id)
        if group.rank is None:
            raise ValueError(f"rank {ronde.rank()} is not a member of process set {self.process_set_id}")
        return group.rank

    def included(self) -> bool | None:
        """Whether this rank is a member; None while the members are not known."""
        with translate_errors():
            return None if self.ranks is None else ronde.rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


class ProcessSetTable:
    """The groups of ronde's by the ids of process sets. Ids that became free are used again in the order in which they
    became free, so all ranks agree on them."""

    def __init__(self) -> None:
        self.dynamic = False  # whether sets may come and go while the job runs
        self._groups: dict[int, ronde.Group] = {}
        self._free: list[int] = []
        self._next = 1

    def start_round(self, *, dynamic: bool) -> None:
        """Start with the global process set alone. Called when a round begins."""
        self.clear()
        self.dynamic = dynamic
        self._groups[0] = ronde.world()
        global_process_set.process_set_id = 0
        global_process_set.ranks = list(range(ronde.size()))

    def clear(self) -> None:
        self._groups.clear()
        self._free.clear()
        self._next = 1

    def group(self, id: int) -> ronde.Group:
        """Return the group of the process set with this id."""
        if not self._groups:
            with translate_errors():
                ronde.rank()
        if id not in self._groups:
            raise ValueError(f"there is no process set {id}; it was removed, or never given to hvd.init()")
        return self._groups[id]

    def find_id(self, ranks: list[int]) -> int | None:
        """Return the id of the process set with these ranks; None if there is none."""
        return next((id for id, group in self._groups.items() if list(group.ranks) == ranks), None)

    def register(self, process_set: ProcessSet) -> None:
        """Give a process set its id; add its group if there is none. All ranks call it, in the same order."""
        ranks = _resolve_ranks(process_set)
        id = self.find_id(ranks)
        if id is None:
            try:
                group = ronde.add_group(ranks)
            except ronde.Mismatch as error:
                raise ValueError(f"every rank must ask for the same process set: {error}") from error
            id = self._free.pop(0) if self._free else self._next
            self._next = max(self._next, id + 1)
            self._groups[id] = group
        process_set.ranks = ranks
        process_set.process_set_id = id

    def remove(self, id: int) -> None:
        """Remove a process set and its group. All ranks call it."""
        ronde.remove_group(self.group(id))
        del self._groups[id]
        self._free.append(id)

    def ranks_by_id(self) -> dict[int, list[int]]:
        """Return the ranks of all process sets."""
        return {id: list(group.ranks) for id, group in sorted(self._groups.items())}


process_set_table = ProcessSetTable()
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a set while the job runs. Every rank calls it, members or not."""
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if found.mpi_comm is not None:
        raise NotImplementedError("a process set made of a communicator must be given to hvd.init()")
    _check_dynamic("add_process_set")
    with translate_errors():
        ranks = _resolve_ranks(found)
        if process_set_table.find_id(ranks) is not None:
            raise ValueError(f"there is a process set of ranks {ranks} already")
        process_set_table.register(found)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set. Every rank calls it. False for the global set, and for one that is not in use."""
    id = process_set.process_set_id
    if id is None or id == 0:
        return False
    _check_dynamic("remove_process_set")
    with translate_errors():
        process_set_table.remove(id)
    process_set.process_set_id = None
    return True


def group_of(process_set: ProcessSet) -> ronde.Group:
    """The group in which a collective of this set runs."""
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set} is not in use; give it to hvd.init() or hvd.add_process_set() on all ranks")
    return process_set_table.group(process_set.process_set_id)


def _resolve_ranks(process_set: ProcessSet) -> list[int]:
    if process_set.mpi_comm is not None:
        return sorted(cast("list[int]", process_set.mpi_comm.allgather(ronde.rank())))
    if process_set is global_process_set:
        return list(range(ronde.size()))
    assert process_set.ranks is not None
    if not process_set.ranks:
        raise ValueError("a process set needs at least one rank")
    wrong = [rank for rank in process_set.ranks if not 0 <= rank < ronde.size()]
    twice = [rank for rank in set(process_set.ranks) if process_set.ranks.count(rank) > 1]
    if wrong or twice:
        what = f"rank {wrong[0]}, but ranks go from 0 to {ronde.size() - 1}" if wrong else f"rank {twice[0]} twice"
        raise ValueError(f"a process set cannot have {what}")
    return process_set.ranks


def _check_dynamic(what: str) -> None:
    with translate_errors():
        ronde.rank()
    if not process_set_table.dynamic:
        raise ValueError(
            f'{what} needs hvd.init(process_sets="dynamic"), or HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment'
        )


def init_process_sets(process_sets: list[ProcessSet], *, fresh: bool) -> None:
    """Register the sets given to hvd.init(). ValueError on all ranks if two have the same ranks, if a set cannot be, or
    if ranks gave different sets."""
    mistake = ""
    try:
        wanted = [_resolve_ranks(process_set) for process_set in process_sets]
        for index, (process_set, ranks) in enumerate(zip(process_sets, wanted, strict=True)):
            if process_set is not global_process_set and ranks in [list(range(ronde.size())), *wanted[:index]]:
                raise ValueError(f"two process sets of the same ranks {ranks} were given")
    except ValueError as error:
        wanted, mistake = [], str(error)
    if fresh or process_sets:  # a later init() without sets may be called by one rank alone
        gathered = ronde.objects.allgather((wanted, mistake))
        if mistake:
            raise ValueError(mistake)
        for rank, (theirs, their_mistake) in enumerate(gathered):
            if their_mistake:
                raise ValueError(f"rank {rank} gave hvd.init() process sets that cannot be: {their_mistake}")
            if theirs != gathered[0][0]:
                raise ValueError(
                    f"every rank must give hvd.init() the same process sets, but rank 0 gave {gathered[0][0]} "
                    f"and rank {rank} gave {theirs}"
                )
    for process_set in process_sets:
        process_set_table.register(process_set)
