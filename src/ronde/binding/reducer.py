"""Combines the gradients of some parameters among the members of one group, while they are being computed. Used by
Passes, which counts backward passes and calls open(), flush() and finish(); docs/internals/gradients.md tells it all.

Nothing is agreed on before the first gradients are there: only then do ranks know which are sparse, which train, and
in which order they come. From then on a full bucket just starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ronde.binding.accord import Account, all_present, tell_all, trade
from ronde.binding.adapter import Adapter, Parameter, State
from ronde.binding.buckets import choose_limits, lay_out
from ronde.binding.codec import Codec
from ronde.binding.gradients import GradientSettings
from ronde.binding.traffic import PASSED, WANTED, Traffic
from ronde.comm.group import Group
from ronde.types import DType

__all__ = ["Reducer"]


class Reducer:
    """The gradients that are combined over one group."""

    def __init__(
        self,
        adapter: Adapter,
        group: Group,
        settings: GradientSettings,
        *,
        begin: Callable[[], None],
        codec: Codec | None = None,
        overlap: bool = True,
    ) -> None:
        """`begin` is called when the first gradient of a pass comes. `overlap`: buckets travel while the pass runs."""
        self._adapter = adapter
        self._group = group
        self._settings = settings
        self._begin = begin
        self._codec = codec
        self._overlap = overlap
        self._traffic: Traffic | None = None
        self._num_passes = self._usual_passes = 1
        self._stale = False  # whether results were delivered that nobody has cleared since
        self._ready_names: list[str] = []  # in the order in which gradients came when that was looked at
        self._parameters: Sequence[Parameter] = ()
        self._listen()

    # --- while a pass runs -----------------------------------------------------------------------------------------

    def open(self, num_passes: int, *, final: bool, alone: bool) -> None:
        """A pass may begin. `final`: it is the last of num_passes, then gradients travel. `alone`: as in flush()."""
        traffic = self._traffic
        self._num_passes = self._usual_passes = num_passes
        self._counting = final and traffic is not None
        self._resting = True
        self._came = [False] * len(self._parameters)
        self._order: list[int] = []
        self._states: dict[int, State] = {}
        self._next = 0  # the first bucket that has not been sent
        self._missing = [len(indices) for indices in self._indices]
        self._missing.append(len(self._parameters) + 1)  # at -1, for those of no bucket: never full
        self._factor = 1.0 if traffic is None else self._rescale(traffic)
        self._num_early = 0 if traffic is None or not self._overlap else len(traffic.buckets) - alone

    def rest(self) -> None:
        """The pass is interrupted: begin() is to be called again when it goes on."""
        self._resting = True

    def ready(self, index: int, _parameter: object = None) -> None:
        """The gradient of a parameter has come. On the path of every gradient, so it takes no lock: callers see to it
        that it runs in one thread at a time."""
        if self._resting:
            self._wake(index)
        if self._came[index]:
            self._come_again(index)
            return
        self._came[index] = True
        if not self._counting:
            self._order.append(index)
            return
        bucket = self._bucket_of[index]
        missing = self._missing[bucket] = self._missing[bucket] - 1
        if not missing and bucket == self._next:
            self._advance()

    def stray(self, _parameter: object = None) -> None:
        """A gradient has come of a parameter that no accord knows. It is a pass all the same; at its end there will be
        another accord."""
        if self._resting:
            self._wake(None)

    # --- when it is over -------------------------------------------------------------------------------------------

    def flush(self, num_passes: int, *, passed: bool, alone: bool) -> None:
        """No more gradients will come: send what has not been sent, zeros for what is missing.

        `passed`: whether this rank had a backward pass. `alone`: nothing else in this process waits for other ranks, so
        what is left may run in this thread, in finish(), which saves waking another one.
        """
        self._num_passes = num_passes
        passed = passed or self._adapter.given()
        if self._traffic is None:
            self._agree()
        traffic = self._traffic
        if traffic is None:
            return
        self._factor = self._rescale(traffic)
        for number in range(self._next, len(traffic.buckets)):
            self._prepare(number)
            if not alone:
                traffic.start(number)
        self._next = len(traffic.buckets)
        if self._sparse:
            self._states.update(self._adapter.collect(self._sparse))
            if self._settings.check_finite:
                self._note_not_finite(self._sparse)
        traffic.write_news(self._states, passed=passed, wanted=self._adapter.changed())
        if not alone:
            traffic.start_news()

    def finish(self) -> None:
        """Wait for everything; the gradients are the results then. Errors are the same on all members."""
        traffic = self._traffic
        if traffic is None:
            return
        traffic.finish()
        self._stale = True
        if traffic.no_news and not self._states and not self._sparse:  # as nearly always
            self._adapter.deliver(self._dense, ())
            return
        highest = traffic.news.tolist()
        if not highest[PASSED] and not self._settings.idle_steps:
            raise ValueError(self._nothing_came())
        self._check_finite(highest)
        self._deliver(highest)
        if highest[WANTED] or any(highest[index] == State.SPARSE for index in self._dense):
            self._agree_anew()

    def forget(self) -> None:
        """Gradients were cleared: what comes now does not add to results."""
        self._stale = False

    def abandon(self) -> None:
        """The pass broke off, on all members alike: wait for what was sent."""
        if self._traffic is not None:
            self._traffic.drain()

    def refresh(self) -> None:
        """The adapter has more parameters: listen for them too. If there is an accord, it will be renewed."""
        if self._traffic is None:
            self._listen()
        else:
            self._adapter.watch(self.stray)

    def reset(self, group: Group) -> None:
        """Go on with another group, in a new round. The next pass agrees anew."""
        self._group = group
        self._close_traffic()
        self._listen()

    def close(self) -> None:
        """Listen for gradients no more, and close the channel. Idempotent."""
        self._adapter.close()
        self._close_traffic()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Before an accord: only note what comes."""
        self._parameters = self._adapter.describe()
        self._bucket_of = [-1] * len(self._parameters)
        self._indices: list[tuple[int, ...]] = []
        self._dense: list[int] = []
        self._sparse: list[int] = []
        self._adapter.bind({}, self.ready)
        self._adapter.watch(self.stray)
        self.open(self._usual_passes, final=False, alone=False)

    def _wake(self, index: int | None) -> None:
        if self._stale:
            adds_up = self._settings.linear and self._usual_passes == 1
            if not adds_up and self._adapter.kept(index):
                raise ValueError(
                    f"{self._who(index)} got a gradient on top of one that was combined before; call "
                    "optimizer.zero_grad() before backward(), or set the number of backward passes per step"
                )
            self._stale = False  # what lies in places from now on is of this step
        self._resting = False
        self._begin()

    def _come_again(self, index: int) -> None:
        if self._counting and 0 <= self._bucket_of[index] < self._next:
            raise ValueError(
                f"{self._who(index)} got a second gradient in one backward pass, while its first was under way; if it "
                "is used in several checkpoints, pass use_reentrant=False to them"
            )

    def _advance(self) -> None:
        """Start the buckets whose turn it is; all members start them in this order."""
        traffic = self._traffic
        assert traffic is not None
        while self._next < self._num_early and not self._missing[self._next]:
            self._prepare(self._next)
            traffic.start(self._next)
            self._next += 1

    def _prepare(self, number: int) -> None:
        """Bring together what belongs into a bucket."""
        indices = self._indices[number]
        odd = self._adapter.collect(indices)
        if odd:
            self._states.update(odd)
        if self._factor != 1.0:
            self._adapter.scale(indices, self._factor)
        if self._settings.check_finite:
            self._note_not_finite(indices)

    def _note_not_finite(self, indices: Sequence[int]) -> None:
        self._states.update(dict.fromkeys(self._adapter.not_finite(indices), State.NOT_FINITE))

    def _rescale(self, traffic: Traffic) -> float:
        """The plan divides by the passes it was made for; this step may have others."""
        divisor = self._settings.pass_divisor
        return divisor(traffic.num_passes) / divisor(self._num_passes)

    def _deliver(self, highest: Sequence[int]) -> None:
        """Results to where they belong, when not all is as usual."""
        missed = [index for index, state in self._states.items() if state is State.NONE]
        absent = [index for index in missed if self._bucket_of[index] >= 0 and highest[index] == State.DENSE]
        self._adapter.deliver([index for index in self._dense if highest[index] == State.DENSE], absent)
        by_itself = [index for index in self._sparse if highest[index]]
        by_itself += [index for index in self._dense if highest[index] == State.SPARSE]
        for index in sorted(by_itself):
            scales = self._settings.sparse_scales(self._num_passes, self._group.size)
            with all_present():
                self._adapter.sum_sparse(index, self._group, scales)

    def _agree(self) -> None:
        """Make a plan together with the other members."""
        if self._order:
            self._ready_names = [self._parameters[index].name for index in self._order]
        mine = self._adapter.describe()
        places = {parameter.name: index for index, parameter in enumerate(mine)}
        ready = tuple(places[name] for name in self._ready_names if name in places)
        words = {"passes": str(self._usual_passes), "codec": str(getattr(self._codec, "name", None))}
        settings = {**self._settings.in_words(), **words}
        accord = trade(self._group, Account(settings, tuple(mine), ready, self._overlap))
        if not accord.parameters:
            self._listen()
            return
        parameters = self._parameters = accord.parameters
        total_bytes = sum(each.count * DType[each.dtype.upper()].num_bytes for each in parameters)
        limits = choose_limits(total_bytes, self._settings.bucket_mb, accord.overlap)
        buckets = lay_out(parameters, accord.ready, limits, self._settings.together)
        self._traffic = Traffic(
            self._group, parameters, buckets, settings=self._settings, num_passes=self._usual_passes, codec=self._codec
        )
        self._take_places(self._traffic)

    def _take_places(self, traffic: Traffic) -> None:
        """From now on gradients go into these buckets."""
        memory = {}
        self._indices = [bucket.indices for bucket in traffic.buckets]
        self._bucket_of = [-1] * len(self._parameters)
        for number, bucket in enumerate(traffic.buckets):
            for span in bucket.spans:
                memory[span.index] = traffic.memory[number][span.start : span.start + span.count]
                self._bucket_of[span.index] = number
        self._dense = sorted(memory)
        self._sparse = [index for index, parameter in enumerate(self._parameters) if parameter.sparse]
        self._came = [False] * len(self._parameters)
        self._adapter.bind(memory, self.ready)
        self._adapter.watch(self.stray)

    def _agree_anew(self) -> None:
        """Some parameters train that did not before, or no longer: new buckets, and those that are new travel now."""
        known = {parameter.name for parameter in self._parameters}
        self._close_traffic()
        self._agree()
        traffic = self._traffic
        if traffic is None:
            return
        new = [index for index, parameter in enumerate(self._parameters) if parameter.name not in known]
        old = [index for index in self._dense if index not in new]
        if new:
            # The others' places hold zeros while the new ones travel: their results are where they were delivered.
            self._states = dict.fromkeys(range(len(self._parameters)), State.NONE)
            self._states.update(dict.fromkeys(new, State.DENSE))
            self._states.update(self._adapter.collect(new))
            if self._rescale(traffic) != 1.0:
                self._adapter.scale([index for index in new if index in self._dense], self._rescale(traffic))
            if self._settings.check_finite:
                self._note_not_finite(new)
            traffic.write_news(self._states, passed=True, wanted=False)
            traffic.finish()
        self._adapter.collect(old)
        if new:
            self._check_finite(traffic.news.tolist())
            self._deliver(traffic.news.tolist())

    def _close_traffic(self) -> None:
        if self._traffic is not None:
            self._traffic.close()
            self._traffic = None

    # --- errors ----------------------------------------------------------------------------------------------------

    def _who(self, index: int | None) -> str:
        if index is None:
            return f"rank {self._rank}: a parameter that did not train before"
        return f"rank {self._rank}: parameter {self._parameters[index].name!r}"

    @property
    def _rank(self) -> int:
        assert self._group.rank is not None
        return self._group.ranks[self._group.rank]

    def _nothing_came(self) -> str:
        first = self._parameters[0].name
        return (
            f"rank {self._rank}: step() without backward(): none of the {len(self._parameters)} parameters that train "
            f"({first!r} is the first) got a gradient on any rank since the last step. If backward() was called, the "
            "optimizer has other parameters than the model: build it after the model was moved, converted or copied. "
            "If gradients were changed in place instead, idle_steps=True allows it"
        )

    def _check_finite(self, highest: Sequence[int]) -> None:
        """If a gradient is not finite somewhere, say whose; all members come here alike."""
        if State.NOT_FINITE not in highest[:PASSED]:
            return
        mine = sorted(index for index, state in self._states.items() if state is State.NOT_FINITE)
        names = [self._parameters[index].name for index in mine]
        said = {rank: words for rank, words in tell_all(self._group, _words(names)).items() if words}
        raise FloatingPointError(
            "gradients are not finite: " + "; ".join(f"rank {rank}: {words}" for rank, words in said.items())
        )


def _words(names: Sequence[str]) -> str:
    if not names:
        return ""
    return f"parameter {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
