"""Errors that are Horovod's and TensorFlow's at once: scripts and elastic training catch the one or the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

import ronde.tensorflow
from horovod.common.exceptions import NOT_INITIALIZED, HorovodInternalError
from ronde.errors import Mismatch, NotInitialized, RondeError


class CollectiveFailed(HorovodInternalError, tf.errors.UnknownError):  # type: ignore[misc]  # TensorFlow has no types
    """A rank is gone, or the round is over."""

    def __init__(self, message: str) -> None:
        tf.errors.UnknownError.__init__(self, None, None, message)


class CollectiveMismatch(HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks have asked for different things."""

    def __init__(self, message: str) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, message)


class InvalidArgument(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """The caller's mistake."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


@contextmanager
def tensorflow_errors() -> Iterator[None]:
    """Raise ronde's errors as those that Horovod's operations raise. A NotImplementedError stays what it is."""
    try:
        yield
    except NotInitialized as error:
        raise ValueError(NOT_INITIALIZED) from error
    except Mismatch as error:
        raise CollectiveMismatch(str(error)) from error
    except RondeError as error:
        raise CollectiveFailed(str(error)) from error
    except tf.errors.OpError:
        raise
    except ValueError as error:
        raise InvalidArgument(str(error)) from error


@contextmanager
def internal_errors() -> Iterator[None]:
    """Raise an error of TensorFlow that an operation of ronde has caused as HorovodInternalError."""
    try:
        yield
    except HorovodInternalError:
        raise
    except Exception as error:
        found = ronde.tensorflow.find_error(error)
        if found is None or not isinstance(found, RondeError | Mismatch):
            raise
        raise HorovodInternalError(str(found)) from found
