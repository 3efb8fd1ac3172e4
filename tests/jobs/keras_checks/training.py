"""The distributed optimizer in fit(), train_on_batch() and training steps of one's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest

import ronde
import ronde.keras
from ronde.comm.world import current_world
from ronde.elastic.training_loop import find_original
from ronde.keras import DistributedOptimizer
from ronde.keras.callbacks import BroadcastInitialState
from tests.jobs.keras_checks.common import (
    BACKEND,
    LOSS,
    NUM_STEPS,
    SHARE,
    assert_close,
    assert_different,
    assert_learns_like_one_process,
    assert_same_on_all_ranks,
    data,
    error_of,
    fit,
    fit_alone,
    fit_on,
    mine,
    perceptron,
    values,
    weights,
)


def check_sgd_learns_like_one_process() -> None:
    model = assert_learns_like_one_process(lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))
    assert type(model.optimizer).__name__ == "SGD"
    assert isinstance(model.optimizer, keras.optimizers.SGD)


def check_gradients_are_clipped_after_they_are_averaged() -> None:
    assert_learns_like_one_process(lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05))


def check_adam_with_weight_decay_and_a_moving_average() -> None:
    assert_learns_like_one_process(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True))


def check_a_schedule_of_keras() -> None:
    assert_learns_like_one_process(
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5))
    )


def check_gradient_accumulation_learns_like_one_process() -> None:
    assert_learns_like_one_process(lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))
    assert_learns_like_one_process(
        lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05, gradient_accumulation_steps=4)
    )


def check_with_gradient_accumulation_only_steps_that_update_travel() -> None:
    """Rank 1 begins its first pass when rank 0 has ended its own; then both update."""
    model = perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)))
    before = weights(model)
    x, y = (mine(each)[:SHARE] for each in data())
    if ronde.rank() == 1:
        ronde.barrier()
    model.train_on_batch(x, y)
    assert_close(weights(model), before, rtol=0.0, atol=0.0)
    if ronde.rank() == 0:
        ronde.barrier()
    model.train_on_batch(x, y)
    assert_different(weights(model), before)
    assert_same_on_all_ranks(weights(model))


def check_the_state_of_the_root_is_broadcast() -> None:
    """The weights of rank 0, whose model starts with another seed on each rank, are those with which all train."""
    model, alone = perceptron(seed=ronde.rank()), perceptron(seed=0)
    fit(model, DistributedOptimizer(keras.optimizers.Adam(0.01)), callbacks=[BroadcastInitialState()], epochs=2)
    fit_alone(alone, keras.optimizers.Adam(0.01), epochs=2)
    assert_same_on_all_ranks([*weights(model), *values(model.optimizer.variables)])
    assert_close(weights(model), weights(alone))


def check_a_model_that_its_first_batch_builds_is_broadcast_after_it() -> None:
    keras.utils.set_random_seed(ronde.rank())
    model = keras.Sequential(
        [keras.layers.Dense(16, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    )
    seeds = [layer.seed_generator.state for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, optimizer, callbacks=[BroadcastInitialState(root=1)], epochs=2)
    assert_same_on_all_ranks([*weights(model), *values(optimizer.variables)])
    gathered = ronde.allgather(values(seeds)[0][None])
    assert (gathered[0] != gathered[1]).any()  # so that ranks drop out different units


def check_a_model_that_several_steps_at_once_build_is_broadcast_after_them() -> None:
    if BACKEND == "torch":  # it has no several steps at once
        return
    keras.utils.set_random_seed(ronde.rank())
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(3)])
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    fit(model, optimizer, callbacks=[BroadcastInitialState()], epochs=2, steps_per_execution=NUM_STEPS)
    assert_same_on_all_ranks([*weights(model), *values(optimizer.variables)])


def check_models_are_freed() -> None:
    model = perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)))
    kept = weakref.ref(model.layers[0].kernel)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert kept() is None


def check_optimizers_that_are_gone_leave_no_channels() -> None:
    """Those of the last two may be open: a rank may have freed its model later than another."""

    def train() -> Any:
        model = perceptron()
        fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)))
        assert_same_on_all_ranks(weights(model))

    for _ in range(2):
        train()
    gc.collect()
    num_channels = len(current_world()._open_channels.channels)
    for _ in range(4):
        train()
        gc.collect()
    assert len(current_world()._open_channels.channels) <= num_channels + 1


def check_a_forgotten_broadcast_is_found_at_the_second_step() -> None:
    model = perceptron(seed=ronde.rank())
    with pytest.raises(Exception, match="the ranks are out of sync") as raised:
        fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)))
    assert "dense/kernel" in str(raised.value)
    assert "BroadcastInitialState" in str(raised.value)
    assert isinstance(find_original(raised.value), ronde.errors.OutOfSync)  # as an elastic job looks for it
    fit(perceptron(seed=ronde.rank()), DistributedOptimizer(keras.optimizers.SGD(0.1), compare_at_step=0))


def check_parameters_are_broadcast_and_compared_without_fit() -> None:
    model = perceptron(seed=ronde.rank())
    assert "out of sync" in error_of(lambda: ronde.keras.check_in_sync(model))
    ronde.keras.broadcast_parameters(model, root=1)
    assert_close(weights(model), weights(perceptron(seed=1)), rtol=0.0, atol=0.0)
    ronde.keras.check_in_sync(model)
    wide = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2 + ronde.rank())])
    assert "broadcast_parameters: the ranks differ" in error_of(lambda: ronde.keras.broadcast_parameters(wide))
    variable = keras.Variable(np.full((2, 3), ronde.rank()), dtype="bfloat16")
    ronde.keras.broadcast_parameters([variable], root=1)
    assert (keras.ops.convert_to_numpy(keras.ops.cast(variable.value, "float32")) == 1.0).all()


def check_train_on_batch() -> None:
    model, alone = perceptron(), perceptron()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS)
    alone.compile(keras.optimizers.SGD(0.1), LOSS)
    x, y = data()
    size = SHARE * ronde.size()
    for step in range(3):
        model.train_on_batch(mine(x)[step * SHARE :][:SHARE], mine(y)[step * SHARE :][:SHARE])
        alone.train_on_batch(x[step * size :][:size], y[step * size :][:size])
    assert_close(weights(model), weights(alone))
    assert_same_on_all_ranks(weights(model))


def step_tensorflow(model: Any, data: Any) -> Any:
    """As Keras' guides write a training step of one's own."""
    import tensorflow as tf

    x, y = data
    with tf.GradientTape() as tape:
        loss = LOSS(y, model(x, training=True))
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


def step_torch(model: Any, data: Any) -> Any:
    import torch

    x, y = data
    model.zero_grad()
    loss = LOSS(y, model(x, training=True))
    loss.backward()
    with torch.no_grad():
        model.optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)
    return {"loss": loss}


def step_jax(model: Any, state: Any, data: Any) -> Any:
    import jax

    trainable, others, optimizer, metrics = state
    x, y = data

    def loss_of(trainable: Any) -> Any:
        return LOSS(y, model.stateless_call(trainable, others, x, training=True)[0])

    loss, gradients = jax.value_and_grad(loss_of)(trainable)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return {"loss": loss}, (trainable, others, optimizer, metrics)


class OwnStep(keras.Model):
    """A model with a training step of its own, and a weight without a gradient."""

    train_step = {"tensorflow": step_tensorflow, "torch": step_torch, "jax": step_jax}[BACKEND]

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()
        self.unused = self.add_weight(shape=(2,), name="unused")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.inner(x)


def check_a_training_step_of_ones_own_and_a_weight_without_gradient() -> None:
    x, y = data()
    models = []
    for optimizer, share, size in (
        (DistributedOptimizer(keras.optimizers.SGD(0.1)), mine, SHARE),
        (keras.optimizers.SGD(0.1), lambda x: x, SHARE * ronde.size()),
    ):
        model = OwnStep()
        model.compile(optimizer)
        model.fit(share(x), share(y), batch_size=size, shuffle=False, verbose=0)
        models.append(model)
    assert_close(weights(models[0]), weights(models[1]))
    assert_same_on_all_ranks(weights(models[0].inner))


def check_a_gradient_that_only_one_rank_has_counts_or_is_an_error() -> None:
    if BACKEND != "torch":  # on the others, which gradients there are is part of the program
        variables = [keras.Variable(np.ones(3, "float32"), name=name) for name in "ab"]
        gradients = [keras.ops.ones(3), None] if ronde.rank() == 0 else [None, keras.ops.ones(3)]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables)
        with pytest.raises(Exception, match="the members asked for different things") as raised:
            optimizer.apply(gradients, variables)
        assert BACKEND == "jax" or isinstance(raised.value, ronde.Mismatch)
        assert "'b" in str(raised.value).partition("rank 1")[0], raised.value
        assert [float(each[0]) for each in values(variables)] == [1.0, 1.0]
        return
    for codec in (None, "float16"):
        variables = [keras.Variable(np.ones(3, "float32"), name=name) for name in "abc"]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), codec=codec)
        optimizer.build(variables)
        optimizer.apply([keras.ops.ones(3), keras.ops.ones(3) if ronde.rank() == 1 else None, None], variables)
        assert [float(each[0]) for each in values(variables)] == [0.0, 0.5, 1.0]


def check_other_ways_to_combine() -> None:
    model, alone = perceptron(), perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1 / ronde.size()), op="sum"))
    fit_alone(alone, keras.optimizers.SGD(0.1))
    assert_close(weights(model), weights(alone))
    model = perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1), predivide=2.0))
    assert_close(weights(model), weights(alone))
    for codec in ("float16", "bfloat16"):
        model = perceptron()
        fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1), codec=codec))
        assert_close(weights(model), weights(alone), rtol=0.05, atol=0.01)
        assert_different(weights(model), weights(alone))
        assert_same_on_all_ranks(weights(model))


def check_an_embedding() -> None:
    def model() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.layers.Input((4,), dtype="int32"),
                keras.layers.Embedding(50, 6),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    _, y = data()
    x = np.random.default_rng(2).integers(0, 50, (len(y), 4))
    ours, alone = model(), model()
    ours.compile(DistributedOptimizer(keras.optimizers.Adam(0.05)), LOSS)
    ours.fit(mine(x), mine(y), batch_size=SHARE, shuffle=False, verbose=0)
    alone.compile(keras.optimizers.Adam(0.05), LOSS)
    alone.fit(x, y, batch_size=SHARE * ronde.size(), shuffle=False, verbose=0)
    assert_close(weights(ours), weights(alone))
    assert_same_on_all_ranks(weights(ours))


def check_a_group_of_ranks() -> None:
    both, first = ronde.add_group(range(ronde.size())), ronde.add_group([0])
    model, alone = perceptron(), perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1), group=both))
    fit_alone(alone, keras.optimizers.SGD(0.1))
    assert_close(weights(model), weights(alone))
    model, alone = perceptron(), perceptron()
    callbacks = [BroadcastInitialState(group=first)]
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1), group=first), callbacks=callbacks)
    alone.compile(keras.optimizers.SGD(0.1), LOSS)
    fit_on(alone, SHARE, mine)
    assert_close(weights(model), weights(alone))  # each rank by itself, and rank 1 is not even a member
    ronde.remove_group(both)
    ronde.remove_group(first)


def check_ranks_with_different_numbers_of_batches_are_told() -> None:
    x, y = data()
    rows = SHARE * (2 + ronde.rank())
    model = perceptron()
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS)
    text = error_of(
        lambda: model.fit(x[:rows], y[:rows], batch_size=SHARE, verbose=0, callbacks=[BroadcastInitialState()])
    )
    assert "different numbers of batches" in text, text
    assert "rank 0: 2" in text, text
    # A last batch of another size is no matter.
    model.fit(
        x[: 20 + ronde.rank()], y[: 20 + ronde.rank()], batch_size=SHARE, verbose=0, callbacks=[BroadcastInitialState()]
    )
    assert_same_on_all_ranks(weights(model))


def check_jit_compile() -> None:
    """TensorFlow's XLA is switched off, JAX's compiler is used, and PyTorch compiles all but the exchange."""
    model, alone = perceptron(), perceptron()
    if BACKEND == "torch":  # without code for the machine, which takes long to make
        import torch

        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS)
        model.make_train_function()
        model.train_function = torch.compile(model.train_function, backend="eager")
        fit_on(model, SHARE, mine)
        fit_alone(alone, keras.optimizers.SGD(0.1))
        assert_close(weights(model), weights(alone))
        return
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    fit_alone(alone, keras.optimizers.SGD(0.1))
    assert model.jit_compile, "only the training step is not compiled"
    assert_close(weights(model), weights(alone))
    assert_same_on_all_ranks(weights(model))


def check_eagerly_and_several_steps_at_once() -> None:
    alone = perceptron()
    fit_alone(alone, keras.optimizers.SGD(0.1))
    model = perceptron()
    fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True)
    assert_close(weights(model), weights(alone))
    if BACKEND != "torch":
        model = perceptron()
        fit(model, DistributedOptimizer(keras.optimizers.SGD(0.1)), steps_per_execution=2)
        assert_close(weights(model), weights(alone))


def check_two_optimizers_in_turn() -> None:
    """Each has its own operations, whatever it is called, and rank 0 may make other optimizers."""
    if ronde.rank() == 0:
        fit_alone(perceptron(), "sgd")
    models = [perceptron(), perceptron(seed=4)]
    for model in models:
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS)
    x, y = data()
    for step in range(3):
        for model in models:
            model.train_on_batch(mine(x)[step * SHARE :][:SHARE], mine(y)[step * SHARE :][:SHARE])
    for model in models:
        assert_same_on_all_ranks(weights(model))


def check_several_optimizers_in_one_function() -> None:
    """The steps in which parameters are compared wait for the other ranks in Python, and there are few threads."""
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    models = [perceptron() for _ in range(8)]
    optimizers = [DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones([2, 8]) * (1.0 + ronde.rank())) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables))

    for _ in range(3):
        step()
    for model in models:
        assert_same_on_all_ranks(weights(model))


def check_a_function_that_was_traced_before_uses_another_optimizer() -> None:
    if BACKEND != "tensorflow":
        return
    import tensorflow as tf

    model = perceptron()
    optimizers = [DistributedOptimizer(each(0.1)) for each in (keras.optimizers.SGD, keras.optimizers.Adam)]
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(index: int) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones([2, 8]) * (1.0 + ronde.rank())) ** 2)
        optimizers[index].apply(tape.gradient(loss, model.trainable_variables))

    for index in (0, 0, 1, 1):
        step(index)
    assert_same_on_all_ranks(weights(model))


def check_mistakes_are_named() -> None:
    optimizer = DistributedOptimizer("sgd")
    assert "distributed already" in error_of(lambda: DistributedOptimizer(optimizer))
    assert "codec must be" in error_of(lambda: DistributedOptimizer("sgd", codec="int8"))
    assert "op must be" in error_of(lambda: DistributedOptimizer("sgd", op="max"))
    assert "optimizer identifier" in error_of(lambda: DistributedOptimizer(3))
