"""Batch normalization over the batches of all ranks together, on each backend of Keras.

Each member's number of values, mean and variance per channel are combined (ronde.training.batch_moments); all else
stays local, and is Keras' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from ronde.comm.group import Group
from ronde.comm.world import current_world, resolve_group


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

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # What it returns has the shape of its inputs; so nothing has to run to find that out.
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)


def combine_moments(count: Any, mean: Any, variance: Any, *, group: Group | None) -> tuple[Any, Any]:
    """Mean and variance over all members, of each member's number of values, mean and variance per channel; collective,
    and differentiable once."""
    combine: Callable[..., Any]
    if keras.backend.backend() == "torch":
        from ronde.torch.batch_norm import combine_moments as combine
    elif keras.backend.backend() == "jax":
        from ronde.jax.collectives import combine_moments as combine
    else:
        from ronde.tensorflow.collectives import combine_moments as combine
    combined_mean, combined_variance = combine(count, mean, variance, group)
    return combined_mean, combined_variance
