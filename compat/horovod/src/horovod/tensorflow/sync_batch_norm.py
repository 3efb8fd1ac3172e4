"""SyncBatchNormalization: batch normalization over the batches of all ranks."""

from __future__ import annotations

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
    """Keras' BatchNormalization with mean and variance of all ranks' batches. With Keras 2 these have the same size."""

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization cannot be fused: use fused=False")
        kwargs.setdefault("name", "sync_batch_normalization")
        if not IS_KERAS_3:  # which would fuse it otherwise
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called by Keras for mean and variance of this rank's batch."""
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if IS_KERAS_3:
            return mean, variance
        own = tf.stack([mean, variance + tf.square(mean)])
        combined = allreduce(own, op=Sum) / tf.cast(size_op(), own.dtype)
        means, squares = tf.unstack(combined)
        return means, squares - tf.square(means)
