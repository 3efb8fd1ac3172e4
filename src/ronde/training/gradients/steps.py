"""The training step of one optimizer: which backward passes belong to it, and when its gradients are reduced.

When backward() returns from the last pass of a step, gradients are reduced: what looks at them next (clipping, a
scaler, the optimizer) sees the same numbers on all ranks. A rank that had no pass takes part when it calls step().

TrainingStep is a state machine; TRANSITIONS is its table. Calls go one way: TrainingStep commands the reducers, and
each reducer commands its framework adapter. Events come back through two callbacks: on_pass_started, which a reducer
calls at the first gradient of a pass, and the end of the pass, which BackwardPass reports, also when it is an error.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary, WeakSet, ref

from ronde.comm.group import Group
from ronde.net.event_loop import start_thread
from ronde.training.gradients.adapter import BackwardPass
from ronde.training.gradients.reducer import Reducer
from ronde.types import Deadline


class StepState(enum.Enum):
    IDLE = enum.auto()
    """No pass has begun since gradients were used by the optimizer, or were cleared."""
    BACKWARD = enum.auto()
    """A backward pass is running, and its end will be reported."""
    OUTER_BACKWARD = enum.auto()
    """A pass inside of another one has ended (a reentrant checkpoint); the outer pass has not gone on yet."""
    ACCUMULATING = enum.auto()
    """Some passes of the step are over, and more are to come."""
    REDUCING = enum.auto()
    """All buckets are filled; the results have not been waited for."""
    REDUCED = enum.auto()
    """Gradients are the results, and the optimizer has not used them."""
    CLOSED = enum.auto()


class StepEvent(enum.Enum):
    GRADIENT = enum.auto()
    """The first gradient of a pass is ready, or the outer one of two passes goes on."""
    INNER_PASS_ENDED = enum.auto()
    PASS_ENDED = enum.auto()
    """A pass has ended that is not the last of its step."""
    LAST_PASS_ENDED = enum.auto()
    SYNCHRONIZE = enum.auto()
    """step() or the user needs the results now, however many passes there were."""
    FINISHED = enum.auto()
    """All ranks have the results."""
    FAILED = enum.auto()
    """There are no results, because of an error."""
    STEP_DONE = enum.auto()
    CLEARED = enum.auto()
    CLOSED = enum.auto()


_S, _E = StepState, StepEvent
_OPEN_TRANSITIONS: dict[StepState, dict[StepEvent, StepState]] = {
    _S.IDLE: {_E.GRADIENT: _S.BACKWARD, _E.SYNCHRONIZE: _S.REDUCING},
    _S.BACKWARD: {
        _E.INNER_PASS_ENDED: _S.OUTER_BACKWARD,
        _E.PASS_ENDED: _S.ACCUMULATING,
        _E.LAST_PASS_ENDED: _S.REDUCING,
        _E.SYNCHRONIZE: _S.REDUCING,
        _E.CLEARED: _S.IDLE,
    },
    _S.OUTER_BACKWARD: {_E.GRADIENT: _S.BACKWARD, _E.SYNCHRONIZE: _S.REDUCING, _E.CLEARED: _S.IDLE},
    _S.ACCUMULATING: {_E.GRADIENT: _S.BACKWARD, _E.SYNCHRONIZE: _S.REDUCING, _E.CLEARED: _S.IDLE},
    _S.REDUCING: {_E.FINISHED: _S.REDUCED, _E.FAILED: _S.IDLE, _E.CLEARED: _S.IDLE},
    _S.REDUCED: {_E.GRADIENT: _S.BACKWARD, _E.STEP_DONE: _S.IDLE, _E.CLEARED: _S.IDLE},
}
TRANSITIONS = {state: {**row, _E.CLOSED: _S.CLOSED} for state, row in _OPEN_TRANSITIONS.items()} | {_S.CLOSED: {}}
"""The next state by state and event. An event that a state does not list changes nothing: the end of a pass may be
reported after the step was synchronized, cleared or closed."""

_open_steps: WeakSet[TrainingStep] = WeakSet()
"""The steps of this process that are not closed. One that is alone may reduce in its own thread, which wakes no other.
Two that did so in different order on two ranks would wait for each other."""


class _ReducingSteps(threading.local):
    def __init__(self) -> None:
        self.steps: WeakSet[TrainingStep] = WeakSet()


_reducing = _ReducingSteps()
"""The steps that the calling thread has begun to reduce; some of them may be over."""

FINISH_IN_TURN_S = 0.05
"""So long the thread of a backward pass waits for the steps of several optimizers one after the other."""


class TrainingStep:
    """The step that an optimizer is in. `num_passes` backward passes make a step."""

    def __init__(self, backward_pass: BackwardPass, num_passes: int, *, gradient_version: Callable[[], object]) -> None:
        """`gradient_version` is called between the passes of a step. Its result changes when gradients are changed by
        something else than a backward pass."""
        self.backward_pass = backward_pass
        self.state = StepState.IDLE
        self._num_passes = _check_num_passes(num_passes)
        self._num_passes_done = 0
        self._num_passes_begun = 0  # in all steps
        self._gradient_version = gradient_version
        self._version_at_pass_end: object = None
        self._reducers: list[Reducer] = []
        self._error: Exception | None = None  # of the step that failed last, if it has not been raised
        _open_steps.add(self)

    @property
    def num_passes(self) -> int:
        return self._num_passes

    @num_passes.setter
    def num_passes(self, num_passes: int) -> None:
        if self.state not in (StepState.IDLE, StepState.REDUCED, StepState.CLOSED):
            raise ValueError(
                f"the number of passes cannot change in the middle of a step, after {self._num_passes_done}"
            )
        self._num_passes = _check_num_passes(num_passes)
        self._prepare_pass()

    @property
    def reducers(self) -> Sequence[Reducer]:
        return self._reducers

    def add_reducer(self, reducer: Reducer) -> None:
        """Reduce the gradients of one more reducer, whose on_pass_started is pass_started()."""
        self._reducers.append(reducer)
        self._prepare_pass()

    def pass_started(self) -> None:
        """Called at the first gradient of a pass by each reducer, and when the outer one of two passes goes on."""
        if self._apply(StepEvent.GRADIENT):
            self._num_passes_begun += 1
            self._call_at_pass_end(self._on_pass_end)

    def pass_interrupted(self, pass_number: int) -> None:
        """An error has ended the backward pass, the n-th of this optimizer, before the step was reduced. If it is still
        the last one, a step begins, as when gradients are cleared: nobody may write to buckets that are under way."""
        is_last = pass_number == self._num_passes_begun
        if is_last and self.state in (StepState.BACKWARD, StepState.REDUCING):
            with suppress(Exception):  # that of the pass is about to be raised
                self._give_up_step()

    def synchronize(self) -> None:
        """Reduce the gradients if that has not been done in this step, and wait for the results. Collective."""
        if self.state is StepState.ACCUMULATING and self._gradient_version() != self._version_at_pass_end:
            raise ValueError(
                f"gradients were changed after {self._num_passes_done} of the {self._num_passes} backward passes of a "
                "step, before they were combined with those of the other ranks. When a step ends early, call "
                "optimizer.synchronize() before gradients are clipped or unscaled (scaler.step() does it, too)"
            )
        in_pass = self.state in (StepState.BACKWARD, StepState.OUTER_BACKWARD)
        if self._apply(StepEvent.SYNCHRONIZE):
            self._start_reducing(self._num_passes_done + in_pass)
        self._finish_reducing()

    def step_done(self) -> None:
        """Called when the optimizer has used the gradients."""
        global _num_optimizer_steps
        self._apply(StepEvent.STEP_DONE)
        _num_optimizer_steps += 1

    def gradients_cleared(self) -> None:
        """Gradients were set to zero or to none: a step begins, also when the one before had not all of its passes or
        its last pass was interrupted by an error, if that happened on all ranks."""
        self._error = None
        for reducer in self._reducers:
            reducer.gradients_cleared()
        self._give_up_step()

    def set_sample_counts(self, group: Group, counts: Sequence[int]) -> None:
        """The next passes are over so many samples on each member of the group. It does nothing if no gradient is
        reduced over that group; if one is, others that are reduced over some of its members are weighted, too."""
        has_passes = self.state is StepState.ACCUMULATING
        changed = [
            reducer.set_sample_counts(counts, has_passes=has_passes)
            for reducer in self._reducers
            if reducer.group is group
        ]
        if 0 < len(changed) < len(self._reducers):
            count_of = dict(zip(group.ranks, counts, strict=True))
            for reducer in self._reducers:
                if reducer.group is not group and count_of.keys() >= set(reducer.group.ranks):
                    members = [count_of[rank] for rank in reducer.group.ranks]
                    changed.append(reducer.set_sample_counts(members, has_passes=has_passes))
        if any(changed):
            self._prepare_pass()

    def close(self) -> None:
        """Reduce gradients no more. Idempotent."""
        self._apply(StepEvent.CLOSED)
        self._error = None
        _open_steps.discard(self)
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()

    def _apply(self, event: StepEvent) -> bool:
        """Go to the next state. Return whether the event changed anything."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            return False
        self.state = following
        return True

    def _call_at_pass_end(self, function: Callable[[], None]) -> None:
        self.backward_pass.on_end(PassCallback(self, self._num_passes_begun, function))

    def _on_pass_end(self) -> None:
        if self.state is not StepState.BACKWARD:
            return
        if self.backward_pass.is_nested(self.pass_started):
            self._apply(StepEvent.INNER_PASS_ENDED)
            for reducer in self._reducers:
                reducer.report_next_gradient()
            return
        if self._num_passes_done + 1 < self._num_passes:
            self._apply(StepEvent.PASS_ENDED)
            self._num_passes_done += 1
            self._version_at_pass_end = self._gradient_version()
            self._prepare_pass()
            return
        self._apply(StepEvent.LAST_PASS_ENDED)
        try:
            self._start_reducing(self._num_passes_done + 1)
        except Exception as error:  # raised by _finish_reducing(), so that it does not end the steps of others
            self._error = error
        # Behind the ends of other optimizers' passes, which may have to start buckets before this one waits.
        self._call_at_pass_end(self._finish_reducing)

    def _start_reducing(self, num_passes_done: int) -> None:
        self._error = None
        _reducing.steps.add(self)
        num_passes, had_backward = num_passes_done or self._num_passes, num_passes_done > 0
        inline = self._may_run_inline
        try:
            for reducer in self._reducers:
                reducer.start_remaining(num_passes, had_backward=had_backward, inline=inline)
        except BaseException:
            self._end_failed_step()
            raise

    def _finish_reducing(self) -> None:
        """Wait for the results, and for those of other steps that this thread has begun to reduce; then raise the error
        of this step, if there is one. The error of another step is raised by that one."""
        steps = [self] if self.state is StepState.REDUCING else []
        steps += [step for step in _reducing.steps if step is not self and step.state is StepState.REDUCING]
        if steps:
            _finish_together(steps)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which has this frame, and would have itself

    def can_finish(self, deadline: Deadline) -> bool:
        """Wait for the buckets until the deadline. Return whether finish() would return then without waiting for other
        ranks."""
        return all([reducer.can_finalize(deadline) for reducer in self._reducers])

    def finish(self) -> None:
        """Wait for the results of all reducers, also if one of them fails: its members need not be those of the others.
        The first error is kept."""
        try:
            _call_each([reducer.finalize for reducer in self._reducers])
        except Exception as error:
            self._error = error
            self._end_step(StepEvent.FAILED)
        except BaseException:
            self._end_failed_step()
            raise
        else:
            self._end_step(StepEvent.FINISHED)

    def _give_up_step(self) -> None:
        """Begin a step, and end what is left of the one before. Buckets that were started are waited for: the other
        ranks have started them, too."""
        interrupted = self.state in (StepState.BACKWARD, StepState.OUTER_BACKWARD, StepState.REDUCING)
        if not self._apply(StepEvent.CLEARED):
            return
        try:
            if interrupted:
                self._drain()
        finally:
            if interrupted or self._num_passes_done:
                self._num_passes_done = 0
                self._prepare_pass()

    def _end_failed_step(self) -> None:
        """End a step in the middle of which an error came, when nothing writes to its buckets any more."""
        try:
            with suppress(Exception):  # the one that came first is about to be raised
                self._drain()
        finally:
            self._end_step(StepEvent.FAILED)

    def _drain(self) -> None:
        _call_each([reducer.drain for reducer in self._reducers])

    def _end_step(self, event: StepEvent) -> None:
        self._apply(event)
        self._num_passes_done = 0
        self._prepare_pass()

    def _prepare_pass(self) -> None:
        is_last = self._num_passes_done + 1 == self._num_passes
        inline = self._may_run_inline
        for reducer in self._reducers:
            reducer.prepare_pass(self._num_passes, is_last=is_last, inline=inline)

    @property
    def _may_run_inline(self) -> bool:
        return len(self._reducers) == 1 and len(_open_steps) == 1


_num_optimizer_steps = 0


def count_optimizer_steps() -> int:
    """How many steps the optimizers of this process have made: data sets learn from it whether a batch was used."""
    return _num_optimizer_steps


_counts_of_batch: WeakKeyDictionary[Group, Sequence[int]] = WeakKeyDictionary()
"""For each group over whose batches a loop is under way, what set_sample_counts() was told last."""
_last_equal_counts: tuple[ref[Group], Sequence[int]] | None = None
"""What set_sample_counts() was told last, if all weights are 1 by it: then a step that began or was reset since has
these weights, too, and nothing is to be done if it is told the same again."""


def set_sample_counts(group: Group, counts: Sequence[int]) -> None:
    """The next backward passes are over so many samples on each member of the group: weigh their gradients. Called when
    a batch is handed out."""
    global _last_equal_counts
    last = _last_equal_counts
    if last is not None and last[1] is counts and last[0]() is group:  # as nearly always
        return
    _last_equal_counts = None  # also if a step raises an error
    _counts_of_batch[group] = counts
    for step in list(_open_steps):
        step.set_sample_counts(group, counts)
    if isinstance(counts, tuple) and counts[0] > 0 and len(set(counts)) == 1:
        _last_equal_counts = ref(group), counts


def gradient_weight(group: Group) -> float:
    """Return what this rank's gradients of the batch under way are multiplied by before they are reduced over the
    group; 0 if this rank has no sample of it. 1 if nothing was told about batches, or no gradient is reduced there."""
    reducers = (reducer for step in list(_open_steps) for reducer in step.reducers)
    return next((reducer.weight for reducer in reducers if reducer.group is group), 1.0)


@contextmanager
def inner_sample_counts(group: Group) -> Iterator[None]:
    """A context for a loop over batches. If it is in the body of another one, as an evaluation may be, the counts of
    that one's batch are set again behind it."""
    global _last_equal_counts
    outer = _counts_of_batch.pop(group, None)
    _last_equal_counts = None
    try:
        yield
    finally:
        _counts_of_batch.pop(group, None)
        _last_equal_counts = None
        if outer is not None:
            set_sample_counts(group, outer)


class PassCallback:
    """What a backward pass calls at its end. A pass that an error interrupts forgets it instead, and so tells the
    step."""

    def __init__(self, step: TrainingStep, pass_number: int, function: Callable[[], None]) -> None:
        self._step = step
        self._pass_number = pass_number
        self._function = function
        self._was_called = False

    def __call__(self) -> None:
        self._was_called = True
        self._function()

    def __del__(self) -> None:
        if not self._was_called:
            self._step.pass_interrupted(self._pass_number)


def _finish_together(steps: Sequence[TrainingStep]) -> None:
    """Wait for the results of steps that were started together, one for each optimizer.

    Usually their buckets are all there is to wait for, and the order does not matter: buckets are reduced in the
    background. What else the members of one have to exchange (an agreement on buckets, sparse gradients) needs a thread
    on every rank. This thread might wait for one optimizer while another rank waits for the next one, because its
    passes ended in another order, or because it had no pass of the first. So then each step has a thread.
    """
    deadline = Deadline(FINISH_IN_TURN_S)
    if len(steps) == 1 or all(step.can_finish(deadline) for step in steps):
        for step in steps:
            step.finish()
        return
    threads: list[threading.Thread] = []
    try:
        for step in steps[1:]:
            thread = threading.Thread(target=step.finish, name="ronde-optimizer", daemon=True)
            start_thread(thread)
            threads.append(thread)
        steps[0].finish()
    finally:
        for thread in threads:
            thread.join()


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    """Call all of them, also if some raise an error; then raise the first one."""
    errors: list[Exception] = []
    for function in functions:
        try:
            function()
        except Exception as error:
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # they have this frame, and would have themselves


def _check_num_passes(num_passes: int) -> int:
    if not isinstance(num_passes, int) or isinstance(num_passes, bool) or num_passes < 1:
        raise ValueError(f"passes must be a whole number from 1, got {num_passes!r}")
    return num_passes
