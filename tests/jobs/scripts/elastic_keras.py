"""A worker of tests/jobs/test_elastic_tensorflow.py: fit() on any backend while workers are killed and come. The
weights count how often each sample was used."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ronde
import ronde.keras as rk
from ronde.comm.world import current_world
from ronde.elastic import State, run
from tests.jobs.scripts.control import until

WORKER = int(os.environ.get("RONDE_WORKER", "-1"))
LENGTH, GLOBAL_BATCH, NUM_EPOCHS = 60, 6, 3
FAULTS: dict[str, str] = json.loads(os.environ["TEST_FAULTS"])
"""By worker, place and step, as in "1 begin 7": kill, or wait until there are 3 ranks or will be."""
FOLDER, KIND = Path(sys.argv[1]), sys.argv[2]


class Count(keras.losses.Loss):  # type: ignore[misc]
    """Its gradient is 1 for each sample that was used."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return -y_pred[:, 0]


class CountForward(keras.layers.Layer):  # type: ignore[misc]
    """Counts its batches, as batch normalization keeps statistics, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(ronde.rank())

    def build(self, shape: Any) -> None:
        self.num_forward = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.num_forward.assign_add(1.0 + 0.0 * keras.ops.sum(x))
            x = x + 0.0 * keras.random.uniform((), seed=self.seeds)
        return x


class Faults(keras.callbacks.Callback):  # type: ignore[misc]
    """What happens to this worker."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        happen("begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        happen("end")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        happen("test")


def happen(place: str) -> None:
    what = FAULTS.pop(f"{WORKER} {place} {state.steps}", "")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "await 3 ranks":
        until(lambda: ronde.size() == 3 or current_world().change_wanted, "somebody who wants to join")


ronde.init()
keras.utils.set_random_seed(5 + WORKER)
model = keras.Sequential(
    [
        keras.layers.Input((), dtype="int32"),
        keras.layers.Embedding(LENGTH, 1, embeddings_initializer="zeros"),
        CountForward(),
    ]
)
optimizer = rk.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.0), op="sum")
model.compile(optimizer, Count(reduction="sum"), steps_per_execution=1)
ids = np.arange(LENGTH, dtype="int32")
data: Any
if KIND == "dataset":
    import tensorflow as tf

    import ronde.tensorflow as rt

    samples = tf.data.Dataset.from_tensor_slices((ids, ids)).filter(lambda x, y: x >= 0)
    data = rt.shard(samples, global_batch=GLOBAL_BATCH, shuffle=LENGTH, seed=4)
else:
    data = rk.shard((ids, ids), global_batch=GLOBAL_BATCH, seed=4)
state = State(model=model, optimizer=optimizer, data=data, epoch=0, batch=0, trained=[])
sizes: list[int] = []


@run
def train(state: Any) -> None:
    sizes.append(ronde.size())
    while data.epoch < NUM_EPOCHS:
        model.fit(
            data.dataset if KIND == "dataset" else data,
            shuffle=False,
            initial_epoch=data.epoch,
            epochs=data.epoch + 1,
            verbose=0,
            validation_data=(ids[:8], ids[:8]),
            callbacks=[Faults(), rk.callbacks.TrackState(state, commit_every=int(sys.argv[3]))],
        )


train(state)
table, num_forward = (np.asarray(each) for each in model.get_weights())
result = {
    "counts": sorted(set(table.ravel().tolist())),
    "forward": float(num_forward),
    "steps": state.steps,
    "sizes": sizes,
    "iterations": int(keras.ops.convert_to_numpy(optimizer.iterations)),
    "epoch": [state.epoch, state.batch, data.epoch],
}
(FOLDER / f"worker-{WORKER}.json").write_text(json.dumps(result))
ronde.shutdown()
