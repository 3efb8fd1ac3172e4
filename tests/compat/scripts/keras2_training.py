"""A training as scripts for Keras 2 have it, run with tf-keras: ranks stay equal. Every rank prints "ok"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd_tensorflow
import horovod.tensorflow.keras as hvd

FOLDER = Path(sys.argv[1])


def make_model() -> Any:
    tf.keras.utils.set_random_seed(10 + hvd.rank())  # other weights on each rank
    model = tf.keras.models.Sequential()
    model.add(tf.keras.layers.Dense(3, input_shape=(4,), activation="tanh"))
    model.add(tf.keras.layers.Dense(1))
    return model


def assert_equal_on_all_ranks(model: Any) -> None:
    both = hvd.allgather(np.concatenate([np.ravel(each) for each in model.get_weights()])[None])
    np.testing.assert_array_equal(both[0], both[1])


def fit(model: Any, epochs: int) -> Any:
    x = np.random.default_rng(hvd.rank()).random((16, 4), np.float32)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.2, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.2, multiplier=0.1, start_epoch=2),
    ]
    return model.fit(x, x.sum(axis=1, keepdims=True), batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks)


hvd.init()
assert not hasattr(tf.keras, "ops"), "this is Keras 3"
optimizers = tf.keras.optimizers
cases: list[tuple[Any, dict[str, Any]]] = [
    (optimizers.SGD(learning_rate=0.2, momentum=0.9), {}),
    (optimizers.legacy.SGD(lr=0.2, momentum=0.9), {"compression": hvd.Compression.fp16}),
    (optimizers.Adam(0.2), {"backward_passes_per_step": 2, "groups": 2}),
    (optimizers.legacy.Adam(0.2), {"backward_passes_per_step": 2}),
]
for optimizer, options in cases:
    model = make_model()
    distributed = hvd.DistributedOptimizer(optimizer, **options)
    model.compile(loss="mse", optimizer=distributed, experimental_run_tf_function=False)
    history = fit(model, 3).history
    np.testing.assert_allclose(history["lr"], [0.15, 0.2, 0.2], rtol=1e-5)
    assert history["loss"][-1] < history["loss"][0]
    assert_equal_on_all_ranks(model)

weight = tf.Variable([0.0])
for passes, expected in ((1, [-1.5, -3.0]), (2, [-0.0, -3.0])):
    weight.assign([0.0])
    distributed = hvd.DistributedOptimizer(optimizers.SGD(1.0), backward_passes_per_step=passes)
    found = []
    for _ in range(2):
        distributed.minimize(lambda: weight * (1.0 + hvd.rank()), [weight])
        found.append(float(weight.numpy()[0]))
    assert found == expected, found

# Under mixed_float16 compile() puts a loss scale around it: a gradient of one rank that is not finite counts on all.
tf.keras.mixed_precision.set_global_policy("mixed_float16")
scaled = make_model()
scaled.compile(hvd.DistributedOptimizer(optimizers.SGD(0.01)), "mse")
tf.keras.mixed_precision.set_global_policy("float32")
fit(scaled, 1)
before, scale = scaled.get_weights(), float(scaled.optimizer.loss_scale)
broken = np.full((4, 4), np.inf if hvd.rank() == 1 else 1.0, np.float32)
scaled.train_on_batch(broken, np.ones((4, 1), np.float32))
np.testing.assert_array_equal(scaled.get_weights()[0], before[0])
assert float(scaled.optimizer.loss_scale) == scale / 2
assert_equal_on_all_ranks(scaled)

# A rank that has more batches would wait for the other one.
x = np.ones((8 + 4 * hvd.rank(), 4), np.float32)
try:
    model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
except ValueError as error:
    assert "different numbers of batches" in str(error)
else:
    raise AssertionError("fit() has not noticed that the ranks have different numbers of batches")

# What Keras 3 has removed.
old = hvd.DistributedOptimizer(optimizers.SGD(lr=0.5))
backend = tf.keras.backend
backend.set_value(old.lr, 0.25)
assert backend.get_value(old.lr) == backend.get_value(old.learning_rate) == 0.25
hvd_tensorflow.broadcast_variables(old.variables(), root_rank=0)
memory = tf.keras.models.Sequential([tf.keras.layers.LSTM(1, stateful=True, batch_input_shape=(1, 2, 1))])
memory.reset_states()
tf.keras.metrics.Mean().reset_states()
generator = ((np.ones((2, 4), np.float32), np.ones((2, 1), np.float32)) for _ in range(4))
model.fit_generator(generator, steps_per_epoch=2, verbose=0)
model.save_weights(FOLDER / f"weights{hvd.rank()}.h5")
config = tf.compat.v1.ConfigProto()
tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))  # without effect when executing eagerly
assert int(hvd_tensorflow.join()) in (0, 1)

path = FOLDER / f"model{hvd.rank()}.h5"
model.save(path)
loaded = hvd.load_model(path)
assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) > 0
saved, read = (each.optimizer.variables for each in (model, loaded))
for one, other in zip(saved() if callable(saved) else saved, read() if callable(read) else read, strict=True):
    np.testing.assert_array_equal(one, other)
x = np.ones((4, 4), np.float32) * hvd.rank()
loaded.train_on_batch(x, x[:, :1])
assert_equal_on_all_ranks(loaded)

state = hvd.elastic.KerasState(loaded, batch=hvd.rank())
state.sync()
assert state.batch == 0
kept = loaded.get_weights()
loaded.train_on_batch(x, x[:, :1])
state.restore()
np.testing.assert_array_equal(loaded.get_weights()[0], kept[0])

batches = np.array([[[1.0], [3.0]], [[5.0], [9.0]]], np.float32)
layer = hvd_tensorflow.SyncBatchNormalization(momentum=0.0, epsilon=0.0)
found = layer(tf.constant(batches[hvd.rank()]), training=True)
np.testing.assert_allclose(found, (batches[hvd.rank()] - batches.mean()) / batches.std(), rtol=1e-5)
# Two of them in a model have names of their own, fit() is called in another line by each rank, and small variances
# beside large means are not lost.
layers = [tf.keras.Input((4,)), *[hvd_tensorflow.SyncBatchNormalization() for _ in range(2)], tf.keras.layers.Dense(1)]
normalized = tf.keras.Sequential(layers)
normalized.compile(hvd.DistributedOptimizer(optimizers.SGD(0.1)), "mse")
hvd_tensorflow.broadcast_variables(normalized.variables, root_rank=0)
x = np.random.default_rng(hvd.rank()).normal(size=(16, 4)).astype(np.float32)
if hvd.rank() == 0:
    normalized.fit(x, x[:, :1], batch_size=8, verbose=0)
else:
    normalized.fit(x, x[:, :1], batch_size=8, verbose=0)
assert_equal_on_all_ranks(normalized)
large = np.array([[[4096.0], [4096.5]], [[4095.5], [4096.0]]], np.float32)
found = hvd_tensorflow.SyncBatchNormalization(epsilon=0.0)(tf.constant(large[hvd.rank()]), training=True)
np.testing.assert_allclose(found, (large[hvd.rank()] - large.mean()) / large.std(), rtol=1e-3)
print("ok")
