"""Keeps torch.compile away from what runs in the middle of a step. Used by the distributed optimizer.

Whoever compiles a whole step, backward() included, lets Dynamo look at every Python frame that runs in it, the hooks of
parameters and the end of the pass among them; they talk to other ranks, which is nothing to compile. The decorator
torch.compiler.disable() would import Dynamo, which is large, and cost time in every call, of hooks that are called for
every gradient. So each function is marked as that decorator marks its own: for Dynamo's eyes alone, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._dynamo import eval_frame

__all__ = ["leave_alone"]


def leave_alone(*functions: Callable[..., object]) -> None:
    """Dynamo is to run these, and all that they call, as they are. Before PyTorch 2.7 it may try all the same."""
    frames: Any = eval_frame
    for function in functions:
        marked: Any = function
        marked._torchdynamo_disable = True  # when it is called by what is being compiled
        if hasattr(frames, "set_code_exec_strategy"):  # when it is called by C++, as hooks are
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
