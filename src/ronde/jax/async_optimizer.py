"""JAX on a parameter server: parameters are a tree, and a step gives a new one. Called outside of jit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ronde.ps import Optimizer
from ronde.ps.async_training import AsyncTraining


class AsyncTreeOptimizer:
    """A tree of parameters whose steps are taken by a parameter server. Made by all ranks alike; they begin with the
    parameters of the first rank, which are `params`.

        optimizer = ronde.jax.AsyncOptimizer(params, ronde.ps.Adam(lr=1e-3), mode="bounded", staleness=4)
        params = optimizer.params
        for indices in optimizer.samples(len(data), 32):
            params = optimizer.step(gradients_of(params, data[indices]))
        optimizer.close()

    `optimizer` is one of ronde.ps. Further options are those of ronde.ps.ParameterServer. step() is called outside of
    jit; what computes gradients may be jitted. Leaves are arrays of float32 or float64.
    """

    def __init__(self, params: Any, optimizer: Optimizer, *, mode: str = "bounded", **options: Any) -> None:
        paths, self._structure = jax.tree_util.tree_flatten_with_path(params)
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}
        self.training = AsyncTraining(arrays, optimizer, mode=mode, **options)
        """The copies of the parameters on this host; `training.learning_rate` is for schedules."""
        self.server = self.training.server
        """The parameter server: its version, staleness and servers."""
        self.params: Any = self._make_tree(self.training.values)
        """The tree as it was read last."""

    def step(self, gradients: Any, *, lr: float | None = None) -> Any:
        """Push a tree of gradients, and return the parameters for the next step. In "async" mode it waits for no other
        worker. `lr` replaces the learning rate of the optimizer."""
        leaves, structure = jax.tree_util.tree_flatten(gradients)
        if structure != self._structure:
            raise ValueError(f"gradients must have the structure of the parameters, {self._structure}, got {structure}")
        self.params = self._make_tree(self.training.exchange(leaves, lr))
        return self.params

    def pull(self) -> Any:
        """Read and return the newest parameters, all of one version."""
        self.server.pull()
        self.params = self._make_tree(self.training.values)
        return self.params

    def samples(self, num_samples: int, batch_size: int, *, epoch: int = 0) -> Iterator[Any]:
        """Yield indices of samples to train on, until every sample of the epoch is used exactly once by some worker.
        step() acknowledges those that were yielded before it; those of a lost worker are given to others."""
        yield from self.training.samples(num_samples, batch_size, epoch=epoch)

    def close(self) -> None:
        """Leave, and wait until all workers have. Idempotent."""
        self.training.close()

    def _make_tree(self, values: Any) -> Any:
        return jax.tree_util.tree_unflatten(self._structure, [jnp.asarray(each) for each in values])


def exchange_in_program(training: AsyncTraining, gradients: Sequence[Any], lr: Any = None) -> list[Any]:
    """AsyncTraining.exchange() with arrays of JAX, also inside of jit: a callback, once in each run of the program."""
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in gradients]

    def exchange(arrays: Sequence[Any], rates: Sequence[Any]) -> list[Any]:
        return training.exchange([np.asarray(each) for each in arrays], float(rates[0]) if rates else None)

    values: list[Any] = io_callback(exchange, shapes, list(gradients), [] if lr is None else [lr], ordered=True)
    return values
