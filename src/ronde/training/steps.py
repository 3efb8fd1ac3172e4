"""The backward passes of one optimizer: counts them, and has all reducers send and wait behind the last of a step.
Used by the bindings' optimizers.

When backward() returns, gradients are combined: what looks at them next (clipping, a scaler, the optimizer) sees the
same numbers on all ranks. A rank that had no pass takes part when it calls step().
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from ronde.training.adapter import BackwardPass
from ronde.training.reducer import Reducer

__all__ = ["TrainingStep"]

_open_steps: WeakSet[TrainingStep] = WeakSet()
"""Those of this process that may wait for other ranks. One that is alone may wait while not all is sent; two that did
so in different order on two ranks would wait for each other."""


class TrainingStep:
    """Passes, num_passes of which make a step."""

    def __init__(
        self, backward_pass: BackwardPass, num_passes: int = 1, *, gradient_version: Callable[[], object] = lambda: None
    ) -> None:
        """`mark` is asked between the passes of a step: it answers differently when gradients were changed since."""
        self.backward_pass = backward_pass
        """Who calls us at the end of a pass."""
        self._num_passes = _check_num_passes(num_passes)
        self._gradient_version = gradient_version
        self._version_at_pass_end: object = None  # at the end of the last pass, if the step has more
        self._reducers: list[Reducer] = []
        self._num_passes_done = 0
        self._pass_running = False  # a pass has begun, and is not over
        self._awaiting_end = False  # and at its end we will be called
        self._gradients_reduced = (
            False  # whether gradients were combined since the last step, or since they were cleared
        )
        _open_steps.add(self)

    @property
    def num_passes(self) -> int:
        """How many passes make a step."""
        return self._num_passes

    @num_passes.setter
    def num_passes(self, num_passes: int) -> None:
        if self._num_passes_done or self._pass_running:
            raise ValueError(
                f"the number of passes cannot change in the middle of a step, after {self._num_passes_done}"
            )
        self._num_passes = _check_num_passes(num_passes)
        self._prepare_pass()

    def add_reducer(self, reducer: Reducer) -> None:
        """One more reducer; begin() is what it has to call."""
        self._reducers.append(reducer)
        self._prepare_pass()

    def pass_started(self) -> None:
        """The first gradient of a pass has come."""
        self._pass_running = True
        if not self._awaiting_end:
            self._awaiting_end = True
            self.backward_pass.on_end(self._on_pass_end)

    def synchronize(self) -> None:
        """Combine what has not been combined since the last step. Does nothing after a backward() that did it."""
        if self._gradients_reduced and not self._pass_running and not self._num_passes_done:
            return
        if self._num_passes_done and not self._pass_running and self._gradient_version() != self._version_at_pass_end:
            raise ValueError(
                f"gradients were changed after {self._num_passes_done} of the {self._num_passes} backward passes of a step, "
                "before they were combined with those of the other ranks. When a step ends early, call "
                "optimizer.synchronize() before gradients are clipped or unscaled (scaler.step() does it, too)"
            )
        num_done = self._num_passes_done + self._pass_running
        self._pass_running = False
        self._start_remaining(num_done)
        self._finalize()

    def step_done(self) -> None:
        """The optimizer has used the gradients."""
        self._gradients_reduced = False

    def gradients_cleared(self) -> None:
        """Gradients were set to zero or to none: a step begins, also when the one before had not all of its passes. It
        ends a pass that broke off, too, if it did so on all ranks."""
        self._gradients_reduced = False
        for reducer in self._reducers:
            reducer.clear()
        if self._pass_running:
            self._pass_running = self._awaiting_end = False
            for reducer in self._reducers:
                reducer.drain()
        elif not self._num_passes_done:
            return
        self._num_passes_done = 0
        self._prepare_pass()

    def close(self) -> None:
        """Combine gradients no more. Idempotent."""
        _open_steps.discard(self)
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()

    def _on_pass_end(self) -> None:
        """A backward pass is over."""
        self._awaiting_end = False
        if self.backward_pass.is_nested(self.pass_started):  # its end is that of the one around it
            for reducer in self._reducers:
                reducer.suspend()
            return
        self._pass_running = False
        if self._num_passes_done + 1 < self._num_passes:
            self._num_passes_done += 1
            self._version_at_pass_end = self._gradient_version()
            self._prepare_pass()
            return
        self._start_remaining(self._num_passes_done + 1)
        # Behind the ends of other optimizers' passes, which may have to send something before we wait.
        self.backward_pass.on_end(self._finalize)

    def _start_remaining(self, num_done: int) -> None:
        for reducer in self._reducers:
            reducer.start_remaining(
                num_done or self._num_passes, had_backward=num_done > 0, only_reducer=self._only_reducer
            )

    def _finalize(self) -> None:
        self._num_passes_done = 0
        self._gradients_reduced = True
        try:
            for reducer in self._reducers:
                reducer.finalize()
        finally:
            self._prepare_pass()

    def _prepare_pass(self) -> None:
        final = self._num_passes_done + 1 == self._num_passes
        for reducer in self._reducers:
            reducer.prepare_pass(self._num_passes, last_pass=final, only_reducer=self._only_reducer)

    @property
    def _only_reducer(self) -> bool:
        return len(self._reducers) == 1 and len(_open_steps) == 1


def _check_num_passes(num_passes: int) -> int:
    if not isinstance(num_passes, int) or isinstance(num_passes, bool) or num_passes < 1:
        raise ValueError(f"passes must be a whole number from 1, got {num_passes!r}")
    return num_passes
