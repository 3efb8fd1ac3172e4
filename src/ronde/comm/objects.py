"""Collectives on Python objects: pickled, sent as bytes, unpickled on arrival. Public as ronde.objects.

Unpickling runs what the sender wrote, so nothing is unpickled that is not authentic: every object travels with a tag
that only a member of the job can make. The data plane itself protects a connection only when it is made. All functions
are matched by program order; without a group they are for all ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from ronde.comm.buffers import Array, split_by_counts
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.errors import ProtocolError, RondeError

__all__ = ["allgather", "alltoall", "broadcast", "gather", "receive", "send"]

TAG_BYTES = 16

Result = TypeVar("Result")


def broadcast(obj: Any, root: int = 0, *, group: Group | None = None) -> Any:  # any object
    """The root's object for all members; what the others pass is ignored. root is a rank of the world."""
    members = resolve_group(group)
    exchange = _Exchange(members, "broadcast")
    is_root = exchange.own_rank == root
    packed = exchange.pack(obj) if is_root else np.empty(0, np.uint8)
    size = members.broadcast(np.array([packed.size], np.int64), root=root)
    data = members.broadcast(packed if is_root else _make_buffer(size, root), root=root)
    exchange.count()
    return obj if is_root else exchange.unpack([(root, data)])[0]


def allgather(obj: Any, *, group: Group | None = None) -> list[Any]:
    """The objects of all members, in their order."""
    members = resolve_group(group)
    exchange = _Exchange(members, "allgather")
    pieces = members.allgather_each(exchange.pack(obj))
    exchange.count()
    return exchange.unpack(zip(members.ranks, pieces, strict=True))


def gather(obj: Any, root: int = 0, *, group: Group | None = None) -> list[Any] | None:
    """The objects of all members on the root, in their order; None on the others."""
    members = resolve_group(group)
    if root not in members.ranks:
        raise ValueError(f"gather: root must be a member of {members!r}, got {root!r}")
    exchange = _Exchange(members, "gather")
    packed = exchange.pack(obj, root)
    data, sizes = members.alltoall(packed, splits=[packed.size if rank == root else 0 for rank in members.ranks])
    exchange.count()
    if exchange.own_rank != root:
        return None
    return exchange.unpack(zip(members.ranks, split_by_counts(data, sizes.tolist()), strict=True), root)


def alltoall(objects: Sequence[Any], *, group: Group | None = None) -> list[Any]:
    """objects[i] goes to member i; the objects that the members gave to this one, in their order."""
    members = resolve_group(group)
    if len(objects) != members.size:
        raise ValueError(f"alltoall: needs {members.size} objects, one per member of {members!r}, got {len(objects)}")
    exchange = _Exchange(members, "alltoall")
    packed = [exchange.pack(obj, rank) for rank, obj in zip(members.ranks, objects, strict=True)]
    data, sizes = members.alltoall(np.concatenate(packed), splits=[piece.size for piece in packed])
    exchange.count()
    pieces = split_by_counts(data, sizes.tolist())
    return exchange.unpack(zip(members.ranks, pieces, strict=True), exchange.own_rank)


def send(obj: Any, to: int, *, group: Group | None = None) -> None:
    """Give an object to one member (a rank of the world), which calls receive().

    It travels with tag 0: give arrays that are sent to the same member meanwhile another tag.
    """
    members = resolve_group(group)
    exchange = _Exchange(members, "message", to=to)
    data = exchange.pack(obj, to)
    members.send(np.array([data.size], np.int64), to)
    members.send(data, to)
    exchange.count()


def receive(source: int, *, group: Group | None = None) -> Any:
    """The object that one member (a rank of the world) sends.

    It travels with tag 0: receive arrays from any source with another tag.
    """
    members = resolve_group(group)
    exchange = _Exchange(members, "message", source=source)
    size = members.receive(np.empty(1, np.int64), source)
    data = members.receive(_make_buffer(size, source), source)
    exchange.count()
    return exchange.unpack([(source, data)], exchange.own_rank)[0]


def call_on_first(function: Callable[[], Result], *, group: Group | None = None) -> Result:
    """Call a function on the first member alone; all members get what it returns, or raise the error that it raises.
    Other errors than RondeError, OSError, ValueError and ImportError end the first member, as everywhere."""
    members = resolve_group(group)
    answer: Result | None = None
    problem: Exception | None = None
    if members.rank == 0:
        try:
            answer = function()
        except (RondeError, OSError, ValueError, ImportError) as error:
            problem = error
    if members.size > 1:
        answer, problem = broadcast((answer, problem), members.ranks[0], group=members)
    if problem is not None:
        raise problem
    return answer  # type: ignore[return-value]  # it is that of the first member


class _Exchange:
    """One call of a function above: signs the objects that this rank sends, and checks those that it receives.

    The tag of an object covers the round (through the key), the channel, the kind of call, sender and receiver, and how
    many calls there were before. So no object can be used in the place of another, or a second time.
    """

    def __init__(self, members: Group, kind: str, *, source: int | None = None, to: int | None = None) -> None:
        """Messages, which have a source or a receiver, are counted for each pair of them, apart from collectives."""
        self._channel = members.ordered_channel.backend_channel.spec.id  # raises when nothing can start in the group
        assert members.rank is not None
        self.own_rank = own = members.ranks[members.rank]
        self._stream: tuple[int, ...] = ()
        if source is not None:
            self._stream = (source, own)
        elif to is not None:
            self._stream = (own, to)
        self._members = members
        self._kind = kind
        self._number = members.num_objects[self._stream]

    def count(self) -> None:
        """The data plane has delivered the objects. What ended in an error, as a mismatch, is not counted by anyone."""
        self._members.num_objects[self._stream] += 1

    def pack(self, obj: object, to: int = -1) -> Array:
        """Pickle an object for one member or, without `to`, for all; behind it is its tag."""
        buffer = io.BytesIO()
        cloudpickle.dump(obj, buffer)
        with buffer.getbuffer() as pickled:
            tag = self._make_tag(self.own_rank, to, pickled)
        buffer.write(tag)
        return np.frombuffer(buffer.getbuffer(), np.uint8)

    def unpack(self, pieces: Iterable[tuple[int, Array]], to: int = -1) -> list[Any]:
        """The objects of these senders. None is unpickled unless all are authentic."""
        pickles = []
        for source, data in pieces:
            pickled, tag = data[:-TAG_BYTES].data, data[-TAG_BYTES:].tobytes()
            if not hmac.compare_digest(tag, self._make_tag(source, to, pickled)):
                raise ProtocolError(
                    f"{self._kind} of an object on rank {self.own_rank}: what came from rank {source} is not what that "
                    "rank sent, and was not unpickled; it was changed on its way, or that rank has sent something else"
                )
            pickles.append(pickled)
        return [cloudpickle.loads(pickled) for pickled in pickles]

    def _make_tag(self, source: int, to: int, pickled: memoryview) -> bytes:
        position = f"{self._channel} {self._kind} {source} {to} {self._number}\n"
        mac = hmac.new(self._members.object_key, position.encode(), hashlib.sha256)
        mac.update(pickled)
        return mac.digest()[:TAG_BYTES]


def _make_buffer(size: Array, source: int) -> Array:
    """Memory for an object of this size, which travels ahead of it."""
    num_bytes = int(size[0])
    if num_bytes < TAG_BYTES:
        raise ProtocolError(f"rank {source} announces an object of {num_bytes} bytes, which cannot be")
    return np.empty(num_bytes, np.uint8)
