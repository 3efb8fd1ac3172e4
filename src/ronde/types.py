"""The vocabulary shared by all layers: element types, operations, members, deadlines."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Deadline", "DType", "OperationKind", "Member", "Op", "Topology", "parse_op"]


class DType(enum.IntEnum):
    """Element types; the numbers are those of the C header."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT32 = 10
    FLOAT64 = 11
    BOOL = 12

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether it has a fraction, so that Adasum makes sense."""
        return DType.FLOAT16 <= self <= DType.FLOAT64

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy type with the same memory; bfloat16, which NumPy lacks, travels as uint16."""
        import numpy as np  # here: who only needs a deadline or a member does not wait for it

        return np.dtype("uint16") if self is DType.BFLOAT16 else np.dtype(self.name.lower())


_BYTES = {
    DType.UINT8: 1,
    DType.INT8: 1,
    DType.UINT16: 2,
    DType.INT16: 2,
    DType.UINT32: 4,
    DType.INT32: 4,
    DType.UINT64: 8,
    DType.INT64: 8,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
    DType.BOOL: 1,
}


class Op(enum.IntEnum):
    """How elements are combined; the numbers are those of the C header."""

    SUM = 0
    MEAN = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    ADASUM = 5


_OPS = {op.name.lower(): op for op in Op}


def parse_op(op: str | Op) -> Op:
    """The operation a caller means by "sum", "mean", "min", "max", "product" or "adasum"."""
    if isinstance(op, Op):
        return op
    found = _OPS.get(op) if isinstance(op, str) else None
    if found is None:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
    return found


class OperationKind(enum.IntEnum):
    """What a collective does; the numbers are those of the C header."""

    BARRIER = 0
    ALLREDUCE = 1
    ALLGATHER = 2
    BROADCAST = 3
    REDUCE_SCATTER = 4
    ALLTOALL = 5
    SEND = 6
    RECEIVE = 7
    JOIN = 8


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of a round, as all others see it."""

    rank: int
    host: str
    """Ranks with an equal host share memory."""
    pid: int
    unix_socket: str
    """Name of the abstract Unix socket where ranks of the same host connect."""
    tcp_addresses: tuple[str, ...] = ()
    """`address:port` where ranks of other hosts connect; tried in turn."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Where all ranks are. Every rank computes the same from the same members."""

    members: tuple[Member, ...]
    rank: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.members)

    @property
    def host_indices(self) -> tuple[int, ...]:
        """Per rank, the index of its host, hosts counted by their lowest rank."""
        seen: dict[str, int] = {}
        return tuple(seen.setdefault(member.host, len(seen)) for member in self.members)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on my host, myself included."""
        mine = self.members[self.rank].host
        return tuple(member.rank for member in self.members if member.host == mine)

    @property
    def local_rank(self) -> int:
        """My index among the ranks of my host."""
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on my host."""
        return len(self.local_ranks)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks with my local rank, one per host that has so many."""
        position: dict[str, int] = {}
        found = []
        for member in self.members:
            index = position.get(member.host, 0)
            position[member.host] = index + 1
            if index == self.local_rank:
                found.append(member.rank)
        return tuple(found)

    @property
    def cross_rank(self) -> int:
        """My index among them."""
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Their number."""
        return len(self.cross_ranks)


class Deadline:
    """A point in time made once at the top and handed down, so that waits add up to what was promised."""

    __slots__ = ("_expires_at_s", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._expires_at_s = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        left_s = self._expires_at_s - time.monotonic()
        return left_s if left_s > 0.0 else 0.0

    @property
    def expired(self) -> bool:
        """Whether time is up."""
        return time.monotonic() >= self._expires_at_s

    def __repr__(self) -> str:
        """For messages and debugging."""
        return f"Deadline({self.timeout_s} s, {self.remaining_s:.3f} s left)"
