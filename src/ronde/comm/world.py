"""Everything between init() and shutdown(), as one object: the groups, the engine, the recorder, and what they need.

A process usually has one, the current one (comm/current). Nothing here is global, so tests run many side by side.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from ronde.comm.backend import ChannelSpec
from ronde.comm.dispatch import Dispatch
from ronde.comm.engine import Engine
from ronde.comm.group import Group
from ronde.comm.lane import Lane
from ronde.comm.named import Named
from ronde.comm.place import Groups, Place
from ronde.comm.presence import Presence
from ronde.comm.threads.backend import Hub, ThreadsBackend
from ronde.errors import Mismatch, OperationTimeout, RondeError
from ronde.net.addresses import host_name
from ronde.net.messages import Failure, GroupWanted, Leave, TraceWanted
from ronde.observe.events import ChannelClosed, ChannelOpened, GroupAdded, GroupRemoved, Started, Stopped
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import where_was_raised
from ronde.observe.timeline import Style
from ronde.types import Deadline

__all__ = ["World", "as_ranks"]


class World:
    """One rank's part in one round."""

    def __init__(self, place: Place, groups: Groups = ()) -> None:
        settings, self.topology = place.settings, place.topology
        self.settings = settings
        self.rank = self.topology.rank
        """This rank."""
        self.size = self.topology.size
        """Number of ranks."""
        self.limit_s = settings.operation_s
        self._host_name = host_name(self.topology.members[self.rank].host)
        self.recorder = Recorder(self.rank)
        self.recorder.set_tracing(bool(settings.timeline), label=self._host_name)
        self._place = place
        self._opening_s = settings.start_s
        self._alone = ThreadsBackend(Hub())
        self._presence = Presence(self.rank, self.size, place.backend)
        self._closing = threading.Lock()
        self._changing_trace = threading.Lock()
        self._closed = False
        self.engine = Engine(
            place.control,
            self._presence,
            self.recorder,
            lifeline=place.lifeline,
            coordinator_rank=place.coordinator_rank,
            stall_s=settings.stall_s,
            watched=settings.coordinator_hosted,
            early=place.early,
        )
        self._groups: dict[int, Group] = {}
        try:
            self.engine.start()
            for id, ranks in enumerate((tuple(range(self.size)), *groups)):
                self._groups[id] = self._make_group(id, ranks)
        except BaseException as error:
            self.close(orderly=False, why=f"it could not start: {error}")
            raise
        self._opening_s = settings.operation_s
        self._note_start()

    @property
    def group(self) -> Group:
        """All ranks."""
        return self._groups[0]

    @property
    def groups(self) -> list[Group]:
        """The groups there are, the world first."""
        return list(self._groups.values())

    def add_group(self, ranks: Iterable[int]) -> Group:
        """A new group of these ranks. Every rank of the world calls it, with the same ranks and in the same order."""
        wanted = GroupWanted(as_ranks(ranks, self.size))
        id = self._ask(wanted)
        group = self._groups[id] = self._make_group(id, wanted.ranks)
        return group

    def remove_group(self, group: Group) -> None:
        """Remove a group. Every rank of the world calls it, when nothing is under way in the group."""
        if group.id == 0:
            raise ValueError("the world cannot be removed; shutdown() ends it")
        if self._groups.get(group.id) is not group:
            raise ValueError(f"group {group.id} was removed before, or belongs to another round")
        self._ask(GroupWanted(group.ranks, group.id))
        del self._groups[group.id]
        group.close(removed=True)
        self.recorder.emit(GroupRemoved(at_ns=time.monotonic_ns(), rank=self.rank, group=group.id))

    def start_timeline(self, path: str | os.PathLike[str], style: Style | None = None) -> None:
        """Write a timeline of all ranks to this file, on the coordinator's host. ValueError when it cannot be done."""
        style = style or Style()
        self._change_trace(TraceWanted(str(Path(path).absolute()), style.horovod, style.departures))

    def stop_timeline(self) -> None:
        """End it; the file has everything then. Without one it does nothing."""
        self._change_trace(TraceWanted(""))

    def close(self, orderly: bool = True, why: str = "", *, error: BaseException | None = None) -> None:
        """Leave the round and free everything. Idempotent. `error` is what ended the script, if anything did."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self.recorder.emit(Stopped(at_ns=time.monotonic_ns(), rank=self.rank, orderly=orderly, why=why))
        try:
            self.engine.leave(_make_leave(orderly, why, error), Deadline(self.settings.shutdown_s))
            for group in self._groups.values():
                group.close()
        finally:
            self.engine.stop()
            self._place.opened.close()

    def abandon(self) -> None:
        """In a forked child: hold the lifeline no longer. Everything else stays as the parent left it."""
        if self._place.lifeline >= 0:
            os.close(self._place.lifeline)

    # --- what groups need ------------------------------------------------------------------------------------------

    def open_lane(
        self, group: int, suffix: str, members: tuple[int, ...], *, bucket_bytes: int = 0, direct: bool = False
    ) -> Lane:
        """Open a channel together with the other members, and watch over it."""
        backend = self._alone if len(members) == 1 else self._place.backend
        spec = ChannelSpec(
            id=f"{group}.{suffix}",
            members=members,
            me=members.index(self.rank),
            bucket_bytes=bucket_bytes,
            direct=direct,
        )
        try:
            channel = backend.open_channel(spec, Deadline(self._opening_s))
        except RondeError as error:
            raise (self._presence.over or error) from None
        lane = Lane(channel, group, self.recorder, self.limit_s, watched=self.settings.coordinator_hosted)
        self._presence.adopt(lane)
        at_ns = time.monotonic_ns()
        self.recorder.emit(ChannelOpened(at_ns=at_ns, rank=self.rank, channel=spec.id, members=members))
        return lane

    def close_lane(self, lane: Lane) -> None:
        """Close a channel. Idempotent."""
        if lane in self._presence.lanes:
            self._presence.drop(lane)
            lane.close()
            at_ns = time.monotonic_ns()
            self.recorder.emit(ChannelClosed(at_ns=at_ns, rank=self.rank, channel=lane.channel.spec.id))

    def add_named(self, named: Named) -> None:
        """Let the engine listen for a group's named operations."""
        self._presence.add_named(named)

    def drop_named(self, group: int) -> None:
        """No more of this group."""
        self._presence.drop_named(group)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _make_group(self, id: int, ranks: tuple[int, ...]) -> Group:
        dispatch = Dispatch(self, id, ranks, ranks.index(self.rank)) if self.rank in ranks else None
        if id:
            self.recorder.emit(GroupAdded(at_ns=time.monotonic_ns(), rank=self.rank, group=id, ranks=ranks))
        return Group(id, ranks, self.rank, dispatch)

    def _ask(self, wanted: GroupWanted) -> int:
        answer = self.engine.ask(wanted, Deadline(self.limit_s))
        if answer.why:
            raise self._presence.fault(range(self.size)) or Mismatch(answer.why)
        return answer.id

    def _change_trace(self, wanted: TraceWanted) -> None:
        with self._changing_trace:
            why = self.engine.ask_trace(wanted, Deadline(self.limit_s))
        if why:
            raise ValueError(why)

    def _note_start(self) -> None:
        self.recorder.emit(
            Started(
                at_ns=time.monotonic_ns(),
                rank=self.rank,
                size=self.size,
                host=self._host_name,
                pid=os.getpid(),
                backend=self._place.backend.name,
            )
        )


def as_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """The members of a group, sorted. ValueError names those that cannot be."""
    given = [operator.index(rank) for rank in ranks]
    if not given:
        raise ValueError("a group needs at least one rank")
    outside = sorted({rank for rank in given if not 0 <= rank < size})
    if outside:
        raise ValueError(f"a group's ranks must be from 0 to {size - 1}, got {', '.join(map(str, outside))}")
    twice = sorted({rank for rank in given if given.count(rank) > 1})
    if twice:
        raise ValueError(f"a group has each rank once, got {', '.join(map(str, twice))} more than once")
    return tuple(sorted(given))


def _make_leave(orderly: bool, why: str, error: BaseException | None) -> Leave:
    if error is None:
        return Leave(orderly, why)
    missing = error.missing if isinstance(error, RondeError) else ()
    failure = Failure.OTHER
    if isinstance(error, Mismatch):
        failure = Failure.MISMATCH
    elif missing or isinstance(error, OperationTimeout):
        failure = Failure.TIMEOUT
    return Leave(orderly, why, failure, missing, where_was_raised(error))
