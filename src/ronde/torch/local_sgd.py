"""LocalSGD: an optimizer of PyTorch that takes steps of its own on each rank, and averages parameters now and then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.torch.async_optimizer import parameter_array
from ronde.training.model_averaging import ModelAverager


class LocalSGD(Optimizer):
    """The same optimizer, on each rank for itself; the parameters of all ranks are brought together every few steps.

    With averaging="allreduce", all ranks take the mean of their parameters every `every` steps, so they take the same
    number of steps. With averaging="gossip", no rank waits for another: every `every` steps it takes in what others
    have sent and sends a share of its own parameters to one of them (push-sum over the ring). Ranks begin with the
    parameters of the first one, and finish() gives all of them the mean of all. States of the optimizer and buffers of
    modules are not averaged. Parameters have to be on the CPU.
    """

    def __init__(
        self, optimizer: Optimizer, *, every: int = 8, averaging: str = "allreduce", group: Group | None = None
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LocalSGD takes an optimizer of PyTorch, got {type(optimizer).__name__}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer = optimizer
        parameters = [each for param_group in self.param_groups for each in param_group["params"]]
        arrays = [parameter_array(str(number), each) for number, each in enumerate(parameters)]
        self._averager = ModelAverager(arrays, every=every, method=averaging, group=resolve_group(group))

    @property
    def weight(self) -> float:
        """What this rank's parameters count in the mean: 1, or with gossip more if it is slower than others."""
        return self._averager.weight

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step on this rank; average the parameters if it is time to. Return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer.step()
        with torch.no_grad():
            self._averager.step()
        return loss

    def finish(self) -> None:
        """Give all ranks the mean of all, weighed by what each has taken in. Collective; called at the end of an epoch
        or of training."""
        with torch.no_grad():
            self._averager.finish()

    def close(self) -> None:
        """Take no more shares of others. Idempotent."""
        self._averager.close()
