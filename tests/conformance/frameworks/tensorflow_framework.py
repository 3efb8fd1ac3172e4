"""ronde.tensorflow, for the collective cases: eager, in tf.function, and in a graph of a session. TensorFlow gets one
thread for operations, with which mistakes in their order are seen at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import ronde.tensorflow
from ronde.tensorflow.op_library import load_op_library
from ronde.types import DType
from tests.conformance.frameworks.framework import Value

tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)


class EagerFramework:
    """Functions are called with eager tensors."""

    collectives = ronde.tensorflow
    dtypes = tuple(DType)
    fixed_shapes = False

    def run(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        return [_as_value(each) for each in tf.nest.flatten(self.evaluate(function, [_as_array(x) for x in inputs]))]

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        return self.run(lambda *xs: _gradients(function, xs), inputs)

    def second_gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        return self.run(
            lambda *xs: _gradients(lambda *ys: tf.add_n([tf.reduce_sum(y) for y in _gradients(function, ys)]), xs),
            inputs,
        )

    def find_error(self, error: Exception) -> Exception:
        return ronde.tensorflow.find_error(error) or error

    def evaluate(self, function: Callable[..., Any], arrays: list[Any]) -> Any:
        """What the function returns for these arrays, as arrays or eager tensors."""
        return function(*map(tf.convert_to_tensor, arrays))


class FunctionFramework(EagerFramework):
    """Functions are traced, and called twice."""

    def evaluate(self, function: Callable[..., Any], arrays: list[Any]) -> Any:
        converted, tensors = tf.function(function), [tf.convert_to_tensor(array) for array in arrays]
        converted(*tensors)
        return converted(*tensors)


class GraphFramework(EagerFramework):
    """Functions add to a graph, which a session runs twice."""

    def evaluate(self, function: Callable[..., Any], arrays: list[Any]) -> Any:
        with tf.Graph().as_default(), make_session() as session:
            found = function(*map(tf.constant, arrays))
            session.run(found)
            return session.run(found)


def make_session() -> Any:
    """A session. Operations that run through Python hold a thread each."""
    if load_op_library() is not None:
        return tf.compat.v1.Session()
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=64, use_per_session_threads=True)
    return tf.compat.v1.Session(config=config)


def _gradients(function: Callable[..., Any], xs: Sequence[Any]) -> Any:
    if not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function:
        return tf.gradients(function(*xs), list(xs))
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = function(*xs)
    return tape.gradient(y, list(xs))


def _as_array(value: Value) -> Any:
    return value.array.view(tf.bfloat16.as_numpy_dtype) if value.dtype is DType.BFLOAT16 else value.array


def _as_value(result: Any) -> Value:
    array = np.asarray(result.numpy() if tf.is_tensor(result) else result)
    dtype = DType[array.dtype.name.upper()]
    return Value(array.view(np.uint16) if dtype is DType.BFLOAT16 else array, dtype)


FRAMEWORKS = {"eager": EagerFramework, "function": FunctionFramework, "graph": GraphFramework}
