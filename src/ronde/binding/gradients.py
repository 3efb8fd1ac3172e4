"""How gradients are combined among ranks, as settings, and what they come to for one group. Used by every binding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ronde.types import Op, parse_op

__all__ = ["GradientSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSettings:
    """What all ranks of an optimizer have in common."""

    op: str | Op = "mean"
    """mean, sum or adasum."""
    bucket_mb: float | None = None
    """Size of the buckets in which gradients travel, in megabytes; None chooses."""
    overlap: bool | None = None
    """Whether buckets travel while the backward pass runs; None: when there are cores for it, or several hosts."""
    predivide: float = 1.0
    """Of a mean: divide by this before the sum and by the rest behind it, for numbers that a sum would overflow."""
    average_passes: bool = True
    """Whether several backward passes per step are averaged, as if their batches were one; else they are summed."""
    check_finite: bool = False
    """Look for infinities and not-a-numbers before gradients travel; the error names rank and parameter."""
    sparse_as_dense: bool = False
    """Let sparse gradients travel as dense ones: for embeddings of which most rows are used in every step."""
    together: tuple[tuple[str, ...], ...] = ()
    """Sets of parameters (names) that share a bucket; the others are put together automatically."""
    idle_steps: bool = False
    """Whether a step for which no rank had a backward pass is all right. It is more often a mistake."""

    def __post_init__(self) -> None:
        """Check at once."""
        op = parse_op(self.op)
        if op not in (Op.MEAN, Op.SUM, Op.ADASUM):
            raise ValueError(f"op must be mean, sum or adasum for gradients, got {op.name.lower()}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0, got {self.bucket_mb!r}")
        if not (math.isfinite(self.predivide) and self.predivide > 0):
            raise ValueError(f"predivide must be a finite number above 0, got {self.predivide!r}")
        if self.predivide != 1.0 and op is not Op.MEAN:
            raise ValueError(f"predivide is for op='mean', got op={op.name.lower()!r}")
        names = [name for names in self.together for name in names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"together: {', '.join(map(repr, twice))} cannot be in two sets")

    @property
    def linear(self) -> bool:
        """Whether reducing what was reduced before changes nothing: a mean of equal numbers is that number."""
        return parse_op(self.op) is Op.MEAN

    def scales(self, num_passes: int) -> tuple[float, float]:
        """Factors before and behind the sum of one step of so many passes."""
        return 1.0 / (self.predivide * self.pass_divisor(num_passes)), self.predivide

    def pass_divisor(self, num_passes: int) -> int:
        """What the sum of so many passes is divided by."""
        return num_passes if self.average_passes else 1

    def sparse_factor(self, num_passes: int, size: int) -> float:
        """Factor on the sum of sparse gradients."""
        op = parse_op(self.op)
        if op is Op.ADASUM:
            raise ValueError("adasum does not know sparse gradients; set sparse_as_dense=True")
        return 1.0 / (self.pass_divisor(num_passes) * (size if op is Op.MEAN else 1))
