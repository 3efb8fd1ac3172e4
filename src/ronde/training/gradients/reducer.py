"""Averages the gradients of some parameters over the members of one group, bucket by bucket, while they are computed.

TrainingStep says when a pass may begin, when no more gradients will come and when results are needed;
docs/internals/gradients.md has the whole protocol. Nothing is agreed on before the first gradients are there: only then
do ranks know which are sparse, which train, and in which order they become ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ronde.comm import objects
from ronde.comm.backends.native_library import make_ready_counter
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.plan import Bucket, Plan
from ronde.comm.work import Work
from ronde.comm.world import World
from ronde.errors import Mismatch, OutOfSync
from ronde.text import format_ranks
from ronde.training.agreement import (
    FINGERPRINT_BYTES,
    PlanProposal,
    agree_on_plan,
    explain_joined_ranks,
    fingerprint,
)
from ronde.training.gradients.adapter import BucketMemory, FrameworkAdapter, GradientKind, ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket, assign_buckets, choose_size_limits
from ronde.training.gradients.compression import Codec, WireArray
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.ready_counter import ReadyCounter
from ronde.training.sample_sharding import sample_weight
from ronde.training.sync_check import checksum_bytes, compare_checksums
from ronde.types import Deadline, DType, Op, parse_op

if TYPE_CHECKING:
    from ronde.comm.backends import hot_calls

NUM_STEP_FLAGS = 3 + 2 * FINGERPRINT_BYTES
HAD_BACKWARD = -NUM_STEP_FLAGS
"""Index of the flag, after those of the parameters, that says whether a member had a backward pass."""
REPLAN_WANTED = HAD_BACKWARD + 1
"""Index of the flag that says whether a member trains other parameters than were agreed on."""
CHANGE_WANTED = REPLAN_WANTED + 1
"""Index of the flag that says whether a member knows that the round is to change (World.change_wanted)."""
FINGERPRINTS = CHANGE_WANTED + 1
"""Index of a fingerprint of the member's parameters, in the step in which these are compared; else zeros. Behind it is
255 minus each of its bytes. The maxima over all members add up to 255 if, and only if, all fingerprints are equal; the
zeros of a member in join() change nothing."""
MAX_ASKING_PREDIVIDE = 1e6
"""With more, a one might become zero before it is summed up."""


class _AgreedBuckets:
    """The buckets that the members agreed on: their memory, their encoders, and the plan that reduces them.

    The plan has a channel of its own. The order there is equal on all members: the first wire of every
    bucket; the flags; then, for codecs with more than one wire, the further wires bucket by bucket; at last what the
    flags make necessary (the sum of a sparse gradient, the names of parameters that differ), through plan.group. Where
    it can, the last bucket has one more element, in which every member says whether it needs the flags. Usually none
    does, and they are left out.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[ParameterInfo],
        buckets: Sequence[GradientBucket],
        *,
        name: str,
        settings: GradientSettings,
        num_passes: int,
        codec: Codec | None,
    ) -> None:
        """`name` is that of the reducer. `num_passes` is the number of passes that the buckets' scale factors are for.
        Collective."""
        self.num_passes = num_passes
        self.indices = tuple(bucket.indices for bucket in buckets)
        """By bucket, the indices of its parameters."""
        self.sparse = [index for index, parameter in enumerate(parameters) if parameter.sparse]
        self.encoders = [None if codec is None else codec.open(bucket, parameters) for bucket in buckets]
        op = parse_op(settings.op)
        scales = 1.0 / (settings.predivide * settings.pass_divisor(num_passes)), settings.predivide
        adds_up = codec is None and op in (Op.MEAN, Op.SUM) and settings.predivide <= MAX_ASKING_PREDIVIDE
        self._asks_for_flags = adds_up and len(buckets) > 0 and buckets[-1].dtype in ("float32", "float64")
        planned, further = list[Bucket](), list[Bucket]()
        self.wire_numbers: list[list[int]] = []
        """By bucket, the numbers of its wires in the plan. That of the flags is the number of buckets."""
        for number, (bucket, encoder) in enumerate(zip(buckets, self.encoders, strict=True)):
            # Adasum weighs every gradient by itself, so it has to know where each begins.
            parts = tuple(location.count for location in bucket.locations) if op is Op.ADASUM else ()
            first, *rest = [
                Bucket(wire.count, wire.dtype, op, *scales, bucket.name, parts if wire.count == bucket.count else ())
                for wire in (encoder.wires if encoder is not None else (WireArray(bucket.count, bucket.dtype),))
            ]
            start = len(buckets) + 1 + len(further)
            self.wire_numbers.append([number, *range(start, start + len(rest))])
            planned.append(first)
            further += rest
        if self._asks_for_flags:
            planned[-1] = replace(planned[-1], count=planned[-1].count + 1)
        flags = Bucket(len(parameters) + NUM_STEP_FLAGS, "uint8", "max", name="flags of the gradients")
        self.have_further_wires = len(further) > 0
        self.plan = Plan([*planned, flags, *further], group, name=name)
        self.works: list[Work | None] = [None] * (len(buckets) + 1)
        """By bucket, and for the flags, what was started in the background and has not been waited for."""
        self.flags = self.plan.arrays[len(buckets)]
        """A GradientKind per parameter, HAD_BACKWARD, REPLAN_WANTED, CHANGE_WANTED and FINGERPRINTS; when reduced, the
        maximum over all members."""
        self._usual_flags = np.full(flags.count, GradientKind.DENSE, np.uint8)
        self._usual_flags[REPLAN_WANTED:] = 0
        self.usual_flags_bytes = self._usual_flags.tobytes()
        """What the flags are when every gradient was dense on some member and nothing is out of the ordinary."""
        self.wires = [[self.plan.arrays[wire] for wire in numbers] for numbers in self.wire_numbers]
        self.bucket_of = [-1] * len(parameters)
        """By parameter, the number of its bucket; -1 for those that are in none."""
        self._arrays: list[tuple[Array, Array]] = []
        """By bucket, the memory of its gradients, and the spare: the first wire itself, unless a codec stands between.
        Memory that is never touched costs nothing."""
        self.memories: list[BucketMemory] = []
        """By bucket, the same memory, parameter by parameter."""
        for number, (bucket, encoder) in enumerate(zip(buckets, self.encoders, strict=True)):
            arrays = self.plan.arrays[number], self.plan.spare_arrays[number]
            if encoder is not None:
                dtype = DType[bucket.dtype.upper()].numpy
                arrays = np.zeros(bucket.count, dtype), np.zeros(bucket.count, dtype)
            self._arrays.append(arrays)
            places = [(each.index, slice(each.start, each.start + each.count)) for each in bucket.locations]
            own, spare = ({index: array[place] for index, place in places} for array in arrays)
            self.memories.append(BucketMemory(own, spare))
            for index, _ in places:
                self.bucket_of[index] = number
        self.dense = [index for index, bucket in enumerate(self.bucket_of) if bucket >= 0]
        self.encoders.append(None)  # of the flags

    def gradients(self, number: int) -> Array:
        """The gradients of a bucket, where they lie in this step."""
        return self._arrays[number][self.memories[number].uses_spare]

    def start(self, number: int) -> None:
        """Reduce the first wire of a bucket, or the flags, in the background."""
        self.works[number] = self.plan.start(number, spare=self._wire_is_spare(number))

    def finish(self, number: int) -> None:
        """Wait for what start() started; run it, if it was not started."""
        work = self.works[number]
        if work is None:
            self.plan.run(number, spare=self._wire_is_spare(number))
        else:
            work.wait()
            self.works[number] = None

    def drain(self) -> None:
        """Wait for all that start() started, also if some of it was refused."""
        works = [work for work in self.works if work is not None]
        self.works = [None] * len(self.works)
        with ExitStack() as stack:
            for work in reversed(works):
                stack.callback(work.wait)

    def _wire_is_spare(self, number: int) -> bool:
        return self.encoders[number] is None and number < len(self.memories) and self.memories[number].uses_spare

    def ask_for_flags(self, needed: bool) -> None:
        """Say in the last bucket, which is filled and has not started, whether this member needs the flags."""
        if self._asks_for_flags:
            self.gradients(len(self.indices) - 1)[-1:] = needed

    def flags_are_needed(self) -> bool:
        """Whether any member needs the flags. Called when the last bucket is reduced: the answer is equal on all."""
        return not self._asks_for_flags or bool(self.gradients(len(self.indices) - 1)[-1:].any())

    def write_flags(
        self,
        kinds: Mapping[int, GradientKind],
        own_fingerprint: Array | None,
        *,
        had_backward: bool,
        replan_wanted: bool,
        change_wanted: bool,
    ) -> bool:
        """Set this member's flags, and return whether they are not the usual ones. A parameter that `kinds` does not
        have is DENSE."""
        self.flags[:] = self._usual_flags
        is_usual = had_backward and not replan_wanted and not change_wanted and own_fingerprint is None
        if is_usual and not kinds:  # as nearly always
            return False
        for index, kind in kinds.items():
            self.flags[index] = kind
        self.flags[HAD_BACKWARD] = had_backward
        self.flags[REPLAN_WANTED] = replan_wanted
        self.flags[CHANGE_WANTED] = change_wanted
        if own_fingerprint is not None:
            self.flags[FINGERPRINTS:] = np.concatenate([own_fingerprint, 255 - own_fingerprint])
        return True

    def need_exchange(self) -> bool:
        """Whether, by the reduced flags, the members have to exchange more than the buckets."""
        kinds = self.flags[:HAD_BACKWARD]
        has_more = (kinds > GradientKind.DENSE).any() or kinds[self.sparse].any()
        return bool(has_more or self.flags[REPLAN_WANTED]) or self.fingerprints_differ()

    def fingerprints_differ(self) -> bool:
        """Whether the reduced flags say that members have different parameters."""
        highest, negated = self.flags[FINGERPRINTS:].reshape(2, -1)
        return bool(negated.any() and (highest != 255 - negated).any())


@dataclass(slots=True)
class _PassProgress:
    """Which buckets of a backward pass have started, and what is to be done with them."""

    fills_buckets: bool = False
    """Whether this is the last pass of its step, after which gradients are reduced: then a full bucket may start."""
    num_overlapped: int = 0
    """How many buckets may start before the pass is over."""
    scale_factor: float = 1.0
    """What gradients are multiplied by: the weight of this rank's samples, and a ratio if the step has another number
    of passes than the buckets are made for."""
    next_bucket: int = 0
    """The first bucket that has not started."""
    full_buckets: set[int] = field(default_factory=set)
    """The buckets whose gradients are all ready, as far as they are counted."""
    kinds: dict[int, GradientKind] = field(default_factory=dict)
    """By index of the parameter, the kinds of the gradients that are not dense."""


class Reducer:
    """The gradients that are reduced over one group."""

    def __init__(
        self,
        adapter: FrameworkAdapter,
        group: Group,
        settings: GradientSettings,
        *,
        on_pass_started: Callable[[], None],
        broadcast_call: Callable[[], str] = lambda: "broadcast_parameters()",
        codec: Codec | None = None,
        overlap: bool = True,
        world: World | None = None,
    ) -> None:
        """`on_pass_started` is called at the first gradient of a pass. `broadcast_call` gives the words for what a
        script calls to broadcast parameters. With `overlap`, buckets are reduced while the pass runs. `world` is given
        if the group is all of it: then the flags carry the wish that the round changes."""
        self._adapter = adapter
        self.group = group
        """The members."""
        self._world = world
        self._name = f"optimizer.{group.new_reducer_number()}"
        """By this the members match what is exchanged before there is a plan: passes of several optimizers may end in
        different orders on different ranks."""
        self._settings = settings
        self._op = parse_op(settings.op)
        self._on_pass_started = on_pass_started
        self._broadcast_call = broadcast_call
        self._codec = codec
        self._overlap = overlap
        self._passes_per_step = 1
        self._num_passes = 1  # of the present step
        self._had_backward = False  # whether this rank has gradients of its own in the present step
        self._holds_results = False  # whether results were assigned and not cleared since
        self._weight = 1.0  # of the samples of the present pass
        self._set_aside: tuple[object, float] | None = None
        """Gradients of earlier passes of the step, and their weight, while the present pass has none."""
        self._num_steps = 0
        self._compare_at_step = 1 if settings.compare_at_step is None else settings.compare_at_step
        self._compared_names: set[str] = set()  # of parameters
        self._has_uncompared = True  # whether there may be parameters that have not been compared
        self._ready_names: list[str] = []  # of parameters, in the order in which gradients were last seen to come
        self._parameters: Sequence[ParameterInfo] = adapter.describe_parameters()
        self._buckets: _AgreedBuckets | None = None
        self._progress = _PassProgress()
        self._counter: ReadyCounter | hot_calls.ReadyCounter
        self._bind_adapter()

    # --- while a pass runs -----------------------------------------------------------------------------------------

    @property
    def weight(self) -> float:
        """What this rank's gradients of the present pass are multiplied by, for the number of its samples."""
        return self._weight

    def prepare_pass(self, num_passes: int, *, is_last: bool, inline: bool) -> None:
        """A pass may begin. `is_last`: it is the last of the num_passes of a step, so gradients are reduced behind it.
        `inline`: as in start_remaining()."""
        self._num_passes = self._passes_per_step = num_passes
        self._progress = self._new_progress(is_last=is_last, inline=inline)
        self._counter.begin(self._progress.fills_buckets and self._progress.num_overlapped > 0)

    def report_next_gradient(self) -> None:
        """Call on_pass_started at the next gradient again: the pass that ended was a part of another one."""
        self._counter.report_next()

    def on_bucket_full(self, bucket: int) -> None:
        """All gradients of a bucket are ready. Called by hooks of gradients, in one thread at a time."""
        progress, buckets = self._progress, self._buckets
        if buckets is None:
            return
        progress.full_buckets.add(bucket)
        # All members start full buckets in the same order.
        while progress.next_bucket < progress.num_overlapped and progress.next_bucket in progress.full_buckets:
            self._fill_bucket(buckets, progress.next_bucket)
            buckets.start(progress.next_bucket)
            progress.next_bucket += 1

    def set_sample_counts(self, counts: Sequence[int], *, has_passes: bool) -> bool:
        """The next passes compute the gradients of so many samples on each member. Returns whether they have another
        weight now. `has_passes`: earlier passes of this step have left gradients, which keep the weight that they had.

        ValueError, on all members alike, if counts differ and the op is adasum.
        """
        assert self.group.rank is not None
        op = self._op
        if op is Op.ADASUM and len(set(counts)) > 1:
            raise ValueError(
                f"op='adasum' cannot weigh gradients by samples, and the ranks have {', '.join(map(str, counts))} of "
                "this batch; take a global batch that the ranks can divide evenly, and ends='drop'"
            )
        weight = sample_weight(counts, self.group.rank) if op is Op.MEAN else float(counts[self.group.rank] > 0)
        if weight == self._weight:  # as nearly always
            return False
        if has_passes:
            taken, taken_weight = self._adapter.take_gradients(), self._weight
            if not taken_weight:  # what passes without a weight have computed is dropped
                taken, taken_weight = self._set_aside or (None, weight)
            self._set_aside = (taken, taken_weight) if not weight and taken is not None else None
            if weight and taken is not None:
                self._adapter.put_back_gradients(taken, taken_weight / weight)
        self._weight = weight
        return True

    # --- when it is over -------------------------------------------------------------------------------------------

    def start_remaining(self, num_passes: int, *, had_backward: bool, inline: bool) -> None:
        """Fill and start the remaining buckets, with zeros for gradients that are missing: no more will come. It does
        not wait for other ranks: where there are no buckets yet, finalize() begins with an agreement on them.

        The step had `num_passes` passes; `had_backward` says whether this rank had one. `inline`: nothing else in this
        process waits for other ranks, so what remains may run in finalize(), in this thread. Collective.
        """
        self._num_passes = num_passes
        self._num_steps += 1
        self._had_backward = had_backward or self._adapter.has_unreduced_gradient()
        if self._buckets is not None:
            self._start_buckets(self._buckets, inline=inline)
            return
        ready = self._counter.ready_order()
        if ready:
            self._ready_names = [self._parameters[index].name for index in ready]

    def can_finalize(self, deadline: Deadline) -> bool:
        """Wait for the buckets until the deadline. Return whether finalize() would return then without waiting for
        other ranks."""
        buckets = self._buckets
        if buckets is None or buckets.have_further_wires or None in buckets.works:
            return False
        try:
            for work in buckets.works:
                assert work is not None
                work.wait(deadline.remaining_s)
        except Exception:  # a timeout, or an error that finalize() will raise
            return False
        return not buckets.need_exchange()

    def finalize(self) -> None:
        """Wait for all buckets. Gradients are the results then. An error is raised on all members alike."""
        buckets = self._buckets
        if buckets is None:
            buckets = self._agree_on_buckets()
            if buckets is None:
                return
            self._start_buckets(buckets, inline=True)
        try:
            self._finish_buckets(buckets)
        except Exception:  # the buckets that were started end alike
            with suppress(Exception):
                buckets.drain()
            with explain_joined_ranks():
                raise
        self._holds_results = True
        if self._world is not None:
            self._world.change_checked = True
        is_usual = buckets.flags.tobytes() == buckets.usual_flags_bytes
        if is_usual and not self._progress.kinds and not buckets.sparse:  # as nearly always
            self._adapter.assign_results(buckets.dense, ())
            return
        if buckets.fingerprints_differ():
            self._compare_parameters(buckets)
        flags = buckets.flags.tolist()
        if flags[CHANGE_WANTED] and self._world is not None:
            self._world.change_agreed = True
        if not flags[HAD_BACKWARD] and not self._settings.idle_steps:
            raise ValueError(
                f"{self._describe_rank()}: step() without backward(): none of the {len(self._parameters)} parameters "
                f"that train ({self._parameters[0].name!r} is the first) got a gradient on any rank since the last "
                "step. If backward() was called, the optimizer has other parameters than the model: build it after the "
                "model was moved, converted or copied. If gradients were changed in place instead, idle_steps=True "
                "allows it"
            )
        self._assign_unusual_results(buckets, flags)
        if flags[REPLAN_WANTED] or any(flags[index] == GradientKind.SPARSE for index in buckets.dense):
            self._rebuild_buckets()

    def gradients_cleared(self) -> None:
        """Gradients were cleared: those that become ready from now on are not added to others."""
        self._holds_results = False
        self._set_aside = None

    def drain(self) -> None:
        """Wait for the buckets that were started. Called when a pass was interrupted, on all members alike."""
        if self._buckets is not None:
            self._buckets.drain()

    def parameters_added(self) -> None:
        """The adapter has more parameters. The members agree on new buckets at the end of the next pass."""
        if self._buckets is None:
            self._forget_buckets()
        else:
            self._adapter.watch_new_parameters(self._counter.hook(None))

    def reset(self, group: Group, world: World | None = None) -> None:
        """Go on with another group, in a new round. The members agree anew at the end of the next pass."""
        self.group = group
        self._world = world
        self._weight = 1.0
        self._name = f"optimizer.{group.new_reducer_number()}"
        self._num_steps = 0
        self._compared_names.clear()
        self._forget_buckets()

    def close(self) -> None:
        """Take the hooks of gradients away, and close the channel. Idempotent."""
        self._adapter.close()
        self._close_buckets()

    # --- one pass --------------------------------------------------------------------------------------------------

    def _new_progress(self, *, is_last: bool, inline: bool) -> _PassProgress:
        buckets = self._buckets
        if buckets is None:
            return _PassProgress()
        # What has no weight is dropped when all gradients are there.
        num_overlapped = len(buckets.indices) - inline if self._overlap and self._weight else 0
        return _PassProgress(is_last, num_overlapped, self._scale_factor(buckets))

    def _make_counter(self) -> ReadyCounter | hot_calls.ReadyCounter:
        bucket_of = [-1] * len(self._parameters) if self._buckets is None else self._buckets.bucket_of
        arguments: dict[str, Any] = {
            "bucket_of": bucket_of,
            "num_buckets": 0 if self._buckets is None else len(self._buckets.indices),
            "on_first": self.on_first_gradient,
            "on_second": self.on_second_gradient,
            "on_full": self.on_bucket_full,
        }
        return make_ready_counter(**arguments) or ReadyCounter(**arguments)

    def on_first_gradient(self, index: int | None) -> None:
        """A pass begins with the gradient of this parameter. None: of one that was not described when the members
        agreed; it makes a pass all the same, and at its end the members agree anew."""
        if self._holds_results:
            # A mean of equal numbers is that number, so a result may be reduced again with what was added to it.
            adds_up = self._op is Op.MEAN and self._passes_per_step == 1
            if not adds_up and self._adapter.still_has_result(index):
                what = "a parameter that did not train before"
                if index is not None:
                    what = f"parameter {self._parameters[index].name!r}"
                raise ValueError(
                    f"{self._describe_rank()}: {what} got a gradient on top of one that was combined before; call "
                    "optimizer.zero_grad() before backward(), or set the number of backward passes per step"
                )
            self._holds_results = False  # the memory of gradients has those of this step from now on
        self._on_pass_started()

    def on_second_gradient(self, index: int) -> None:
        """A parameter got a further gradient in one pass: ValueError if the first one is under way."""
        buckets, progress = self._buckets, self._progress
        if buckets is not None and progress.fills_buckets and 0 <= buckets.bucket_of[index] < progress.next_bucket:
            raise ValueError(
                f"{self._describe_rank()}: parameter {self._parameters[index].name!r} got a second gradient in one "
                "backward pass, while its first was under way; if it is used in several checkpoints, pass "
                "use_reentrant=False to them"
            )

    def _start_buckets(self, buckets: _AgreedBuckets, *, inline: bool) -> None:
        """Fill and start the buckets that have not started; with `inline` only fill them."""
        progress = self._progress
        if not self._weight:
            self._drop_gradients()
        progress.scale_factor = self._scale_factor(buckets)
        num_buckets = len(buckets.indices)
        last_is_inline = inline and progress.next_bucket < num_buckets
        for number in range(progress.next_bucket, num_buckets):
            self._fill_bucket(buckets, number)
            if not inline:
                buckets.start(number)
        progress.next_bucket = num_buckets
        if buckets.sparse:
            progress.kinds.update(self._adapter.copy_to_buckets(buckets.sparse))
            if self._settings.check_finite:
                self._record_non_finite(buckets.sparse)
        replan_wanted = self._adapter.parameters_changed(all_ready=self._counter.all_ready())
        own_fingerprint = self._next_fingerprint()
        flags_needed = buckets.write_flags(
            progress.kinds,
            own_fingerprint,
            had_backward=self._had_backward,
            replan_wanted=replan_wanted,
            change_wanted=self._world is not None and self._world.change_wanted,
        )
        if last_is_inline:  # else it asks for the flags already
            buckets.ask_for_flags(flags_needed)
        if not inline:
            buckets.start(num_buckets)

    def _fill_bucket(self, buckets: _AgreedBuckets, number: int) -> None:
        indices, progress = buckets.indices[number], self._progress
        kinds = self._adapter.copy_to_buckets(indices)
        if kinds:
            progress.kinds.update(kinds)
        if progress.scale_factor != 1.0:
            self._adapter.scale(indices, progress.scale_factor)
        if self._settings.check_finite:
            self._record_non_finite(indices)
        encoder = buckets.encoders[number]
        if encoder is not None:
            encoder.encode(0, buckets.gradients(number), buckets.wires[number])
        if number + 1 == len(buckets.indices):
            buckets.ask_for_flags(True)  # start_remaining() asks for less, if it knows all before the bucket starts

    def _drop_gradients(self) -> None:
        """The last pass had no weight: what it computed, which need not be finite, is dropped. Gradients of earlier
        passes count as they would without it."""
        self._adapter.take_gradients()
        if self._set_aside is not None:
            taken, self._weight = self._set_aside
            self._adapter.put_back_gradients(taken, 1.0)
            self._set_aside = None

    def _record_non_finite(self, indices: Sequence[int]) -> None:
        found = self._adapter.find_non_finite(indices)
        self._progress.kinds.update(dict.fromkeys(found, GradientKind.NOT_FINITE))

    def _scale_factor(self, buckets: _AgreedBuckets) -> float:
        """The weight of this rank's samples. The buckets divide by the number of passes they are made for; this step
        may have another."""
        divisor = self._settings.pass_divisor
        return (self._weight or 1.0) * divisor(buckets.num_passes) / divisor(self._num_passes)

    def _finish_buckets(self, buckets: _AgreedBuckets) -> None:
        """Run what was not started, and wait for the rest. The memory of the gradients holds the results then."""
        for number, encoder in enumerate(buckets.encoders):
            if number == len(buckets.indices) and not buckets.flags_are_needed():  # so they are the usual ones
                continue
            buckets.finish(number)
            if encoder is not None and len(encoder.wires) == 1:
                encoder.decode(buckets.wires[number], buckets.gradients(number))
        for number, encoder in enumerate(buckets.encoders):
            if encoder is not None and len(encoder.wires) > 1:
                gradients, wires = buckets.gradients(number), buckets.wires[number]
                for wire in range(1, len(wires)):
                    encoder.encode(wire, gradients, wires)
                    buckets.plan.run(buckets.wire_numbers[number][wire])
                encoder.decode(wires, gradients)

    def _assign_unusual_results(self, buckets: _AgreedBuckets, flags: Sequence[int]) -> None:
        """Make the results gradients when not all of them are dense. FloatingPointError on all members if a gradient of
        one of them is not finite."""
        kinds = self._progress.kinds
        if GradientKind.NOT_FINITE in flags[:HAD_BACKWARD]:
            group = buckets.plan.group
            mine = [self._parameters[index].name for index in sorted(kinds) if kinds[index] is GradientKind.NOT_FINITE]
            found = [
                f"rank {rank}: parameter {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for rank, names in zip(group.ranks, objects.allgather(mine, group=group), strict=True)
                if names
            ]
            raise FloatingPointError(f"gradients are not finite: {'; '.join(found)}")
        dense = [index for index in buckets.dense if flags[index] == GradientKind.DENSE]
        self._adapter.assign_results(dense, [index for index in dense if kinds.get(index) is GradientKind.NONE])
        sparse = [index for index in buckets.sparse if flags[index]]
        sparse += [index for index in buckets.dense if flags[index] == GradientKind.SPARSE]
        for index in sorted(sparse):
            before, after = self._settings.sparse_scales(self._num_passes, self.group.size)
            with explain_joined_ranks():
                self._adapter.allreduce_sparse(index, buckets.plan.group, (before * (self._weight or 1.0), after))

    # --- comparing parameters --------------------------------------------------------------------------------------

    def _next_fingerprint(self) -> Array | None:
        """The fingerprint of the parameters that have not been compared, if they are to be compared in this step."""
        is_due = 0 < self._compare_at_step <= self._num_steps and self.group.size > 1
        if not self._has_uncompared or not is_due:
            return None
        self._has_uncompared = False
        checksums = self._adapter.checksum_parameters(self._compared_names)
        self._compared_names.update(name for name, _ in checksums)
        return fingerprint(checksum_bytes(checksums)) if checksums else None

    def _compare_parameters(self, buckets: _AgreedBuckets) -> None:
        """Raise OutOfSync, on all members alike, if their parameters differ; they compare again in the next step."""
        self._has_uncompared = True
        self._compared_names.clear()
        advice = (
            f". Call {self._broadcast_call()} before the first step, on all ranks, or let all of them load the same "
            "checkpoint. If they are meant to differ, compare_at_step=0 or RONDE_COMPARE_AT_STEP=0 turns this off"
        )
        try:
            compare_checksums(buckets.plan.group, self._adapter.checksum_parameters(()), advice=advice)
        except Mismatch as error:
            if not error.joined:
                raise
            names = f"which parameters differ cannot be told while {format_ranks(error.joined)} is in join()"
            raise OutOfSync(f"the ranks are out of sync; {names}{advice}") from None

    # --- agreeing on buckets ---------------------------------------------------------------------------------------

    def _agree_on_buckets(self) -> _AgreedBuckets | None:
        """Make the buckets together with the other members, and return them. There are none while nothing trains.
        Collective."""
        described = self._adapter.describe_parameters()
        index_by_name = {parameter.name: index for index, parameter in enumerate(described)}
        ready_order = tuple(index_by_name[name] for name in self._ready_names if name in index_by_name)
        compared = {"passes": str(self._passes_per_step), "codec": str(getattr(self._codec, "name", None))}
        settings = {**self._settings.describe(), **compared}
        proposal = PlanProposal(settings, tuple(described), ready_order, self._overlap)
        agreed = agree_on_plan(self.group, f"ronde.{self._name}", proposal)
        if not agreed.parameters:
            self._forget_buckets()
            return None
        self._has_uncompared = True
        self._parameters = agreed.parameters
        total_bytes = sum(each.count * DType[each.dtype.upper()].num_bytes for each in agreed.parameters)
        limits = choose_size_limits(total_bytes, self._settings.bucket_mb, agreed.overlap)
        buckets = self._buckets = _AgreedBuckets(
            self.group,
            agreed.parameters,
            assign_buckets(agreed.parameters, agreed.ready_order, limits, self._settings.together),
            name=self._name,
            settings=self._settings,
            num_passes=self._passes_per_step,
            codec=self._codec,
        )
        self._bind_adapter()
        return buckets

    def _rebuild_buckets(self) -> None:
        """Other parameters train than before: make new buckets, and reduce the gradients of new parameters now."""
        known = {parameter.name for parameter in self._parameters}
        self._close_buckets()
        buckets = self._agree_on_buckets()
        if buckets is None:
            return
        new = [index for index, parameter in enumerate(self._parameters) if parameter.name not in known]
        if new:
            # The memory of the others holds zeros while the new ones are reduced: p.grad still has their results.
            kinds = self._progress.kinds = dict.fromkeys(range(len(self._parameters)), GradientKind.NONE)
            kinds.update(dict.fromkeys(new, GradientKind.DENSE))
            kinds.update(self._adapter.copy_to_buckets(new))
            new_dense = [index for index in new if buckets.bucket_of[index] >= 0]
            factor = self._scale_factor(buckets)
            if factor != 1.0 and new_dense:
                self._adapter.scale(new_dense, factor)
            if self._settings.check_finite:
                self._record_non_finite(new)
            buckets.write_flags(
                kinds, self._next_fingerprint(), had_backward=True, replan_wanted=False, change_wanted=False
            )
            for number, encoder in enumerate(buckets.encoders):
                if encoder is not None:
                    encoder.encode(0, buckets.gradients(number), buckets.wires[number])
            buckets.ask_for_flags(True)
            self._finish_buckets(buckets)
            if buckets.fingerprints_differ():
                self._compare_parameters(buckets)
        self._adapter.copy_to_buckets([index for index in buckets.dense if index not in new])
        if new:
            self._assign_unusual_results(buckets, buckets.flags.tolist())

    def _forget_buckets(self) -> None:
        """Close the buckets, and only record the order of gradients until the members agree on new ones."""
        self._close_buckets()
        self._parameters = self._adapter.describe_parameters()
        self._progress = _PassProgress()
        self._bind_adapter()

    def _bind_adapter(self) -> None:
        counter = self._counter = self._make_counter()
        hooks = list(map(counter.hook, range(len(self._parameters))))
        self._adapter.bind_buckets([] if self._buckets is None else self._buckets.memories, hooks)
        self._adapter.watch_new_parameters(counter.hook(None))

    def _close_buckets(self) -> None:
        if self._buckets is not None:
            self._buckets.plan.close()
            self._buckets = None

    def _describe_rank(self) -> str:
        assert self.group.rank is not None
        return f"rank {self.group.ranks[self.group.rank]}"
