"""Buckets that are agreed on once and then reduced over and over. For distributed optimizers, through ronde.plan().

A plan has a channel of its own, so it never waits for other operations, and its buckets live in memory that the ranks
of a host share. After the members have compared their plans nothing is negotiated any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import TracebackType

import msgspec
import numpy as np

from ronde.comm.buffers import Array, address_of
from ronde.comm.call import Call, CallOptions, Signature, SignatureCache, Span
from ronde.comm.channel import CallRecord, Channel
from ronde.comm.group import Group, GroupChannels
from ronde.comm.work import Work
from ronde.errors import Mismatch
from ronde.text import format_rank_answers
from ronde.types import DType, Op, OperationKind

__all__ = ["Bucket", "Plan"]

ALIGNMENT = 64
"""Buckets begin at a cache line, so that no line has two writers."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One array that is reduced as a whole: so many numbers of this dtype, combined in this way."""

    count: int
    """Number of elements, at least 1."""
    dtype: str = "float32"
    """Name of the element type; `bfloat16` shows as uint16 in NumPy."""
    op: str | Op = "mean"
    """How the members' numbers are combined, as in allreduce."""
    prescale: float = 1.0
    """Factor on the way in."""
    postscale: float = 1.0
    """Factor on the way out."""
    name: str = ""
    """For errors and events."""
    parts: tuple[int, ...] = ()
    """How many elements each of the arrays in it has, for adasum, which weighs every array by itself; else empty."""

    def __post_init__(self) -> None:
        """Check at once what can be checked here; Forms checks the rest."""
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"bucket {self.name!r}: count must be a whole number from 1, got {self.count!r}")
        if self.dtype.upper() not in DType.__members__:
            known = ", ".join(dtype.name.lower() for dtype in DType)
            raise ValueError(f"bucket {self.name!r}: dtype must be one of {known}, got {self.dtype!r}")
        if self.parts and sum(self.parts) != self.count:
            raise ValueError(f"bucket {self.name!r}: its parts have {sum(self.parts)} elements, it has {self.count}")

    @property
    def number(self) -> DType:
        """The dtype as the channel knows it."""
        return DType[self.dtype.upper()]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.count * self.number.num_bytes


class Plan:
    """Buckets under one agreement. Write into `arrays[i]`, then start(i) or run(i): the result is in the same place.

    All members must make the same plan and start its buckets in the same order.
    """

    def __init__(self, buckets: Sequence[Bucket], group: Group) -> None:
        self.buckets = tuple(buckets)
        """What was agreed on."""
        if not self.buckets:
            raise ValueError("a plan needs at least one bucket")
        self._channels: GroupChannels = group.dispatch
        self._operation_timeout_s = self._channels.operation_timeout_s
        forms = [_signature_of(bucket) for bucket in self.buckets]
        texts = [
            _describe(index, bucket, form) for index, (bucket, form) in enumerate(zip(self.buckets, forms, strict=True))
        ]
        _check_plans_match(group, texts)
        starts = _starts(self.buckets)
        self._channel: Channel = self._channels.open_plan_channel(starts[-1])
        memory = self._channel.backend_channel.bucket()
        self.arrays: tuple[Array, ...] = tuple(
            memory[start : start + bucket.num_bytes].view(bucket.number.numpy)
            for start, bucket in zip(starts, self.buckets, strict=False)
        )
        """My buckets, in memory shared with the other ranks of this host; zeros at first."""
        self._calls: tuple[Call, ...] = tuple(
            form.make_call(_spans(bucket, address_of(array)), None, description=text)
            for bucket, form, array, text in zip(self.buckets, forms, self.arrays, texts, strict=True)
        )
        self._records = tuple(
            (CallRecord("bucket", bucket.name or str(index), bucket.num_bytes),)
            for index, bucket in enumerate(self.buckets)
        )

    def start(self, index: int) -> Work:
        """Reduce bucket `index` in the background; the work's result is its array."""
        array = self.arrays[index]
        flight = self._channel.submit(self._calls[index], self._records[index])
        return Work((flight,), lambda: array, self._operation_timeout_s)

    def run(self, index: int) -> Array:
        """Reduce bucket `index` and wait for it."""
        entry = self._records[index][0]
        self._channel.run(self._calls[index], entry.label, entry.num_bytes)
        return self.arrays[index]

    def close(self) -> None:
        """Close the channel. The arrays stay usable as memory of one's own. Idempotent; all members close theirs."""
        self._channels.close_plan_channel(self._channel)

    def __enter__(self) -> Plan:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _signature_of(bucket: Bucket) -> Signature:
    options = CallOptions(bucket.op, bucket.prescale, bucket.postscale)
    return SignatureCache().find(
        OperationKind.ALLREDUCE, bucket.number, tuple((count,) for count in _counts(bucket)), options
    )


def _counts(bucket: Bucket) -> tuple[int, ...]:
    return bucket.parts or (bucket.count,)


def _spans(bucket: Bucket, start: int) -> tuple[Span, ...]:
    """The bucket in place, which begins at this address."""
    parts = []
    for count in _counts(bucket):
        parts.append(Span(start, start, count))
        start += count * bucket.number.num_bytes
    return tuple(parts)


def _describe(index: int, bucket: Bucket, signature: Signature) -> str:
    named = f" {bucket.name!r}" if bucket.name else ""
    return f"bucket {index}{named}: {signature.description}"


def _starts(buckets: Sequence[Bucket]) -> list[int]:
    """Where each bucket begins, and behind the last one the size of all."""
    starts = [0]
    for bucket in buckets:
        starts.append(starts[-1] + -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT)
    return starts


def _check_plans_match(group: Group, descriptions: list[str]) -> None:
    """Raise Mismatch, the same on every member, naming the first bucket in which the members' plans differ."""
    mine = np.frombuffer(msgspec.json.encode(descriptions), np.uint8)
    plans = [msgspec.json.decode(data.tobytes(), type=list[str]) for data in group.allgather_each(mine)]
    for index, row in enumerate(zip_longest(*plans, fillvalue="no such bucket")):
        if len(set(row)) > 1:
            sides = format_rank_answers(dict(zip(group.ranks, row, strict=True)), verb=": ")
            raise Mismatch(f"the members' plans differ in bucket {index}: {sides}")
