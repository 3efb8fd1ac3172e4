"""How the gradients of a Keras optimizer are averaged over ranks, on each of Keras' backends.

torch        after the backward pass, in place, one operation per dtype (ronde.torch.gradients)
jax          one ordered callback to the host, also inside of jit (ronde.jax.gradients)
tensorflow   operations of the graph (ronde.tensorflow.gradients)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras

from ronde.comm.buffers import Array
from ronde.comm.collectives import mark_step
from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group
from ronde.keras.variables import compare_arrays
from ronde.training.gradient_settings import GradientSettings
from ronde.types import parse_op

CODECS = ("float16", "bfloat16")
FIRST_COMPARED_STEP = 2
"""The first step that can be compared: the parameters of a model that is built by its first batch are broadcast after
it."""
ADVICE = (
    ". Add ronde.keras.callbacks.BroadcastInitialState() to the callbacks of fit(), or call "
    "ronde.keras.broadcast_parameters(model) before training, on all ranks, or let all of them load the same checkpoint. "
    "If they are meant to differ, compare_at_step=0 or RONDE_COMPARE_AT_STEP=0 turns this off"
)
_num_reductions: WeakKeyDictionary[Group, Counter[str]] = WeakKeyDictionary()
"""How many optimizers have averaged gradients over each group."""


class GradientReduction:
    """Averages the gradients of one optimizer over the ranks of a group; all of its members call it equally often."""

    def __init__(self, settings: GradientSettings, group: Group | None, codec: str | None) -> None:
        self.settings = settings
        self.group = group
        self._codec = codec
        self._name = ""
        self._num_steps = 0
        self._compared_variables: Sequence[Any] = ()

    @property
    def is_needed(self) -> bool:
        """Whether there are other ranks, or may be: an elastic job can grow."""
        members = resolve_group(self.group)
        return members.included and (members.size > 1 or current_world().settings.elastic)

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], *, values: Sequence[Any] | None = None, when: Any = None
    ) -> list[Any]:
        """Return the average of the gradients; None stays None. Collective.

        `values` are those of the variables, if these are not current, as in a stateless call of JAX. `when` is a
        boolean of JAX: gradients are only averaged if it holds, as it must on all ranks alike.
        """
        if not self.is_needed:
            return list(gradients)
        sent = [self._encode(each) for each in gradients]
        reduced = _REDUCE[keras.backend.backend()](self, sent, list(variables), values, when)
        return [self._decode(each, variable) for each, variable in zip(reduced, variables, strict=True)]

    def all_true(self, flag: Any) -> Any:
        """Whether a boolean tensor is true on all ranks. Collective."""
        if not self.is_needed:
            return flag
        backend = keras.backend.backend()
        number = keras.ops.cast(flag, "float32")
        if backend == "torch":
            from ronde.torch.collectives import allreduce

            return allreduce(number, op="min", group=self.group) > 0.5
        if backend == "jax":
            from ronde.jax.gradients import reduce_gradients

            options = {"op": "min"}
            (number,) = reduce_gradients([number], group=self.group, options=options, name=f"{self.name}.finite")
        else:
            number = _run_on_host([number], self.group, {"op": "min"}, f"{self.name}.finite")[0]
        return number > 0.5

    @property
    def name(self) -> str:
        """The same on all ranks: which optimizer of the group this is, counted when it is first used."""
        if not self._name:
            counts = _num_reductions.setdefault(resolve_group(self.group), Counter())
            counts["keras"] += 1
            self._name = f"ronde.keras.{counts['keras']}"
        return self._name

    @property
    def options(self) -> dict[str, Any]:
        """As those of an allreduce. With `predivide` the sum is of smaller numbers, and does not overflow."""
        predivide = self.settings.predivide
        return {"op": parse_op(self.settings.op), "prescale": 1.0 / predivide, "postscale": predivide}

    # --- comparing parameters --------------------------------------------------------------------------------------

    def count_step(self) -> bool:
        """Count a step, and return whether parameters are compared in it."""
        self._num_steps += 1
        mark_step()
        return self._num_steps == self.compare_at_step

    @property
    def compare_at_step(self) -> int:
        """0: never."""
        at_step = self.settings.compare_at_step
        if at_step is None:
            at_step = current_world().settings.compare_at_step
        return max(at_step, FIRST_COMPARED_STEP) if at_step else 0

    def compare(self, arrays: Sequence[Array]) -> None:
        """Compare the values of the trainable variables over all ranks; OutOfSync names the first that differs."""
        compare_arrays(self._compared_variables, arrays, resolve_group(self.group), advice=ADVICE)

    # --- the backends ----------------------------------------------------------------------------------------------

    def _encode(self, gradient: Any) -> Any:
        """The gradient with 16 bits per number, if that was asked for and it has more. Sums are made with 32 bits."""
        if self._codec is None or gradient is None or hasattr(gradient, "indices"):
            return gradient
        if keras.backend.standardize_dtype(gradient.dtype) not in ("float32", "float64"):
            return gradient
        return keras.ops.cast(gradient, self._codec)

    def _decode(self, reduced: Any, variable: Any) -> Any:
        if self._codec is None or reduced is None or hasattr(reduced, "indices"):
            return reduced
        return keras.ops.cast(reduced, variable.dtype)

    def _reduce_torch(self, gradients: list[Any], variables: list[Any], values: Any, when: Any) -> list[Any]:
        from ronde.torch.gradients import reduce_gradients
        from ronde.torch.tensors import ReduceOptions

        templates = [  # of missing gradients, as they are sent
            variable.value if gradient is not None else self._encode(variable.value)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        options = ReduceOptions(**self.options)
        reduced = reduce_gradients(gradients, templates, group=resolve_group(self.group), options=options)
        if self.count_step():
            self._compared_variables = variables
            self.compare([keras.ops.convert_to_numpy(variable.value) for variable in variables])
        return list(reduced)

    def _reduce_jax(self, gradients: list[Any], variables: list[Any], values: Any, when: Any) -> list[Any]:
        from ronde.jax.gradients import reduce_gradients

        self._compared_variables = variables
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        parameters = [variable.value for variable in variables] if values is None else list(values)
        reduced = reduce_gradients(
            [gradients[index] for index in indices],
            group=self.group,
            options=self.options,
            name=self.name,
            when=when,
            parameters=parameters if self.compare_at_step else (),
            is_compared=self.count_step,
            compare=self.compare,
        )
        for index, gradient in zip(indices, reduced, strict=True):
            gradients[index] = gradient
        return gradients

    def _reduce_tensorflow(self, gradients: list[Any], variables: list[Any], values: Any, when: Any) -> list[Any]:
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        reduced = _run_on_host([gradients[index] for index in indices], self.group, self.options, self.name)
        for index, gradient in zip(indices, reduced, strict=True):
            gradients[index] = gradient
        return gradients


_REDUCE = {
    "torch": GradientReduction._reduce_torch,
    "jax": GradientReduction._reduce_jax,
    "tensorflow": GradientReduction._reduce_tensorflow,
}


def _run_on_host(tensors: list[Any], group: Group | None, options: dict[str, Any], name: str) -> list[Any]:
    import numpy as np
    import tensorflow as tf

    tensors = [tf.convert_to_tensor(each) for each in tensors]

    def reduce(*arrays: Any) -> list[Array]:
        by_dtype: dict[str, list[Any]] = {}
        mine = [np.array(each) for each in arrays]
        for array in mine:
            by_dtype.setdefault(array.dtype.name, []).append(array)
        for dtype, found in by_dtype.items():
            resolve_group(group).allreduce(found, out=found, name=f"{name}.{dtype}", **options)
        return mine

    reduced = tf.numpy_function(reduce, tensors, [each.dtype for each in tensors])
    for each, tensor in zip(reduced, tensors, strict=True):
        each.set_shape(tensor.shape)
    return list(reduced)
