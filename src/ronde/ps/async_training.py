"""What asynchronous optimizers share in frameworks whose arrays cannot be written in place: copies of the parameters in
arrays of NumPy, which a parameter server trains. ronde.torch needs none: there the server writes to the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ronde.ps.optimizers import Optimizer
from ronde.ps.parameter_server import ParameterServer
from ronde.ps.partition import Array


class AsyncTraining:
    """Copies of parameters that a parameter server trains. Made by all ranks alike; those of the first rank count."""

    def __init__(
        self,
        parameters: Mapping[str, Array],
        optimizer: Optimizer,
        *,
        mode: str = "bounded",
        **options: Any,  # of ParameterServer
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"the optimizer must be one of ronde.ps, such as ronde.ps.SGD, got {optimizer!r}")
        copies = {name: np.array(each, order="C") for name, each in parameters.items()}
        self.server = ParameterServer(copies, optimizer, mode=mode, **options)
        """The parameter server: its version, staleness and servers."""
        self.learning_rate: float | None = None
        """If it is set, the servers use it in place of the optimizer's own: for schedules of the program."""
        self._num_groups = 1 + max((options.get("groups") or {}).values(), default=0)

    @property
    def values(self) -> list[Array]:
        """The parameters as they were read last, in new memory: frameworks may keep arrays without copying them, and
        these are written again by the next step."""
        return [array.copy() for array in self.server.parameters.values()]

    def exchange(self, gradients: Sequence[Any], lr: float | None = None) -> list[Array]:
        """Push gradients, in the order of the parameters, and return the parameters for the next step. None stands for
        zeros."""
        parameters = list(self.server.parameters.values())
        if len(gradients) != len(parameters):
            raise ValueError(f"there are {len(parameters)} parameters, and {len(gradients)} gradients were given")
        given = [
            np.zeros_like(parameter) if gradient is None else np.asarray(gradient)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        lr = self.learning_rate if lr is None else float(lr)
        self.server.step(given, lrs=() if lr is None else [lr] * self._num_groups)
        return self.values

    def samples(self, num_samples: int, batch_size: int, *, epoch: int = 0) -> Iterator[Array]:
        """Yield indices of samples to train on, until every sample of the epoch is used exactly once by some worker.
        The next step acknowledges those that were yielded before it; those of a lost worker are given to others."""
        yield from self.server.samples(num_samples, batch_size, epoch=epoch)

    def close(self) -> None:
        """Leave, and wait until all workers have. Idempotent."""
        self.server.close()
