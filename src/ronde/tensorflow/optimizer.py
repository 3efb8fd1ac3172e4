"""What a training loop uses instead of its own tape or optimizer: DistributedGradientTape, and DistributedOptimizer for
optimizers of tf.compat.v1. Optimizers of Keras are in ronde.keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.tensorflow.collectives import size_op
from ronde.tensorflow.gradients import reduce_gradients
from ronde.tensorflow.tracing import without_autograph
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.types import Op

_ATTRIBUTE = "_ronde_reduction"
UNUSED_SETTINGS = ("average_passes", "compare_at_step", "idle_steps")
"""Settings that are for optimizers which see every step and every pass."""


class GradientReduction:
    """How a tape or an optimizer reduces its gradients."""

    def __init__(
        self,
        settings: GradientSettings,
        group: Group | None,
        name: str,
        codec: str | None,
        local_variables: Sequence[Any] = (),
        scale_local: bool = True,
    ) -> None:
        for setting in UNUSED_SETTINGS:
            if getattr(settings, setting) != getattr(GradientSettings(), setting):
                raise ValueError(f"{setting} has no effect on gradients of TensorFlow; leave it out")
        self.settings = settings
        self.local_variables = list(local_variables)
        """Variables whose gradients stay on this rank."""
        self._group = group
        self._name = name
        self._codec = codec
        self._scale_local = scale_local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients as the optimizer gets them."""
        local = {id(variable) for variable in self.local_variables}
        shared = [index for index, variable in enumerate(variables) if id(variable) not in local]
        results = list(gradients)
        reduced = reduce_gradients(
            [gradients[index] for index in shared],
            [variables[index] for index in shared],
            settings=self.settings,
            group=self._group,
            name=self._name,
            codec=self._codec,
        )
        for index, gradient in zip(shared, reduced, strict=True):
            results[index] = gradient
        if self._scale_local and len(shared) < len(variables):
            factor = 1.0 / tf.cast(size_op(group=resolve_group(self._group)), tf.float64)
            for index in set(range(len(variables))).difference(shared):
                results[index] = _scale(results[index], factor)
        return results


def _scale(gradient: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def DistributedGradientTape(
    tape: Any,
    *,
    op: str | Op = "mean",
    codec: str | None = None,
    group: Group | None = None,
    name: str = "",
    local_variables: Sequence[Any] = (),
    scale_local: bool = True,
    **settings: Any,  # see GradientSettings
) -> Any:
    """Return the tape with a gradient() that averages over all ranks. It is the same tape: what it has recorded and
    what it will record is there.

        with tf.GradientTape() as tape:
            loss = ...
        tape = ronde.tensorflow.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    `codec` (float16 or bfloat16), `group` and `name` are as in reduce_gradients(), and further settings are those of
    GradientSettings. Gradients of `local_variables` stay on their rank; with scale_local they are divided by the
    number of ranks, so that they weigh as much as those of the others.
    """
    distributed = object.__new__(_tape_class(type(tape)))
    distributed.__dict__ = tape.__dict__
    wanted = GradientSettings(op=op, **settings)
    reduction = GradientReduction(wanted, group, name, codec, local_variables, scale_local)
    setattr(distributed, _ATTRIBUTE, reduction)
    return distributed


def _tape_class(base: Any) -> Any:
    @without_autograph
    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As tf.GradientTape.gradient, averaged over all ranks. Collective."""
        flat = tf.nest.flatten(sources)
        found = base.gradient(self, target, flat, output_gradients, unconnected_gradients)
        return tf.nest.pack_sequence_as(sources, getattr(self, _ATTRIBUTE).reduce(found, flat))

    def local_tape(self: Any) -> Any:
        local = object.__new__(base)
        local.__dict__ = self.__dict__
        return local

    def jacobian(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As tf.GradientTape.jacobian, of this rank alone."""
        return local_tape(self).jacobian(*args, **kwargs)

    def batch_jacobian(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As tf.GradientTape.batch_jacobian, of this rank alone."""
        return local_tape(self).batch_jacobian(*args, **kwargs)

    methods = {"gradient": gradient, "jacobian": jacobian, "batch_jacobian": batch_jacobian}
    return type("DistributedGradientTape", (base,), methods)


def DistributedOptimizer(
    optimizer: Any,
    *,
    op: str | Op = "mean",
    codec: str | None = None,
    group: Group | None = None,
    name: str = "",
    local_variables: Sequence[Any] = (),
    scale_local: bool = True,
    **settings: Any,  # see GradientSettings
) -> Any:
    """Return an optimizer of tf.compat.v1 whose compute_gradients() averages over all ranks, and which leaves the rest
    to the given one. The options are those of DistributedGradientTape()."""
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"ronde.tensorflow.DistributedOptimizer is for optimizers of tf.compat.v1.train, got a "
            f"{type(optimizer).__name__}; use ronde.keras.DistributedOptimizer for those of Keras"
        )
    wanted = GradientSettings(op=op, **settings)
    reduction = GradientReduction(wanted, group, name, codec, local_variables, scale_local)
    return _DistributedV1Optimizer(optimizer, reduction)


class _DistributedV1Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # TensorFlow has no types
    def __init__(self, optimizer: Any, reduction: GradientReduction) -> None:
        super().__init__(use_locking=False, name=f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own, averaged over all ranks. Collective."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        reduced = self._reduction.reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)
