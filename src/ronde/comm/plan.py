"""Buckets that are agreed on once and then reduced, gathered or broadcast in every step. For distributed optimizers,
through ronde.plan().

A plan has a channel of its own, so it never waits for other operations, and its buckets are in memory that the ranks of
a host share. After the members have compared their plans nothing is negotiated any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import msgspec
import numpy as np

from ronde.comm.buffers import ALIGNMENT, Array, address_of, as_array
from ronde.comm.call import Call, CallOptions, Signature, Span, even_shares, get_signature
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.comm.work import Work
from ronde.errors import Mismatch
from ronde.text import format_rank_answers, format_ranks
from ronde.types import REDUCING_KINDS, DType, Op, OperationKind

BUCKET_KINDS = ("allreduce", "reduce_scatter", "allgather", "broadcast")
SHARED_KINDS = ("reduce_scatter", "allgather")


@dataclass(frozen=True, slots=True)
class Bucket:
    """One array that travels as a whole, in place: the number and type of its elements, and what is done with it.

    allreduce       every member gets the reduced bucket
    reduce_scatter  every member gets its share of the reduced bucket; what the other shares hold then is undefined
    allgather       every member gives its share, and gets those of all
    broadcast       every member gets the bucket of the root
    """

    count: int
    """Number of elements, at least 1."""
    dtype: str = "float32"
    """Name of the element type; `bfloat16` shows as uint16 in NumPy."""
    op: str | Op = "mean"
    """How the members' numbers are combined, as in allreduce."""
    prescale: float = 1.0
    """Each member's numbers are multiplied by this before they are combined."""
    postscale: float = 1.0
    """The result is multiplied by this."""
    name: str = ""
    """For errors and events."""
    parts: tuple[int, ...] = ()
    """How many elements each of the arrays in it has, for adasum, which weighs every array by itself; else empty."""
    kind: str = "allreduce"
    """allreduce, reduce_scatter, allgather or broadcast."""
    root: int = 0
    """The root of a broadcast, a rank of the world."""
    shares: tuple[int, ...] = ()
    """reduce_scatter and allgather: how many elements each member has. Empty divides them evenly; the first members may
    have one more."""

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"bucket {self.name!r}: count must be a whole number from 1, got {self.count!r}")
        if self.dtype.upper() not in DType.__members__:
            known = ", ".join(dtype.name.lower() for dtype in DType)
            raise ValueError(f"bucket {self.name!r}: dtype must be one of {known}, got {self.dtype!r}")
        if self.parts and sum(self.parts) != self.count:
            raise ValueError(f"bucket {self.name!r}: its parts have {sum(self.parts)} elements, it has {self.count}")
        if self.kind not in BUCKET_KINDS:
            known = ", ".join(BUCKET_KINDS)
            raise ValueError(f"bucket {self.name!r}: kind must be one of {known}, got {self.kind!r}")
        if self.parts and self.kind != "allreduce":
            raise ValueError(f"bucket {self.name!r}: parts are for allreduce, not for {self.kind}")
        if self.shares and self.kind not in SHARED_KINDS:
            raise ValueError(f"bucket {self.name!r}: shares are for {' and '.join(SHARED_KINDS)}, not for {self.kind}")
        if self.shares and (min(self.shares) < 0 or sum(self.shares) != self.count):
            raise ValueError(f"bucket {self.name!r}: shares must be from 0 and have {self.count} elements together")

    @property
    def number(self) -> DType:
        # The element type as channels know it.
        return DType[self.dtype.upper()]

    @property
    def num_bytes(self) -> int:
        """Size of the bucket."""
        return self.count * self.number.num_bytes


class Plan(AbstractContextManager["Plan"]):
    """Buckets that the members agreed on. Write into `arrays[i]` (of an allgather into `shares[i]`), then start(i) or
    run(i): the result is there, too (of a reduce_scatter in `shares[i]`).

    All members must make the same plan and start its buckets in the same order.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Group, *, name: str = "") -> None:
        """Members that give their plans names may make those of different names in any order."""
        self.buckets = tuple(buckets)
        """The buckets that the members agreed on."""
        if not self.buckets:
            raise ValueError("a plan needs at least one bucket")
        self._group = group
        for bucket in self.buckets:
            _check_members(bucket, group)
        signatures = [_signature_of(index, bucket) for index, bucket in enumerate(self.buckets)]
        _check_plans_match(group, [signature.description for signature in signatures], name and f"ronde.plan.{name}")
        sizes = [-(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT for bucket in self.buckets]
        starts = [0, *accumulate(sizes)]
        self._channel: Channel = group.open_plan_channel(starts[-1], name)
        self.group = group.with_channel(self._channel)
        """The members. Operations without a name run on the plan's channel, in one order with its buckets."""
        memory = as_array(self._channel.backend_channel.bucket())
        arrays = [
            memory[start : start + bucket.num_bytes].view(bucket.number.numpy)
            for area in range(2)
            for start, bucket in zip((area * starts[-1] + start for start in starts), self.buckets, strict=False)
        ]
        self.arrays: tuple[Array, ...] = tuple(arrays[: len(self.buckets)])
        """The buckets of this rank, in memory shared with the other ranks of its host; zeros at first."""
        self.spare_arrays: tuple[Array, ...] = tuple(arrays[len(self.buckets) :])
        """Other memory for the same buckets, which costs nothing until it is used: for a rank that still needs what
        `arrays` hold. join() of this rank overwrites it."""
        self.shares: tuple[Array, ...] = self._cut_shares(self.arrays)
        """By bucket, this rank's share of its array; for kinds without shares the whole array."""
        self._records = tuple(
            ((signature, bucket.name or str(index)),)
            for index, (signature, bucket) in enumerate(zip(signatures, self.buckets, strict=True))
        )
        """Per bucket, what is recorded at the end of its call."""
        self._calls, self._spare_calls = (
            tuple(
                _make_call(signature, bucket, group, address_of(array))
                for signature, bucket, array in zip(signatures, self.buckets, arrays, strict=True)
            )
            for arrays in (self.arrays, self.spare_arrays)
        )
        spare_shares = self._cut_shares(self.spare_arrays)
        self._results, self._spare_results = (
            tuple(
                share if bucket.kind == "reduce_scatter" else array
                for bucket, array, share in zip(self.buckets, arrays, shares, strict=True)
            )
            for arrays, shares in ((self.arrays, self.shares), (self.spare_arrays, spare_shares))
        )

    def start(self, index: int, *, spare: bool = False) -> Work:
        """Do in the background what bucket `index` is for; the work's result is its array, or this rank's share of it
        after a reduce_scatter. With `spare`, this rank uses its spare array; the other members may use either."""
        records, call = self._records[index], (self._spare_calls if spare else self._calls)[index]
        running_calls = (self._channel.submit(call, records),)
        signature, name = records[0]
        result = (self._spare_results if spare else self._results)[index]
        return Work(signature, name, (), result, running_calls=running_calls, timeout_s=self._group.operation_timeout_s)

    def run(self, index: int, *, spare: bool = False) -> Array:
        """As start(), but wait for it and return the result."""
        self._channel.run((self._spare_calls if spare else self._calls)[index], self._records[index][0][0])
        return (self._spare_results if spare else self._results)[index]

    def _cut_shares(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        pairs = zip(self.buckets, arrays, strict=True)
        return tuple(array[slice(*_own_range(bucket, self._group))] for bucket, array in pairs)

    def close(self) -> None:
        """Close the channel. The arrays stay usable as memory of this rank. Idempotent; all members close theirs."""
        self._group.close_plan_channel(self._channel)

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_members(bucket: Bucket, group: Group) -> None:
    if bucket.kind == "broadcast" and bucket.root not in group.ranks:
        members = format_ranks(group.ranks)
        raise ValueError(f"bucket {bucket.name!r}: root must be a member ({members}), got {bucket.root!r}")
    if bucket.shares and len(bucket.shares) != group.size:
        raise ValueError(f"bucket {bucket.name!r} has {len(bucket.shares)} shares for {group.size} members")


def _signature_of(index: int, bucket: Bucket) -> Signature:
    kind = OperationKind[bucket.kind.upper()]
    reduces = kind in REDUCING_KINDS
    if not reduces and (bucket.prescale, bucket.postscale) != (1.0, 1.0):
        raise ValueError(f"bucket {bucket.name!r}: prescale and postscale are for reductions, not for {bucket.kind}")
    options = CallOptions(
        bucket.op if reduces else Op.SUM,
        bucket.prescale,
        bucket.postscale,
        bucket.root if kind is OperationKind.BROADCAST else -1,
    )
    shapes = tuple((count,) for count in bucket.parts or (bucket.count,))
    signature = get_signature(kind, bucket.number, shapes, options)
    name = f" {bucket.name!r}" if bucket.name else ""
    description = f"bucket {index}{name}: {signature.description}"
    if kind is OperationKind.ALLGATHER:
        description += f" of {bucket.count}"
    if bucket.shares and bucket.shares != even_shares(bucket.count, len(bucket.shares)):
        description += f" in shares of {', '.join(map(str, bucket.shares))}"
    return msgspec.structs.replace(signature, label="bucket", description=description)


def _shares_of(bucket: Bucket, group: Group) -> tuple[int, ...]:
    return bucket.shares or even_shares(bucket.count, group.size)


def _own_range(bucket: Bucket, group: Group) -> tuple[int, int]:
    """Where this rank's share of a bucket begins and ends; for kinds without shares that is all of it."""
    if bucket.kind not in SHARED_KINDS:
        return 0, bucket.count
    shares, member = _shares_of(bucket, group), group.rank or 0
    begin = sum(shares[:member])
    return begin, begin + shares[member]


def _make_call(signature: Signature, bucket: Bucket, group: Group, start: int) -> Call:
    """The call that works in place on a bucket that begins at this address."""
    if bucket.kind in SHARED_KINDS:
        begin, end = _own_range(bucket, group)
        share = start + begin * bucket.number.num_bytes
        is_gather = bucket.kind == "allgather"
        span = Span(share, start, end - begin) if is_gather else Span(start, share, bucket.count)
        return signature.make_call((span,), None, counts=_shares_of(bucket, group))
    if bucket.kind == "broadcast":
        return signature.make_call((Span(start, start, bucket.count),), None, peer=group.ranks.index(bucket.root))
    spans = []
    for count in bucket.parts or (bucket.count,):
        spans.append(Span(start, start, count))
        start += count * bucket.number.num_bytes
    return signature.make_call(tuple(spans), None)


def _check_plans_match(group: Group, descriptions: list[str], name: str) -> None:
    """Raise Mismatch, the same on every member, naming the first bucket in which the members' plans differ."""
    own = np.frombuffer(msgspec.json.encode(descriptions), np.uint8)
    plans = [msgspec.json.decode(data.tobytes(), type=list[str]) for data in group.allgather_each(own, name)]
    for index, row in enumerate(zip_longest(*plans, fillvalue="no such bucket")):
        if len(set(row)) > 1:
            sides = format_rank_answers(dict(zip(group.ranks, row, strict=True)), verb=": ")
            raise Mismatch(f"the members' plans differ in bucket {index}: {sides}")
