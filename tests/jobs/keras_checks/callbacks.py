"""The callbacks, each against what it says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ronde
from ronde.keras import DistributedOptimizer, average_metrics
from ronde.keras.callbacks import (
    BroadcastInitialState,
    LearningRateSchedule,
    LearningRateWarmup,
    MetricAverage,
    ModelCheckpoint,
    learning_rate_of,
)
from tests.jobs.keras_checks.common import (
    BACKEND,
    LOSS,
    NUM_STEPS,
    SHARE,
    assert_close,
    assert_same_on_all_ranks,
    data,
    error_of,
    fit,
    mine,
    perceptron,
    weights,
)


class Rates(keras.callbacks.Callback):
    """The learning rate of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(learning_rate_of(self.model.optimizer))


def check_metrics_are_averaged_by_the_number_of_samples() -> None:
    x, y = data()
    rows = slice(0, 12) if ronde.rank() == 0 else slice(12, 40)
    model = perceptron()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.0001)), LOSS, metrics=["accuracy"])
    history = model.fit(
        mine(x),
        mine(y),
        batch_size=SHARE,
        verbose=0,
        epochs=2,
        validation_data=(x[rows], y[rows]),
        callbacks=[BroadcastInitialState(), MetricAverage()],
    ).history
    assert_same_on_all_ranks([np.array(history[name]) for name in sorted(history)])
    expected = model.evaluate(x[:40], y[:40], batch_size=40, verbose=0, return_dict=True)
    for name, value in expected.items():
        np.testing.assert_allclose(history[f"val_{name}"][-1], value, rtol=1e-4)
    found = average_metrics(model.evaluate(x[rows], y[rows], verbose=0, return_dict=True), count=rows.stop - rows.start)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4)


class OwnMetrics(keras.callbacks.Callback):
    """Metrics of the user's, as numbers of several kinds, and something that is no number."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        me = ronde.rank()
        logs.update({"own": np.float32(me), "int": np.int64(4 * me), "array": np.array(2.0 * me), "text": f"rank {me}"})


def check_metrics_of_any_kind_of_number_are_averaged() -> None:
    kept = keras.callbacks.History()
    callbacks = [OwnMetrics(), MetricAverage(), kept]
    fit(perceptron(), DistributedOptimizer(keras.optimizers.SGD(0.1)), callbacks=callbacks)
    found = {name: each[0] for name, each in kept.history.items()}
    assert (found["own"], found["int"], found["array"], found["text"]) == (0.5, 2.0, 1.0, f"rank {ronde.rank()}")


def check_the_warm_up_rises_batch_by_batch() -> None:
    rates = Rates()
    callbacks = [LearningRateWarmup(initial_lr=0.8, warmup_epochs=2), rates]
    history = fit(perceptron(), DistributedOptimizer(keras.optimizers.SGD(0.8)), epochs=3, callbacks=callbacks)
    num_steps, start = 2 * NUM_STEPS, 1.0 / ronde.size()
    rising = [0.8 * (start + (1 - start) * (step + 1) / num_steps) for step in range(num_steps)]
    np.testing.assert_allclose(rates.found, [*rising, *[0.8] * NUM_STEPS], rtol=1e-6)
    assert len(history.history["learning_rate"]) == 3


def check_the_warm_up_ends_at_its_rate_when_several_batches_are_one_execution() -> None:
    if BACKEND == "torch":  # where Keras refuses it
        return
    schedule = LearningRateSchedule(0.8, lambda epoch: 0.5, start_epoch=2)
    callbacks = [schedule, LearningRateWarmup(initial_lr=0.8, warmup_epochs=1)]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.8))
    history = fit(perceptron(), optimizer, epochs=3, callbacks=callbacks, steps_per_execution=NUM_STEPS)
    np.testing.assert_allclose(history.history["learning_rate"], [0.8, 0.8, 0.4], rtol=1e-6)


def check_schedules_follow_their_epochs() -> None:
    rates = Rates()
    callbacks = [
        LearningRateSchedule(0.4, 0.5, start_epoch=1, end_epoch=3),
        LearningRateSchedule(0.4, lambda epoch: epoch - 2.0, start_epoch=3, staircase=False),
        rates,
    ]
    fit(perceptron(), DistributedOptimizer(keras.optimizers.SGD(0.4)), epochs=4, callbacks=callbacks)
    staircase = [0.4, 0.4, 0.2]
    smooth = [0.4 * (1 + batch / NUM_STEPS) for batch in range(NUM_STEPS)]
    np.testing.assert_allclose(rates.found, [*np.repeat(staircase, NUM_STEPS), *smooth], rtol=1e-6)
    assert "initial_lr" in error_of(lambda: LearningRateSchedule(None, 0.5))  # type: ignore[arg-type]


def check_the_momentum_is_corrected_when_the_rate_changes() -> None:
    """The velocity contains the rate: v = momentum * v * new / old - new * gradient."""
    for correct in (True, False):
        variable = keras.Variable(np.zeros(1, "float32"), name="x")
        model = perceptron()
        model.compile(DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)), LOSS)
        model.optimizer.build([variable])
        callback = LearningRateSchedule(1.0, lambda epoch: 1.0 if epoch < 1 else 4.0, momentum_correction=correct)
        callback.set_model(model)
        callback.set_params({"steps": 1})
        callback.on_train_begin()
        found = []
        for epoch in range(2):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            model.optimizer.apply([keras.ops.ones(1)], [variable])
            found.append(float(keras.ops.convert_to_numpy(variable.value)[0]))
        # first: v = -1; then v = 0.5 * -1 * (4 if corrected) - 4
        assert found == [-1.0, -1.0 + (-2.0 if correct else -0.5) - 4.0], found


def check_only_rank_0_writes_checkpoints() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model-{epoch}.keras"
        model = perceptron()
        callbacks = [BroadcastInitialState(), MetricAverage(), ModelCheckpoint(str(path))]
        fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)), epochs=2, callbacks=callbacks)
        names = sorted(each.name for each in Path(folder).iterdir())
        assert names == (["model-1.keras", "model-2.keras"] if ronde.rank() == 0 else [])
        if names:
            assert_close(weights(keras.saving.load_model(Path(folder) / names[-1])), weights(model), rtol=0.0, atol=0.0)
