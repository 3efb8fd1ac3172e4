"""When a backward pass of PyTorch ends. Used by the distributed optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

__all__ = ["Autograd"]


class Autograd:
    """The engine behind loss.backward()."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call this when the pass that is running has come to its end. What it raises, backward() raises."""
        Variable._execution_engine.queue_callback(callback)  # as FSDP does

    def nested(self) -> bool:
        """Whether the pass that is ending was started by the backward of a Function (a reentrant checkpoint)."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is BackwardCFunction.apply.__code__:
                return True
            frame = frame.f_back
        return False
