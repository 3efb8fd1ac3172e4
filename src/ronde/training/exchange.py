"""How gradients are reduced (GradientSettings), and the reduction of one set of buckets (GradientExchange).

A GradientExchange has a plan of its own, and so a channel on which nothing else runs. The order on that channel is
equal on all members: the first wire of every bucket; the flags; then, for codecs with more than one wire, the further
wires bucket by bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real

import numpy as np

from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.plan import Bucket, Plan
from ronde.comm.work import Work
from ronde.training.adapter import GradientKind, ParameterInfo
from ronde.training.buckets import GradientBucket
from ronde.training.compression import BucketEncoder, Codec, WireArray
from ronde.types import DType, Op, parse_op


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

    def __post_init__(self) -> None:
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
        """Raise ValueError if `together` has a name that is not among these."""
        unknown = sorted({name for names in self.together for name in names}.difference(known))
        if unknown:
            raise ValueError(f"together: no parameter of the optimizer is named {', '.join(map(repr, unknown))}")

    def describe(self) -> dict[str, str]:
        """The settings in the form in which ranks compare them."""
        texts = {field.name: repr(getattr(self, field.name)) for field in fields(self)}
        return {**texts, "op": parse_op(self.op).name.lower()}

    @property
    def is_idempotent(self) -> bool:
        """Whether reducing what was reduced before changes nothing: a mean of equal numbers is that number."""
        return parse_op(self.op) is Op.MEAN

    def scales(self, num_passes: int) -> tuple[float, float]:
        """Factors before and after the sum, for a step of so many passes."""
        return 1.0 / (self.predivide * self.pass_divisor(num_passes)), self.predivide

    def pass_divisor(self, num_passes: int) -> int:
        return num_passes if self.average_passes else 1

    def sparse_scales(self, num_passes: int, size: int) -> tuple[float, float]:
        """Factors before and after the sum of sparse gradients. Ranks may have had different numbers of passes, so each
        divides by its own before the sum."""
        op = parse_op(self.op)
        if op is Op.ADASUM:
            raise ValueError("adasum does not know sparse gradients; set sparse_as_dense=True")
        return 1.0 / self.pass_divisor(num_passes), 1.0 / (size if op is Op.MEAN else 1)


NUM_STEP_FLAGS = 2
HAD_BACKWARD = -2
"""Index of the flag, after those of the parameters, that says whether a member had a backward pass."""
REPLAN_WANTED = -1
"""Index of the flag that says whether a member trains other parameters than were agreed on."""


class GradientExchange:
    """Reduces the gradients that the members agreed on, bucket by bucket, and one flag per parameter behind them.

    A bucket is started in the background, or runs in finish(), in the calling thread.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[ParameterInfo],
        buckets: Sequence[GradientBucket],
        *,
        settings: GradientSettings,
        num_passes: int,
        codec: Codec | None,
    ) -> None:
        """`num_passes` is the number of passes that the buckets' scale factors are for. Collective."""
        self.buckets = tuple(buckets)
        self.num_passes = num_passes
        self.bucket_indices = tuple(bucket.indices for bucket in self.buckets)
        """By bucket, the indices of its parameters."""
        self.sparse = [index for index, parameter in enumerate(parameters) if parameter.sparse]
        self._encoders = [codec.open(bucket, parameters) if codec is not None else None for bucket in self.buckets]
        first: list[Bucket] = []
        further: list[Bucket] = []
        self._wire_numbers: list[list[int]] = []  # by bucket, the numbers of its wires in the plan
        scales = settings.scales(num_passes)
        num_first = len(self.buckets) + 1
        for number, (bucket, encoder) in enumerate(zip(self.buckets, self._encoders, strict=True)):
            wires = _plan_buckets(bucket, encoder, parse_op(settings.op), scales)
            first.append(wires[0])
            start = num_first + len(further)
            self._wire_numbers.append([number, *range(start, start + len(wires) - 1)])
            further.extend(wires[1:])
        flags = Bucket(len(parameters) + NUM_STEP_FLAGS, "uint8", "max", name="flags of the gradients")
        self._plan = Plan([*first, flags, *further], group)
        self._wire_arrays = [[self._plan.arrays[wire] for wire in wires] for wires in self._wire_numbers]
        self.flags = self._plan.arrays[len(first)]
        """A GradientKind per parameter, HAD_BACKWARD and REPLAN_WANTED; after finish() the maximum over all members."""
        self._usual_flags = np.full(flags.count, GradientKind.DENSE, np.uint8)
        self._usual_flags[REPLAN_WANTED] = 0
        self._usual_flags_bytes = self._usual_flags.tobytes()
        self._bucket_arrays: list[Array] = [
            arrays[0] if encoder is None else np.zeros(bucket.count, DType[bucket.dtype.upper()].numpy)
            for bucket, encoder, arrays in zip(self.buckets, self._encoders, self._wire_arrays, strict=True)
        ]  # where the gradients lie: on the first wire itself, unless a codec stands between
        self._works: list[Work | None] = [None] * (len(first) + 1)
        self.bucket_of = [-1] * len(parameters)
        """By parameter, the number of its bucket; -1 for those that are in none."""
        self.gradient_arrays: dict[int, Array] = {}
        """By parameter, the memory of its gradient, for those that are in a bucket."""
        for number, bucket in enumerate(self.buckets):
            for location in bucket.locations:
                self.bucket_of[location.index] = number
                array = self._bucket_arrays[number][location.start : location.start + location.count]
                self.gradient_arrays[location.index] = array
        self.dense = sorted(self.gradient_arrays)

    def start(self, number: int) -> None:
        """Reduce a bucket in the background. Its gradients are in its memory."""
        encoder = self._encoders[number]
        if encoder is not None:
            encoder.encode(0, self._bucket_arrays[number], self._wire_arrays[number])
        self._works[number] = self._plan.start(number)

    def write_flags(self, kinds: Mapping[int, GradientKind], *, had_backward: bool, replan_wanted: bool) -> None:
        """Set this member's flags. A parameter that `kinds` does not have is DENSE."""
        self.flags[:] = self._usual_flags
        for index, kind in kinds.items():
            self.flags[index] = kind
        self.flags[HAD_BACKWARD] = had_backward
        self.flags[REPLAN_WANTED] = replan_wanted

    @property
    def flags_are_usual(self) -> bool:
        """Whether, after finish(), every gradient was dense on some member and nothing is out of the ordinary."""
        return self.flags.tobytes() == self._usual_flags_bytes

    def start_flags(self) -> None:
        """Reduce the flags in the background. Called after all buckets were started."""
        self._works[-1] = self._plan.start(len(self.buckets))

    def finish(self) -> None:
        """Run what was not started, and wait for the rest. The memory of the gradients holds the results then."""
        for number, encoder in enumerate(self._encoders):
            if self._works[number] is None and encoder is not None:
                encoder.encode(0, self._bucket_arrays[number], self._wire_arrays[number])
            self._run_or_wait(number)
            if encoder is not None and len(self._wire_arrays[number]) == 1:
                encoder.decode(self._wire_arrays[number], self._bucket_arrays[number])
        self._run_or_wait(len(self.buckets))
        for number, encoder in enumerate(self._encoders):
            if encoder is not None and len(self._wire_arrays[number]) > 1:
                self._run_further_wires(number, encoder)

    def drain(self) -> None:
        """Wait for what was started, and drop it."""
        for number, work in enumerate(self._works):
            if work is not None:
                self._run_or_wait(number)

    def close(self) -> None:
        """Close the channel. The memory of the gradients stays. Idempotent."""
        self._plan.close()

    def _run_or_wait(self, number: int) -> None:
        work = self._works[number]
        if work is None:
            self._plan.run(number)
        else:
            self._works[number] = None
            work.wait()

    def _run_further_wires(self, number: int, encoder: BucketEncoder) -> None:
        gradients, arrays = self._bucket_arrays[number], self._wire_arrays[number]
        for wire in range(1, len(arrays)):
            encoder.encode(wire, gradients, arrays)
            self._plan.run(self._wire_numbers[number][wire])
        encoder.decode(arrays, gradients)


def _plan_buckets(
    bucket: GradientBucket, encoder: BucketEncoder | None, op: Op, scales: tuple[float, float]
) -> list[Bucket]:
    """The plan's buckets for the wires of one bucket of gradients."""
    wires = (WireArray(bucket.count, bucket.dtype),) if encoder is None else encoder.wires
    # Adasum weighs every gradient by itself, so it has to know where each begins.
    parts = tuple(location.count for location in bucket.locations) if op is Op.ADASUM else ()
    return [
        Bucket(wire.count, wire.dtype, op, *scales, bucket.name, parts if wire.count == bucket.count else ())
        for wire in wires
    ]
