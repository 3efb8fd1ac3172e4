"""Keras optimizers whose steps are taken by a parameter server, for model.compile() and for training loops of your own.

The optimizer gets a subclass of its own class, as with DistributedOptimizer, so models are saved as usual. Its apply()
pushes the gradients and assigns the parameters for the next step: on the torch backend at once, with TensorFlow in an
operation of the graph, with JAX in a callback of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from ronde.ps import SGD, Adagrad, Adam, AdamW, Optimizer, RMSProp
from ronde.ps.async_training import AsyncTraining

NOT_KNOWN = ("amsgrad", "use_ema", "gradient_accumulation_steps", "clipnorm", "clipvalue", "global_clipnorm")
"""Options of Keras that servers do not have."""
MAKERS: dict[type, Callable[[Any, float], Optimizer]] = {
    keras.optimizers.SGD: lambda own, lr: SGD(lr=lr, momentum=own.momentum, nesterov=own.nesterov),
    keras.optimizers.Adam: lambda own, lr: Adam(lr=lr, betas=(own.beta_1, own.beta_2), eps=own.epsilon),
    keras.optimizers.AdamW: lambda own, lr: AdamW(
        lr=lr, betas=(own.beta_1, own.beta_2), eps=own.epsilon, weight_decay=own.weight_decay
    ),
    keras.optimizers.Adagrad: lambda own, lr: Adagrad(lr=lr, eps=own.epsilon),
    keras.optimizers.RMSprop: lambda own, lr: RMSProp(
        lr=lr, alpha=own.rho, eps=own.epsilon, momentum=own.momentum, centered=own.centered
    ),
}
"""By optimizer of Keras, what servers have in its place."""


def AsyncOptimizer(
    optimizer: Any,
    variables: Iterable[Any],
    *,
    mode: str = "bounded",
    server_optimizer: Optimizer | None = None,
    **options: Any,
) -> Any:  # an optimizer of Keras
    """Return the same optimizer, whose steps are taken by a parameter server. Made by all ranks alike; they begin with
    the variables of the first rank, which are assigned here.

        optimizer = ronde.keras.AsyncOptimizer(keras.optimizers.SGD(0.1), model.trainable_variables, staleness=4)
        model.compile(optimizer, loss=...)
        model.fit(...)
        optimizer.parameter_server.close()

    It takes SGD, Adam, AdamW, Adagrad and RMSprop, or, as `server_optimizer`, one of ronde.ps for any. The servers
    follow PyTorch's rules of these names, which treat epsilon a little differently. Learning rates and their schedules
    are those of the optimizer. `variables` are the trainable variables of a model that is built, in its order. Further
    options are those of ronde.ps.ParameterServer. With TensorFlow and JAX, the step must not be compiled by XLA into a
    program of another device, and with TensorFlow not by jit_compile.
    """
    optimizer = keras.optimizers.get(optimizer)
    found = list(variables)
    rule = server_optimizer or make_server_optimizer(optimizer)
    # Paths have numbers in them that differ between ranks, if one has made more layers than another.
    arrays = {f"{index} {each.name}": keras.ops.convert_to_numpy(each.value) for index, each in enumerate(found)}
    training = AsyncTraining(arrays, rule, mode=mode, **options)
    for variable, value in zip(found, training.values, strict=True):
        variable.assign(value)
    base = type(optimizer)
    facts = {"__module__": base.__module__, "__doc__": base.__doc__}
    # Not optimizer.__class__ = …: Keras looks at what is set.
    object.__setattr__(optimizer, "__class__", type(base.__name__, (AsyncApply, base), facts))
    object.__setattr__(optimizer, "_async_training", training)
    object.__setattr__(optimizer, "_learns_lr", server_optimizer is None)
    return optimizer


class AsyncApply:
    """What an optimizer's class gets whose steps are taken by a parameter server."""

    built: bool
    _async_training: AsyncTraining
    _learns_lr: bool
    _trainable_variables: list[Any]

    @property
    def parameter_server(self) -> Any:
        """The parameter server: its version, staleness and servers; to be closed after training."""
        return self._async_training.server

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Push the gradients, and assign the parameters for the next step."""
        base: Any = self
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            with keras.name_scope(base.name):
                base.build(variables)
            self.built = True
        given = [
            keras.ops.zeros_like(variable.value) if gradient is None else gradient
            for variable, gradient in zip(variables, grads, strict=True)
        ]
        lr = keras.ops.convert_to_tensor(base._get_current_learning_rate()) if self._learns_lr else None
        for variable, value in zip(variables, self._exchange(given, lr), strict=True):
            variable.assign(value)
        base.iterations.assign_add(1)

    def _exchange(self, gradients: Sequence[Any], lr: Any) -> Sequence[Any]:
        """AsyncTraining.exchange() for tensors of the backend."""
        training, backend = self._async_training, keras.backend.backend()
        if backend == "tensorflow":
            from ronde.tensorflow.async_optimizer import exchange_tensors

            return exchange_tensors(training, [keras.ops.convert_to_tensor(each) for each in gradients], lr)
        if backend == "jax":
            from ronde.jax.async_optimizer import exchange_in_program

            return exchange_in_program(training, list(gradients), lr)
        arrays = [keras.ops.convert_to_numpy(each) for each in gradients]
        return training.exchange(arrays, None if lr is None else float(lr))


def make_server_optimizer(optimizer: Any) -> Optimizer:
    """What servers do in the place of an optimizer of Keras."""
    # On the torch backend an optimizer is of a subclass with the same name.
    own = type(optimizer)
    make = next((MAKERS[each] for each in own.__mro__ if each in MAKERS and each.__name__ == own.__name__), None)
    if make is None:
        names = ", ".join(each.__name__ for each in MAKERS)
        raise TypeError(f"AsyncOptimizer knows {names}, got {type(optimizer).__name__}; give a server_optimizer")
    unknown = [name for name in NOT_KNOWN if getattr(optimizer, name, None)]
    if unknown:
        advice = "; give clip_norm to AsyncOptimizer" if "clip" in unknown[0] else ""
        raise ValueError(f"servers do not have the option {unknown[0]} of {type(optimizer).__name__}{advice}")
    if optimizer.weight_decay and not isinstance(optimizer, keras.optimizers.AdamW):
        raise ValueError(f"servers do not have the decoupled weight_decay of {type(optimizer).__name__}; use AdamW")
    if getattr(optimizer, "initial_accumulator_value", 0):
        raise ValueError("servers begin with an accumulator of 0; give initial_accumulator_value=0")
    return make(optimizer, 0.0)  # the learning rate comes with each step
