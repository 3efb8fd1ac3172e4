"""Gradients of several backward passes, added up on each rank before they are reduced; in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.gradients import scale
from horovod.tensorflow.mpi_ops import size_op
from horovod.tensorflow.util import contains


class LocalAggregation:
    """What both helpers share: the arguments, and what is done with the sums of the last pass."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet,
        scale_local_gradients: bool,
    ) -> None:
        """`allreduce_func` takes gradients and variables, and returns the reduced gradients."""
        if backward_passes_per_step <= 0:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_grads = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self._local_variables: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of this variable on their rank."""
        self._local_variables.append(var)

    def _reduce(self, totals: list[Any], variables: list[Any]) -> list[Any]:
        if self.average_aggregated_gradients:
            totals = [each / tf.cast(self.backward_passes_per_step, each.dtype) for each in totals]
        results = list(totals)
        shared = [i for i, variable in enumerate(variables) if not contains(self._local_variables, variable)]
        reduced = self.allreduce_grads([totals[i] for i in shared], [variables[i] for i in shared])
        for index, grad in zip(shared, reduced, strict=True):
            results[index] = grad
        if self.scale_local_gradients and len(shared) < len(variables):
            factor = 1.0 / tf.cast(size_op(self.process_set.process_set_id or 0), tf.float64)
            for index in set(range(len(variables))).difference(shared):
                results[index] = scale(results[index], factor)
        return results

    def _as_dense(self, grad: Any) -> Any:
        if isinstance(grad, tf.IndexedSlices):
            if not self.sparse_as_dense:
                raise ValueError("IndexedSlices cannot be added up over several passes; use sparse_as_dense=True")
            return tf.convert_to_tensor(grad)
        return grad


class LocalGradientAggregationHelper(LocalAggregation):
    """Adds the gradients of backward_passes_per_step passes up, and reduces the sums in the last of them.

    compute_gradients() is called once per graph, and apply_gradients() after it. Steps between do not change variables,
    but count in the optimizer's iterations or global step.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        )
        self.rank = rank
        self.optimizer_type = optimizer_type
        self.name = name
        self.counter: Any = None
        """How many passes were added up since the last update."""
        self._is_last: Any = None

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add these gradients to those of the passes before. Return the reduced sums in the last pass, and the sums of
        this rank in the others."""
        present = [index for index, grad in enumerate(grads) if grad is not None]
        dense = [self._as_dense(grads[index]) for index in present]
        self.counter = self._local_variable(tf.zeros([], tf.int32), "aggregation_counter")
        sums = [self._local_variable(tf.zeros(grad.shape, grad.dtype), "aggregated_gradient") for grad in dense]
        is_first = tf.equal(self.counter.read_value(), 0)
        with tf.control_dependencies([is_first]):
            added = [
                each.assign(tf.where(is_first, grad, each.read_value() + grad))
                for each, grad in zip(sums, dense, strict=True)
            ]
        with tf.control_dependencies([each.op for each in added]):
            counted = self.counter.assign((self.counter.read_value() + 1) % self.backward_passes_per_step)
        with tf.control_dependencies([counted.op]):
            self._is_last = tf.equal(self.counter.read_value(), 0)
            totals = [each.read_value() for each in sums]
        found = tf.cond(self._is_last, lambda: self._reduce(totals, [vars[i] for i in present]), lambda: list(totals))
        results: list[Any] = [None] * len(grads)
        for index, grad in zip(present, found if isinstance(found, list | tuple) else [found], strict=True):
            results[index] = grad
        return results

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the closure, which updates variables, after the last pass; else only count the step."""
        global_step = kwargs.get("global_step")

        def update() -> Any:
            return _after(apply_grads_closure())

        def count() -> Any:
            if self.optimizer_type == self._OPTIMIZER_TYPE_KERAS:
                return _after(optimizer.iterations.assign_add(1))
            return _after(None if global_step is None else global_step.assign_add(1))

        return tf.group(tf.cond(self._is_last, update, count))

    def _local_variable(self, initial: Any, name: str) -> Any:
        collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
        return tf.compat.v1.Variable(
            initial, trainable=False, collections=collections, name=f"{name}{self.name}", use_resource=True
        )


def _after(operation: Any) -> Any:
    """A tensor that is there when the operation has run."""
    with tf.control_dependencies([] if operation is None else [operation]):
        return tf.constant(True)
