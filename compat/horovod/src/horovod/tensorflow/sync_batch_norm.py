"""SyncBatchNormalization: batch normalization over the batches of all ranks."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from horovod.tensorflow.mpi_ops import Sum, allreduce, size_op

IS_KERAS_3 = hasattr(tf.keras, "ops")
_Base: Any
if IS_KERAS_3:
    from ronde.keras import SyncBatchNormalization as _Base
else:
    _Base = tf.keras.layers.BatchNormalization


class SyncBatchNormalization(_Base):  # type: ignore[misc]  # Keras has no types
    """Keras' BatchNormalization with mean and variance of all ranks' batches, which with Keras 2 are of one size."""

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization cannot be fused: use fused=False")
        if not IS_KERAS_3:  # which would fuse it otherwise
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called by Keras for mean and variance of this rank's batch."""
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if IS_KERAS_3:
            return mean, variance
        exact_mean, exact_variance = tf.cast(mean, tf.float64), tf.cast(variance, tf.float64)
        own = tf.stack([exact_mean, exact_variance + tf.square(exact_mean)])
        # Not the place of the call, which is that of fit(): ranks may call it in different lines.
        name = None if tf.executing_eagerly() else re.sub(r"_\d+$", "", self.name)
        means, squares = tf.unstack(allreduce(own, op=Sum, name=name) / tf.cast(size_op(), tf.float64))
        return tf.cast(means, mean.dtype), tf.cast(squares - tf.square(means), variance.dtype)
