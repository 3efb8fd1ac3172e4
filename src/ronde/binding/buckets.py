"""Which gradients travel together, and in which order. Used by the Reducer; pure functions of what all ranks agreed on.

Gradients become ready in about the same order in every step. A bucket takes neighbours of that order, so it is full
early; the first ones are small, so that traffic starts early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ronde.binding.adapter import Parameter
from ronde.types import DType

__all__ = ["GradientBucket", "Limits", "Span", "choose_limits", "lay_out", "pays_to_overlap"]

MEGABYTE = 1_000_000
FIRST_BYTES = 1 * MEGABYTE
MOST_BYTES = 25 * MEGABYTE
FEWEST_BUCKETS = 4
"""With fewer, most of the traffic would begin only when the backward pass is over."""


class Limits(NamedTuple):
    """How large buckets may become. One gradient that is larger has a bucket of its own."""

    first_bytes: int
    """The first one; each next may be twice as large."""
    most_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """The place of one gradient in its bucket, in elements."""

    index: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Gradients of one dtype that travel as one array."""

    dtype: str
    spans: tuple[Span, ...]
    name: str
    """For errors and events."""

    @property
    def count(self) -> int:
        """Number of elements."""
        last = self.spans[-1]
        return last.start + last.count

    @property
    def indices(self) -> tuple[int, ...]:
        """The parameters, in the order of their places."""
        return tuple(span.index for span in self.spans)


def choose_limits(total_bytes: int, bucket_mb: float | None, overlap: bool) -> Limits:
    """Sizes for so many bytes of gradients. `overlap`: whether buckets travel while the backward pass runs."""
    if bucket_mb is not None:
        most_bytes = max(1, int(bucket_mb * MEGABYTE))
        return Limits(most_bytes, most_bytes)
    if not overlap:  # nothing to gain from pieces: each costs a meeting of all members
        return Limits(total_bytes, total_bytes)
    most_bytes = min(MOST_BYTES, max(FIRST_BYTES, total_bytes // FEWEST_BUCKETS))
    return Limits(min(FIRST_BYTES, most_bytes), most_bytes)


def pays_to_overlap(*, num_hosts: int, num_busy: int, num_cores: int) -> bool:
    """Whether buckets should travel while the backward pass runs, on hosts with so many busy threads and cores.

    A network works by itself. Inside a host it is the same cores that would compute: then sending at the end costs
    less, for no thread has to be woken and none is interrupted.
    """
    return num_hosts > 1 or num_busy < num_cores


def lay_out(
    parameters: Sequence[Parameter], ready: Iterable[int], limits: Limits, together: Sequence[Sequence[str]] = ()
) -> tuple[GradientBucket, ...]:
    """The buckets of all dense parameters, in the order in which they will be full.

    `ready` is the order in which gradients came; what is missing there (it was not used) comes behind, last parameters
    first. `together` are names that share a bucket, whatever its size.
    """
    order = list(dict.fromkeys([*ready, *reversed(range(len(parameters)))]))
    dense = [index for index in order if not parameters[index].sparse and parameters[index].count]
    sets = {name: number for number, names in enumerate(together) for name in names}
    filling: dict[tuple[str, int], list[int]] = {}
    """Buckets that are not full yet, by dtype and number of their set; -1 for those of no set."""
    full: list[list[int]] = []
    used_bytes: dict[tuple[str, int], int] = {}
    allowed = limits.first_bytes
    for index in dense:
        parameter = parameters[index]
        key = (parameter.dtype, sets.get(parameter.name, -1))
        num_bytes = parameter.count * DType[parameter.dtype.upper()].num_bytes
        if key in filling and key[1] < 0 and used_bytes[key] + num_bytes > allowed:
            full.append(filling.pop(key))
            allowed = min(2 * allowed, limits.most_bytes)
        if key not in filling:
            filling[key], used_bytes[key] = [], 0
        filling[key].append(index)
        used_bytes[key] += num_bytes
    full.extend(filling.values())
    place = {index: position for position, index in enumerate(order)}
    full.sort(key=lambda bucket: place[bucket[-1]])
    return tuple(_bucket(parameters, bucket) for bucket in full)


def _bucket(parameters: Sequence[Parameter], indices: Sequence[int]) -> GradientBucket:
    spans, start = [], 0
    for index in indices:
        spans.append(Span(index, start, parameters[index].count))
        start += parameters[index].count
    first = parameters[indices[0]]
    more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
    return GradientBucket(first.dtype, tuple(spans), f"{first.name}{more}")
