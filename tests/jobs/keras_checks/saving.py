"""A saved model is one that Keras loads; ronde.keras.load_model() makes its optimizer distributed again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras

import ronde
import ronde.keras
from ronde.keras import DistributedOptimizer
from ronde.keras.callbacks import BroadcastInitialState
from ronde.keras.optimizer import DistributedBase
from tests.jobs.keras_checks.common import (
    LOSS,
    SHARE,
    assert_close,
    assert_same_on_all_ranks,
    fit,
    fit_alone,
    fit_on,
    mine,
    perceptron,
    values,
    weights,
)


def check_a_loaded_model_trains_on_as_if_it_had_not_been_saved() -> None:
    for plain_optimizer in (
        keras.optimizers.Adam(0.01),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)),
    ):
        model = perceptron()
        fit(model, DistributedOptimizer(plain_optimizer))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.keras"
            model.save(path)
            plain = keras.saving.load_model(path)
            loaded = ronde.keras.load_model(path)
        assert not isinstance(plain.optimizer, DistributedBase)
        assert_close(values(plain.optimizer.variables), values(model.optimizer.variables), rtol=0.0, atol=0.0)
        assert isinstance(loaded.optimizer, DistributedBase)
        assert type(loaded.optimizer).__name__ == type(model.optimizer).__name__
        for each in (model, loaded):
            fit_on(each, SHARE, mine)
        assert_close(weights(loaded), weights(model), rtol=1e-6, atol=1e-7)
        assert_same_on_all_ranks(weights(loaded))


def check_rank_0_may_load_a_model_alone() -> None:
    model = perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.Adam(0.01)))
    if ronde.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            other = ronde.keras.load_model(Path(folder) / "model.keras")
    else:
        other = perceptron(seed=9)
        other.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)), LOSS)
    fit_on(other, SHARE, mine, callbacks=[BroadcastInitialState()])
    fit_on(model, SHARE, mine)
    assert_close(weights(other), weights(model), rtol=1e-6, atol=1e-7)


def check_a_model_without_an_optimizer_is_loaded() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        perceptron().save(path)
        loaded = ronde.keras.load_model(path)
    assert_close(weights(loaded), weights(perceptron()), rtol=0.0, atol=0.0)


def check_a_copy_from_the_config_is_distributed_and_starts_anew() -> None:
    optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(perceptron(), optimizer)
    copy = type(optimizer).from_config(optimizer.get_config())
    assert not copy.built
    model, alone = perceptron(), perceptron()
    fit(model, copy)
    fit_alone(alone, keras.optimizers.SGD(0.1, momentum=0.9))
    assert_close(weights(model), weights(alone))


def check_an_optimizer_that_has_trained_keeps_its_state() -> None:
    model, alone = perceptron(), perceptron()
    for each in (model, alone):
        fit_alone(each, keras.optimizers.SGD(0.1, momentum=0.9))
    before = values(model.optimizer.variables)
    optimizer = DistributedOptimizer(model.optimizer)
    assert optimizer is model.optimizer
    assert_close(values(optimizer.variables), before, rtol=0.0, atol=0.0)
    fit(model, optimizer)
    fit_on(alone, SHARE * ronde.size(), lambda x: x)
    assert_close(weights(model), weights(alone))
