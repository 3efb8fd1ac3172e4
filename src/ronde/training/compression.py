"""How a bucket of gradients looks on the wire. Used by the Reducer; a codec of one's own implements Codec and Encoder.

A codec opens one Encoder per bucket, which may keep state from step to step: what rounding lost (error feedback), a
matrix of PowerSGD. Its *wires* are arrays that are reduced as the optimizer's op says, one after the other: what the
first came to may decide what the second carries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ronde.comm.buffers import Array
from ronde.training.adapter import ParameterInfo
from ronde.training.buckets import GradientBucket

__all__ = ["BFLOAT16", "BucketEncoder", "CODECS", "CastCodec", "Codec", "FLOAT16", "WireArray", "find_codec"]


@dataclass(frozen=True, slots=True)
class WireArray:
    """An array that travels."""

    count: int
    dtype: str


class BucketEncoder(Protocol):
    """One bucket's way onto the wire and back. Arrays of bfloat16 show their bits as uint16."""

    @property
    def wires(self) -> tuple[WireArray, ...]:
        """What travels, in this order; every one is reduced before the next is encoded."""

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        """Fill wires[number]. The wires before it hold what they were reduced to."""

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        """All wires are reduced: write the gradients."""


class Codec(Protocol):
    """Makes encoders."""

    @property
    def name(self) -> str:
        """What ranks compare: two codecs of one name must do the same."""

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        """For one bucket, whose spans say where each gradient lies; None to let it travel as it is."""


class CastCodec:
    """Fewer bits for each number of a float32 or float64 bucket. Sums are made in float32 all the same."""

    def __init__(self, dtype: str) -> None:
        self.name = dtype

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> BucketEncoder | None:
        """Nothing to gain for buckets that are as small already."""
        if bucket.dtype not in ("float32", "float64"):
            return None
        return _CastEncoder(bucket.count, self.name)


class _CastEncoder:
    """float16 or bfloat16 by NumPy alone; a library that has both does it quicker."""

    def __init__(self, count: int, dtype: str) -> None:
        self.wires = (WireArray(count, dtype),)
        self._dtype = dtype

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        """To 16 bits, to the nearest."""
        if self._dtype == "float16":
            with np.errstate(over="ignore"):  # too large is infinity, as everywhere
                np.copyto(wires[0], gradients, casting="unsafe")
        else:
            np.copyto(wires[0], to_bfloat16(gradients))

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        """Back to what they were."""
        if self._dtype == "float16":
            np.copyto(gradients, wires[0])
        else:
            np.copyto(gradients, (wires[0].astype(np.uint32) << 16).view(np.float32))


def to_bfloat16(x: Array) -> Array:
    """The bits of the nearest bfloat16 numbers, ties to even."""
    with np.errstate(over="ignore"):
        bits = x.astype(np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # wraps around only for what is not a number
    return (np.where(np.isnan(x), bits | 0x0040_0000, rounded) >> 16).astype(np.uint16)


FLOAT16 = CastCodec("float16")
BFLOAT16 = CastCodec("bfloat16")
CODECS: dict[str, Codec] = {"float16": FLOAT16, "bfloat16": BFLOAT16}


def find_codec(codec: str | Codec | None, known: Mapping[str, Codec] = CODECS) -> Codec | None:
    """The codec a caller means."""
    if codec is None or codec == "none":
        return None
    if isinstance(codec, str):
        if codec not in known:
            raise ValueError(f"codec must be one of none, {', '.join(known)}, or a Codec, got {codec!r}")
        return known[codec]
    if not callable(getattr(codec, "open", None)) or not isinstance(getattr(codec, "name", None), str):
        raise TypeError(f"codec must be a name or have a name and open(), got {type(codec).__name__}")
    return codec
