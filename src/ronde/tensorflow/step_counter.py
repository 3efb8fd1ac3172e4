"""How many times this process has reduced gradients, eagerly or in functions. An elastic State sees by it whether
variables may have changed since the last step end.

A step of a tf.function that fails has run in part: TensorFlow runs nodes in any order, and an optimizer may have
changed one variable while the gradient of another one was on its way. So in a job whose ranks may change, gradients are
handed on only when all of them are reduced and the counter has been raised. If it is as before, no optimizer has begun.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ronde.tensorflow.graph_operations import get_world_can_change


COUNTER_NAME = "ronde_reductions"


class _Counter:
    num_eager = 0
    is_in_functions = False
    """Whether there is a counter for functions, in which Python does not run in every step."""


_counter = _Counter()
_lock = threading.Lock()


def count_reductions() -> int:
    """How many times gradients were reduced in this process."""
    if not _counter.is_in_functions:
        return _counter.num_eager
    with tf.init_scope():
        return _counter.num_eager + int(tf.raw_ops.ReadVariableOp(resource=_find_counter(), dtype=tf.int64))


def count_reduction(gradients: list[Any]) -> list[Any]:
    """Count one more reduction when these gradients, its results, are there, and return them. In graphs of sessions
    nothing is counted."""
    if tf.executing_eagerly():
        _counter.num_eager += 1
        return gradients
    graph = tf.compat.v1.get_default_graph()
    if not graph.building_function or tf.distribute.has_strategy() or not _is_in_eager_program():
        return gradients
    _prepare_counter()
    if not get_world_can_change():
        _add_one()
        return gradients
    tensors = [each for gradient in gradients for each in _tensors_of(gradient)]
    with tf.control_dependencies(tensors):
        counted = _add_one()
    with tf.control_dependencies([counted]):
        return [_identity(gradient) for gradient in gradients]


def _add_one() -> Any:
    return tf.raw_ops.AssignAddVariableOp(resource=_find_counter(), value=tf.constant(1, tf.int64))


def _find_counter() -> Any:
    """The counter of functions, found by its name when a function runs: one that was handed to the function would keep
    it from being saved, because the user's module does not have it."""
    with tf.device("CPU:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=COUNTER_NAME)


def _prepare_counter() -> None:
    with _lock, tf.init_scope():
        if not _counter.is_in_functions:
            tf.raw_ops.AssignVariableOp(resource=_find_counter(), value=tf.constant(0, tf.int64))
            _counter.is_in_functions = True


def after_first_gradient(gradients: Sequence[Any]) -> Any:
    """A context in which nodes wait for the gradient that a backward pass computes first: that of the last variable."""
    found = next((each for each in reversed(gradients) if each is not None), None)
    return tf.control_dependencies(_tensors_of(found))


def _is_in_eager_program() -> bool:
    """Whether the function that is built is called by Python, and not in the graph of a session."""
    with tf.init_scope():
        return bool(tf.executing_eagerly())


def make_counter(name: str) -> Any:
    """A variable that counts from 0, also if a function is being traced.

    It is made in a thread of its own: a function notices variables that are made in the thread in which it is traced,
    is traced once more because of them, and refuses them if it was traced before.
    """
    made: list[Any] = []

    def make() -> None:
        with tf.device("CPU:0"):
            made.append(tf.Variable(0, dtype=tf.int64, trainable=False, name=name))

    thread = threading.Thread(target=make, name="ronde-tensorflow-counter", daemon=True)
    thread.start()
    thread.join()
    return made[0]


def _tensors_of(gradient: Any) -> list[Any]:
    if gradient is None:
        return []
    return [gradient.values, gradient.indices] if isinstance(gradient, tf.IndexedSlices) else [gradient]


def _identity(gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(gradient.values), tf.identity(gradient.indices), gradient.dense_shape)
    return tf.identity(gradient)
