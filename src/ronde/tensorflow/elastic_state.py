"""The parts of an elastic State that are variables of TensorFlow: a tf.Variable, a list of them, or a tf.Module.
Importing ronde.tensorflow registers them. Models and optimizers of Keras are in ronde.keras.

Nobody knows which of the variables an optimizer changes, so all of them are kept at every step end, and every
interrupted step can be undone. To keep one, TensorFlow's memory of its numbers is referred to; it is copied when
something writes to the variable. So a variable that does not change costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ronde.comm.world import current_world
from ronde.elastic.state import State, StatePart, register_container_part, register_part
from ronde.tensorflow.broadcast_state import broadcast_variables
from ronde.tensorflow.gradients import count_reductions


class VariableReader:
    """Reads variables at once, in a function of TensorFlow, which takes a fraction of the time of reading each."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = list(variables)
        self._read: Any = None

    def read(self) -> list[Any]:
        """The values as tensors, which stay as they are when the variables change."""
        if not self._variables:
            return []
        if self._read is None:
            function = tf.function(lambda: [each.read_value() for each in self._variables], autograph=False)
            self._read = function.get_concrete_function()
        return list(self._read())


class VariablesPart(StatePart):
    """Variables of TensorFlow."""

    def __init__(self, variables: Sequence[Any], state: State) -> None:
        self._variables = list(variables)
        if not tf.executing_eagerly():
            raise ValueError(
                "variables in a graph of a session cannot be in a ronde.elastic.State; use tf.function, or "
                "horovod.tensorflow.elastic.TensorFlowState"
            )
        self._reader = VariableReader(self._variables)
        self._kept: list[Any] = []
        self._num_reductions = 0
        self.end_step()

    def commit(self) -> list[Any]:
        return self._reader.read()

    def restore(self, committed: list[Any]) -> None:
        for variable, value in zip(self._variables, committed, strict=True):
            variable.assign(value)

    def end_step(self) -> None:
        self._kept = self._reader.read()
        self._num_reductions = count_reductions()

    def undo_step(self) -> None:
        self.restore(self._kept)

    def has_stepped(self) -> bool:
        return count_reductions() != self._num_reductions

    def can_undo_step(self) -> bool:
        return True

    def sync(self, givers: Sequence[int]) -> None:
        broadcast_variables(self._variables, root=givers[0], group=current_world().group)


def _is_variables(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, tf.Variable) for each in value)


def _make_module_part(module: Any, state: State) -> VariablesPart:
    if not module.variables:
        raise ValueError("the tf.Module has no variables yet, which a State could keep; call it on a batch first")
    return VariablesPart(module.variables, state)


register_part(tf.Variable, lambda variable, state: VariablesPart([variable], state))
register_part(tf.Module, _make_module_part)
register_container_part(_is_variables, VariablesPart)
