"""Compression of gradients: which arrays are reduced instead of a bucket. A user's codec implements Codec and
BucketEncoder.

A codec opens one encoder per bucket, which may keep state from step to step: what rounding lost (error feedback), a
matrix of PowerSGD. Its *wires* are arrays that are reduced as the optimizer's op says, one after the other: the result
of the first may decide what the second holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ronde.comm.buffers import Array
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket


@dataclass(frozen=True, slots=True)
class WireArray:
    """An array that is reduced between the ranks."""

    count: int
    dtype: str


class BucketEncoder(Protocol):
    """Compresses the gradients of one bucket, and decompresses the results. Arrays of bfloat16 are uint16 here."""

    @property
    def wires(self) -> tuple[WireArray, ...]:
        """The arrays, in the order in which they are reduced. Each is reduced before the next is encoded."""

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        """Fill wires[number]. The wires before it hold what they were reduced to."""

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        """All wires are reduced: write the gradients."""


class Codec(Protocol):
    """Makes the encoders of buckets."""

    @property
    def name(self) -> str:
        """Compared between ranks: codecs of one name must do the same."""

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        """The encoder of a bucket, whose locations say where each gradient lies. None: it is reduced as it is."""


class CastCodec:
    """Reduces float32 and float64 buckets with 16 bits per number. Sums are made in float32 all the same."""

    def __init__(self, dtype: str, convert: Callable[[Array, str, Array, str], None]) -> None:
        """`convert` writes numbers into an array of another dtype: (source, its dtype, target, its dtype). One that is
        too large becomes infinity."""
        self.name = dtype
        self._convert = convert

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        if bucket.dtype not in ("float32", "float64"):  # there is nothing to gain
            return None
        return _CastEncoder(bucket, self.name, self._convert)


class _CastEncoder:
    def __init__(
        self, bucket: GradientBucket, wire_dtype: str, convert: Callable[[Array, str, Array, str], None]
    ) -> None:
        self.wires = (WireArray(bucket.count, wire_dtype),)
        self._dtype = bucket.dtype
        self._wire_dtype = wire_dtype
        self._convert = convert

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        self._convert(gradients, self._dtype, wires[0], self._wire_dtype)

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        self._convert(wires[0], self._wire_dtype, gradients, self._dtype)


def find_codec(codec: str | Codec | None, known: Mapping[str, Codec]) -> Codec | None:
    """The codec of this name, or the caller's own."""
    if codec is None or codec == "none":
        return None
    if isinstance(codec, str):
        if codec not in known:
            raise ValueError(f"codec must be one of none, {', '.join(known)}, or a Codec, got {codec!r}")
        return known[codec]
    if not callable(getattr(codec, "open", None)) or not isinstance(getattr(codec, "name", None), str):
        raise TypeError(f"codec must be a name or have a name and open(), got {type(codec).__name__}")
    return codec
