"""`hvd.callbacks` for fit(), of the Keras that tf.keras is."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

if hasattr(tf.keras, "ops"):
    from horovod._keras import callbacks as _callbacks
else:  # Keras 2, by TF_USE_LEGACY_KERAS=1
    from horovod._keras import keras2_callbacks as _callbacks  # type: ignore[no-redef]

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

BestModelCheckpoint: Any = _callbacks.BestModelCheckpoint
BroadcastGlobalVariablesCallback: Any = _callbacks.BroadcastGlobalVariablesCallback
LearningRateScheduleCallback: Any = _callbacks.LearningRateScheduleCallback
LearningRateWarmupCallback: Any = _callbacks.LearningRateWarmupCallback
MetricAverageCallback: Any = _callbacks.MetricAverageCallback
