"""The optimizer for op=hvd.Adasum: not gradients are combined but what a step makes of the parameters.

Every process takes its own step; the changes are added up by Adasum, and all begin the next step at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horovod.torch.compression import Compressor
from horovod.torch.operations import Adasum, allreduce_async_, synchronize
from horovod.torch.wrapped import Wrapped, class_for

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer(Wrapped):
    """What it adds to an optimizer's class."""

    _compression: type[Compressor]
    backward_passes_per_step = 1

    @classmethod
    def wrap(
        cls, optimizer: Optimizer, compression: type[Compressor], passes: int, told: Mapping[str, Any]
    ) -> Optimizer:
        """The same optimizer, of a class that combines its steps. `told` are the attributes of a Wrapped."""
        optimizer.__class__ = class_for(cls, type(optimizer))
        assert isinstance(optimizer, AdasumOptimizer)
        vars(optimizer).update(told)
        optimizer._compression = compression
        optimizer.backward_passes_per_step = passes
        return optimizer

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Taken for the sake of old scripts: gradients add up until step() in any case."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing to do before step()."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not for this optimizer: its step() is where the processes meet."""
        raise AssertionError("skip_synchronize() cannot be used with op=hvd.Adasum")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # as the closure returns
        """One's own step, then Adasum of all processes' steps."""
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        for param in params:
            if param.grad is None:  # a process that did not use it takes part with no change
                param.grad = torch.zeros_like(param)
        result = super().step(closure) if closure is not None else super().step()
        with torch.no_grad():
            flights = [
                self._send(index, param, start) for index, (param, start) in enumerate(zip(params, starts, strict=True))
            ]
            for param, start, (handle, context) in zip(params, starts, flights, strict=True):
                param.copy_(start + self._compression.decompress(synchronize(handle), context))
        return result

    step.hooked = True  # type: ignore[attr-defined]  # torch need not: the one below calls the hooks

    def _send(self, index: int, param: Tensor, start: Tensor) -> tuple[int, Any]:
        small, context = self._compression.compress(param.detach() - start)
        return allreduce_async_(small, name=f"adasum.delta.{index}", op=Adasum), context
