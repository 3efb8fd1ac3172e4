"""`hvd.elastic` for fit(): a state of model and optimizer, and the callbacks that keep it."""

from __future__ import annotations

from typing import Any

from horovod._keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class KerasState(TensorFlowKerasState):
    """A model of Keras with its optimizer, and plain values by keyword."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
