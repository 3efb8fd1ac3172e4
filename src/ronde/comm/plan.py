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

from ronde.comm.backend import Call, Part
from ronde.comm.buffers import Array, address
from ronde.comm.dispatch import Dispatch
from ronde.comm.group import Group
from ronde.comm.lane import Entry, Lane
from ronde.comm.signature import Form, Forms, Options
from ronde.comm.wording import answers
from ronde.comm.work import Work
from ronde.errors import Mismatch
from ronde.types import DType, Kind, Op

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
        self._dispatch: Dispatch = group.dispatch
        self._limit_s = self._dispatch.limit_s
        forms = [_form(bucket) for bucket in self.buckets]
        texts = [
            _text(index, bucket, form) for index, (bucket, form) in enumerate(zip(self.buckets, forms, strict=True))
        ]
        _compare(group, texts)
        starts = _starts(self.buckets)
        self._lane: Lane = self._dispatch.open_plan(starts[-1])
        memory = self._lane.channel.bucket()
        self.arrays: tuple[Array, ...] = tuple(
            memory[start : start + bucket.num_bytes].view(bucket.number.numpy)
            for start, bucket in zip(starts, self.buckets, strict=False)
        )
        """My buckets, in memory shared with the other ranks of this host; zeros at first."""
        self._calls: tuple[Call, ...] = tuple(
            form.call(_parts(bucket, address(array)), None, text=text)
            for bucket, form, array, text in zip(self.buckets, forms, self.arrays, texts, strict=True)
        )
        self._entries = tuple(
            (Entry("bucket", bucket.name or str(index), bucket.num_bytes),) for index, bucket in enumerate(self.buckets)
        )

    def start(self, index: int) -> Work:
        """Reduce bucket `index` in the background; the work's result is its array."""
        array = self.arrays[index]
        flight = self._lane.submit(self._calls[index], self._entries[index])
        return Work((flight,), lambda: array, self._limit_s)

    def run(self, index: int) -> Array:
        """Reduce bucket `index` and wait for it."""
        entry = self._entries[index][0]
        self._lane.run(self._calls[index], entry.label, entry.num_bytes)
        return self.arrays[index]

    def close(self) -> None:
        """Close the channel. The arrays stay usable as memory of one's own. Idempotent; all members close theirs."""
        self._dispatch.close_plan(self._lane)

    def __enter__(self) -> Plan:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _form(bucket: Bucket) -> Form:
    options = Options(bucket.op, bucket.prescale, bucket.postscale)
    return Forms().find(Kind.ALLREDUCE, bucket.number, tuple((count,) for count in _counts(bucket)), options)


def _counts(bucket: Bucket) -> tuple[int, ...]:
    return bucket.parts or (bucket.count,)


def _parts(bucket: Bucket, start: int) -> tuple[Part, ...]:
    """The bucket in place, which begins at this address."""
    parts = []
    for count in _counts(bucket):
        parts.append(Part(start, start, count))
        start += count * bucket.number.num_bytes
    return tuple(parts)


def _text(index: int, bucket: Bucket, form: Form) -> str:
    named = f" {bucket.name!r}" if bucket.name else ""
    return f"bucket {index}{named}: {form.text}"


def _starts(buckets: Sequence[Bucket]) -> list[int]:
    """Where each bucket begins, and behind the last one the size of all."""
    starts = [0]
    for bucket in buckets:
        starts.append(starts[-1] + -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT)
    return starts


def _compare(group: Group, texts: list[str]) -> None:
    """Raise Mismatch, the same on every member, naming the first bucket in which the members' plans differ."""
    mine = np.frombuffer(msgspec.json.encode(texts), np.uint8)
    plans = [msgspec.json.decode(data.tobytes(), type=list[str]) for data in group.allgather_each(mine)]
    for index, row in enumerate(zip_longest(*plans, fillvalue="no such bucket")):
        if len(set(row)) > 1:
            sides = answers(dict(zip(group.ranks, row, strict=True)), verb=": ")
            raise Mismatch(f"the members' plans differ in bucket {index}: {sides}")
