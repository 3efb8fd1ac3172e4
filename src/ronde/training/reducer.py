"""Combines the gradients of some parameters among the members of one group, while they are being computed. Used by
Passes, which counts backward passes and calls open(), flush() and finish(); docs/internals/gradients.md tells it all.

Nothing is agreed on before the first gradients are there: only then do ranks know which are sparse, which train, and
in which order they come. From then on a full bucket just starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ronde.comm.group import Group
from ronde.training.adapter import FrameworkAdapter, GradientKind, ParameterInfo
from ronde.training.agreement import PlanProposal, agree_on_plan, allgather_text, explain_joined_ranks
from ronde.training.buckets import assign_buckets, choose_size_limits
from ronde.training.compression import Codec
from ronde.training.exchange import HAD_BACKWARD, REPLAN_WANTED, GradientExchange, GradientSettings
from ronde.types import DType

__all__ = ["Reducer"]


class Reducer:
    """The gradients that are combined over one group."""

    def __init__(
        self,
        adapter: FrameworkAdapter,
        group: Group,
        settings: GradientSettings,
        *,
        on_pass_started: Callable[[], None],
        codec: Codec | None = None,
        overlap: bool = True,
    ) -> None:
        """`begin` is called when the first gradient of a pass comes. `overlap`: buckets travel while the pass runs."""
        self._adapter = adapter
        self._group = group
        self._settings = settings
        self._on_pass_started = on_pass_started
        self._codec = codec
        self._overlap = overlap
        self._exchange: GradientExchange | None = None
        self._num_passes = self._passes_per_step = 1
        self._holds_results = False  # whether results were delivered that nobody has cleared since
        self._ready_names: list[str] = []  # in the order in which gradients came when that was looked at
        self._parameters: Sequence[ParameterInfo] = ()
        self._watch_gradients()

    # --- while a pass runs -----------------------------------------------------------------------------------------

    def prepare_pass(self, num_passes: int, *, last_pass: bool, only_reducer: bool) -> None:
        """A pass may begin. `final`: it is the last of num_passes, then gradients travel. `alone`: as in flush()."""
        traffic = self._exchange
        self._num_passes = self._passes_per_step = num_passes
        self._filling_buckets = last_pass and traffic is not None
        self._suspended = True
        self._is_ready = [False] * len(self._parameters)
        self._ready_order: list[int] = []
        self._gradient_kinds: dict[int, GradientKind] = {}
        self._next_bucket = 0  # the first bucket that has not been sent
        self._num_missing = [len(indices) for indices in self._bucket_indices]
        self._num_missing.append(len(self._parameters) + 1)  # at -1, for those of no bucket: never full
        self._scale_factor = 1.0 if traffic is None else self._rescale_factor(traffic)
        self._num_overlapped = 0 if traffic is None or not self._overlap else len(traffic.buckets) - only_reducer

    def suspend(self) -> None:
        """The pass is interrupted: begin() is to be called again when it goes on."""
        self._suspended = True

    def mark_ready(self, index: int, _parameter: object = None) -> None:
        """The gradient of a parameter has come. On the path of every gradient, so it takes no lock: callers see to it
        that it runs in one thread at a time."""
        if self._suspended:
            self._on_first_gradient(index)
        if self._is_ready[index]:
            self._check_second_gradient(index)
            return
        self._is_ready[index] = True
        if not self._filling_buckets:
            self._ready_order.append(index)
            return
        bucket = self._bucket_of[index]
        missing = self._num_missing[bucket] = self._num_missing[bucket] - 1
        if not missing and bucket == self._next_bucket:
            self._start_full_buckets()

    def mark_new_parameter(self, _parameter: object = None) -> None:
        """A gradient has come of a parameter that no accord knows. It is a pass all the same; at its end there will be
        another accord."""
        if self._suspended:
            self._on_first_gradient(None)

    # --- when it is over -------------------------------------------------------------------------------------------

    def start_remaining(self, num_passes: int, *, had_backward: bool, only_reducer: bool) -> None:
        """No more gradients will come: send what has not been sent, zeros for what is missing.

        `passed`: whether this rank had a backward pass. `alone`: nothing else in this process waits for other ranks, so
        what is left may run in this thread, in finish(), which saves waking another one.
        """
        self._num_passes = num_passes
        had_backward = had_backward or self._adapter.has_unreduced_gradient()
        if self._exchange is None:
            self._agree_on_plan()
        traffic = self._exchange
        if traffic is None:
            return
        self._scale_factor = self._rescale_factor(traffic)
        for number in range(self._next_bucket, len(traffic.buckets)):
            self._fill_bucket(number)
            if not only_reducer:
                traffic.start(number)
        self._next_bucket = len(traffic.buckets)
        if self._sparse:
            self._gradient_kinds.update(self._adapter.copy_to_buckets(self._sparse))
            if self._settings.check_finite:
                self._record_non_finite(self._sparse)
        traffic.write_flags(
            self._gradient_kinds, had_backward=had_backward, replan_wanted=self._adapter.parameters_changed()
        )
        if not only_reducer:
            traffic.start_flags()

    def finalize(self) -> None:
        """Wait for everything; the gradients are the results then. Errors are the same on all members."""
        traffic = self._exchange
        if traffic is None:
            return
        traffic.finish()
        self._holds_results = True
        if traffic.flags_are_usual and not self._gradient_kinds and not self._sparse:  # as nearly always
            self._adapter.assign_results(self._dense, ())
            return
        highest = traffic.flags.tolist()
        if not highest[HAD_BACKWARD] and not self._settings.idle_steps:
            raise ValueError(self._no_backward_message())
        self._check_finite(highest)
        self._assign_results(highest)
        if highest[REPLAN_WANTED] or any(highest[index] == GradientKind.SPARSE for index in self._dense):
            self._rebuild_buckets()

    def clear(self) -> None:
        """Gradients were cleared: what comes now does not add to results."""
        self._holds_results = False

    def drain(self) -> None:
        """The pass broke off, on all members alike: wait for what was sent."""
        if self._exchange is not None:
            self._exchange.drain()

    def parameters_added(self) -> None:
        """The adapter has more parameters: listen for them too. If there is an accord, it will be renewed."""
        if self._exchange is None:
            self._watch_gradients()
        else:
            self._adapter.watch_new_parameters(self.mark_new_parameter)

    def reset(self, group: Group) -> None:
        """Go on with another group, in a new round. The next pass agrees anew."""
        self._group = group
        self._close_exchange()
        self._watch_gradients()

    def close(self) -> None:
        """Listen for gradients no more, and close the channel. Idempotent."""
        self._adapter.close()
        self._close_exchange()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _watch_gradients(self) -> None:
        """Before an accord: only note what comes."""
        self._parameters = self._adapter.describe_parameters()
        self._bucket_of = [-1] * len(self._parameters)
        self._bucket_indices: list[tuple[int, ...]] = []
        self._dense: list[int] = []
        self._sparse: list[int] = []
        self._adapter.bind_buckets({}, self.mark_ready)
        self._adapter.watch_new_parameters(self.mark_new_parameter)
        self.prepare_pass(self._passes_per_step, last_pass=False, only_reducer=False)

    def _on_first_gradient(self, index: int | None) -> None:
        if self._holds_results:
            adds_up = self._settings.is_idempotent and self._passes_per_step == 1
            if not adds_up and self._adapter.still_has_result(index):
                raise ValueError(
                    f"{self._describe_parameter(index)} got a gradient on top of one that was combined before; call "
                    "optimizer.zero_grad() before backward(), or set the number of backward passes per step"
                )
            self._holds_results = False  # what lies in places from now on is of this step
        self._suspended = False
        self._on_pass_started()

    def _check_second_gradient(self, index: int) -> None:
        if self._filling_buckets and 0 <= self._bucket_of[index] < self._next_bucket:
            raise ValueError(
                f"{self._describe_parameter(index)} got a second gradient in one backward pass, while its first was under way; if it "
                "is used in several checkpoints, pass use_reentrant=False to them"
            )

    def _start_full_buckets(self) -> None:
        """Start the buckets whose turn it is; all members start them in this order."""
        traffic = self._exchange
        assert traffic is not None
        while self._next_bucket < self._num_overlapped and not self._num_missing[self._next_bucket]:
            self._fill_bucket(self._next_bucket)
            traffic.start(self._next_bucket)
            self._next_bucket += 1

    def _fill_bucket(self, number: int) -> None:
        """Bring together what belongs into a bucket."""
        indices = self._bucket_indices[number]
        odd = self._adapter.copy_to_buckets(indices)
        if odd:
            self._gradient_kinds.update(odd)
        if self._scale_factor != 1.0:
            self._adapter.scale(indices, self._scale_factor)
        if self._settings.check_finite:
            self._record_non_finite(indices)

    def _record_non_finite(self, indices: Sequence[int]) -> None:
        self._gradient_kinds.update(dict.fromkeys(self._adapter.find_non_finite(indices), GradientKind.NOT_FINITE))

    def _rescale_factor(self, exchange: GradientExchange) -> float:
        """The plan divides by the passes it was made for; this step may have others."""
        divisor = self._settings.pass_divisor
        return divisor(exchange.num_passes) / divisor(self._num_passes)

    def _assign_results(self, flags: Sequence[int]) -> None:
        """Results to where they belong, when not all is as usual."""
        missed = [index for index, state in self._gradient_kinds.items() if state is GradientKind.NONE]
        absent = [index for index in missed if self._bucket_of[index] >= 0 and flags[index] == GradientKind.DENSE]
        self._adapter.assign_results([index for index in self._dense if flags[index] == GradientKind.DENSE], absent)
        by_itself = [index for index in self._sparse if flags[index]]
        by_itself += [index for index in self._dense if flags[index] == GradientKind.SPARSE]
        for index in sorted(by_itself):
            scales = self._settings.sparse_scales(self._num_passes, self._group.size)
            with explain_joined_ranks():
                self._adapter.allreduce_sparse(index, self._group, scales)

    def _agree_on_plan(self) -> None:
        """Make a plan together with the other members."""
        if self._ready_order:
            self._ready_names = [self._parameters[index].name for index in self._ready_order]
        mine = self._adapter.describe_parameters()
        places = {parameter.name: index for index, parameter in enumerate(mine)}
        ready = tuple(places[name] for name in self._ready_names if name in places)
        words = {"passes": str(self._passes_per_step), "codec": str(getattr(self._codec, "name", None))}
        settings = {**self._settings.describe(), **words}
        accord = agree_on_plan(self._group, PlanProposal(settings, tuple(mine), ready, self._overlap))
        if not accord.parameters:
            self._watch_gradients()
            return
        parameters = self._parameters = accord.parameters
        total_bytes = sum(each.count * DType[each.dtype.upper()].num_bytes for each in parameters)
        limits = choose_size_limits(total_bytes, self._settings.bucket_mb, accord.overlap)
        buckets = assign_buckets(parameters, accord.ready_order, limits, self._settings.together)
        self._exchange = GradientExchange(
            self._group,
            parameters,
            buckets,
            settings=self._settings,
            num_passes=self._passes_per_step,
            codec=self._codec,
        )
        self._bind_buckets(self._exchange)

    def _bind_buckets(self, exchange: GradientExchange) -> None:
        """From now on gradients go into these buckets."""
        memory = {}
        self._bucket_indices = [bucket.indices for bucket in exchange.buckets]
        self._bucket_of = [-1] * len(self._parameters)
        for number, bucket in enumerate(exchange.buckets):
            for span in bucket.locations:
                memory[span.index] = exchange.bucket_arrays[number][span.start : span.start + span.count]
                self._bucket_of[span.index] = number
        self._dense = sorted(memory)
        self._sparse = [index for index, parameter in enumerate(self._parameters) if parameter.sparse]
        self._is_ready = [False] * len(self._parameters)
        self._adapter.bind_buckets(memory, self.mark_ready)
        self._adapter.watch_new_parameters(self.mark_new_parameter)

    def _rebuild_buckets(self) -> None:
        """Some parameters train that did not before, or no longer: new buckets, and those that are new travel now."""
        known = {parameter.name for parameter in self._parameters}
        self._close_exchange()
        self._agree_on_plan()
        traffic = self._exchange
        if traffic is None:
            return
        new = [index for index, parameter in enumerate(self._parameters) if parameter.name not in known]
        old = [index for index in self._dense if index not in new]
        if new:
            # The others' places hold zeros while the new ones travel: their results are where they were delivered.
            self._gradient_kinds = dict.fromkeys(range(len(self._parameters)), GradientKind.NONE)
            self._gradient_kinds.update(dict.fromkeys(new, GradientKind.DENSE))
            self._gradient_kinds.update(self._adapter.copy_to_buckets(new))
            if self._rescale_factor(traffic) != 1.0:
                self._adapter.scale([index for index in new if index in self._dense], self._rescale_factor(traffic))
            if self._settings.check_finite:
                self._record_non_finite(new)
            traffic.write_flags(self._gradient_kinds, had_backward=True, replan_wanted=False)
            traffic.finish()
        self._adapter.copy_to_buckets(old)
        if new:
            self._check_finite(traffic.flags.tolist())
            self._assign_results(traffic.flags.tolist())

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    # --- errors ----------------------------------------------------------------------------------------------------

    def _describe_parameter(self, index: int | None) -> str:
        if index is None:
            return f"rank {self._rank}: a parameter that did not train before"
        return f"rank {self._rank}: parameter {self._parameters[index].name!r}"

    @property
    def _rank(self) -> int:
        assert self._group.rank is not None
        return self._group.ranks[self._group.rank]

    def _no_backward_message(self) -> str:
        first = self._parameters[0].name
        return (
            f"rank {self._rank}: step() without backward(): none of the {len(self._parameters)} parameters that train "
            f"({first!r} is the first) got a gradient on any rank since the last step. If backward() was called, the "
            "optimizer has other parameters than the model: build it after the model was moved, converted or copied. "
            "If gradients were changed in place instead, idle_steps=True allows it"
        )

    def _check_finite(self, flags: Sequence[int]) -> None:
        """If a gradient is not finite somewhere, say whose; all members come here alike."""
        if GradientKind.NOT_FINITE not in flags[:HAD_BACKWARD]:
            return
        mine = sorted(index for index, state in self._gradient_kinds.items() if state is GradientKind.NOT_FINITE)
        names = [self._parameters[index].name for index in mine]
        said = {
            rank: words for rank, words in allgather_text(self._group, _format_parameter_names(names)).items() if words
        }
        raise FloatingPointError(
            "gradients are not finite: " + "; ".join(f"rank {rank}: {words}" for rank, words in said.items())
        )


def _format_parameter_names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"parameter {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
