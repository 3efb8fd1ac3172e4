"""Averages the gradients of some parameters over the members of one group, bucket by bucket, while they are computed.

TrainingStep says when a pass may begin, when no more gradients will come and when results are needed;
docs/internals/gradients.md has the whole protocol. Nothing is agreed on before the first gradients are there: only then
do ranks know which are sparse, which train, and in which order they become ready. From then on a full bucket just
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ronde.comm.group import Group
from ronde.training.adapter import FrameworkAdapter, GradientKind, ParameterInfo
from ronde.training.agreement import PlanProposal, agree_on_plan, allgather_names, explain_joined_ranks
from ronde.training.buckets import assign_buckets, choose_size_limits
from ronde.training.compression import Codec
from ronde.training.exchange import HAD_BACKWARD, REPLAN_WANTED, GradientExchange, GradientSettings
from ronde.types import DType


@dataclass(slots=True)
class _PassProgress:
    """Which gradients of a backward pass are ready, and which buckets have started."""

    is_ready: list[bool]
    num_missing: list[int]
    """By bucket, how many of its gradients are not ready."""
    fills_buckets: bool
    """Whether this is the last pass of its step, after which gradients are reduced: then a full bucket may start."""
    num_overlapped: int
    """How many buckets may start before the pass is over."""
    scale_factor: float
    """What gradients are multiplied by, when the step has another number of passes than the buckets are made for."""
    reports_gradient: bool = True
    """Whether the next gradient is the first one of a pass, or of a part of it, which is reported."""
    next_bucket: int = 0
    """The first bucket that has not started."""
    ready_order: list[int] = field(default_factory=list)
    """The indices of the parameters in the order in which gradients became ready, while no buckets are filled."""
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
        codec: Codec | None = None,
        overlap: bool = True,
    ) -> None:
        """`on_pass_started` is called at the first gradient of a pass. With `overlap`, buckets are reduced while the
        pass runs."""
        self._adapter = adapter
        self._group = group
        self._settings = settings
        self._on_pass_started = on_pass_started
        self._codec = codec
        self._overlap = overlap
        self._passes_per_step = 1
        self._num_passes = 1  # of the present step
        self._holds_results = False  # whether results were assigned and not cleared since
        self._ready_names: list[str] = []  # of parameters, in the order in which gradients were last seen to come
        self._parameters: Sequence[ParameterInfo] = adapter.describe_parameters()
        self._exchange: GradientExchange | None = None  # None until the members have agreed on buckets
        self._progress = self._new_progress(is_last=False, inline=False)
        self._bind_adapter()

    # --- while a pass runs -----------------------------------------------------------------------------------------

    def prepare_pass(self, num_passes: int, *, is_last: bool, inline: bool) -> None:
        """A pass may begin. `is_last`: it is the last of the num_passes of a step, so gradients are reduced behind it.
        `inline`: as in start_remaining()."""
        self._num_passes = self._passes_per_step = num_passes
        self._progress = self._new_progress(is_last=is_last, inline=inline)

    def report_next_gradient(self) -> None:
        """Call on_pass_started at the next gradient again: the pass that ended was a part of another one."""
        self._progress.reports_gradient = True

    def mark_ready(self, index: int, _parameter: object = None) -> None:
        """The gradient of a parameter is ready. Called for every gradient, so it takes no lock: the adapter calls it in
        one thread at a time."""
        progress = self._progress
        if progress.reports_gradient:
            self._on_first_gradient(index)
        if progress.is_ready[index]:
            self._check_second_gradient(index)
            return
        progress.is_ready[index] = True
        exchange = self._exchange
        if exchange is None or not progress.fills_buckets:
            progress.ready_order.append(index)
            return
        bucket = exchange.bucket_of[index]
        if bucket < 0:
            return
        progress.num_missing[bucket] = missing = progress.num_missing[bucket] - 1
        if not missing and bucket == progress.next_bucket:
            self._start_full_buckets(exchange)

    def mark_new_parameter(self, _parameter: object = None) -> None:
        """A parameter got a gradient that was not described when the members agreed. It makes a pass all the same; at
        its end the members agree anew."""
        if self._progress.reports_gradient:
            self._on_first_gradient(None)

    # --- when it is over -------------------------------------------------------------------------------------------

    def start_remaining(self, num_passes: int, *, had_backward: bool, inline: bool) -> None:
        """Fill and start the remaining buckets, with zeros for gradients that are missing: no more will come.

        The step had `num_passes` passes; `had_backward` says whether this rank had one. `inline`: nothing else in this
        process waits for other ranks, so what remains may run in finalize(), in this thread. Collective.
        """
        self._num_passes = num_passes
        had_backward = had_backward or self._adapter.has_unreduced_gradient()
        if self._exchange is None:
            self._agree_on_buckets()
        exchange, progress = self._exchange, self._progress
        if exchange is None:
            return
        progress.scale_factor = self._scale_factor(exchange)
        for number in range(progress.next_bucket, len(exchange.buckets)):
            self._fill_bucket(exchange, number)
            if not inline:
                exchange.start(number)
        progress.next_bucket = len(exchange.buckets)
        if exchange.sparse:
            progress.kinds.update(self._adapter.copy_to_buckets(exchange.sparse))
            if self._settings.check_finite:
                self._record_non_finite(exchange.sparse)
        exchange.write_flags(
            progress.kinds, had_backward=had_backward, replan_wanted=self._adapter.parameters_changed()
        )
        if not inline:
            exchange.start_flags()

    def finalize(self) -> None:
        """Wait for all buckets. Gradients are the results then. An error is raised on all members alike."""
        exchange = self._exchange
        if exchange is None:
            return
        exchange.finish()
        self._holds_results = True
        if exchange.flags_are_usual and not self._progress.kinds and not exchange.sparse:  # as nearly always
            self._adapter.assign_results(exchange.dense, ())
            return
        flags = exchange.flags.tolist()
        if not flags[HAD_BACKWARD] and not self._settings.idle_steps:
            raise ValueError(self._no_backward_message())
        self._check_finite(flags)
        self._assign_results(exchange, flags)
        if flags[REPLAN_WANTED] or any(flags[index] == GradientKind.SPARSE for index in exchange.dense):
            self._rebuild_buckets()

    def gradients_cleared(self) -> None:
        """Gradients were cleared: those that become ready from now on are not added to results."""
        self._holds_results = False

    def drain(self) -> None:
        """Wait for the buckets that were started. Called when a pass was interrupted, on all members alike."""
        if self._exchange is not None:
            self._exchange.drain()

    def parameters_added(self) -> None:
        """The adapter has more parameters. The members agree on new buckets at the end of the next pass."""
        if self._exchange is None:
            self._forget_buckets()
        else:
            self._adapter.watch_new_parameters(self.mark_new_parameter)

    def reset(self, group: Group) -> None:
        """Go on with another group, in a new round. The members agree anew at the end of the next pass."""
        self._group = group
        self._forget_buckets()

    def close(self) -> None:
        """Take the hooks of gradients away, and close the channel. Idempotent."""
        self._adapter.close()
        self._close_exchange()

    # --- one pass --------------------------------------------------------------------------------------------------

    def _new_progress(self, *, is_last: bool, inline: bool) -> _PassProgress:
        exchange, is_ready = self._exchange, [False] * len(self._parameters)
        if exchange is None:
            return _PassProgress(is_ready, [], fills_buckets=False, num_overlapped=0, scale_factor=1.0)
        return _PassProgress(
            is_ready,
            list(map(len, exchange.bucket_indices)),
            fills_buckets=is_last,
            num_overlapped=len(exchange.buckets) - inline if self._overlap else 0,
            scale_factor=self._scale_factor(exchange),
        )

    def _on_first_gradient(self, index: int | None) -> None:
        if self._holds_results:
            adds_up = self._settings.is_idempotent and self._passes_per_step == 1
            if not adds_up and self._adapter.still_has_result(index):
                raise ValueError(
                    f"{self._describe_parameter(index)} got a gradient on top of one that was combined before; call "
                    "optimizer.zero_grad() before backward(), or set the number of backward passes per step"
                )
            self._holds_results = False  # the memory of gradients has those of this step from now on
        self._progress.reports_gradient = False
        self._on_pass_started()

    def _check_second_gradient(self, index: int) -> None:
        exchange, progress = self._exchange, self._progress
        if exchange is not None and progress.fills_buckets and 0 <= exchange.bucket_of[index] < progress.next_bucket:
            raise ValueError(
                f"{self._describe_parameter(index)} got a second gradient in one backward pass, while its first was "
                "under way; if it is used in several checkpoints, pass use_reentrant=False to them"
            )

    def _start_full_buckets(self, exchange: GradientExchange) -> None:
        """Start the full buckets whose turn it is. All members start buckets in the same order."""
        progress = self._progress
        while progress.next_bucket < progress.num_overlapped and not progress.num_missing[progress.next_bucket]:
            self._fill_bucket(exchange, progress.next_bucket)
            exchange.start(progress.next_bucket)
            progress.next_bucket += 1

    def _fill_bucket(self, exchange: GradientExchange, number: int) -> None:
        indices, progress = exchange.bucket_indices[number], self._progress
        kinds = self._adapter.copy_to_buckets(indices)
        if kinds:
            progress.kinds.update(kinds)
        if progress.scale_factor != 1.0:
            self._adapter.scale(indices, progress.scale_factor)
        if self._settings.check_finite:
            self._record_non_finite(indices)

    def _record_non_finite(self, indices: Sequence[int]) -> None:
        found = self._adapter.find_non_finite(indices)
        self._progress.kinds.update(dict.fromkeys(found, GradientKind.NOT_FINITE))

    def _scale_factor(self, exchange: GradientExchange) -> float:
        """The buckets divide by the number of passes they are made for; this step may have another."""
        divisor = self._settings.pass_divisor
        return divisor(exchange.num_passes) / divisor(self._num_passes)

    def _assign_results(self, exchange: GradientExchange, flags: Sequence[int]) -> None:
        """Make the results gradients when not all of them are dense."""
        dense = [index for index in exchange.dense if flags[index] == GradientKind.DENSE]
        kinds = self._progress.kinds
        self._adapter.assign_results(dense, [index for index in dense if kinds.get(index) is GradientKind.NONE])
        sparse = [index for index in exchange.sparse if flags[index]]
        sparse += [index for index in exchange.dense if flags[index] == GradientKind.SPARSE]
        for index in sorted(sparse):
            scales = self._settings.sparse_scales(self._num_passes, self._group.size)
            with explain_joined_ranks():
                self._adapter.allreduce_sparse(index, self._group, scales)

    # --- agreeing on buckets ---------------------------------------------------------------------------------------

    def _agree_on_buckets(self) -> None:
        """Make the buckets together with the other members. There are none while nothing trains. Collective."""
        if self._progress.ready_order:
            self._ready_names = [self._parameters[index].name for index in self._progress.ready_order]
        described = self._adapter.describe_parameters()
        index_by_name = {parameter.name: index for index, parameter in enumerate(described)}
        ready_order = tuple(index_by_name[name] for name in self._ready_names if name in index_by_name)
        compared = {"passes": str(self._passes_per_step), "codec": str(getattr(self._codec, "name", None))}
        settings = {**self._settings.describe(), **compared}
        agreed = agree_on_plan(self._group, PlanProposal(settings, tuple(described), ready_order, self._overlap))
        if not agreed.parameters:
            self._forget_buckets()
            return
        self._parameters = agreed.parameters
        total_bytes = sum(each.count * DType[each.dtype.upper()].num_bytes for each in agreed.parameters)
        limits = choose_size_limits(total_bytes, self._settings.bucket_mb, agreed.overlap)
        buckets = assign_buckets(agreed.parameters, agreed.ready_order, limits, self._settings.together)
        self._exchange = GradientExchange(
            self._group,
            agreed.parameters,
            buckets,
            settings=self._settings,
            num_passes=self._passes_per_step,
            codec=self._codec,
        )
        self._bind_adapter()

    def _rebuild_buckets(self) -> None:
        """Other parameters train than before: make new buckets, and reduce the gradients of new parameters now."""
        known = {parameter.name for parameter in self._parameters}
        self._close_exchange()
        self._agree_on_buckets()
        exchange = self._exchange
        if exchange is None:
            return
        new = [index for index, parameter in enumerate(self._parameters) if parameter.name not in known]
        if new:
            # The memory of the others holds zeros while the new ones are reduced: p.grad still has their results.
            kinds = self._progress.kinds = dict.fromkeys(range(len(self._parameters)), GradientKind.NONE)
            kinds.update(dict.fromkeys(new, GradientKind.DENSE))
            kinds.update(self._adapter.copy_to_buckets(new))
            if self._scale_factor(exchange) != 1.0:
                self._adapter.scale(
                    [index for index in new if index in exchange.gradient_arrays], self._scale_factor(exchange)
                )
            if self._settings.check_finite:
                self._record_non_finite(new)
            exchange.write_flags(kinds, had_backward=True, replan_wanted=False)
            exchange.finish()
        self._adapter.copy_to_buckets([index for index in exchange.dense if index not in new])
        if new:
            flags = exchange.flags.tolist()
            self._check_finite(flags)
            self._assign_results(exchange, flags)

    def _forget_buckets(self) -> None:
        """Close the buckets, and only record the order of gradients until the members agree on new ones."""
        self._close_exchange()
        self._parameters = self._adapter.describe_parameters()
        self._progress = self._new_progress(is_last=False, inline=False)
        self._bind_adapter()

    def _bind_adapter(self) -> None:
        self._adapter.bind_buckets({} if self._exchange is None else self._exchange.gradient_arrays, self.mark_ready)
        self._adapter.watch_new_parameters(self.mark_new_parameter)

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
        """Raise FloatingPointError on all members if a gradient of one of them is not finite."""
        if GradientKind.NOT_FINITE not in flags[:HAD_BACKWARD]:
            return
        kinds = self._progress.kinds
        names = [self._parameters[index].name for index in sorted(kinds) if kinds[index] is GradientKind.NOT_FINITE]
        found = [
            f"rank {rank}: parameter {theirs[0]!r}" + (f" and {len(theirs) - 1} more" if len(theirs) > 1 else "")
            for rank, theirs in allgather_names(self._group, names).items()
            if theirs
        ]
        raise FloatingPointError(f"gradients are not finite: {'; '.join(found)}")
