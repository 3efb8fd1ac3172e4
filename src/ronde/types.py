"""The types that all layers share: element types, operations and their rules, members, topology, deadlines."""

from __future__ import annotations

import enum
import operator
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


CPU = "cpu"
"""The device whose memory is that of the process."""


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
        return _BYTES[self]

    @property
    def is_float(self) -> bool:
        return DType.FLOAT16 <= self <= DType.FLOAT64

    @property
    def is_unsigned(self) -> bool:
        return self in (DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64, DType.BOOL)

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy type with the same memory; bfloat16, which NumPy lacks, travels as uint16."""
        import numpy as np  # here, because modules that need only deadlines or members must load quickly

        return np.dtype("uint16") if self is DType.BFLOAT16 else np.dtype(self.name.lower())


_BYTES = dict(zip(DType, (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1), strict=True))


class Op(enum.IntEnum):
    """How elements are combined; the numbers are those of the C header."""

    SUM = 0
    MEAN = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4
    ADASUM = 5
    BIT_AND = 6
    BIT_OR = 7
    BIT_XOR = 8

    @property
    def is_bitwise(self) -> bool:
        return self in (Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR)


_OPS = {op.name.lower(): op for op in Op}


def parse_op(op: str | Op) -> Op:
    """The operation a caller means by its name, such as "sum" or "bit_and"."""
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
    REDUCE = 9
    GATHER = 10
    SCATTER = 11


REDUCING_KINDS = (OperationKind.ALLREDUCE, OperationKind.REDUCE_SCATTER, OperationKind.REDUCE)
ROOTED_KINDS = (OperationKind.BROADCAST, OperationKind.REDUCE, OperationKind.GATHER, OperationKind.SCATTER)
VARIABLE_ROW_KINDS = (
    OperationKind.ALLGATHER,
    OperationKind.ALLTOALL,
    OperationKind.GATHER,
    OperationKind.SCATTER,
)
"""Kinds where members may have different numbers of rows."""


def find_reduction_error(kind: OperationKind, dtype: DType, op: Op, *, scaled: bool) -> str:
    """Return why a reduction of this kind cannot be done; empty when it can.

    These are the rules of supported() in the native library.
    """
    if dtype is DType.BOOL and (op is Op.MEAN or scaled):
        return "bool has no mean and cannot be scaled; convert it to numbers first"
    if op is Op.ADASUM and (not dtype.is_float or kind is not OperationKind.ALLREDUCE):
        return f"adasum is for allreduce of floating-point numbers, got {kind.name.lower()} of {dtype.name.lower()}"
    if op.is_bitwise and (dtype.is_float or scaled):
        what = "cannot be scaled" if scaled else f"is for whole numbers and bool, got {dtype.name.lower()}"
        return f"{op.name.lower()} {what}"
    return ""


JOINABLE = (
    "only in an allreduce that its zeros do not change: op sum, mean, bit_or, bit_xor, and max of unsigned numbers"
)
"""What a rank that has called join() takes part in, for errors."""


def can_be_joined(dtype: DType, op: Op) -> bool:
    """Whether ranks that have called join() can take part in such an allreduce of the others. The rule is that of
    works_with_zeros() in the native library."""
    return op in (Op.SUM, Op.MEAN, Op.BIT_OR, Op.BIT_XOR) or (op is Op.MAX and dtype.is_unsigned)


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
    pid_namespace: str = ""
    """Where its pid means something; empty if it is not known."""
    worker: str = ""
    """The identity of its process, which no other process of the job has: ranks belong to a round, and the next round
    may give this one to another process."""


def check_group_ranks(ranks: Iterable[int], size: int) -> tuple[int, ...]:
    """The ranks of a group, sorted. ValueError says what is wrong with them in a job of `size` ranks."""
    given = [operator.index(rank) for rank in ranks]
    if not given:
        raise ValueError("a group needs at least one rank")
    outside = sorted({rank for rank in given if not 0 <= rank < size})
    if outside:
        raise ValueError(f"a group's ranks must be from 0 to {size - 1}, got {', '.join(map(str, outside))}")
    unique = sorted(set(given))
    if len(unique) < len(given):
        twice = [rank for rank in unique if given.count(rank) > 1]
        raise ValueError(f"a group has each rank once, got {', '.join(map(str, twice))} more than once")
    return tuple(unique)


class Topology:
    """Which rank is on which host, as seen by one rank. Every rank derives the same from the same members."""

    def __init__(self, members: tuple[Member, ...], rank: int, *, round: int = 0) -> None:
        by_host: dict[str, list[int]] = {}
        for member in members:
            by_host.setdefault(member.host, []).append(member.rank)
        index_of = {host: index for index, host in enumerate(by_host)}
        self.members = members
        self.rank = rank
        self.round = round
        """The id of the round; no other round of the job has it."""
        self.size = len(members)
        self.host_indices = tuple([index_of[member.host] for member in members])
        """Per rank, the index of its host; hosts are counted by their lowest rank."""
        self.local_ranks = tuple(by_host[members[rank].host])
        """The ranks on this rank's host, itself included."""
        self.local_rank = self.local_ranks.index(rank)
        self.local_size = len(self.local_ranks)
        same_position = [ranks[self.local_rank] for ranks in by_host.values() if len(ranks) > self.local_rank]
        self.cross_ranks = tuple(sorted(same_position))
        """The ranks with the same local rank, one per host that has so many."""
        self.cross_rank = self.cross_ranks.index(rank)
        self.cross_size = len(self.cross_ranks)


class Deadline:
    """A point in time, made once where a wait begins and handed down, so that all waits together end in time."""

    __slots__ = ("_expires_at_s", "timeout_s")

    def __init__(self, timeout_s: float, *, elapsed_s: float = 0.0) -> None:
        self.timeout_s = timeout_s
        self._expires_at_s = time.monotonic() + timeout_s - elapsed_s

    @property
    def remaining_s(self) -> float:
        """Seconds until then, never negative."""
        remaining_s = self._expires_at_s - time.monotonic()
        return remaining_s if remaining_s > 0.0 else 0.0

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._expires_at_s
