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
from ronde.tensorflow.graph_operations import without_autograph
from ronde.training.gradient_settings import GradientSettings

_ATTRIBUTE = "_ronde_reduction"


class GradientReduction:
    """How a tape or an optimizer reduces its gradients."""

    def __init__(
        self,
        settings: GradientSettings | None,
        group: Group | None,
        name: str,
        codec: str | None,
        local_variables: Sequence[Any] = (),
        scale_local: bool = True,
    ) -> None:
        self.settings = settings or GradientSettings()
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
    settings: GradientSettings | None = None,
    group: Group | None = None,
    name: str = "",
    codec: str | None = None,
    local_variables: Sequence[Any] = (),
    scale_local: bool = True,
) -> Any:
    """Return the tape with a gradient() that averages over all ranks. It is the same tape: what it has recorded and what
    it will record is there.

        with tf.GradientTape() as tape:
            loss = ...
        tape = ronde.tensorflow.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    `settings`, `group`, `name` and `codec` are as in reduce_gradients(). Gradients of `local_variables` stay on their
    rank; with scale_local they are divided by the number of ranks, so that they weigh as much as those of the others.
    """
    distributed = object.__new__(_tape_class(type(tape)))
    distributed.__dict__ = tape.__dict__
    reduction = GradientReduction(settings, group, name, codec, local_variables, scale_local)
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
        found = base.gradient(self, target, sources, output_gradients, unconnected_gradients)
        flat_sources = tf.nest.flatten(sources)
        flat = [found] if not tf.nest.is_nested(sources) else _flatten_like(sources, found)
        reduced = getattr(self, _ATTRIBUTE).reduce(flat, flat_sources)
        return tf.nest.pack_sequence_as(sources, reduced)

    return type("DistributedGradientTape", (base,), {"gradient": gradient})


def _flatten_like(sources: Any, found: Any) -> list[Any]:
    """The gradients in the order of the flat sources. None and IndexedSlices count as one each."""
    return list(tf.nest.flatten_up_to(sources, found)) if hasattr(tf.nest, "flatten_up_to") else tf.nest.flatten(found)


def DistributedOptimizer(
    optimizer: Any,
    *,
    settings: GradientSettings | None = None,
    group: Group | None = None,
    name: str = "",
    codec: str | None = None,
    local_variables: Sequence[Any] = (),
    scale_local: bool = True,
) -> Any:
    """Return an optimizer of tf.compat.v1 whose compute_gradients() averages over all ranks, and which leaves the rest
    to the given one. The options are those of DistributedGradientTape()."""
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            f"ronde.tensorflow.DistributedOptimizer is for optimizers of tf.compat.v1.train, got a "
            f"{type(optimizer).__name__}; use ronde.keras.DistributedOptimizer for those of Keras"
        )
    return _DistributedV1Optimizer(
        optimizer, GradientReduction(settings, group, name, codec, local_variables, scale_local)
    )


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
