"""An elastic training of one weight by fit(), which every batch makes smaller by exactly 1. Worker 1 kills itself at
batch 5."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import horovod.tensorflow.keras as hvd

WORKER = int(os.environ.get("RONDE_WORKER", "0"))
LOG = Path(sys.argv[1])


def note(event: str) -> None:
    with LOG.open("a") as file:
        found = {"event": event, "worker": WORKER, "batch": state.batch, "weight": float(model.get_weights()[0][0, 0])}
        file.write(json.dumps(found) + "\n")


class Count(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Counts batches, and ends worker 1."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if state.batch == 5 and WORKER == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        state.batch += 1


@hvd.elastic.run
def train(state: hvd.elastic.KerasState) -> None:
    note("train")
    x = np.ones([1, 1], np.float32)
    callbacks = [Count(), hvd.elastic.CommitStateCallback(state, batches_per_commit=2)]
    steps = 10 - state.batch
    state.model.fit(x.repeat(steps, 0), x.repeat(steps, 0), batch_size=1, verbose=0, callbacks=callbacks)


hvd.init()
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), loss=lambda y, predicted: predicted)
state = hvd.elastic.KerasState(model, batch=0)
train(state)
note("end")
