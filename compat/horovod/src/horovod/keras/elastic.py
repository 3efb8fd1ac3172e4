"""`hvd.elastic` for fit(): a state of model and optimizer, and the callbacks that keep it."""

from __future__ import annotations

from horovod.tensorflow.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
