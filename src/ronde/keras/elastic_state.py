"""The parts of an elastic State that are objects of Keras: models, layers and optimizers. Importing ronde.keras
registers them.

A forward pass changes variables that no optimizer has, such as the statistics of batch normalization and the states of
random generators. They are kept at every step end, and return to that when a rank is lost. Variables that an optimizer
has change only when it steps, so only commit() copies them, and whether it has begun to step decides what happens after
a loss:

tensorflow   the counter of reductions in ronde.tensorflow.gradients, which is raised before an optimizer gets gradients
torch        the optimizer's own counter of iterations: Python runs in every step
jax          a step of fit() gives its memory away to the next state, so that nothing is left of an interrupted one:
             training goes on from the last commit. Elsewhere as with torch
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ronde.comm.world import current_world
from ronde.elastic.state import State, StatePart, register_check, register_part
from ronde.keras.gradients import KerasGradientReduction
from ronde.keras.optimizer import DistributedBase
from ronde.keras.variables import broadcast_parameters


class VariableCopier:
    """Copies the values of variables, and writes them back."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self._read: Callable[[], list[Any]] = self._copy
        if keras.backend.backend() == "tensorflow":
            from ronde.tensorflow.elastic_state import VariableReader

            self._read = VariableReader([each.value for each in self.variables]).read

    def copy(self) -> list[Any]:
        return self._read()

    def write(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def _copy(self) -> list[Any]:
        return [np.array(keras.ops.convert_to_numpy(each.value)) for each in self.variables]


class KerasModelPart(StatePart):
    """A model or a layer: its weights, and the states of its random generators, which every rank has for itself.
    Metrics are not a part of it: fit() resets them."""

    def __init__(self, model: Any, state: State) -> None:
        if not all(layer.built for layer in model._flatten_layers()):
            raise ValueError(
                "the model is not built, so it has no weights yet that a State could keep; call it on a batch, or give "
                "it an Input layer"
            )
        self._model = model
        self._state = state
        self._weights = VariableCopier(model.weights)
        found = {id(each) for each in (*model.weights, *getattr(model, "metrics_variables", ()))}
        self._random = VariableCopier([each for each in model.variables if id(each) not in found])
        self._unoptimized: VariableCopier | None = None
        """Weights that no optimizer of the State has. Found out at the first step end, when the State is complete."""
        self._kept: tuple[list[Any], list[Any]] = [], []

    def commit(self) -> tuple[list[Any], list[Any]]:
        return self._weights.copy(), self._random.copy()

    def restore(self, committed: tuple[list[Any], list[Any]]) -> None:
        forget_jax_state(self._model)
        weights, random = committed
        self._weights.write(weights)
        self._random.write(random)

    def end_step(self) -> None:
        if self._unoptimized is None:
            self._unoptimized = self._find_unoptimized()
        self._kept = self._unoptimized.copy(), self._random.copy()

    def undo_step(self) -> None:
        forget_jax_state(self._model)
        unoptimized, random = self._kept
        if self._unoptimized is not None:
            self._unoptimized.write(unoptimized)
            self._random.write(random)

    def can_undo_step(self) -> bool:
        return self._unoptimized is not None and have_values(self._weights.variables)

    def sync(self, givers: Sequence[int]) -> None:
        broadcast_parameters(self._weights.variables, givers[0], group=current_world().group)

    def _find_unoptimized(self) -> VariableCopier:
        optimizers = [each for each in self._state._objects.values() if isinstance(each, keras.optimizers.Optimizer)]
        optimized = {id(variable) for each in optimizers for variable in each._trainable_variables}
        return VariableCopier([each for each in self._weights.variables if id(each) not in optimized])


class KerasOptimizerPart(StatePart):
    """An optimizer, distributed or not: its slots, its iterations and its learning rate, and a loss scale."""

    def __init__(self, optimizer: Any, state: State) -> None:
        self._optimizer = optimizer
        self._state = state
        self._all: VariableCopier | None = None
        """Its variables. Found out when they are first needed, when the State is complete."""
        self._numbers: VariableCopier | None = None
        """Those that are single numbers: iterations, the learning rate, the loss scale."""
        self._accumulators: list[Any] = []
        self._kept: list[Any] = []
        self._kept_progress: tuple[float, ...] = ()
        self._kept_reductions = 0

    def commit(self) -> list[Any]:
        return self._find_variables().copy()

    def restore(self, committed: list[Any]) -> None:
        self._find_variables().write(committed)

    def end_step(self) -> None:
        self._find_variables()
        assert self._numbers is not None
        self._kept = self._numbers.copy()
        self._kept_progress = self._progress()
        self._kept_reductions = count_reductions()

    def undo_step(self) -> None:
        assert self._numbers is not None
        self._numbers.write(self._kept)
        for variable in self._accumulators:  # they are zero at a step end
            variable.assign(keras.ops.zeros(variable.shape, variable.dtype))

    def has_stepped(self) -> bool:
        if count_reductions() != self._kept_reductions:
            return True
        # A tape averages gradients for this optimizer, or something that is not ronde's does; it may not be elastic.
        return not self._is_counted and self._progress() != self._kept_progress

    def can_undo_step(self) -> bool:
        if not have_values(self._find_variables().variables) or self.has_stepped():
            return False
        # In a graph, an optimizer whose gradients nobody has counted may have changed some variables and not others.
        return self._is_counted or keras.backend.backend() != "tensorflow"

    def reset(self) -> None:
        for each in reductions_of(self._optimizer):
            each.reset()

    def sync(self, givers: Sequence[int]) -> None:
        for each in reductions_of(self._optimizer):
            each.agree_on_name()
        broadcast_parameters(self._find_variables().variables, givers[0], group=current_world().group)

    @property
    def _is_counted(self) -> bool:
        """Whether count_reductions() tells when the optimizer steps."""
        return keras.backend.backend() == "tensorflow" and count_reductions() > 0

    def _progress(self) -> tuple[float, ...]:
        """Changes when the optimizer has made a step, or skipped one. Not in between, while gradients are
        accumulated."""
        optimizer = self._optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        variables = [inner._iterations]
        if inner is not optimizer:
            variables += [optimizer.step_counter, optimizer.dynamic_scale]
        if not have_values(variables):
            return (-1.0,)
        iterations, *scale = (float(keras.ops.convert_to_numpy(each.value)) for each in variables)
        return iterations // (inner.gradient_accumulation_steps or 1), *scale

    def _find_variables(self) -> VariableCopier:
        if self._all is None:
            self._build()
            optimizer = self._optimizer
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            self._all = VariableCopier(optimizer.variables)
            self._numbers = VariableCopier([each for each in optimizer.variables if len(each.shape) == 0])
            self._accumulators = list(getattr(inner, "_accumulated_gradients", None) or ())
        return self._all

    def _build(self) -> None:
        """Make the variables of an optimizer that has not stepped yet, for the model that is compiled with it, or the
        only one of the State."""
        optimizer = self._optimizer
        if optimizer.built:
            return
        models = [each for each in self._state._objects.values() if isinstance(each, keras.layers.Layer)]
        found = [each for each in models if getattr(each, "optimizer", None) is optimizer] or models
        if len(found) != 1:
            raise ValueError(
                "an optimizer of the State is not built, and it is not clear for which model; call "
                "optimizer.build(model.trainable_variables) before State() is made"
            )
        with keras.name_scope(optimizer.name):
            optimizer.build(found[0].trainable_variables)


def reductions_of(optimizer: Any) -> list[KerasGradientReduction]:
    """What averages the gradients of an optimizer: none if it is not distributed, two if it has a loss scale and
    accumulates gradients."""
    found = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return [each.gradient_reduction for each in found if isinstance(each, DistributedBase)]


def count_reductions() -> int:
    """How many times gradients were reduced by TensorFlow in this process; 0 with other backends."""
    if keras.backend.backend() != "tensorflow":
        return 0
    from ronde.tensorflow import gradients

    return gradients.count_reductions()


def have_values(variables: Sequence[Any]) -> bool:
    """Whether the variables can be read. While fit() runs with JAX, it has their values for itself, and it loses them
    when a step fails."""
    if keras.backend.backend() != "jax":
        return True
    values = [each._value for each in variables]
    return all(each is not None and not (hasattr(each, "is_deleted") and each.is_deleted()) for each in values)


def forget_jax_state(model: Any) -> None:
    """Let fit() with JAX begin with the values of the variables, and not with those of an interrupted step."""
    if keras.backend.backend() == "jax":
        from ronde.jax.gradients import forget_failed_callbacks

        forget_failed_callbacks()
        if hasattr(model, "_jax_state_synced"):
            model._jax_state = None
            model._jax_state_synced = True


def _check_optimizers(state: State) -> None:
    """Raise ValueError if a model of the State is compiled with an optimizer that is not in it."""
    held = [each for each in state._objects.values() if isinstance(each, keras.optimizers.Optimizer)]
    for name, model in state._objects.items():
        optimizer = getattr(model, "optimizer", None) if isinstance(model, keras.Model) else None
        if optimizer is not None and all(each is not optimizer for each in held):
            raise ValueError(
                f"ronde.elastic.run(): {name} of the State is compiled with an optimizer that is not in the State, so "
                f"ranks would not agree on its state after a loss; add State(optimizer={name}.optimizer, …)"
            )


register_part(keras.layers.Layer, KerasModelPart)
register_part(keras.optimizers.Optimizer, KerasOptimizerPart)
register_check(_check_optimizers)
