"""The backward passes of one optimizer: counts them, and has all reducers send and wait behind the last of a step.
Used by the bindings' optimizers.

When backward() returns, gradients are combined: what looks at them next (clipping, a scaler, the optimizer) sees the
same numbers on all ranks. A rank that had no pass takes part when it calls step().
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

from ronde.binding.adapter import Backward
from ronde.binding.reducer import Reducer

__all__ = ["Passes"]

_in_use: WeakSet[Passes] = WeakSet()
"""Those of this process that may wait for other ranks. One that is alone may wait while not all is sent; two that did
so in different order on two ranks would wait for each other."""


class Passes:
    """Passes, num_passes of which make a step."""

    def __init__(self, backward: Backward, num_passes: int = 1, *, mark: Callable[[], object] = lambda: None) -> None:
        """`mark` is asked between the passes of a step: it answers differently when gradients were changed since."""
        self.backward = backward
        """Who calls us at the end of a pass."""
        self._num_passes = _checked(num_passes)
        self._mark = mark
        self._marked: object = None  # at the end of the last pass, if the step has more
        self._reducers: list[Reducer] = []
        self._num_done = 0
        self._running = False  # a pass has begun, and is not over
        self._awaiting_end = False  # and at its end we will be called
        self._combined = False  # whether gradients were combined since the last step, or since they were cleared
        _in_use.add(self)

    @property
    def num_passes(self) -> int:
        """How many passes make a step."""
        return self._num_passes

    @num_passes.setter
    def num_passes(self, num_passes: int) -> None:
        if self._num_done or self._running:
            raise ValueError(f"the number of passes cannot change in the middle of a step, after {self._num_done}")
        self._num_passes = _checked(num_passes)
        self._open()

    def add(self, reducer: Reducer) -> None:
        """One more reducer; begin() is what it has to call."""
        self._reducers.append(reducer)
        self._open()

    def begin(self) -> None:
        """The first gradient of a pass has come."""
        self._running = True
        if not self._awaiting_end:
            self._awaiting_end = True
            self.backward.at_end(self._end)

    def synchronize(self) -> None:
        """Combine what has not been combined since the last step. Does nothing after a backward() that did it."""
        if self._combined and not self._running and not self._num_done:
            return
        if self._num_done and not self._running and self._mark() != self._marked:
            raise ValueError(
                f"gradients were changed after {self._num_done} of the {self._num_passes} backward passes of a step, "
                "before they were combined with those of the other ranks. When a step ends early, call "
                "optimizer.synchronize() before gradients are clipped or unscaled (scaler.step() does it, too)"
            )
        num_done = self._num_done + self._running
        self._running = False
        self._flush(num_done)
        self._finish()

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        self._combined = False

    def cleared(self) -> None:
        """Gradients were set to zero or to none: a step begins, also when the one before had not all of its passes. It
        ends a pass that broke off, too, if it did so on all ranks."""
        self._combined = False
        for reducer in self._reducers:
            reducer.forget()
        if self._running:
            self._running = self._awaiting_end = False
            for reducer in self._reducers:
                reducer.abandon()
        elif not self._num_done:
            return
        self._num_done = 0
        self._open()

    def close(self) -> None:
        """Combine gradients no more. Idempotent."""
        _in_use.discard(self)
        for reducer in self._reducers:
            reducer.close()
        self._reducers.clear()

    def _end(self) -> None:
        """A backward pass is over."""
        self._awaiting_end = False
        if self.backward.nested(self.begin):  # its end is that of the one around it
            for reducer in self._reducers:
                reducer.rest()
            return
        self._running = False
        if self._num_done + 1 < self._num_passes:
            self._num_done += 1
            self._marked = self._mark()
            self._open()
            return
        self._flush(self._num_done + 1)
        # Behind the ends of other optimizers' passes, which may have to send something before we wait.
        self.backward.at_end(self._finish)

    def _flush(self, num_done: int) -> None:
        for reducer in self._reducers:
            reducer.flush(num_done or self._num_passes, passed=num_done > 0, alone=self._alone)

    def _finish(self) -> None:
        self._num_done = 0
        self._combined = True
        try:
            for reducer in self._reducers:
                reducer.finish()
        finally:
            self._open()

    def _open(self) -> None:
        final = self._num_done + 1 == self._num_passes
        for reducer in self._reducers:
            reducer.open(self._num_passes, final=final, alone=self._alone)

    @property
    def _alone(self) -> bool:
        return len(self._reducers) == 1 and len(_in_use) == 1


def _checked(num_passes: int) -> int:
    if not isinstance(num_passes, int) or isinstance(num_passes, bool) or num_passes < 1:
        raise ValueError(f"passes must be a whole number from 1, got {num_passes!r}")
    return num_passes
