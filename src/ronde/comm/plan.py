"""Buckets that are agreed on once and then reduced in every step. For distributed optimizers, through ronde.plan().

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

from ronde.comm.buffers import ALIGNMENT, Array, address_of
from ronde.comm.call import CallOptions, Signature, Span, get_signature
from ronde.comm.channel import Channel
from ronde.comm.group import Group
from ronde.comm.work import Work
from ronde.errors import Mismatch
from ronde.text import format_rank_answers
from ronde.types import DType, Op, OperationKind


@dataclass(frozen=True, slots=True)
class Bucket:
    """One array that is reduced as a whole: the number and type of its elements, and how they are combined."""

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

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"bucket {self.name!r}: count must be a whole number from 1, got {self.count!r}")
        if self.dtype.upper() not in DType.__members__:
            known = ", ".join(dtype.name.lower() for dtype in DType)
            raise ValueError(f"bucket {self.name!r}: dtype must be one of {known}, got {self.dtype!r}")
        if self.parts and sum(self.parts) != self.count:
            raise ValueError(f"bucket {self.name!r}: its parts have {sum(self.parts)} elements, it has {self.count}")

    @property
    def number(self) -> DType:
        """The element type as channels know it."""
        return DType[self.dtype.upper()]

    @property
    def num_bytes(self) -> int:
        """Size of the bucket."""
        return self.count * self.number.num_bytes


class Plan(AbstractContextManager["Plan"]):
    """Buckets that the members agreed on. Write into `arrays[i]`, then start(i) or run(i): the result is there, too.

    All members must make the same plan and start its buckets in the same order.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Group) -> None:
        self.buckets = tuple(buckets)
        """The buckets that the members agreed on."""
        if not self.buckets:
            raise ValueError("a plan needs at least one bucket")
        self._group = group
        signatures = [_signature_of(index, bucket) for index, bucket in enumerate(self.buckets)]
        _check_plans_match(group, [signature.description for signature in signatures])
        sizes = [-(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT for bucket in self.buckets]
        starts = [0, *accumulate(sizes)]
        self._channel: Channel = group.open_plan_channel(starts[-1])
        memory = self._channel.backend_channel.bucket()
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
        self._records = tuple(
            ((signature, bucket.name or str(index)),)
            for index, (signature, bucket) in enumerate(zip(signatures, self.buckets, strict=True))
        )
        """Per bucket, what is recorded when it was reduced."""
        self._calls, self._spare_calls = (
            tuple(
                signature.make_call(_spans(bucket, address_of(array)), None)
                for signature, bucket, array in zip(signatures, self.buckets, arrays, strict=True)
            )
            for arrays in (self.arrays, self.spare_arrays)
        )

    def start(self, index: int, *, spare: bool = False) -> Work:
        """Reduce bucket `index` in the background; the work's result is its array. With `spare`, this rank uses its
        spare array; the other members may use either."""
        records, call = self._records[index], (self._spare_calls if spare else self._calls)[index]
        running_calls = (self._channel.submit(call, records),)
        signature, name = records[0]
        result = (self.spare_arrays if spare else self.arrays)[index]
        return Work(signature, name, (), result, running_calls=running_calls, timeout_s=self._group.operation_timeout_s)

    def run(self, index: int, *, spare: bool = False) -> Array:
        """Reduce bucket `index` and wait for it; as start()."""
        self._channel.run((self._spare_calls if spare else self._calls)[index], self._records[index][0][0])
        return (self.spare_arrays if spare else self.arrays)[index]

    def close(self) -> None:
        """Close the channel. The arrays stay usable as memory of this rank. Idempotent; all members close theirs."""
        self._group.close_plan_channel(self._channel)

    def __exit__(self, *_: object) -> None:
        self.close()


def _signature_of(index: int, bucket: Bucket) -> Signature:
    options = CallOptions(bucket.op, bucket.prescale, bucket.postscale)
    shapes = tuple((count,) for count in _counts(bucket))
    signature = get_signature(OperationKind.ALLREDUCE, bucket.number, shapes, options)
    name = f" {bucket.name!r}" if bucket.name else ""
    description = f"bucket {index}{name}: {signature.description}"
    return msgspec.structs.replace(signature, label="bucket", description=description)


def _counts(bucket: Bucket) -> tuple[int, ...]:
    return bucket.parts or (bucket.count,)


def _spans(bucket: Bucket, start: int) -> tuple[Span, ...]:
    """The arrays of a bucket that begins at this address; each is reduced in place."""
    spans = []
    for count in _counts(bucket):
        spans.append(Span(start, start, count))
        start += count * bucket.number.num_bytes
    return tuple(spans)


def _check_plans_match(group: Group, descriptions: list[str]) -> None:
    """Raise Mismatch, the same on every member, naming the first bucket in which the members' plans differ."""
    own = np.frombuffer(msgspec.json.encode(descriptions), np.uint8)
    plans = [msgspec.json.decode(data.tobytes(), type=list[str]) for data in group.allgather_each(own)]
    for index, row in enumerate(zip_longest(*plans, fillvalue="no such bucket")):
        if len(set(row)) > 1:
            sides = format_rank_answers(dict(zip(group.ranks, row, strict=True)), verb=": ")
            raise Mismatch(f"the members' plans differ in bucket {index}: {sides}")
