"""Which gradients share a bucket, and in which order buckets are reduced: pure functions of what all ranks agreed on.

Gradients become ready in about the same order in every step. A bucket takes neighbours of that order, so it is full
early; the first ones are small, so that the first reduction starts early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ronde.training.gradients.adapter import ParameterInfo
from ronde.types import DType

MEGABYTE = 1_000_000
FIRST_BUCKET_BYTES = 1 * MEGABYTE
MAX_BUCKET_BYTES = 25 * MEGABYTE
MIN_BUCKETS = 4
"""With fewer, most of the traffic would begin only when the backward pass is over."""


@dataclass(frozen=True, slots=True)
class GradientLocation:
    """Where one gradient lies in its bucket, in elements."""

    index: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients of one dtype that are reduced as one array."""

    dtype: str
    locations: tuple[GradientLocation, ...]
    name: str
    """For errors and events."""

    @property
    def count(self) -> int:
        last = self.locations[-1]
        return last.start + last.count

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(location.index for location in self.locations)


def choose_size_limits(total_bytes: int, bucket_mb: float | None, overlap: bool) -> tuple[int, int]:
    """How large the first bucket, and how large any may become, for so many bytes of gradients. Each next one may be
    twice as large. `overlap`: whether buckets are reduced while the backward pass runs."""
    if bucket_mb is not None:
        most_bytes = max(1, int(bucket_mb * MEGABYTE))
        return most_bytes, most_bytes
    if not overlap:  # nothing to gain from several: each has a latency
        return total_bytes, total_bytes
    most_bytes = min(MAX_BUCKET_BYTES, max(FIRST_BUCKET_BYTES, total_bytes // MIN_BUCKETS))
    return min(FIRST_BUCKET_BYTES, most_bytes), most_bytes


def assign_buckets(
    parameters: Sequence[ParameterInfo],
    ready_order: Iterable[int],
    limits: tuple[int, int],
    together: Sequence[Sequence[str]] = (),
) -> tuple[GradientBucket, ...]:
    """The buckets of all dense parameters, in the order in which they will be full.

    `ready_order` is the order in which gradients became ready; parameters that are missing there follow, the last ones
    first. A gradient beyond the limits has a bucket of its own. Each set of names in `together` shares one, whatever
    its size.
    """
    order = list(dict.fromkeys([*ready_order, *reversed(range(len(parameters)))]))
    dense = [index for index in order if not parameters[index].sparse and parameters[index].count]
    sets = {name: number for number, names in enumerate(together) for name in names}
    filling: dict[tuple[str, int], list[int]] = {}
    """Buckets that are not full yet, by dtype and number of their set; -1 for those of no set."""
    full: list[list[int]] = []
    used_bytes: dict[tuple[str, int], int] = {}
    allowed, max_bytes = limits
    for index in dense:
        parameter = parameters[index]
        key = (parameter.dtype, sets.get(parameter.name, -1))
        num_bytes = parameter.count * DType[parameter.dtype.upper()].num_bytes
        if key in filling and key[1] < 0 and used_bytes[key] + num_bytes > allowed:
            full.append(filling.pop(key))
            allowed = min(2 * allowed, max_bytes)
        if key not in filling:
            filling[key], used_bytes[key] = [], 0
        filling[key].append(index)
        used_bytes[key] += num_bytes
    full.extend(filling.values())
    position = {index: number for number, index in enumerate(order)}
    full.sort(key=lambda bucket: position[bucket[-1]])
    buckets = []
    for indices in full:
        locations, start = [], 0
        for index in indices:
            locations.append(GradientLocation(index, start, parameters[index].count))
            start += parameters[index].count
        first = parameters[indices[0]]
        more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
        buckets.append(GradientBucket(first.dtype, tuple(locations), f"{first.name}{more}"))
    return tuple(buckets)
