"""What scripts of 2017 to 2022 have in them, on today's TensorFlow and Keras 3: it works, or the guide has the change.

The table of docs/horovod.md says the same. A line that works again one day fails here, so that the guide can say so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod.tensorflow
import horovod.tensorflow.keras as hvd
from tests.compat.tensorflow_checks.keras_training import assert_equal_on_all_ranks, fit, make_model
from tests.compat.tensorflow_checks.registry import check, raises

K = tf.keras.backend
v1 = tf.compat.v1


@check
def names_of_keras_2_work_on_the_distributed_optimizer() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
    variable = tf.Variable(1.0)
    assert K.get_value(optimizer.lr) == 0.5
    K.set_value(optimizer.lr, 0.25)
    assert float(optimizer.lr) == float(optimizer.learning_rate) == 0.25
    optimizer.lr.assign(0.125)
    assert float(optimizer.learning_rate) == 0.125
    optimizer.lr = 1.0
    gradient = tf.constant(1.0 + hvd.rank())
    optimizer.apply_gradients([(gradient, variable)], experimental_aggregate_gradients=False)
    assert float(variable) == -0.5
    assert [each.name for each in optimizer.variables()] == [each.name for each in optimizer.variables]
    hvd_variables = optimizer.variables()
    horovod.tensorflow.broadcast_variables(hvd_variables, root_rank=0)


@check
def an_h5_file_is_loaded_with_its_optimizer_and_trains() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse", metrics=["mae"])
    fit(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.h5")
        loaded = hvd.load_model(Path(folder) / "model.h5")
        other = hvd.load_model(Path(folder) / "model.h5", custom_objects={"mse": keras.losses.Huber()})
    assert isinstance(other.loss, keras.losses.Huber), "the script's own objects come first"
    assert hasattr(loaded.optimizer, "register_local_var")
    assert loaded.optimizer.iterations.numpy() == 8
    for one, same in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, same)
    x = np.random.default_rng(hvd.rank()).random((4, 4), np.float32)
    for each in (model, loaded):
        each.train_on_batch(x, x.sum(axis=1, keepdims=True))
    assert_equal_on_all_ranks(loaded)
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


@check
def what_was_removed_has_the_replacement_of_the_guide() -> None:
    model, plain, mean = make_model(), keras.optimizers.SGD(0.1), keras.metrics.Mean()
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    memory = keras.Sequential([keras.layers.Input(batch_shape=(1, 2, 1)), keras.layers.LSTM(1, stateful=True)])
    removed: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: tf.ConfigProto(), lambda: v1.ConfigProto()),
        (lambda: tf.Session(), lambda: v1.Session().close()),
        (lambda: K.set_session(None), lambda: None),
        (lambda: tf.train.MonitoredTrainingSession, lambda: v1.train.MonitoredTrainingSession),
        (lambda: tf.train.SessionRunHook, lambda: v1.train.SessionRunHook),
        (lambda: tf.placeholder, lambda: v1.placeholder),
        (lambda: strategy.experimental_run_v2(lambda: 1), lambda: strategy.run(lambda: 1)),
        (lambda: keras.optimizers.SGD(lr=0.1), lambda: keras.optimizers.SGD(learning_rate=0.1)),
        (lambda: plain.lr, lambda: plain.learning_rate),
        (lambda: plain.variables(), lambda: list(plain.variables)),
        (lambda: K.set_value(plain.learning_rate, 0.2), lambda: plain.learning_rate.assign(0.2)),
        (
            lambda: model.compile(plain, "mse", experimental_run_tf_function=False),
            lambda: model.compile(plain, "mse"),
        ),
        (lambda: model.fit_generator, lambda: model.fit),
        (lambda: memory.reset_states(), lambda: [layer.reset_state() for layer in memory.layers]),
        (lambda: mean.reset_states(), lambda: mean.reset_state()),
        (
            lambda: model.save_weights("weights.h5"),
            lambda: keras.callbacks.ModelCheckpoint("a.weights.h5", save_weights_only=True),
        ),
        (lambda: keras.layers.BatchNormalization(fused=False), lambda: keras.layers.BatchNormalization()),
        (lambda: model.variables[0].ref(), lambda: model.variables[0].value.ref()),
        (lambda: tf.keras.optimizers.legacy.SGD(0.1), lambda: tf.keras.optimizers.SGD(0.1)),
    ]
    for index, (old, new) in enumerate(removed):
        try:
            old()
        except (AttributeError, TypeError, ValueError, ImportError):
            new()
        else:
            raise AssertionError(f"line {index} of the table works again")


@check
def join_is_also_a_barrier() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(horovod.tensorflow.broadcast_object(f"{folder}/written"))
        if hvd.rank() == 1:
            path.write_text("")
        assert int(horovod.tensorflow.join()) in (0, 1)
        assert path.exists(), "rank 0 has waited for rank 1"
        assert float(hvd.allreduce(1.0, op=hvd.Sum)) == 2.0, "and all go on together"


@check
def a_monitored_session_trains_with_hooks() -> None:
    with tempfile.TemporaryDirectory() as folder, tf.Graph().as_default():
        config = v1.ConfigProto()
        config.gpu_options.allow_growth = True
        config.gpu_options.visible_device_list = str(hvd.local_rank())
        weight = v1.get_variable("weight", initializer=10.0 * (1 + hvd.rank()), use_resource=False)
        step = v1.train.get_or_create_global_step()
        optimizer = horovod.tensorflow.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        train = optimizer.minimize(weight * (1.0 + hvd.rank()), global_step=step)
        hooks = [horovod.tensorflow.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=4)]
        checkpoints = folder if hvd.rank() == 0 else None
        with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoints, config=config, hooks=hooks) as session:
            while not session.should_stop():
                _, found = session.run([train, weight])
        assert found == 10.0 - 4 * 1.5 or found == 10.0 - 3 * 1.5, found  # read before or after the last update
        if hvd.rank() == 0:
            assert tf.train.load_checkpoint(folder).get_tensor("weight") == 4.0
    with raises(RuntimeError, "broadcast_variables"):
        horovod.tensorflow.broadcast_global_variables(0)
