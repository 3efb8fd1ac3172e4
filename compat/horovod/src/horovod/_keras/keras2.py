"""Optimizers of Keras 2, as tf-keras has it (TF_USE_LEGACY_KERAS=1): gradients are averaged where they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet
from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
from horovod.tensorflow.gradients import HorovodGradientReduction
from horovod.tensorflow.util import without_autograph


def is_keras_2(thing: Any) -> bool:
    """Whether an object is of a class of Keras 2."""
    return any(kind.__module__.split(".")[0] == "tf_keras" for kind in type(thing).__mro__)


def evaluate(operation: Any) -> Any:
    """The tensor itself, eagerly and in tf.function. In a graph of TensorFlow 1, what Keras' session computes."""
    if tf.executing_eagerly() or tf.inside_function():
        return operation
    backend = tf.compat.v1.keras.backend
    session = backend.get_session() if hasattr(backend, "get_session") else tf.compat.v1.get_default_session()
    if session is None:
        raise ValueError("in a graph this needs a session: use `with session:`, Keras 3 has none of its own")
    return session.run(operation)


class Keras2Optimizer:
    """What an optimizer's class of Keras 2 gets in addition."""

    _HAS_AGGREGATE_GRAD = True
    _horovod_reduction: HorovodGradientReduction
    _agg_helper: LocalGradientAggregationHelperEager | None

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of this variable on their rank."""
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)
        else:
            self._horovod_reduction.register_local(var)

    @without_autograph
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """As the optimizer's own, averaged over the ranks. Collective."""
        base: Any = super()
        return self._reduce_pairs(base.compute_gradients(loss, var_list, tape))

    @without_autograph
    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        base: Any = super()
        if hasattr(base, "_compute_gradients"):  # of tf.keras.optimizers.legacy
            return self._reduce_pairs(base._compute_gradients(loss, var_list, grad_loss, tape))
        if not callable(loss) and tape is not None and getattr(tape, "_persistent", False):
            return self._reduce_pairs(list(zip(tape.gradient(loss, var_list, grad_loss), var_list, strict=True)))
        return self.compute_gradients(loss, var_list, tape)

    @without_autograph
    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Any]:
        """The gradients of a graph, averaged over the ranks."""
        base: Any = super()
        return self._allreduce(base.get_gradients(loss, params), params)

    def _reduce_pairs(self, pairs: Any) -> list[tuple[Any, Any]]:
        pairs = list(pairs)
        variables = [variable for _, variable in pairs]
        reduced = self._allreduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))

    def _allreduce(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        if self._agg_helper is not None:
            return self._agg_helper.compute_gradients(grads, vars)
        return self._horovod_reduction.reduce(grads, vars)

    @without_autograph
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own; with several passes per step, after the last of them."""
        base: Any = super()
        pairs = list(grads_and_vars)
        if hasattr(base, "_compute_gradients"):
            kwargs.pop("skip_gradients_aggregation", None)
        elif "experimental_aggregate_gradients" in kwargs:
            kwargs["skip_gradients_aggregation"] = not kwargs.pop("experimental_aggregate_gradients")
        if self._agg_helper is None:
            return base.apply_gradients(pairs, *args, **kwargs)
        with tf.init_scope():  # variables cannot be made in a branch
            variables = [variable for _, variable in pairs]
            if hasattr(base, "_create_all_weights"):
                base._create_all_weights(variables)
            else:
                base.build(variables)
        return self._agg_helper.apply_gradients(lambda: base.apply_gradients(pairs, *args, **kwargs), self)


def create_keras2_optimizer(
    optimizer: Any,
    name: str | None,
    *,
    reduction: dict[str, Any],  # the arguments of HorovodGradientReduction
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    process_set: ProcessSet,
) -> Any:
    """A new optimizer of the same configuration, which averages gradients."""
    base = type(optimizer)
    config = optimizer.get_config()
    config["name"] = name or f"Distributed{base.__name__}"

    class Distributed(Keras2Optimizer, base):  # type: ignore[misc, valid-type]  # the class is known when it runs
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            shared = HorovodGradientReduction(**reduction)
            helper = None
            if backward_passes_per_step > 1:
                helper = LocalGradientAggregationHelperEager(
                    backward_passes_per_step,
                    shared.reduce,
                    reduction["sparse_as_dense"],
                    average_aggregated_gradients,
                    process_set,
                    reduction["scale_local_gradients"],
                )
            object.__setattr__(self, "_horovod_reduction", shared)
            object.__setattr__(self, "_agg_helper", helper)

    Distributed.__name__ = base.__name__
    Distributed.__qualname__ = base.__qualname__
    Distributed.__module__ = base.__module__
    return Distributed.from_config(config)
