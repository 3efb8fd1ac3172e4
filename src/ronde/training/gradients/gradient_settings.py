"""How gradients are reduced: the settings of a distributed optimizer, and the factors that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real

from ronde.types import Op, parse_op


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSettings:
    """How gradients are reduced. All ranks of an optimizer must have equal settings."""

    op: str | Op = "mean"
    """mean, sum or adasum."""
    bucket_mb: float | None = None
    """Size of the buckets in megabytes; None chooses."""
    overlap: bool | None = None
    """Whether buckets are reduced while the backward pass runs; None: when cores are idle, or with several hosts."""
    predivide: float = 1.0
    """For a mean: divide by this before the sum and by the rest after it, so that the sum does not overflow."""
    average_passes: bool = True
    """Whether several backward passes per step are averaged, as if their batches were one; else they are summed."""
    check_finite: bool = False
    """Look for infinities and NaNs before gradients are reduced; the error names rank and parameter."""
    sparse_as_dense: bool = False
    """Reduce sparse gradients as dense ones: for embeddings of which most rows are used in every step."""
    together: Sequence[Sequence[str]] = ()
    """Sets of parameters (by name) that share a bucket; the others are assigned to buckets automatically."""
    idle_steps: bool = False
    """Allow steps for which no rank had a backward pass. They are more often a mistake."""
    compare_at_step: int | None = None
    """At which step the parameters of all ranks are compared: 1 for the first, 2 for scripts that broadcast after it, 0
    for never. None: as the setting of this name says."""

    def __post_init__(self) -> None:
        op = self.op.name.lower() if isinstance(self.op, Op) else self.op
        if op not in ("mean", "sum", "adasum"):
            raise ValueError(f"op must be mean, sum or adasum for gradients, got {op!r}")
        for name in ("bucket_mb", "predivide"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (name, value) != ("bucket_mb", None):
                raise TypeError(f"{name} must be a number, got {value!r}")
        step = self.compare_at_step
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
            raise ValueError(f"compare_at_step must be a whole number from 0, got {step!r}")
        for name in ("overlap", "average_passes", "check_finite", "sparse_as_dense", "idle_steps"):
            value = getattr(self, name)
            if value not in (True, False) and (name, value) != ("overlap", None):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        sets = self.together if isinstance(self.together, list | tuple) else ("",)
        if not all(isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) for names in sets):
            raise TypeError(f"together must be sets of names, such as [('a', 'b')], got {self.together!r}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0, got {self.bucket_mb!r}")
        if not (math.isfinite(self.predivide) and self.predivide > 0):
            raise ValueError(f"predivide must be a finite number above 0, got {self.predivide!r}")
        if self.predivide != 1.0 and op != "mean":
            raise ValueError(f"predivide is for op='mean', got op={op!r}")
        names = [name for names in self.together for name in names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"together: {', '.join(map(repr, twice))} cannot be in two sets")

    def check_names(self, known: Iterable[str]) -> None:
        # Raise ValueError if `together` has a name that is not among these.
        unknown = sorted({name for names in self.together for name in names}.difference(known))
        if unknown:
            raise ValueError(f"together: no parameter of the optimizer is named {', '.join(map(repr, unknown))}")

    def describe(self) -> dict[str, str]:
        # The settings in the form in which ranks compare them.
        texts = {field.name: repr(getattr(self, field.name)) for field in fields(self)}
        return {**texts, "op": parse_op(self.op).name.lower()}

    def pass_divisor(self, num_passes: int) -> int:
        return num_passes if self.average_passes else 1

    def sparse_scales(self, num_passes: int, size: int) -> tuple[float, float]:
        # Factors before and after the sum of sparse gradients. Ranks may have had different numbers of passes, so each
        # divides by its own before the sum.
        op = parse_op(self.op)
        if op is Op.ADASUM:
            raise ValueError("adasum does not know sparse gradients; set sparse_as_dense=True")
        return 1.0 / self.pass_divisor(num_passes), 1.0 / (size if op is Op.MEAN else 1)
