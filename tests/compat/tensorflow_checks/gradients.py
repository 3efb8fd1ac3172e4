"""Gradients of the collectives, and tapes and optimizers that average gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from tests.compat.tensorflow_checks.registry import check, raises


def gradient_of(function: Callable[[Any], Any], x: Any) -> list[Any]:
    """The gradients of the sum of a function's results: eager, and in tf.function."""

    def compute(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, x, output_gradients=tf.ones_like(y) * (1.0 + hvd.rank()))

    return [compute(tf.constant(x)).numpy(), tf.function(compute)(tf.constant(x)).numpy()]


@check
def gradients_follow_horovods_formulas() -> None:
    ones, rank = np.ones([2, 2], np.float32), hvd.rank()
    for found in gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum), ones):
        np.testing.assert_allclose(found, 3 * ones)
    for found in gradient_of(lambda x: hvd.allreduce(x), ones):
        np.testing.assert_allclose(found, 1.5 * ones)
    for found in gradient_of(lambda x: hvd.allgather(x), ones):
        np.testing.assert_allclose(found, 1.5 * ones)  # averaged, not summed
    for found in gradient_of(lambda x: hvd.broadcast(x, root_rank=1), ones):
        np.testing.assert_allclose(found, (1.5 if rank == 1 else 0.0) * ones)
    each = np.array([[1.0, 1.0], [2.0, 2.0]])
    for found in gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum), ones):
        np.testing.assert_allclose(found, 2 * each)  # times the number of ranks
    for found in gradient_of(lambda x: hvd.reducescatter(x), ones):
        np.testing.assert_allclose(found, each)
    for found in gradient_of(lambda x: hvd.alltoall(x), ones):
        np.testing.assert_allclose(found, each)


def tape_gradients(distribute: Callable[[Any], Any], variables: list[Any]) -> list[list[Any]]:
    """Gradients that are 1 + rank, eager and in tf.function."""

    def compute() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(each) for each in variables]) * (1.0 + hvd.rank())
        return distribute(tape).gradient(loss, variables)

    return [[each.numpy() for each in way()] for way in (compute, tf.function(compute))]


@check
def a_tape_averages_gradients() -> None:
    variables = [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([2, 2]))]
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 1.5),
        ({"op": hvd.Sum}, 3.0),
        ({"compression": hvd.Compression.fp16}, 1.5),
        ({"gradient_predivide_factor": 2.0}, 1.5),
        ({"groups": 2}, 1.5),
        ({"groups": [variables]}, 1.5),
    ]
    for options, expected in cases:
        for found in tape_gradients(partial(hvd.DistributedGradientTape, **options), variables):
            assert isinstance(found, list)
            for gradient in found:
                np.testing.assert_allclose(gradient, expected)
    with raises(ValueError, "hvd.Average"):
        hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with raises(ValueError, "groups"):
        hvd.DistributedGradientTape(tf.GradientTape(), groups="two")


@check
def gradients_of_local_variables_stay() -> None:
    variables = [tf.Variable(tf.zeros([3])), tf.Variable(tf.zeros([2 + hvd.rank()]))]

    def distribute(tape: Any, *, scale: bool) -> Any:
        found = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        found.register_local_source(variables[1])
        return found

    for scale, own in ((True, 0.5), (False, 1.0)):
        for shared, local in tape_gradients(partial(distribute, scale=scale), variables):
            np.testing.assert_allclose(shared, 1.5)
            np.testing.assert_allclose(local, own * (1 + hvd.rank()))
    layer = tf.keras.layers.Dense(1)
    layer.build([None, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.ones([1, 2]))) + tf.reduce_sum(variables[0])
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    local, shared = tape.get_local_and_global_gradients(loss, [*layer.trainable_weights, variables[0]])
    assert [len(local), len(shared)] == [2, 1]
    np.testing.assert_allclose(local[0][1], 0.5)
    with raises(ValueError, "local_layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers="all")


@check
def tapes_outside_of_their_process_set_do_nothing() -> None:
    alone = hvd.add_process_set([0])
    variables = [tf.Variable(tf.zeros([3]))]
    for (found,) in tape_gradients(lambda tape: hvd.DistributedGradientTape(tape, process_set=alone), variables):
        np.testing.assert_allclose(found, 1.0 + hvd.rank())
    hvd.remove_process_set(alone)


def train_in_session(steps: int, **options: Any) -> tuple[list[Any], int]:
    """The weights after each step of plain gradient descent, whose gradient is 1 + rank, and the global step."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=np.zeros(2, np.float32))
        global_step = tf.compat.v1.train.get_or_create_global_step()
        plain = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(plain, **options)
        loss = tf.reduce_sum(weight) * (1.0 + hvd.rank())
        train = optimizer.minimize(loss, global_step=global_step)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        found = []
        for _ in range(steps):
            session.run(train)
            found.append(session.run(weight)[0])
        return found, session.run(global_step)


@check
def an_optimizer_of_version_1_averages_gradients() -> None:
    assert train_in_session(2) == ([-1.5, -3.0], 2)
    assert train_in_session(2, op=hvd.Sum, compression=hvd.Compression.fp16) == ([-3.0, -6.0], 2)
    assert train_in_session(4, backward_passes_per_step=2) == ([0.0, -3.0, -3.0, -6.0], 4)
    assert train_in_session(2, backward_passes_per_step=2, average_aggregated_gradients=True) == ([0.0, -1.5], 2)
    assert train_in_session(1, op=hvd.Adasum) == ([-1.5], 1)
    with raises(ValueError, "graphs"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
    with raises(ValueError, "optimizer"):
        hvd.DistributedOptimizer("sgd")


@check
def batches_of_all_ranks_are_normalized_together() -> None:
    batches = np.array([[[1.0], [3.0]], [[5.0], [9.0]]], np.float32)
    layer = hvd.SyncBatchNormalization(momentum=0.0, epsilon=0.0)
    found = layer(tf.constant(batches[hvd.rank()]), training=True)
    np.testing.assert_allclose(found, (batches[hvd.rank()] - batches.mean()) / batches.std(), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_mean, [batches.mean()])
    with raises(ValueError, "fused"):
        hvd.SyncBatchNormalization(fused=True)
