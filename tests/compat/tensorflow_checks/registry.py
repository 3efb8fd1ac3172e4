"""The list of checks, and what several of them need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

CHECKS: dict[str, Callable[[], None]] = {}


def check(body: Callable[[], None]) -> Callable[[], None]:
    """Run it on every rank."""
    CHECKS[f"{body.__module__.rpartition('.')[2]}.{body.__name__}"] = body
    return body


@contextmanager
def raises(kind: type[BaseException], words: str = "") -> Iterator[None]:
    """As pytest's, which a job need not import."""
    try:
        yield
    except kind as error:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
    else:
        raise AssertionError(f"nothing was raised; {kind.__name__} was expected")


def each_way(function: Callable[..., Any], *inputs: Any) -> Iterator[list[Any]]:
    """What a function of tensors gives eagerly, in tf.function and in a graph of a session, as flat lists of arrays."""
    tensors = [tf.convert_to_tensor(each) for each in inputs]
    yield [np.asarray(each) for each in tf.nest.flatten(function(*tensors))]
    converted = tf.function(function)
    yield [np.asarray(each) for each in tf.nest.flatten(converted(*tensors))]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session.run(tf.nest.flatten(function(*[tf.constant(each) for each in inputs])))


def assert_each_way(function: Callable[..., Any], inputs: list[Any], expected: list[Any]) -> None:
    for found in each_way(function, *inputs):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
