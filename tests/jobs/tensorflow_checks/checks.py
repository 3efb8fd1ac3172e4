"""The list of checks, and the ways in which a function of tensors can run."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

import ronde
from ronde.tensorflow.op_library import load_op_library

_Function = TypeVar("_Function", bound=Callable[..., Any])
CHECKS: dict[str, Callable[[], None]] = {}


def check(body: Callable[[], None]) -> Callable[[], None]:
    """Run it on every rank."""
    CHECKS[f"{body.__module__.rpartition('.')[2]}.{body.__name__}"] = body
    return body


def run_checks() -> None:
    """Run all of them, on all ranks in the same order, and end the process at the first that fails."""
    for name, body in CHECKS.items():
        try:
            body()
            ronde.barrier()
        except Exception:
            traceback.print_exc()
            sys.exit(f"{name} failed on rank {ronde.rank()}")
        print(f"passed {name}", flush=True)


def each_way(function: Callable[..., Any], *inputs: Any) -> Iterator[tuple[str, list[Any]]]:
    """What a function of tensors gives eagerly, in tf.function and in a graph of a session, as flat lists of arrays."""
    tensors = [tf.convert_to_tensor(each) for each in inputs]
    yield "eager", [np.asarray(each) for each in tf.nest.flatten(function(*tensors))]
    converted = tf.function(function)
    converted(*tensors)
    yield "function", [np.asarray(each) for each in tf.nest.flatten(converted(*tensors))]
    with tf.Graph().as_default(), make_session() as session:
        nodes = function(*[tf.constant(each) for each in inputs])
        yield "graph", session.run(tf.nest.flatten(nodes))


def in_graph(function: _Function) -> _Function:
    """tf.function, with the type of the function."""
    converted: _Function = tf.function(function)
    return converted


def count_python_ranks() -> int:
    """How many ranks run operations of graphs through Python. Collective. While at most one does, ranks may have the
    operations of a graph in different orders."""
    return sum(ronde.objects.allgather(load_op_library() is None))


def make_session() -> Any:
    """A session. Operations that run through Python hold a thread each."""
    if load_op_library() is not None:
        return tf.compat.v1.Session()
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16, use_per_session_threads=True)
    return tf.compat.v1.Session(config=config)
