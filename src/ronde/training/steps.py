"""The training step of one optimizer: which backward passes belong to it, and when its gradients are reduced.

When backward() returns from the last pass of a step, gradients are reduced: what looks at them next (clipping, a
scaler, the optimizer) sees the same numbers on all ranks. A rank that had no pass takes part when it calls step().

TrainingStep is a state machine; TRANSITIONS is its table. Calls go one way: TrainingStep commands the reducers, and
each reducer commands its framework adapter. Events come back through two callbacks: on_pass_started, which a reducer
calls at the first gradient of a pass, and the end of the pass, which BackwardPass reports.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from weakref import WeakSet

from ronde.training.adapter import BackwardPass
from ronde.training.reducer import Reducer


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
    """All ranks have the results, or all ranks have raised an error."""
    FAILED = enum.auto()
    """The ranks could not begin to reduce."""
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


class TrainingStep:
    """The step that an optimizer is in. `num_passes` backward passes make a step."""

    def __init__(self, backward_pass: BackwardPass, num_passes: int, *, gradient_version: Callable[[], object]) -> None:
        """`gradient_version` is called between the passes of a step. Its result changes when gradients are changed by
        something else than a backward pass."""
        self.backward_pass = backward_pass
        self.state = StepState.IDLE
        self._num_passes = _check_num_passes(num_passes)
        self._num_passes_done = 0
        self._gradient_version = gradient_version
        self._version_at_pass_end: object = None
        self._reducers: list[Reducer] = []
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

    def add_reducer(self, reducer: Reducer) -> None:
        """Reduce the gradients of one more reducer, whose on_pass_started is pass_started()."""
        self._reducers.append(reducer)
        self._prepare_pass()

    def pass_started(self) -> None:
        """Called at the first gradient of a pass by each reducer, and when the outer one of two passes goes on."""
        if self._apply(StepEvent.GRADIENT):
            self.backward_pass.on_end(self._on_pass_end)

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
        self._apply(StepEvent.STEP_DONE)

    def gradients_cleared(self) -> None:
        """Gradients were set to zero or to none: a step begins, also when the one before had not all of its passes or
        its last pass was interrupted by an error, if that happened on all ranks."""
        for reducer in self._reducers:
            reducer.gradients_cleared()
        interrupted = self.state in (StepState.BACKWARD, StepState.OUTER_BACKWARD, StepState.REDUCING)
        if not self._apply(StepEvent.CLEARED):
            return
        if interrupted:
            for reducer in self._reducers:
                reducer.drain()
        if interrupted or self._num_passes_done:
            self._num_passes_done = 0
            self._prepare_pass()

    def close(self) -> None:
        """Reduce gradients no more. Idempotent."""
        self._apply(StepEvent.CLOSED)
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
        self._start_reducing(self._num_passes_done + 1)
        # Behind the ends of other optimizers' passes, which may have to start buckets before this one waits.
        self.backward_pass.on_end(self._finish_reducing)

    def _start_reducing(self, num_passes_done: int) -> None:
        num_passes, had_backward = num_passes_done or self._num_passes, num_passes_done > 0
        inline = self._may_run_inline
        try:
            for reducer in self._reducers:
                reducer.start_remaining(num_passes, had_backward=had_backward, inline=inline)
        except BaseException:
            self._end_step(StepEvent.FAILED)
            raise

    def _finish_reducing(self) -> None:
        if self.state is not StepState.REDUCING:
            return
        try:
            for reducer in self._reducers:
                reducer.finalize()
        finally:
            self._end_step(StepEvent.FINISHED)

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


def _check_num_passes(num_passes: int) -> int:
    if not isinstance(num_passes, int) or isinstance(num_passes, bool) or num_passes < 1:
        raise ValueError(f"passes must be a whole number from 1, got {num_passes!r}")
    return num_passes
