"""Metrics of the whole job from those of each rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.training.metrics import weighted_means, weighted_values


def average_metrics(
    values: Mapping[str, float | Tensor],
    *,
    count: float | Mapping[str, float] = 1.0,
    group: Group | None = None,
) -> dict[str, float]:
    """Return the means over all ranks, weighted by `count`, the number of samples that this rank's values stand for.

    Every rank calls it, even one without a sample: with count=0 its values do not count, and `values` may be empty. A
    metric without any sample is NaN. Every rank gets the same numbers.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"average_metrics takes values by name, such as {{'loss': loss}}, got a {type(values).__name__}"
        )
    numbers = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
    mine = weighted_values(numbers, count)
    return weighted_means(objects.allgather(mine, group=group))
