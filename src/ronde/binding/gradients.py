"""How gradients are combined among ranks, as settings, and what they come to for one group. Used by every binding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real

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
    together: Sequence[Sequence[str]] = ()
    """Sets of parameters (names) that share a bucket; the others are put together automatically."""
    idle_steps: bool = False
    """Whether a step for which no rank had a backward pass is all right. It is more often a mistake."""

    def __post_init__(self) -> None:
        """Check at once."""
        given = self.op.name.lower() if isinstance(self.op, Op) else self.op
        if given not in ("mean", "sum", "adasum"):
            raise ValueError(f"op must be mean, sum or adasum for gradients, got {given!r}")
        op = parse_op(given)
        self._check_types()
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

    def _check_types(self) -> None:
        for name in ("bucket_mb", "predivide"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (name, value) != ("bucket_mb", None):
                raise TypeError(f"{name} must be a number, got {value!r}")
        for name in ("overlap", "average_passes", "check_finite", "sparse_as_dense", "idle_steps"):
            value = getattr(self, name)
            if value not in (True, False) and (name, value) != ("overlap", None):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        sets = self.together if isinstance(self.together, list | tuple) else ("",)
        if not all(isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) for names in sets):
            raise TypeError(f"together must be sets of names, such as [('a', 'b')], got {self.together!r}")

    def check_names(self, known: Iterable[str]) -> None:
        """Whether all names are those of parameters, when these are known."""
        unknown = sorted({name for names in self.together for name in names}.difference(known))
        if unknown:
            raise ValueError(f"together: no parameter of the optimizer is named {', '.join(map(repr, unknown))}")

    def in_words(self) -> dict[str, str]:
        """What ranks compare."""
        words = {field.name: repr(getattr(self, field.name)) for field in fields(self)}
        return {**words, "op": parse_op(self.op).name.lower()}

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

    def sparse_scales(self, num_passes: int, size: int) -> tuple[float, float]:
        """Factors before and behind the sum of sparse gradients. A rank's passes are its own: they count before it."""
        op = parse_op(self.op)
        if op is Op.ADASUM:
            raise ValueError("adasum does not know sparse gradients; set sparse_as_dense=True")
        return 1.0 / self.pass_divisor(num_passes), 1.0 / (size if op is Op.MEAN else 1)
