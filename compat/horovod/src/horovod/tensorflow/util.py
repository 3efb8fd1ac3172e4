"""Small functions of horovod.tensorflow that scripts and tests use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

F = TypeVar("F", bound=Callable[..., Any])

_cache = functools.cache


def without_autograph(function: F) -> F:
    """A decorator of functions that scripts call inside of tf.function: AutoGraph leaves them as they are."""
    wrapped: F = tf.autograph.experimental.do_not_convert(function)
    return wrapped


def _executing_eagerly() -> bool:
    return bool(tf.executing_eagerly())


def _make_subgraph(f: Callable[..., Any]) -> Any:
    """The function as a tf.function."""
    return tf.function(f)


def tensorflow_variable(variable: Any) -> Any:
    """What TensorFlow knows as the variable: that inside of a variable of Keras, or the variable itself."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def vars_to_refs(vars: Any) -> Any:
    """What stands for variables as keys of a dict; lists become tuples."""
    if isinstance(vars, list | tuple):
        return tuple(vars_to_refs(each) for each in vars)
    variable = tensorflow_variable(vars)
    return variable.ref() if hasattr(variable, "ref") else vars


def refs_to_vars(refs: Any) -> Any:
    """The variables that vars_to_refs() stands for."""
    if isinstance(refs, list | tuple):
        return [refs_to_vars(each) for each in refs]
    return refs.deref() if hasattr(refs, "deref") else refs


def contains(variables: Iterable[Any], variable: Any) -> bool:
    """Whether the variable is among these, as itself or as that inside of a variable of Keras."""
    wanted = tensorflow_variable(variable)
    return any(tensorflow_variable(each) is wanted for each in variables)


def lr_variable(rate: Any) -> Any:
    """A learning rate of Keras 3 as Keras 2 had it: a variable of TensorFlow, which tf.keras.backend.set_value() takes,
    too. What is no variable, such as that of a schedule, stays as it is."""
    value = tensorflow_variable(rate)
    return value if hasattr(value, "assign") else rate
