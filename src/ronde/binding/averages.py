"""Means over ranks that saw different numbers of samples. Used by the metrics of the frameworks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["combine", "weigh"]

Weighed = dict[str, tuple[float, float]]
"""Per metric, its value times its weight, and the weight."""


def weigh(values: Mapping[str, float], count: float | Mapping[str, float]) -> Weighed:
    """My part. count is how many samples stand behind the values: one number, or one per metric."""
    weighed: Weighed = {}
    for name, value in values.items():
        weight = float(count[name] if isinstance(count, Mapping) else count)
        if not weight >= 0.0:
            raise ValueError(f"the count of {name!r} must be 0 or more, got {weight}")
        weighed[name] = (float(value) * weight if weight else 0.0, weight)  # a mean of nothing is NaN: it says nothing
    return weighed


def combine(parts: Sequence[Weighed]) -> dict[str, float]:
    """The means over all parts. A metric that nobody has a sample of is NaN; names may be missing in some parts."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _mean([part[name] for part in parts if name in part]) for name in names}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    total = math.fsum(weight for _, weight in pairs)
    return sum(value for value, _ in pairs) / total if total else math.nan
