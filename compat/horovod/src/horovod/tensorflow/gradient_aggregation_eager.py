"""Gradients of several backward passes, added up on each rank before they are reduced; eager and in tf.function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.tensorflow.gradient_aggregation import LocalAggregation
from horovod.tensorflow.util import without_autograph


class LocalGradientAggregationHelperEager(LocalAggregation):
    """Adds the gradients of backward_passes_per_step passes up, and reduces the sums in the last of them. Steps between
    change no variables but the optimizer's iterations. It is called in every step."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set,
            scale_local_gradients,
        )
        with tf.init_scope():
            self.counter = tf.Variable(0, trainable=False, dtype=tf.int32)
        """How many passes were added up since the last update."""
        self._sums: list[Any] = []

    @without_autograph
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add these gradients to those of the passes before. Return the reduced sums in the last pass, and the sums of
        this rank in the others."""
        if any(grad is None for grad in grads):
            raise ValueError("gradients cannot be None when they are added up over several passes")
        dense = [self._as_dense(grad) for grad in grads]
        if not self._sums:
            with tf.init_scope():
                self._sums = [tf.Variable(tf.zeros(grad.shape, grad.dtype), trainable=False) for grad in dense]
        totals = [each.assign_add(grad) for each, grad in zip(self._sums, dense, strict=True)]
        totals = [tf.identity(each) for each in totals]
        is_last = tf.equal(self.counter.assign_add(1), self.backward_passes_per_step)
        results = tf.cond(is_last, lambda: self._finish(totals, list(vars)), lambda: list(totals))
        return list(results) if isinstance(results, list | tuple) else [results]

    @without_autograph
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the closure, which updates variables, after the last pass; else only count the step."""

        def update() -> Any:
            apply_grads_closure()
            return tf.constant(True)

        def count() -> Any:
            optimizer.iterations.assign_add(1)
            return tf.constant(False)

        return tf.cond(tf.equal(self.counter, 0), update, count)

    def _finish(self, totals: list[Any], variables: list[Any]) -> list[Any]:
        for each in self._sums:
            each.assign(tf.zeros_like(each))
        self.counter.assign(0)
        return self._reduce(totals, variables)
