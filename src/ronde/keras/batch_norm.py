"""Batch normalization over the batches of all ranks together, on each backend of Keras.

Each member's number of values n, mean m and variance v per channel are combined into those of all members:

    N = sum(n)    M = sum(n * m) / N    V = sum(n * (v + m²)) / N - M²

The sums are one allreduce of float64, so that nothing is lost in the difference. With the gradients of M and V, summed
over all members, the gradients of a member's own are

    dm = n / N * (dM + 2 * (m - M) * dV)    dv = n / N * dV

which is one more allreduce. All else stays local, and is Keras' own. Members may have batches of different sizes, also
none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group

OPERATION_NAME = "ronde.keras.moments"
"""On JAX, where operations of a step are called in the order of the program, by a thread of its own."""


@keras.saving.register_keras_serializable(package="ronde")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras' BatchNormalization, with the statistics of all members of a group (default: all ranks) in training.

    Masked values do not count, and a member counts with as many values as it has. With 16-bit inputs statistics are of
    32 bits. Outside of training nothing is sent. A loaded or copied layer is for all ranks.

    All members call their layers in the same order.
    """

    def __init__(self, *args: Any, group: Group | None = None, **kwargs: Any) -> None:
        if kwargs.pop("synchronized", False):
            raise ValueError("synchronized=True is for a tf.distribute.Strategy; leave it out")
        super().__init__(*args, **kwargs)
        self._group = group

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Called by Keras in training, with inputs of 32 bits or more."""
        axes, ops = self._reduction_axes, keras.ops
        if mask is None:
            num_values = 1
            for axis in axes:
                num_values = num_values * ops.shape(inputs)[axis]
            total = ops.sum(inputs, axes, keepdims=True)
            count = ops.ones_like(total) * ops.cast(num_values, total.dtype)
            mean = total / ops.maximum(count, 1)
            squares = ops.square(inputs - mean)
        else:
            counts = ops.broadcast_to(ops.cast(ops.expand_dims(mask, -1), "bool"), ops.shape(inputs))
            count = ops.sum(ops.cast(counts, inputs.dtype), axes, keepdims=True)
            mean = ops.sum(ops.where(counts, inputs, 0), axes, keepdims=True) / ops.maximum(count, 1)
            squares = ops.where(counts, ops.square(inputs - mean), 0)
        variance = ops.sum(squares, axes, keepdims=True) / ops.maximum(count, 1)
        own = [ops.reshape(each, (-1,)) for each in (ops.stop_gradient(count), mean, variance)]
        members = resolve_group(self._group)
        if not members.included or (members.size == 1 and not current_world().can_rejoin):
            return own[1], own[2]
        return combine_moments(*own, group=self._group)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """What it returns has the shape of its inputs; so nothing has to run to find that out."""
        return keras.KerasTensor(args[0].shape, dtype=self.compute_dtype)


def combine_moments(count: Any, mean: Any, variance: Any, *, group: Group | None) -> tuple[Any, Any]:
    """Mean and variance over all members, of each member's number of values, mean and variance per channel; collective,
    and differentiable once."""
    combine = {"tensorflow": _combine_tensorflow, "torch": _combine_torch, "jax": _combine_jax}
    return combine[keras.backend.backend()](count, mean, variance, group)


def weigh(count: Any, mean: Any, variance: Any) -> list[Any]:
    """What is summed over members."""
    return [count, count * mean, count * (variance + mean * mean)]


def unweigh(total: Any, maximum: Callable[[Any, float], Any]) -> tuple[Any, Any, Any]:
    """Number, mean and variance, of the sums."""
    count = maximum(total[0], 1.0)
    mean = total[1] / count
    return count, mean, maximum(total[2] / count - mean * mean, 0.0)


def backpropagate(own: Any, combined: Any, gradients: Any) -> tuple[Any, Any]:
    """The gradients of a member's mean and variance. `own` and `combined` are number and mean, and `gradients` those of
    mean and variance of all, summed over members."""
    (count, mean), (total_count, total_mean), (d_mean, d_variance) = own, combined, gradients
    share = count / total_count
    return share * (d_mean + 2.0 * (mean - total_mean) * d_variance), share * d_variance


def _combine_tensorflow(count: Any, mean: Any, variance: Any, group: Group | None) -> tuple[Any, Any]:
    import tensorflow as tf

    from ronde.tensorflow.collectives import allreduce
    from ronde.tensorflow.graph_operations import without_autograph

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    @without_autograph
    def combine(count: Any, mean: Any, variance: Any) -> Any:
        exact = [tf.cast(each, tf.float64) for each in (count, mean, variance)]
        total_count, total_mean, total_variance = unweigh(allreduce(tf.stack(weigh(*exact)), group=group), tf.maximum)

        @without_autograph
        def backward(*grads: Any) -> Any:
            summed = allreduce(tf.cast(tf.stack(grads), tf.float64), group=group)
            own = backpropagate(exact[:2], (total_count, total_mean), tf.unstack(summed))
            return None, *(tf.cast(each, mean.dtype) for each in own)

        return (tf.cast(total_mean, mean.dtype), tf.cast(total_variance, mean.dtype)), backward

    combined_mean, combined_variance = combine(count, mean, variance)
    return combined_mean, combined_variance


def _combine_torch(count: Any, mean: Any, variance: Any, group: Group | None) -> tuple[Any, Any]:
    from ronde.torch.gradients import call_outside_of_graphs
    from ronde.torch.moments import CombineMoments

    combined_mean, combined_variance = call_outside_of_graphs(
        CombineMoments.apply, count, mean, variance, resolve_group(group), weigh, unweigh, backpropagate
    )
    return combined_mean, combined_variance


def _combine_jax(count: Any, mean: Any, variance: Any, group: Group | None) -> tuple[Any, Any]:
    import jax

    from ronde.jax.gradients import call_on_host

    def allreduce(stacked: Any) -> Any:
        total = np.empty_like(stacked)
        resolve_group(group).allreduce(stacked, out=total, name=OPERATION_NAME)
        return total

    def reduce_forward(stacked: Any) -> Any:
        total = allreduce(np.stack(weigh(*np.asarray(stacked, np.float64))))
        return np.stack(unweigh(total, np.maximum)).astype(stacked.dtype)

    def reduce_backward(stacked: Any) -> Any:
        return allreduce(np.asarray(stacked, np.float64)).astype(stacked.dtype)

    def forward(count: Any, mean: Any, variance: Any) -> Any:
        stacked = keras.ops.stack([count, mean, variance])
        total_count, total_mean, total_variance = call_on_host(reduce_forward, stacked)
        return (total_mean, total_variance), ((count, mean), (total_count, total_mean))

    def backward(kept: Any, grads: Any) -> Any:
        summed = call_on_host(reduce_backward, keras.ops.stack(grads))
        own, combined = kept
        return keras.ops.zeros_like(own[0]), *backpropagate(own, combined, summed)

    combine = jax.custom_vjp(lambda *own: forward(*own)[0])
    combine.defvjp(forward, backward)
    combined_mean, combined_variance = combine(count, mean, variance)
    return combined_mean, combined_variance
