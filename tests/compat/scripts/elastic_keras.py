"""An elastic training of one weight by fit(), with Keras 3 or tf-keras. Every batch makes the weight smaller by exactly
1; an epoch has two. Worker 1 kills itself in the middle of epoch 2, and epoch 4 waits for another one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow.keras as hvd
from tests.limits import RANK_S

WORKER = int(os.environ.get("RONDE_WORKER", "0"))
LOG = Path(sys.argv[1])
NUM_EPOCHS = 5


def note(event: str) -> None:
    with LOG.open("a") as file:
        found = {
            "event": event,
            "worker": WORKER,
            "batch": 2 * state.epoch + state.batch,
            "weight": float(model.get_weights()[0][0, 0]),
            "lr": float(tf.keras.backend.get_value(model.optimizer.learning_rate)),
            "size": hvd.size(),
        }
        file.write(json.dumps(found) + "\n")


class Faults(tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Ends worker 1, and waits for the one that replaces it."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (state.epoch, batch) == (2, 1) and WORKER == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        until_s = time.monotonic() + RANK_S
        while state.epoch == 4 and hvd.size() < 2:
            assert time.monotonic() < until_s, "nobody came"
            state.check_host_updates()
            time.sleep(0.05)


@hvd.elastic.run
def train(state: hvd.elastic.KerasState) -> None:
    note("train")
    x = np.ones([2, 1], np.float32)
    callbacks = [
        Faults(),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
    ]
    epochs = NUM_EPOCHS - state.epoch
    state.model.fit(x, x, batch_size=1, epochs=epochs, verbose=0, callbacks=callbacks)


def on_state_reset() -> None:
    tf.keras.backend.set_value(model.optimizer.lr, 1.0)


hvd.init()
dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = tf.keras.Sequential([tf.keras.layers.InputLayer((1,)), dense])
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.5 if WORKER > 1 else 1.0))
model.compile(optimizer, loss=lambda y, predicted: predicted)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
note("end")
