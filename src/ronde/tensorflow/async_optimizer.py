"""TensorFlow's variables on a parameter server. Optimizers of Keras are in ronde.keras."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from ronde.ps import Optimizer
from ronde.ps.async_training import AsyncTraining


class AsyncVariableOptimizer:
    """Variables whose steps are taken by a parameter server: apply_gradients() pushes the gradients and assigns the
    parameters for the next step. Made by all ranks alike; they begin with the values of the first rank.

        optimizer = ronde.tensorflow.AsyncOptimizer(variables, ronde.ps.SGD(lr=0.1), mode="bounded", staleness=4)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    `optimizer` is one of ronde.ps. Further options are those of ronde.ps.ParameterServer. It works eagerly and in
    tf.function, but not with jit_compile.
    """

    def __init__(
        self, variables: Iterable[Any], optimizer: Optimizer, *, mode: str = "bounded", **options: Any
    ) -> None:
        self._variables = list(variables)
        self._indices = {variable.ref(): index for index, variable in enumerate(self._variables)}
        arrays = {f"{index} {each.name}": each.numpy() for index, each in enumerate(self._variables)}
        self.training = AsyncTraining(arrays, optimizer, mode=mode, **options)
        """The copies of the variables on this host; `training.learning_rate` is for schedules."""
        self.server = self.training.server
        """The parameter server: its version, staleness and servers."""
        self._assign(self.training.values)

    def apply_gradients(self, gradients_and_variables: Iterable[tuple[Any, Any]]) -> None:
        """Push the gradients, and assign the parameters for the next step. In "async" mode it waits for no other
        worker. Variables without a gradient are pushed with zeros."""
        gradients: list[Any] = [None] * len(self._variables)
        for gradient, variable in gradients_and_variables:
            index = self._indices.get(variable.ref())
            if index is None:
                raise ValueError(f"{variable.name} was not among the variables that AsyncOptimizer was made with")
            gradients[index] = gradient
        for index, variable in enumerate(self._variables):
            gradient = gradients[index]
            gradients[index] = tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
        self._assign(exchange_tensors(self.training, gradients))

    def pull(self) -> None:
        """Read the newest parameters, all of one version, into the variables."""
        self.server.pull()
        self._assign(self.training.values)

    def samples(self, num_samples: int, batch_size: int, *, epoch: int = 0) -> Iterator[Any]:
        """Yield indices of samples to train on, until every sample of the epoch is used exactly once by some worker.
        apply_gradients() acknowledges those that were yielded before it; those of a lost worker are given to others."""
        yield from self.training.samples(num_samples, batch_size, epoch=epoch)

    def close(self) -> None:
        """Leave, and wait until all workers have. Idempotent."""
        self.training.close()

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)


def exchange_tensors(training: AsyncTraining, gradients: Sequence[Any], lr: Any = None) -> list[Any]:
    """AsyncTraining.exchange() with tensors, eagerly or as an operation of a graph, which runs once per step."""
    if tf.executing_eagerly():
        return list(training.exchange([each.numpy() for each in gradients], lr))

    def exchange(*arrays: Any) -> list[Any]:
        given, rate = (arrays, None) if lr is None else (arrays[:-1], float(arrays[-1]))
        return training.exchange(given, rate)

    inputs = [*gradients] if lr is None else [*gradients, lr]
    values = tf.numpy_function(exchange, inputs, [each.dtype for each in gradients])
    for value, gradient in zip(values, gradients, strict=True):
        value.set_shape(gradient.shape)
    return list(values)
