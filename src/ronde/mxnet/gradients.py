"""Gradients of MXNet parameters, reduced over all ranks in MXNet's engine: for trainers and optimizers.

Gradients travel in buckets, each of which is one operation in the engine: it starts when the last gradient of the
bucket is computed, and whatever updates a parameter waits for its bucket only. All of it is pushed at once; nothing
here waits, except in an elastic job, where no parameter may change before all gradients are there.

With overlap=False the caller waits for its gradients and reduces them itself.

A parameter on several contexts has a gradient on each. They are summed to one, as MXNet does it, which is reduced and
copied back to all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mxnet as mx

from ronde.comm.call import hash_signature
from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group
from ronde.mxnet.arrays import check_array, clear_errors, get_dtype, wait_for_arrays
from ronde.mxnet.collectives import push_ordered, run_ordered
from ronde.mxnet.engine_operations import OrderedStream, streams
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.planned_buckets import GradientLayout, PlannedBucket, plan_buckets
from ronde.types import Op, parse_op

MAX_CHANNEL_NAME = 40
COMPRESSIONS = ("none", "fp16", "2bit")
MAX_INT8 = 127


# --- compression -----------------------------------------------------------------------------------------------------


class WireCodec(Protocol):
    """What travels instead of a gradient. All of it is done by the engine."""

    name: str
    """Compared between ranks."""

    def encode(self, key: object, gradient: Any, size: int) -> Any:
        """The array that is reduced, over `size` members, for the gradient of the parameter of this key; the gradient
        itself if it travels as it is."""

    def decode(self, key: object, wire: Any, gradient: Any, size: int) -> None:
        """Write the gradient, of what the wires of `size` members were reduced to."""

    def undo(self, key: object) -> None:
        """Forget the last encode() of this key: the reduction was interrupted, and will be done again."""

    def choose_op(self, op: Op) -> Op:
        """How wires are reduced if gradients are to be reduced like this."""


class CastWire:
    """float32 and float64 travel with 16 bits. Sums are made in float32 all the same."""

    name = "fp16"

    def encode(self, key: object, gradient: Any, size: int) -> Any:
        return gradient.astype("float16") if get_dtype(gradient).num_bytes > 2 else gradient

    def decode(self, key: object, wire: Any, gradient: Any, size: int) -> None:
        if wire is not gradient:
            wire.astype(gradient.dtype).copyto(gradient)

    def undo(self, key: object) -> None:
        return

    def choose_op(self, op: Op) -> Op:
        return op


class ThresholdWire:
    """The 2bit compression of MXNet's kvstore: of each number travels whether it is at least the threshold, at most its
    negative, or between them, and what is lost is added to the next gradient. A number travels as 8 bits, so that
    members can add them up; as 32 if there are more than 127 of them."""

    def __init__(self, threshold: float = 0.5) -> None:
        if not isinstance(threshold, int | float) or not threshold > 0:
            raise ValueError(f"the threshold of compression type 2bit must be a number above 0, got {threshold!r}")
        self.name = f"2bit {threshold!r}"
        self._threshold = float(threshold)
        self._lost: dict[object, Any] = {}
        """By the key of the parameter."""
        self._lost_before: dict[object, Any] = {}
        """The same before the last gradient."""
        self._op = Op.SUM

    def encode(self, key: object, gradient: Any, size: int) -> Any:
        lost = self._lost_before[key] = self._lost.get(key)
        rest = gradient if lost is None else gradient + lost
        signs = (rest >= self._threshold) - (rest <= -self._threshold)
        self._lost[key] = rest - signs * self._threshold
        return signs.astype("int8" if size <= MAX_INT8 else "int32")

    def decode(self, key: object, wire: Any, gradient: Any, size: int) -> None:
        factor = self._threshold / (size if self._op is Op.MEAN else 1)
        (wire.astype(gradient.dtype) * factor).copyto(gradient)

    def undo(self, key: object) -> None:
        self._lost[key] = self._lost_before.get(key)

    def choose_op(self, op: Op) -> Op:
        if op is Op.ADASUM:
            raise ValueError("compression type 2bit does not know adasum")
        self._op = op
        return Op.SUM  # the mean of whole numbers would be rounded


def make_wire_codec(compression: Any) -> WireCodec | None:
    """The codec for a name, or for a dictionary as gluon's trainers take it: {"type": "2bit", "threshold": 0.5}."""
    options: dict[str, Any] = {}
    kind = compression
    if isinstance(compression, Mapping):
        options = dict(compression)
        kind = options.pop("type", "fp16" if options.pop("fp16", False) else "none")
    if kind is None or kind == "none":
        found: WireCodec | None = None
    elif kind in ("fp16", "float16"):
        found = CastWire()
    elif kind == "2bit":
        found = ThresholdWire(options.pop("threshold", 0.5))
    else:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {kind!r}")
    if options:
        raise ValueError(f"compression {kind!r} has no option {', '.join(map(repr, options))}")
    return found


# --- reduction -------------------------------------------------------------------------------------------------------


class _ReductionCount:
    num_reductions = 0


_count = _ReductionCount()


def count_reductions() -> int:
    """How many times this process has reduced gradients. An elastic State sees by it whether parameters may have
    changed since the last step end."""
    return _count.num_reductions


class ParameterGradients(NamedTuple):
    """The gradients of one parameter."""

    name: str
    arrays: list[Any]
    """One for each context."""
    key: object
    """By which the parameter is known from one reduction to the next: its name may not be the only one of its kind."""


class GradientReducer:
    """Reduces the gradients of some parameters. All members first use theirs in the same order, or give them names."""

    def __init__(
        self,
        settings: GradientSettings,
        group: Group | None,
        codec: WireCodec | None,
        name: str = "",
        factors: tuple[float, float] | None = None,
    ) -> None:
        """`factors` before and after the reduction are those of the settings unless given."""
        self._settings = settings
        self._group = group
        self._codec = codec
        self._name = name
        self._factors = factors
        self._stream: OrderedStream | None = None
        self._planned: tuple[object, tuple[PlannedBucket, ...]] = (None, ())
        if codec is not None:
            codec.choose_op(parse_op(settings.op))

    def reduce(self, gradients: Sequence[ParameterGradients]) -> None:
        """Let the gradients become those of all ranks and contexts, in place. Collective."""
        members = resolve_group(self._group)
        for each in gradients:
            for array in each.arrays:
                check_array(array, f"the gradient of {each.name!r}")
        world = current_world("gradients")
        try:
            self._reduce_contexts(members, gradients, alone=members.size == 1 and not world.can_rejoin)
            if world.can_rejoin:  # then nothing is updated unless all gradients are there
                wait_for_arrays([array for each in gradients for array in each.arrays])
        except Exception:
            if world.can_rejoin:
                clear_errors()
                self._undo(gradients)
            raise
        _count.num_reductions += 1

    def _reduce_contexts(self, members: Group, gradients: Sequence[ParameterGradients], *, alone: bool) -> None:
        with mx.autograd.pause():
            totals = [_sum_contexts(each.arrays) for each in gradients]
            if members.rank is not None and not alone:  # who is no member updates with its own gradients
                self._reduce(members, gradients, totals)
            for total, each in zip(totals, gradients, strict=True):
                for array in each.arrays[1:]:
                    total.copyto(array)

    def _undo(self, gradients: Sequence[ParameterGradients]) -> None:
        if self._codec is not None:
            for each in gradients:
                self._codec.undo(each.key)

    def _reduce(self, members: Group, gradients: Sequence[ParameterGradients], totals: Sequence[Any]) -> None:
        codec, wires = self._codec, list(totals)
        if codec is not None:
            given = zip(gradients, totals, strict=True)
            wires = [codec.encode(each.key, total, members.size) for each, total in given]
        stream, overlaps = self._get_stream(members), self._settings.overlap is not False
        for bucket in self._plan([each.name for each in gradients], wires):
            pairs = [(wires[index], wires[index]) for index in bucket.indices]
            if overlaps:
                push_ordered(stream, bucket.signature, pairs, priority=-min(bucket.indices))
            else:
                run_ordered(stream, bucket.signature, [wire for wire, _ in pairs])
        if codec is not None:
            for each, wire, total in zip(gradients, wires, totals, strict=True):
                codec.decode(each.key, wire, total, members.size)

    def _get_stream(self, members: Group) -> OrderedStream:
        """The stream of this reducer in this round."""
        if self._stream is None or self._stream.group is not members:
            if self._name:
                readable = re.sub(r"[^\w.-]+", "-", self._name)[:MAX_CHANNEL_NAME]
                key = f"{readable}.{hash_signature(self._name) & 0xFFFFFFFF:08x}"
                self._stream = streams.get(members, f"mxnet.gradients.{key}")
            else:
                number = members.new_reducer_number()
                self._stream = streams.get(members, f"mxnet.gradients.{number}", owner=self)
        return self._stream

    def _plan(self, names: Sequence[str], wires: Sequence[Any]) -> tuple[PlannedBucket, ...]:
        described = tuple((name, wire.shape, wire.dtype) for name, wire in zip(names, wires, strict=True))
        if self._planned[0] != described:
            parameters = [
                ParameterInfo(_stable_name(name), tuple(wire.shape), get_dtype(wire).name.lower(), wire.size)
                for name, wire in zip(names, wires, strict=True)
            ]
            settings, factors = self._settings, self._factors
            if self._codec is not None:
                op = self._codec.choose_op(parse_op(settings.op))
                if op is not parse_op(settings.op):  # it divides by itself
                    settings, factors = GradientSettings(op=op, together=settings.together), (1.0, 1.0)
            settings.check_names(names)
            plan = f"{self._name} {self._codec.name if self._codec else ''}"
            layout = GradientLayout("d" * len(names), "")
            self._planned = (described, plan_buckets(parameters, list(names), plan, layout, settings, factors))
        return self._planned[1]


def _sum_contexts(arrays: list[Any]) -> Any:
    """The first array, to which the others are added."""
    total = arrays[0]
    for each in arrays[1:]:
        total += each.as_in_context(total.context)
    return total


def _stable_name(name: str) -> str:
    """The name without the numbers that gluon gives to blocks: they depend on what else a process has built, so that
    they may differ between ranks."""
    return re.sub(r"(?<=[a-z])\d+(?=_)", "", name)
