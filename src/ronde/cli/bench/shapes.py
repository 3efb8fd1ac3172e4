"""How much is reduced: sizes as written on the command line, and the gradients of a real network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

__all__ = ["BUCKET_BYTES", "MANY", "Work", "buckets", "format_bytes", "parse_numbers", "parse_works", "resnet50"]

MANY = "many"
"""Stands for the gradients of ResNet-50 in a list of sizes."""

BUCKET_BYTES = 25 * 1024 * 1024
"""How large the buckets are that PyTorch's DistributedDataParallel makes by default."""

FLOAT_BYTES = 4
UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass(frozen=True, slots=True)
class Work:
    """What one measured step reduces: one array of float32, or several."""

    name: str
    counts: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes each rank puts in."""
        return FLOAT_BYTES * sum(self.counts)

    @property
    def is_many(self) -> bool:
        """Whether it is a set of gradients and not one array."""
        return len(self.counts) > 1


def resnet50() -> Iterator[tuple[int, ...]]:
    """The shapes of the 161 parameters of ResNet-50 (25,557,032 numbers), first layer first."""
    yield (64, 3, 7, 7)
    yield from ((64,), (64,))
    inside = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            outside = 4 * width
            for shape in ((width, inside, 1, 1), (width, width, 3, 3), (outside, width, 1, 1)):
                yield from (shape, shape[:1], shape[:1])  # a convolution, then scale and shift of its normalization
            if block == 0:  # the short cut has to change the width
                yield from ((outside, inside, 1, 1), (outside,), (outside,))
            inside = outside
    yield from ((1000, 2048), (1000,))


def buckets(counts: Sequence[int], limit_bytes: int = BUCKET_BYTES) -> tuple[int, ...]:
    """Elements per bucket when arrays are packed in their order; an array larger than the limit gets its own."""
    packed: list[int] = []
    for count in counts:
        if packed and (packed[-1] + count) * FLOAT_BYTES <= limit_bytes:
            packed[-1] += count
        else:
            packed.append(count)
    return tuple(packed)


def parse_works(text: str) -> tuple[Work, ...]:
    """`4K,1M,many` as what is to be reduced."""
    return tuple(_parse_work(part.strip()) for part in text.split(",") if part.strip())


def _parse_work(text: str) -> Work:
    if text.lower() == MANY:
        # Backward makes the gradient of the last layer first.
        return Work(MANY, tuple(prod(shape) for shape in resnet50())[::-1])
    upper = text.upper().removesuffix("IB").removesuffix("B")
    unit = UNITS.get(upper[-1:], 1)
    digits = upper[:-1] if unit > 1 else upper
    num_bytes = int(digits) * unit if digits.isascii() and digits.isdigit() else 0
    if num_bytes <= 0 or num_bytes % FLOAT_BYTES:
        raise ValueError(f"a size is a multiple of 4 bytes such as 4096, 4K, 16M or 1G, or {MANY!r}; got {text!r}")
    return Work(format_bytes(num_bytes), (num_bytes // FLOAT_BYTES,))


def parse_numbers(text: str, what: str) -> tuple[int, ...]:
    """`1,10,100` as numbers from 1."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or int(part) < 1:
            raise ValueError(f"{what} must be whole numbers from 1, separated by commas; got {part!r}")
    return tuple(int(part) for part in parts)


def format_bytes(num_bytes: int) -> str:
    """A size as one would type it."""
    for unit, value in reversed(UNITS.items()):
        if num_bytes >= value and num_bytes % value == 0:
            return f"{num_bytes // value}{unit}"
    return str(num_bytes)
