"""Who is still there, and what ends when somebody is not. Shared by the engine, which learns of losses, and the world,
which opens and closes lanes.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable

from ronde.comm.backend import Backend
from ronde.comm.lane import Lane
from ronde.comm.named import Named
from ronde.errors import PeerLost, RondeError

__all__ = ["Presence"]


class Presence:
    """The lanes and named operations of this rank; each ends when a member is lost or the round is over."""

    def __init__(self, rank: int, size: int, backend: Backend) -> None:
        self._rank = rank
        self._size = size
        self._backend = backend
        self._lock = threading.Lock()
        self._over: RondeError | None = None
        self._lost: dict[int, str] = {}
        self._lanes: tuple[Lane, ...] = ()
        self._named: dict[int, Named] = {}

    @property
    def over(self) -> RondeError | None:
        """Why the round is over for this rank, if it is."""
        return self._over

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All that are open."""
        return self._lanes

    @property
    def all_named(self) -> tuple[Named, ...]:
        """The named operations of all groups."""
        with self._lock:
            return tuple(self._named.values())

    def named(self, group: int) -> Named | None:
        """Those of one group."""
        return self._named.get(group)

    def fault(self, members: Container[int]) -> RondeError | None:
        """Why these ranks cannot do anything together any more, the first reason there was; None when they can."""
        for rank, why in self._lost.items():
            if rank in members:
                return PeerLost(rank=self._rank, peer=rank, why=why)
        return self._over

    def adopt(self, lane: Lane) -> None:
        """Watch over a lane. It ends at once if a member is lost already."""
        with self._lock:
            self._lanes = (*self._lanes, lane)
            error = self.fault(lane.members)
        if error is not None:
            _abort(lane, error)

    def drop(self, lane: Lane) -> None:
        """The lane is closed."""
        with self._lock:
            self._lanes = tuple(each for each in self._lanes if each is not lane)

    def add_named(self, named: Named) -> None:
        """Watch over a group's named operations. They end at once if a member is lost already."""
        with self._lock:
            self._named[named.group] = named
            error = self.fault(named.lane.members)
        if error is not None:
            named.end(error)

    def drop_named(self, group: int) -> None:
        """The group is no more."""
        with self._lock:
            self._named.pop(group, None)

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone: everything it was part of is over."""
        with self._lock:
            self._lost.setdefault(rank, why)
            lanes = [lane for lane in self._lanes if rank in lane.members]
            named = [each for each in self._named.values() if rank in each.lane.members]
        self._backend.lost(rank, why)
        _finish(lanes, named, PeerLost(rank=self._rank, peer=rank, why=why))

    def end(self, error: RondeError) -> None:
        """The round is over, and everything with it. The first reason stays."""
        with self._lock:
            if self._over is not None:
                return
            self._over = error
            lanes, named = list(self._lanes), list(self._named.values())
        for rank in range(self._size):
            if rank != self._rank:
                self._backend.lost(rank, str(error))  # so that nobody waits in the opening of a channel
        _finish(lanes, named, error)


def _finish(lanes: Iterable[Lane], named: Iterable[Named], error: RondeError) -> None:
    for lane in lanes:
        _abort(lane, error)
    for each in named:
        each.end(error)


def _abort(lane: Lane, error: RondeError) -> None:
    if isinstance(error, PeerLost):
        lane.abort(lost=error.peer, why=error.why)
    else:
        lane.abort(why=str(error))
