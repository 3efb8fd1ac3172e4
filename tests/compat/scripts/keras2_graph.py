"""A script of TensorFlow 1 with Keras, as posts of 2018 have it but for its first two lines, run with tf-keras: one
session for all, which Keras shares. Every rank prints "ok"."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

import horovod.tensorflow.keras as hvd

tf.disable_v2_behavior()
K = tf.keras.backend
hvd.init()

config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.Session(config=config))

tf.set_random_seed(10 + hvd.rank())  # other weights on each rank
rng = np.random.default_rng(hvd.rank())
x = rng.random((16, 4)).astype(np.float32)
model = tf.keras.models.Sequential()
model.add(tf.keras.layers.Dense(3, input_shape=(4,), activation="tanh"))
model.add(tf.keras.layers.Dense(1))
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(lr=0.01 * hvd.size(), momentum=0.5))
model.compile(loss="mse", optimizer=optimizer, metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=2),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(f"{sys.argv[1]}/checkpoint-{{epoch}}.h5"))
history = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=4, epochs=3, verbose=0, callbacks=callbacks).history

np.testing.assert_allclose(history["lr"], [0.015, 0.02, 0.02], rtol=1e-5)
assert history["loss"][-1] < history["loss"][0]
both = hvd.allgather(np.concatenate([np.ravel(each) for each in model.get_weights()])[None])
np.testing.assert_array_equal(both[0], both[1])
losses = hvd.allgather(np.array(history["loss"])[None])
np.testing.assert_array_equal(losses[0], losses[1])
assert hvd.allreduce(np.array([1.0 + hvd.rank()])) == [1.5]

state = hvd.elastic.KerasState(model, batch=hvd.rank())
model.train_on_batch(x, x[:, :1])
state.restore()
np.testing.assert_array_equal(np.concatenate([np.ravel(each) for each in model.get_weights()]), both[0])
model.set_weights([each + hvd.rank() for each in model.get_weights()])
state.sync()
assert state.batch == 0
np.testing.assert_array_equal(np.concatenate([np.ravel(each) for each in model.get_weights()]), both[0])
if hvd.rank() == 0:
    assert sorted(path.name for path in Path(sys.argv[1]).glob("*.h5"))[-1] == "checkpoint-3.h5"
print("ok")
