"""Keras: optimizers, callbacks and the functions of values."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import horovod.keras
import horovod.tensorflow as hvd_tensorflow
import horovod.tensorflow.keras as hvd
from tests.compat.tensorflow_checks.registry import check, raises


def make_model() -> Any:
    """A model that is another one on each rank."""
    keras.utils.set_random_seed(10 + hvd.rank())
    layers = [keras.layers.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def fit(model: Any, epochs: int = 2, callbacks: tuple[Any, ...] = ()) -> Any:
    keras.utils.set_random_seed(hvd.rank())
    x = np.random.default_rng(hvd.rank()).random((16, 4), np.float32)
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    y = x.sum(axis=1, keepdims=True)
    return model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[first, *callbacks])


def assert_equal_on_all_ranks(model: Any, *, weights: Any = None) -> None:
    mine = np.concatenate([np.ravel(each) for each in (model.get_weights() if weights is None else weights)])
    both = hvd.allgather(mine[None])
    np.testing.assert_array_equal(both[0], both[1])


@check
def ranks_stay_equal_with_each_option() -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"op": hvd.Sum, "gradient_predivide_factor": 1.0},
        {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 2, "groups": 2},
    ]
    for options in cases:
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05), **options), "mse")
        before = fit(model, 1).history["loss"][0]
        assert fit(model, 3).history["loss"][-1] < before
        assert_equal_on_all_ranks(model)


@check
def gradients_are_averages() -> None:
    cases: list[tuple[dict[str, Any], list[float]]] = [
        ({}, [1.5, 3.0]),
        ({"op": hvd.Sum}, [3.0, 6.0]),
        ({"backward_passes_per_step": 2}, [0.0, 3.0]),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, [0.0, 1.5]),
    ]
    for options, expected in cases:
        weight = keras.Variable(np.zeros(2, np.float32))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        found = []
        for _ in range(2):
            optimizer.apply_gradients([(np.full(2, -1.0 - hvd.rank(), np.float32), weight)])
            found.append(float(weight.numpy()[0]))
        assert found == expected, f"{options}: {found}"
    assert optimizer.iterations.numpy() == 2
    with raises(ValueError, "op"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd_tensorflow.Adasum)
    assert isinstance(hvd_tensorflow.DistributedOptimizer(keras.optimizers.SGD()), keras.optimizers.SGD)


@check
def a_copy_by_config_is_the_same() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.25, momentum=0.9))
    assert optimizer.name == "DistributedSGD"
    weight = keras.Variable(np.zeros(2, np.float32))
    optimizer.apply_gradients([(np.ones(2, np.float32), weight)], experimental_aggregate_gradients=False)
    copy = type(optimizer).from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()


@check
def layers_may_be_local() -> None:
    model = make_model()
    first, second = model.layers
    optimizer = horovod.keras.PartialDistributedOptimizer(keras.optimizers.Adam(0.05), local_layers=first)
    model.compile(optimizer, "mse")
    before = [np.copy(each) for each in first.get_weights()]
    x = np.random.default_rng(hvd.rank()).random((16, 4), np.float32)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=first.trainable_variables)
    model.fit(x, x.sum(axis=1, keepdims=True), batch_size=4, verbose=0, callbacks=[broadcast])
    assert_equal_on_all_ranks(model, weights=second.get_weights())
    kernels = hvd.allgather(first.get_weights()[0][None])
    assert not np.allclose(kernels[0], kernels[1]), "they are different models"
    assert not np.allclose(first.get_weights()[0], before[0]), "and train"


@check
def the_state_of_other_variables_than_local_ones_is_broadcast() -> None:
    inputs = keras.layers.Input((2,))
    names = ("dense", "my_dense", "dense_kernel", "dense_2")
    layers = [keras.layers.Dense(2, name=name) for name in names]
    outputs = inputs
    for layer in layers:
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    slots = [each for each in optimizer.variables if "kernel" in each.path or "bias" in each.path]
    assert len(slots) == 4 * 4
    for slot in slots:
        slot.assign(keras.ops.ones_like(slot) * (hvd.rank() + 1.0))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layers[0].trainable_variables)
    callback.set_model(model)
    callback.set_params({"steps": 1, "epochs": 1})
    callback.on_train_begin()
    kept = [each.path.partition("/")[2] for each in slots if np.all(each.numpy() == 2.0)]
    local = [f"dense_{part}_{kind}" for part in ("kernel", "bias") for kind in ("momentum", "velocity")]
    assert kept == (local if hvd.rank() == 1 else []), kept


@check
def a_saved_model_is_distributed_again() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    fit(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = hvd.load_model(path)
    assert hasattr(loaded.optimizer, "register_local_var")
    assert loaded.optimizer.iterations.numpy() == model.optimizer.iterations.numpy() == 8
    x = np.random.default_rng(hvd.rank()).random((4, 4), np.float32)
    loaded.train_on_batch(x, x.sum(axis=1, keepdims=True))
    assert_equal_on_all_ranks(loaded)


@check
def learning_rates_follow_their_callbacks() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    later = hvd.callbacks.LearningRateScheduleCallback(0.2, multiplier=lambda epoch: 0.1, start_epoch=2)
    history = fit(model, 3, (hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2), later)).history
    np.testing.assert_allclose(history["lr"], [0.15, 0.2, 0.02], rtol=1e-5)  # from 0.2 / 2 to 0.2
    with raises(ValueError, "initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(None, multiplier=1.0)


@check
def metrics_are_averaged() -> None:
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": 0.0}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "accuracy": 0.0}


@check
def values_are_reduced() -> None:
    rank = hvd.rank()
    assert hvd.allreduce(float(rank)) == horovod.keras.allreduce(float(rank)) == 0.5
    assert (
        hvd.allreduce(np.array([rank]), op=hvd.Sum) == horovod.keras.allreduce(np.array([rank]), average=False) == [1]
    )
    np.testing.assert_array_equal(hvd.allgather(np.array([rank])), [0, 1])
    assert hvd.broadcast(np.array([rank]), root_rank=1) == [1]
    np.testing.assert_array_equal(hvd.reducescatter(np.array([2.0, 4.0])), [[2.0], [4.0]][rank])


@check
def a_loss_scale_is_inside() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
        model.compile(optimizer, "mse")
        assert model.optimizer is optimizer
        fit(model)
        assert_equal_on_all_ranks(model)
    finally:
        keras.config.set_dtype_policy("float32")
