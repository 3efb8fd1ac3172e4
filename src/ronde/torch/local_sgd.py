"""LocalSGD: an optimizer of PyTorch that takes steps of its own on each rank, and averages parameters now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    _is_made = False
    """Whether its parameters are those that are averaged."""

    def __init__(
        self, optimizer: Optimizer, *, every: int = 8, averaging: str = "allreduce", group: Group | None = None
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"LocalSGD takes an optimizer of PyTorch, got {type(optimizer).__name__}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_made = True
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """It is refused: ranks average the parameters that there were when this object was made."""
        if self._is_made:
            raise ValueError(
                "parameters cannot be added to a LocalSGD, which would not average them; close it and make another one "
                "with all parameters"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer of this rank; ranks have different ones."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer of this rank a state."""
        self._optimizer.load_state_dict(state_dict)
        self.param_groups = self._optimizer.param_groups

    def finish(self) -> None:
        """Give all ranks the mean of all, weighed by what each has taken in. Collective; called at the end of an epoch
        or of training."""
        with torch.no_grad():
            self._averager.finish()

    def close(self) -> None:
        """Take no more shares of others. Idempotent."""
        self._averager.close()
