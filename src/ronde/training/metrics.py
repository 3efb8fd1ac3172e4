"""Metrics of the whole job, from those of ranks that saw different numbers of samples. The packages of the frameworks
have average_metrics() among their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from ronde.comm import objects
from ronde.comm.group import Group

WeightedValues = dict[str, tuple[float, float]]
"""Per metric, its value times its weight, and the weight."""


def average_metrics(
    values: Mapping[str, Any], *, count: float | Mapping[str, float] = 1.0, group: Group | None = None
) -> dict[str, float]:
    """Return the means over all ranks, weighted by `count`, the number of samples that this rank's values stand for.

    `values` are numbers, tensors with one number, or metrics of Keras, by name. Every rank calls it, even one without a
    sample: with count=0 its values do not count, and `values` may be empty. A metric without any sample is NaN. Every
    rank gets the same numbers.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"average_metrics takes values by name, such as {{'loss': loss}}, got a {type(values).__name__}"
        )
    mine = weighted_values({name: _value_of(given) for name, given in values.items()}, count)
    return weighted_means(objects.allgather(mine, group=group))


def _value_of(given: Any) -> Any:
    """The value of a metric of Keras; a tensor of PyTorch without its gradient, which a number cannot have."""
    value = given.result() if hasattr(given, "result") else given
    return value.detach() if hasattr(value, "detach") else value


def weighted_values(
    values: Mapping[str, SupportsFloat], count: SupportsFloat | Mapping[str, SupportsFloat]
) -> WeightedValues:
    """This rank's values with their weights. `count` is on how many samples they were computed: one number, or one per
    metric."""
    weighted: WeightedValues = {}
    for name, given in values.items():
        if isinstance(count, Mapping) and name not in count:
            raise ValueError(f"there is no count of {name!r}, only of {', '.join(map(repr, count)) or 'nothing'}")
        weight = _as_float(f"the count of {name!r}", count[name] if isinstance(count, Mapping) else count)
        if not weight >= 0.0:
            raise ValueError(f"the count of {name!r} must be 0 or more, got {weight}")
        value = _as_float(f"the metric {name!r}", given)
        weighted[name] = (value * weight if weight else 0.0, weight)  # a mean of no samples is NaN
    return weighted


def _as_float(what: str, given: SupportsFloat) -> float:
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from tensors with several numbers
        raise TypeError(f"{what} must be one number, got a {type(given).__name__}: {error}") from error


def weighted_means(by_rank: Sequence[WeightedValues]) -> dict[str, float]:
    """The weighted mean of every metric. One without any sample is NaN. A rank may lack some metrics."""
    means = {}
    for name in dict.fromkeys(name for values in by_rank for name in values):
        pairs = [values[name] for values in by_rank if name in values]
        total = math.fsum(weight for _, weight in pairs)
        means[name] = sum(value for value, _ in pairs) / total if total else math.nan
    return means
