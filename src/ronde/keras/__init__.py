"""Distributed training with Keras 3 on its TensorFlow, PyTorch and JAX backends.

    import ronde
    import ronde.keras

    ronde.init()
    model.compile(ronde.keras.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[ronde.keras.callbacks.BroadcastInitialState()])

The guide is docs/guides/keras.md.
"""

from __future__ import annotations

import ronde.keras.elastic_state  # noqa: F401 - registers the parts of an elastic State
from ronde.errors import OutOfSync
from ronde.keras import callbacks
from ronde.keras.async_optimizer import AsyncOptimizer
from ronde.keras.batch_norm import SyncBatchNormalization
from ronde.keras.optimizer import DistributedOptimizer, load_model
from ronde.keras.sharding import ShardedArrays, shard
from ronde.keras.stream_dataset import StreamPyDataset
from ronde.keras.variables import broadcast_parameters, check_in_sync
from ronde.training.metrics import average_metrics

__all__ = [
    "AsyncOptimizer",
    "DistributedOptimizer",
    "OutOfSync",
    "ShardedArrays",
    "StreamPyDataset",
    "SyncBatchNormalization",
    "average_metrics",
    "broadcast_parameters",
    "callbacks",
    "check_in_sync",
    "load_model",
    "shard",
]
