"""Optimizers whose steps are taken by a parameter server."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import ronde
from ronde.keras import AsyncOptimizer
from tests.jobs.keras_checks.common import assert_close, fit, fit_alone, perceptron, weights


def make_sgd() -> Any:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.9))


def check_a_parameter_server_in_sync_mode_learns_like_one_process() -> None:
    ours, alone = perceptron(3 + ronde.rank()), perceptron()  # the weights of rank 0 count
    optimizer = AsyncOptimizer(make_sgd(), ours.trainable_variables, mode="sync")
    fit(ours, optimizer, epochs=2)
    fit_alone(alone, make_sgd(), epochs=2)
    assert_close(weights(ours), weights(alone))
    assert type(optimizer).__name__ == "SGD" and int(optimizer.iterations) == 8
    optimizer.parameter_server.close()


def check_a_parameter_server_in_async_mode_learns() -> None:
    model = perceptron()
    optimizer = AsyncOptimizer(keras.optimizers.Adam(0.02), model.trainable_variables, mode="async")
    history = fit(model, optimizer, epochs=8)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert all(np.isfinite(each).all() for each in weights(model))
    ronde.barrier()
    optimizer.parameter_server.close()


def check_options_that_servers_do_not_have_are_named() -> None:
    variables = perceptron().trainable_variables
    with pytest.raises(ValueError, match="option global_clipnorm of SGD; give clip_norm to AsyncOptimizer"):
        AsyncOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=1.0), variables)
    with pytest.raises(TypeError, match="got Nadam; give a server_optimizer"):
        AsyncOptimizer("nadam", variables)
