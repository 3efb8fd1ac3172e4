"""Loss scales and 16-bit policies: all ranks skip a step, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

import ronde
from ronde.keras import DistributedOptimizer
from tests.jobs.keras_checks.common import (
    LOSS,
    SHARE,
    assert_close,
    assert_learns_like_one_process,
    assert_same_on_all_ranks,
    data,
    error_of,
    fit,
    mine,
    perceptron,
    values,
    weights,
)


@contextmanager
def policy(name: str) -> Iterator[None]:
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def scale_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale.value))


def iterations_of(optimizer: Any) -> int:
    return int(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(optimizer.inner_optimizer._iterations)))


def train(model: Any, step: int, *, broken: bool = False) -> None:
    """One step; on rank 1 with a gradient that is not finite."""
    x, y = mine(data()[0])[step * SHARE :][:SHARE], mine(data()[1])[step * SHARE :][:SHARE]
    if broken and ronde.rank() == 1:
        x = np.full_like(x, np.inf)
    model.train_on_batch(x, y)


def check_under_mixed_float16_it_is_a_loss_scale() -> None:
    with policy("mixed_float16"):
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model = perceptron()
        history = fit(model, optimizer, epochs=3)
        assert model.optimizer is optimizer
        assert history.history["loss"][-1] < history.history["loss"][0]
        assert_same_on_all_ranks([*weights(model), *values(optimizer.variables)])
        assert iterations_of(optimizer) == 12


def check_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all() -> None:
    for name in ("mixed_float16", "float32"):
        with policy(name):
            plain = keras.optimizers.SGD(0.1)
            scaled = plain if name == "mixed_float16" else keras.optimizers.LossScaleOptimizer(plain)
            optimizer = DistributedOptimizer(scaled)
            model = perceptron()
            model.compile(optimizer, LOSS)
            train(model, 0)
            before, scale = weights(model), scale_of(optimizer)
            train(model, 1, broken=True)
            assert scale_of(optimizer) == scale / 2
            assert iterations_of(optimizer) == 1
            assert_close(weights(model), before, rtol=0.0, atol=0.0)
            train(model, 2)
            assert iterations_of(optimizer) == 2
            assert_same_on_all_ranks([*weights(model), *values(optimizer.variables)])


def check_a_loss_scale_with_gradient_accumulation() -> None:
    def make() -> Any:
        inner = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)

    assert_learns_like_one_process(make)
    optimizer = DistributedOptimizer(make())
    model = perceptron()
    model.compile(optimizer, LOSS)
    train(model, 0)
    train(model, 1, broken=True)  # would have been the second of two passes
    assert (scale_of(optimizer), iterations_of(optimizer)) == (2.0, 1)
    train(model, 2)
    assert iterations_of(optimizer) == 2
    assert_same_on_all_ranks(weights(model))
    again = type(optimizer).from_config(optimizer.get_config())
    model = perceptron()
    fit(model, again)
    assert_same_on_all_ranks(weights(model))


def check_loss_scales_learn_like_one_process() -> None:
    assert_learns_like_one_process(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)))
    assert_learns_like_one_process(lambda: keras.optimizers.SGD(0.1, loss_scale_factor=128.0))


def check_mixed_bfloat16() -> None:
    with policy("mixed_bfloat16"):
        model = perceptron()
        history = fit(model, DistributedOptimizer(keras.optimizers.Adam(0.01)), epochs=3)
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert history.history["loss"][-1] < history.history["loss"][0]
        assert_same_on_all_ranks(weights(model))


def check_weights_of_bfloat16() -> None:
    with policy("bfloat16"):
        model = perceptron()
        fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)), epochs=2)
        assert model.layers[0].kernel.dtype == "bfloat16"
        assert_same_on_all_ranks([np.asarray(each, "float32") for each in weights(model)])


def check_a_policy_that_is_set_too_late_is_refused() -> None:
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    with policy("mixed_float16"):
        model = perceptron()
        assert "around the loss scale" in error_of(lambda: model.compile(optimizer, LOSS))
