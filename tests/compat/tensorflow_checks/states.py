"""Elastic states and the callbacks that keep them, without a change of processes."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
from tests.compat.tensorflow_checks.keras_training import make_model
from tests.compat.tensorflow_checks.registry import check, raises


@check
def a_state_of_variables_is_synchronized_and_restored() -> None:
    variable = tf.Variable([1.0 + hvd.rank()])
    state = hvd.elastic.TensorFlowState([variable], batch=10 + hvd.rank())
    state.sync()
    assert (variable.numpy(), state.batch) == ([1.0], 10)
    variable.assign([7.0])
    state.batch = 11
    state.restore()
    assert (variable.numpy(), state.batch) == ([1.0], 10)
    variable.assign([7.0])
    state.batch = 11
    state.commit()
    variable.assign([8.0])
    state.restore()
    assert (variable.numpy(), state.batch) == ([7.0], 11)


@check
def a_state_of_a_session_is_synchronized_and_restored() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("weight", initializer=np.float32(1.0 + hvd.rank()))
        session.run(tf.compat.v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, step=hvd.rank())
        state.sync()
        assert (session.run(variable), state.step) == (1.0, 0)
        variable.load(5.0, session)
        state.restore()
        assert session.run(variable) == 1.0


@check
def a_state_of_a_model_has_its_optimizer() -> None:
    model = make_model()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    state = hvd_keras.elastic.KerasState(model, epoch=hvd.rank(), batch=0)
    state.sync()
    assert state.epoch == 0
    kept = [np.array(each) for each in (*model.variables, *model.optimizer.variables)]
    x = np.ones([4, 4], np.float32)
    model.train_on_batch(x, x[:, :1])
    state.restore()
    for variable, value in zip((*model.variables, *model.optimizer.variables), kept, strict=True):
        np.testing.assert_array_equal(variable, value)
    with raises(ValueError, "built"):
        hvd_keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


@check
def reset_callbacks_set_the_lr_of_a_plain_optimizer() -> None:
    optimizer = keras.optimizers.SGD(0.1)
    num_variables = len(optimizer.variables)
    model = make_model()
    hvd.elastic.TensorFlowKerasState(model, optimizer)
    optimizer.lr.assign(0.2)
    assert float(optimizer.learning_rate) == np.float32(0.2)
    tf.keras.backend.set_value(optimizer.lr, 0.3)
    assert float(optimizer.learning_rate) == np.float32(0.3)
    assert len(optimizer.variables) == num_variables


@check
def callbacks_keep_a_state() -> None:
    commits: list[tuple[int, int]] = []

    class State(hvd_keras.elastic.KerasState):
        def commit(self) -> None:
            commits.append((self.epoch, self.batch))
            super().commit()

    model = make_model()
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    state = State(model, epoch=0, batch=0)
    state.sync()
    callbacks = [
        hvd_keras.elastic.UpdateBatchStateCallback(state),
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]

    @hvd_keras.elastic.run
    def train(state: State) -> None:
        x = np.ones([16, 4], np.float32)
        state.model.fit(x, x[:, :1], batch_size=4, epochs=2 - state.epoch, verbose=0, callbacks=callbacks)

    train(state)
    assert commits == [(0, 1), (0, 3), (1, 0), (1, 1), (1, 3), (2, 0)]
