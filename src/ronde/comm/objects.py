"""Collectives on Python objects: pickled, sent as bytes, unpickled on arrival. Public as ronde.objects.

What is unpickled was sent by a member of the job: the sockets of the data plane were authenticated with the job's key
before anything was read from them. All of them are matched by program order; without a group they are for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group, split_by_counts
from ronde.comm.world import resolve_group

__all__ = ["allgather", "alltoall", "broadcast", "gather", "receive", "send"]


def broadcast(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """The root's object for all members; what the others pass is ignored. root is a rank of the world."""
    members = resolve_group(group)
    is_root = _is(members, root)
    pickled = _pickle(obj) if is_root else np.empty(0, np.uint8)
    size = members.broadcast(np.array([pickled.size], np.int64), root=root)
    data = members.broadcast(pickled if is_root else np.empty(int(size[0]), np.uint8), root=root)
    return obj if is_root else _unpickle(data)


def allgather(obj: Any, *, group: Group | None = None) -> list[Any]:
    """The objects of all members, in their order."""
    return [_unpickle(data) for data in resolve_group(group).allgather_each(_pickle(obj))]


def gather(obj: Any, root: int = 0, *, group: Group | None = None) -> list[Any] | None:
    """The objects of all members on the root, in their order; None on the others."""
    members = resolve_group(group)
    if root not in members.ranks:
        raise ValueError(f"gather: root must be a member of {members!r}, got {root!r}")
    pickled = _pickle(obj)
    data, sizes = members.alltoall(pickled, splits=[pickled.size if rank == root else 0 for rank in members.ranks])
    return [_unpickle(piece) for piece in split_by_counts(data, sizes.tolist())] if _is(members, root) else None


def alltoall(objects: Sequence[Any], *, group: Group | None = None) -> list[Any]:
    """objects[i] goes to member i; the objects that the members gave to this one, in their order."""
    members = resolve_group(group)
    if len(objects) != members.size:
        raise ValueError(f"alltoall: needs {members.size} objects, one per member of {members!r}, got {len(objects)}")
    pickled = [_pickle(obj) for obj in objects]
    data, sizes = members.alltoall(np.concatenate(pickled), splits=[piece.size for piece in pickled])
    return [_unpickle(piece) for piece in split_by_counts(data, sizes.tolist())]


def send(obj: Any, to: int, *, group: Group | None = None) -> None:
    """Give an object to one member (a rank of the world), which calls receive()."""
    members = resolve_group(group)
    data = _pickle(obj)
    members.send(np.array([data.size], np.int64), to)
    members.send(data, to)


def receive(source: int, *, group: Group | None = None) -> Any:
    """The object that one member (a rank of the world) sends."""
    members = resolve_group(group)
    size = members.receive(np.empty(1, np.int64), source)
    return _unpickle(members.receive(np.empty(int(size[0]), np.uint8), source))


def _is(group: Group, rank: int) -> bool:
    return group.rank is not None and group.ranks[group.rank] == rank


def _pickle(obj: object) -> Array:
    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)


def _unpickle(data: Array) -> Any:
    return cloudpickle.loads(data.data)
