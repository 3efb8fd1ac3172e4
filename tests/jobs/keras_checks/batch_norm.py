"""SyncBatchNormalization against Keras' own layer in one process, on the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import ronde
from ronde.comm.buffers import Array
from ronde.keras import DistributedOptimizer, SyncBatchNormalization
from tests.jobs.keras_checks.common import (
    BACKEND,
    LOSS,
    SHARE,
    assert_close,
    assert_same_on_all_ranks,
    data,
    error_of,
    fit,
    fit_alone,
    mine,
    values,
    weights,
)

SIZES = (5, 3)
"""Rows of the ranks' batches, if a check does not say otherwise."""


def run_layer(layer: Any, x: Array, factors: Array, mask: Array | None = None) -> tuple[Array, list[Array]]:
    """What the layer returns in training, and the gradients of sum(y * factors) by x, gamma and beta."""
    variables = layer.trainable_variables
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function  # type: ignore[untyped-decorator]
        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True, mask=mask)
                loss = tf.reduce_sum(tf.cast(y, tf.float32) * factors)
            return y, tape.gradient(loss, [x, *(each.value for each in variables)])

        y, gradients = compute(tf.constant(x))
    elif BACKEND == "torch":
        given = keras.ops.convert_to_tensor(x).requires_grad_()
        y = layer(given, training=True, mask=None if mask is None else keras.ops.convert_to_tensor(mask))
        for each in variables:
            each.value.grad = None
        (y.float() * keras.ops.convert_to_tensor(factors)).sum().backward()
        gradients = [given.grad, *(each.value.grad for each in variables)]
    else:
        import jax

        others = [each.value for each in layer.non_trainable_variables]

        def loss_of(x: Any, trainable: Any) -> Any:
            y, state = layer.stateless_call(trainable, others, x, training=True, mask=mask)
            return (y.astype("float32") * factors).sum(), (y, state)

        compute_jax = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))
        (_, (y, state)), (d_x, d_weights) = compute_jax(x, [each.value for each in variables])
        for variable, value in zip(layer.non_trainable_variables, state, strict=True):
            variable.assign(value)
        gradients = [d_x, *d_weights]
    found = [keras.ops.convert_to_numpy(each) for each in gradients]
    return np.array(keras.ops.convert_to_numpy(y), "float32"), [np.array(each, "float32") for each in found]


def batches(shape: tuple[int, ...], dtype: str, sizes: tuple[int, ...], *, masked: bool) -> tuple[Any, ...]:
    """Inputs, factors of the loss and mask, of all ranks together, and where those of this rank are."""
    source = np.random.default_rng(11)
    x = (100.0 + 3.0 * source.normal(size=(sum(sizes), *shape))).astype(dtype)
    factors = source.normal(size=x.shape).astype("float32")
    mask = source.random((sum(sizes), *shape[:-1])) < 0.6 if masked else None
    start = sum(sizes[: ronde.rank()])
    return x, factors, mask, slice(start, start + sizes[ronde.rank()])


def compare(shape: tuple[int, ...], *, masked: bool = False, tolerance: float = 2e-3, **options: Any) -> None:
    dtype, sizes = options.pop("inputs", "float32"), options.pop("sizes", SIZES)
    x, factors, mask, mine = batches(shape, "float32" if dtype == "bfloat16" else dtype, sizes, masked=masked)
    if dtype == "bfloat16":
        x = np.array(keras.ops.convert_to_numpy(keras.ops.cast(x, dtype)), x.dtype)  # rounded, as both will see it
    ours, alone = SyncBatchNormalization(name="sync", **options), keras.layers.BatchNormalization(**options)
    for layer in (ours, alone):
        layer.build((None, *shape))
    for variable, value in zip(ours.weights, (0.5, -1.5), strict=False):
        variable.assign(np.full(variable.shape, value, "float32"))
    for variable, other in zip(ours.weights, alone.weights, strict=True):
        other.assign(variable)
    given = {} if mask is None else {"mask": mask[mine]}
    y, gradients = run_layer(ours, x[mine], factors[mine], **given)
    all_y, all_gradients = run_layer(alone, x, factors, mask)
    assert_close([y], [all_y[mine]], rtol=tolerance, atol=tolerance)
    assert_close([gradients[0]], [all_gradients[0][mine]], rtol=tolerance, atol=tolerance)
    for own, expected in zip(gradients[1:], all_gradients[1:], strict=True):  # the optimizer adds them up
        assert_close([ronde.allreduce(own)], [expected], rtol=tolerance, atol=10 * tolerance)
    axis, kept = ours.axis % x.ndim, ours.momentum
    channels = np.moveaxis(x.astype("float64"), axis, -1).reshape(-1, x.shape[axis])
    counted = channels if mask is None else channels[mask.reshape(-1)]
    expected_statistics = [counted.mean(0) * (1 - kept), kept + counted.var(0) * (1 - kept)]
    assert_close(values([ours.moving_mean, ours.moving_variance]), expected_statistics, rtol=1e-5)


def check_synchronized_batch_norm_is_that_of_all_batches_together() -> None:
    """The ranks' batches differ in size, and one has none."""
    compare((4,))
    compare((4,), sizes=(0, 8))
    compare((2, 3, 4), epsilon=1e-2, momentum=0.7)
    compare((4, 6), axis=1)


def check_a_model_with_synchronized_batch_norm_learns_like_one_process() -> None:
    def make(kind: Any) -> Any:
        keras.utils.set_random_seed(6)
        dense = keras.layers.Dense
        return keras.Sequential([keras.layers.Input((8,)), dense(6), kind(), dense(6), kind(), dense(3)])

    ours, alone = make(SyncBatchNormalization), make(keras.layers.BatchNormalization)
    fit(ours, DistributedOptimizer(keras.optimizers.SGD(0.1)), epochs=2)
    fit_alone(alone, keras.optimizers.SGD(0.1), epochs=2)
    assert_close(weights(ours), weights(alone), rtol=1e-3, atol=1e-4)
    assert_same_on_all_ranks(weights(ours))


def check_ranks_with_synchronized_batch_norm_may_call_fit_in_different_lines() -> None:
    keras.utils.set_random_seed(6)
    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(3)(SyncBatchNormalization()(inputs=SyncBatchNormalization()(inputs)))
    model, optimizer = keras.Model(inputs, outputs), DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, LOSS)
    x, y = (mine(each) for each in data())
    if ronde.rank() == 0:
        model.fit(x, y, batch_size=SHARE, verbose=0)
    else:
        model.fit(x, y, batch_size=SHARE, verbose=0)
    assert_same_on_all_ranks(weights(model))


def check_synchronized_batch_norm_leaves_masked_values_out() -> None:
    compare((7, 4), masked=True)


def check_synchronized_batch_norm_of_16_bits_has_statistics_of_32() -> None:
    compare((6,), inputs="float16", tolerance=2e-2)
    compare((6,), dtype="mixed_bfloat16", inputs="bfloat16", tolerance=6e-2)


def check_synchronized_batch_norm_without_training_sends_nothing() -> None:
    layer = SyncBatchNormalization()
    layer.build((None, 3))
    if ronde.rank() == 0:
        y = layer(np.ones((2, 3), "float32"), training=False)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(y), 1.0, rtol=1e-3)
    config = layer.get_config()
    assert SyncBatchNormalization.from_config(config).get_config() == config
    assert "tf.distribute.Strategy" in error_of(lambda: SyncBatchNormalization(synchronized=True))


def check_synchronized_batch_norm_of_a_group_is_that_of_its_members() -> None:
    groups = [ronde.add_group([rank]) for rank in range(ronde.size())]
    layer = SyncBatchNormalization(group=groups[ronde.rank()], momentum=0.0)
    layer.build((None, 3))
    run_layer(layer, np.full((2, 3), float(ronde.rank()), "float32"), np.ones((2, 3), "float32"))
    np.testing.assert_allclose(values([layer.moving_mean])[0], float(ronde.rank()), atol=1e-6)
