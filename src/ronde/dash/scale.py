"""Axes: which round numbers to put at them, where a value lies, and how a number is written. Used by the charts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ronde.text import format_compact_number

__all__ = [
    "Axis",
    "fit_axis",
]


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, drawn from pixel `start` to pixel `end` (which may be the smaller)."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def words(self, tick: float) -> str:
        """A tick as text, with as many decimals as tell ticks apart."""
        gap = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(tick)
        if abs(tick) >= 10_000:
            return format_compact_number(tick)
        decimals = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap else 0
        return f"{tick:.{decimals}f}"


def fit_axis(low: float, high: float, start: float, end: float, *, most_ticks: int = 6) -> Axis:
    """An axis with round ticks that has room for values from low to high."""
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"an axis needs finite limits, got {low} and {high}")
    if high <= low:
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    gap = _round_gap((high - low) / (most_ticks - 1))
    first, last = math.floor(low / gap + 1e-9), math.ceil(high / gap - 1e-9)
    ticks = tuple(number * gap for number in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def _round_gap(least: float) -> float:
    """1, 2 or 5 times a power of ten, not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
