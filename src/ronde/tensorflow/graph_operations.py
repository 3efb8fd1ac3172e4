"""Operations in graphs: the nodes that stand for them. Their names, and what the graph around them has to hold to, are
in tracing.

A node is a native kernel, or Python through numpy_function where the kernels cannot be used. Such Python nodes hold a
thread of TensorFlow while they wait, so those of a function run one after the other, in the order in which they were
added. In the graph of a session that is not possible, because a step runs only a part of it: there, operations that do
not need each other have to be few, or TensorFlow needs as many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from ronde.comm.group import Group
from ronde.comm.world import current_world
from ronde.errors import RondeError
from ronde.tensorflow.operation_thread import get_ops
from ronde.tensorflow.tracing import prepare_graph
from ronde.training.graph_errors import describe_error
from ronde.training.graph_operations import (
    NUMBERS,
    GraphOperation,
    check_group,
    find_group,
    group_of,
    names_in_python,
    read_number,
    start_by_name,
)

# What it holds must not hold the graph, or no graph would ever be freed.
_last_python_node: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def resolve_group(group: Group | None) -> Group:
    """The group, or that of all ranks. In a graph, one of an earlier round is an error."""
    if group is not None and not tf.executing_eagerly():
        check_group(group)
    return current_world("a TensorFlow operation").group if group is None else group


def get_graph_ops(*, communicates: bool = True) -> Any:
    """The functions that add native operations to a graph; None if operations have to run through Python. Called
    before a node is added, for which it prepares the graph."""
    prepare_graph(communicates=communicates)
    return get_ops()


def run_independently(operation: Any) -> None:
    """Let a node of a function run before and beside others that have effects. Without this, TensorFlow would run all
    of them in the order in which they were added, and wait for each."""
    manager = getattr(operation.graph, "experimental_acd_manager", None)
    if manager is not None and hasattr(manager, "run_independently"):
        manager.run_independently(operation)


def add_same_shape(operation: GraphOperation, xs: Sequence[Any]) -> list[Any]:
    """A node for an allreduce of tensors of one dtype, or a broadcast of one."""
    ops = get_graph_ops()
    if ops is None:
        return _add_python_operation(operation, xs, [x.dtype for x in xs], [x.shape for x in xs])
    add = ops.ronde_allreduce if operation.kind == "allreduce" else ops.ronde_broadcast
    ys = list(add(inputs=list(xs), operation=operation.encode()))
    run_independently(ys[0].op)
    return ys


def add_rows(operation: GraphOperation, x: Any) -> Any:
    """A node for an allgather or a reduce_scatter, whose result may have another number of rows."""
    ops = get_graph_ops()
    shape = _rows_shape(x)
    if ops is None:
        return _add_python_operation(operation, [x], [x.dtype], [shape])[0]
    add = ops.ronde_allgather if operation.kind == "allgather" else ops.ronde_reduce_scatter
    y = add(input=x, operation=operation.encode())
    run_independently(y.op)
    y.set_shape(shape)
    return y


def add_alltoall(operation: GraphOperation, x: Any, splits: Any) -> tuple[Any, Any]:
    """A node for an alltoall: the rows, and how many came from each member. No splits, as a vector without elements,
    mean equal shares."""
    ops = get_graph_ops()
    size = find_group(operation.group).size
    shapes = [_rows_shape(x), tf.TensorShape([None if get_world_can_change() else size])]
    if ops is None:
        rows, received = _add_python_operation(operation, [x, splits], [x.dtype, tf.int64], shapes)
        return rows, received
    rows, received = ops.ronde_alltoall(input=x, splits=splits, operation=operation.encode())
    run_independently(rows.op)
    rows.set_shape(shapes[0])
    received.set_shape(shapes[1])
    return rows, received


def add_barrier(operation: GraphOperation) -> Any:
    """A node that ends when every member has come to it."""
    ops = get_graph_ops()
    if ops is None:
        return _add_python_operation(operation, [], [tf.bool], [tf.TensorShape([])])[0].op
    return ops.ronde_barrier(operation=operation.encode())


def add_number(operation: GraphOperation) -> Any:
    """A node with a rank or a size when it runs; of `join`, the rank that has joined last."""
    ops = get_graph_ops(communicates=operation.kind not in NUMBERS)
    if ops is None:
        return _add_python_operation(operation, [], [tf.int32], [tf.TensorShape([])])[0]
    number = ops.ronde_number(operation=operation.encode())
    if operation.kind in NUMBERS:  # a join stays in its place
        run_independently(number.op)
    return number


def get_world_can_change() -> bool:
    """Whether a graph may run in a round with other ranks than the one in which it is built."""
    return current_world("a TensorFlow graph").can_rejoin


def _rows_shape(x: Any) -> Any:
    if x.shape.rank is None:
        return tf.TensorShape(None)
    return tf.TensorShape([None, *x.shape[1:]])


def add_broadcasts(operations: Sequence[GraphOperation], xs: Sequence[Any]) -> list[Any]:
    """Nodes for broadcasts of tensors of any dtypes: one for each, or one in Python for all."""
    if get_graph_ops() is not None:
        return [add_same_shape(operation, [x])[0] for operation, x in zip(operations, xs, strict=True)]

    def run(*arrays: Any) -> list[Any]:
        with names_in_python.hold(operations):
            works = [start_by_name(operation, [array]) for operation, array in zip(operations, arrays, strict=True)]
            return [work.wait() for work in works]

    return add_python_node(run, xs, [x.dtype for x in xs], [x.shape for x in xs])


# --- nodes in Python -------------------------------------------------------------------------------------------------


def add_python_node(
    function: Callable[..., Sequence[Any]], xs: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    """A node that calls a function with arrays and returns arrays. In a tf.function, it runs after the ones that were
    added before it."""

    def run(*arrays: Any) -> list[Any]:
        try:
            return list(function(*arrays))
        except (ValueError, TypeError) as error:
            raise ValueError(describe_error(error)) from error
        except RondeError as error:
            raise RuntimeError(describe_error(error)) from error

    with _after_last_python_node():
        ys = tf.numpy_function(run, list(xs), list(dtypes), stateful=True)
    for y, shape in zip(ys, shapes, strict=True):
        y.set_shape(shape)
    _last_python_node[ys[0].graph] = ys[0].op.name
    return list(ys)


def add_python_branch(condition: Any, function: Callable[..., None], xs: Sequence[Any]) -> None:
    """A node that calls a function with arrays if a condition holds. It has its place among those of
    add_python_node(): otherwise ranks could wait for each other in several branches, in another order on each."""

    def run(*arrays: Any) -> list[Any]:
        function(*arrays)
        return [np.True_]

    def add() -> Any:
        return add_python_node(run, xs, [tf.bool], [tf.TensorShape([])])[0]

    with _after_last_python_node():
        done = tf.cond(condition, add, lambda: tf.constant(True))
    _last_python_node[done.graph] = done.op.name


def _after_last_python_node() -> Any:
    """A context in which nodes of a tf.function wait for the Python node that was added last."""
    graph = tf.compat.v1.get_default_graph()
    last = _last_python_node.get(graph) if graph.building_function else None
    return tf.control_dependencies([] if last is None else [graph.get_operation_by_name(last)])


def _add_python_operation(
    operation: GraphOperation, xs: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    def run(*arrays: Any) -> list[Any]:
        if operation.kind in NUMBERS:
            return [np.int32(read_number(operation))]
        if operation.kind == "join":
            return [np.int32(group_of(operation).join())]
        with names_in_python.hold([operation]):
            if operation.kind == "alltoall":
                rows, received = start_by_name(operation, arrays, splits=arrays[1] if arrays[1].size else None).wait()
                return [rows, np.asarray(received, np.int64)]
            result = start_by_name(operation, arrays).wait()
        if operation.kind == "barrier":
            return [np.True_]
        return list(result) if operation.kind == "allreduce" else [result]

    return add_python_node(run, xs, dtypes, shapes)
