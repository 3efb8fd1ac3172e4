"""DistributedGradientTape and DistributedOptimizer with Horovod's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.compression import Compression, Compressor
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper
from horovod.tensorflow.gradients import HorovodGradientReduction
from horovod.tensorflow.mpi_ops import Adasum, Average, allreduce, rank
from horovod.tensorflow.util import _executing_eagerly, without_autograph

_ATTRIBUTE = "_horovod_reduction"


class DistributedTape:
    """What the class of a tape gets in addition."""

    @without_autograph
    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of this variable on their rank."""
        getattr(self, _ATTRIBUTE).register_local(source)

    @without_autograph
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> list[Any]:
        """The gradients as a list, averaged over all ranks. Collective.

        With use_generic_names they are matched by their order and not by the names of the variables, for ranks that
        have different layers of their own.
        """
        flat = tf.nest.flatten(sources)
        found = super().gradient(target, flat, output_gradients)  # type: ignore[misc]  # that of the tape's class
        reduced: list[Any] = getattr(self, _ATTRIBUTE).reduce(found, flat, use_generic_names)
        return reduced

    @without_autograph
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """The pairs of variable and gradient of the local variables, and those of the others. Collective."""
        flat = tf.nest.flatten(sources)
        gradients = self.gradient(target, flat, output_gradients, use_generic_names)
        reduction: HorovodGradientReduction = getattr(self, _ATTRIBUTE)
        pairs = list(zip(flat, gradients, strict=True))
        return (
            [pair for pair in pairs if reduction.is_local(pair[0])],
            [pair for pair in pairs if not reduction.is_local(pair[0])],
        )


@without_autograph
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:  # a tape of a class made for it
    """The tape, with a gradient() that averages over the ranks. The devices have no effect."""
    reduction = HorovodGradientReduction(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    kind = type(gradtape)
    distributed: Any = object.__new__(type(kind.__name__, (DistributedTape, kind), {}))
    distributed.__dict__ = gradtape.__dict__
    setattr(distributed, _ATTRIBUTE, reduction)
    return distributed


@without_autograph
def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As DistributedGradientTape; the gradients of `local_layers`, a layer or a list of them, stay on their rank."""
    variables = local_variables_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables:
        tape.register_local_source(variable)
    return tape


def local_variables_of(layers: Any) -> list[Any]:
    """The trainable weights of a layer or a list of layers."""
    if layers is None:
        return []
    found = [layers] if hasattr(layers, "trainable_weights") else layers
    if not isinstance(found, list | tuple) or not all(hasattr(layer, "trainable_weights") for layer in found):
        raise ValueError(f"local_layers must be a layer or a list of layers, got {layers!r}")
    return [variable for layer in found for variable in layer.trainable_weights]


@without_autograph
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer of tf.compat.v1.train or of Keras that averages gradients over the ranks."""
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("average_aggregated_gradients cannot be used with op=hvd.Adasum")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if op == Adasum:
            return _DistributedAdasumOptimizer(
                optimizer, name, use_locking, compression, backward_passes_per_step, process_set
            )
        reduction = HorovodGradientReduction(
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
        return _DistributedOptimizer(
            optimizer, name, use_locking, reduction, backward_passes_per_step, average_aggregated_gradients
        )
    if isinstance(optimizer, tf.keras.optimizers.Optimizer):
        if op == Adasum:
            raise ValueError("op=hvd.Adasum is for optimizers of tf.compat.v1.train, not for those of Keras")
        import horovod.tensorflow.keras as hvd_keras  # that imports this module

        return hvd_keras.DistributedOptimizer(
            optimizer,
            name=name,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            num_groups=num_groups,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    raise ValueError(
        f"DistributedOptimizer takes an optimizer of tf.compat.v1.train or of Keras, got a {type(optimizer).__name__}"
    )


class _WrappedOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]  # TensorFlow has no types
    """An optimizer that leaves what it does not change to another one."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        pairs: list[tuple[Any, Any]] = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_WrappedOptimizer):
    """Averages gradients in compute_gradients()."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        reduction: HorovodGradientReduction,
        backward_passes_per_step: int,
        average_aggregated_gradients: bool,
    ) -> None:
        super().__init__(optimizer, name or f"Distributed{type(optimizer).__name__}", use_locking)
        self._reduction = reduction
        self._agg_helper: LocalGradientAggregationHelper | None = None
        if backward_passes_per_step != 1:
            if _executing_eagerly():
                raise ValueError(
                    "backward_passes_per_step above 1 works with optimizers of tf.compat.v1 in graphs only"
                )
            self._agg_helper = LocalGradientAggregationHelper(
                backward_passes_per_step,
                reduction.reduce,
                reduction.settings.sparse_as_dense,
                average_aggregated_gradients,
                rank(),
                LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY,
                reduction.process_set,
                reduction.scale_local_gradients,
            )

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of this variable on their rank."""
        if self._agg_helper is not None:
            self._agg_helper.register_local_var(var)
        else:
            self._reduction.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer's own, averaged over the ranks. Collective."""
        pairs = super().compute_gradients(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        reduce = self._reduction.reduce if self._agg_helper is None else self._agg_helper.compute_gradients
        return list(zip(reduce(gradients, variables), variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer's own; with several passes per step, after the last of them."""
        if self._agg_helper is None:
            return super().apply_gradients(*args, **kwargs)
        return self._agg_helper.apply_gradients(
            lambda: self._optimizer.apply_gradients(*args, **kwargs), self._optimizer, *args, **kwargs
        )


class _DistributedAdasumOptimizer(_WrappedOptimizer):
    """Takes a step of its own on every rank, and adds Adasum of all ranks' changes to the variables."""

    def __init__(
        self,
        optimizer: Any,
        name: str | None,
        use_locking: bool,
        compression: type[Compressor] | Compressor,
        backward_passes_per_step: int,
        process_set: ProcessSet,
    ) -> None:
        if process_set.process_set_id:
            raise NotImplementedError("Adasum works with all processes, not with a process set")
        super().__init__(optimizer, name or f"DistributedDelta{type(optimizer).__name__}", use_locking)
        if backward_passes_per_step != 1:
            raise NotImplementedError("backward_passes_per_step above 1 does not work with Adasum and TensorFlow")
        self._compression = compression

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Take the step, then combine the changes. Collective."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        variables = [variable for _, variable in pairs]
        before = [tf.identity(variable) for variable in variables]
        with tf.control_dependencies(before):
            stepped = self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        with tf.control_dependencies([] if stepped is None or _executing_eagerly() else [stepped]):
            changes = [tf.identity(variable) - start for variable, start in zip(variables, before, strict=True)]
        combined = [
            allreduce(change, compression=self._compression, op=Adasum, name=f"adasum.delta.{index}")
            for index, change in enumerate(changes)
        ]
        return tf.group(
            *[v.assign(start + change) for v, start, change in zip(variables, before, combined, strict=True)]
        )
