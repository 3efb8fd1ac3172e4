"""When a backward pass of PyTorch ends. Used by the distributed optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

__all__ = ["Autograd", "find_frame"]


class Autograd:
    """The engine behind loss.backward()."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call this when the pass that is running has come to its end. What it raises, backward() raises."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(
                "gradients cannot be combined in a backward pass that is compiled (compiled autograd): such a pass "
                "does not tell its end. Compile the model, or the whole step, without it"
            )
        Variable._execution_engine.queue_callback(callback)  # as FSDP does

    def nested(self, goes_on: Callable[[], None]) -> bool:
        """Whether the pass that is ending was started by the backward of a Function (a reentrant checkpoint). Then this
        is called when the pass around it comes to the nodes behind that Function, and can be asked for its end."""
        frame = find_frame(BackwardCFunction.apply)
        if frame is None:
            return False
        _call_behind(frame.f_locals["self"], goes_on)
        return True


def find_frame(function: Callable[..., object]) -> FrameType | None:
    """The innermost call of this function that is under way in this thread."""
    code, frame = function.__code__, sys._getframe().f_back
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _call_behind(node: Node, call: Callable[[], None]) -> None:
    """Call this before the first of the nodes that get this node's gradients."""
    hooks: list[RemovableHandle] = []

    def once(_grads: object) -> None:
        while hooks:
            hooks.pop().remove()
        call()

    hooks += [behind.register_prehook(once) for behind, _ in node.next_functions if behind is not None]
