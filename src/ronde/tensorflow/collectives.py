"""The collectives on tensors: as ronde's own of the same names, eager, in tf.function and in graphs of sessions, and
differentiable.

Eager, a tensor is used where it is, and members are matched by the order of their calls unless there is a name; errors
are ronde's own. In a graph they are matched by name, which is made of the place of the call if there is none, and
errors are TensorFlow's, in which find_error() finds ronde's.

By convention the loss of the job is the sum of the members' losses. So the gradient of one member's input is the
gradient of the sum of all members' losses:

    allreduce        allreduce with the same op and scales
    allgather        this member's rows of the sum of all members' gradients
    broadcast        the sum of all members' gradients on the root, zeros elsewhere
    reduce_scatter   allgather, with the same factors
    alltoall         alltoall with the received numbers of rows

Backward is a collective too, so every member has to compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import tensorflow as tf

from ronde.comm.group import Group
from ronde.tensorflow.graph_operations import (
    add_alltoall,
    add_barrier,
    add_number,
    add_rows,
    add_same_shape,
    get_graph_ops,
    resolve_group,
)
from ronde.tensorflow.tracing import backward_name, operation_name, without_autograph
from ronde.text import format_ranks
from ronde.training.batch_moments import backpropagate, unweigh, weigh
from ronde.training.graph_operations import GraphOperation, group_of, read_number
from ronde.types import DType, Op, parse_op

DTYPES = frozenset(dtype.name.lower() for dtype in DType)


@without_autograph
def allreduce(
    x: Any,  # a tensor, tf.IndexedSlices, or a list of them
    *,
    op: str | Op = "sum",
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Return postscale * op(prescale * x) over all members.

    op is sum, mean, min, max, product, adasum, or for whole numbers and bool bit_and, bit_or, bit_xor; sum and mean
    have gradients. The tensors of a list that have one dtype are one operation. IndexedSlices are summed or averaged
    by gathering their indices and values.
    """
    members = resolve_group(group)
    _check_name(name)
    options = GraphOperation(
        "allreduce", name or "", members.id, parse_op(op).name.lower(), float(prescale), float(postscale)
    )
    if not isinstance(x, list | tuple):
        return _allreduce_list(members, [x], options)[0]
    if not x:
        raise ValueError("allreduce: the list of tensors is empty")
    return _allreduce_list(members, list(x), options)


@without_autograph
def allgather(x: Any, *, group: Group | None = None, name: str | None = None) -> Any:
    """Return the tensors of all members, concatenated along the first dimension, in which they may differ. A scalar
    counts as one row. A list gives a list."""
    members = resolve_group(group)
    return _for_each(x, "allgather", name, lambda tensor, name: _allgather(members, tensor, name))


@without_autograph
def broadcast(x: Any, *, root: int = 0, group: Group | None = None, name: str | None = None) -> Any:
    """Return the tensor of the root, a rank of the world. The tensors of the other ranks only give shape and dtype. A
    list gives a list."""
    members = resolve_group(group)
    return _for_each(x, "broadcast", name, lambda tensor, name: _broadcast(members, tensor, root, name))


@without_autograph
def reduce_scatter(
    x: Any,
    *,
    op: str | Op = "sum",
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Reduce x over all members and return this rank's share of the rows. If the rows cannot be divided evenly, the
    first members get one more. A list gives a list."""
    members = resolve_group(group)
    options = (parse_op(op), float(prescale), float(postscale))
    return _for_each(x, "reduce_scatter", name, lambda tensor, name: _reduce_scatter(members, tensor, *options, name))


@without_autograph
def alltoall(x: Any, *, splits: Any = None, group: Group | None = None, name: str | None = None) -> tuple[Any, Any]:
    """Send splits[i] rows of x to member i (default: equal shares). Return the rows that this rank received, in the
    order of the members, and how many came from each."""
    return _alltoall(resolve_group(group), _as_tensor(x, "alltoall"), splits, _name_of("alltoall", name))


@without_autograph
def barrier(*, group: Group | None = None, name: str | None = None) -> Any:
    """Wait until every member has called barrier(). In a graph it returns the node that does so."""
    members = resolve_group(group)
    if tf.executing_eagerly():
        members.barrier(name=name)
        return None
    return add_barrier(GraphOperation("barrier", operation_name("barrier", name), members.id))


@without_autograph
def join(*, group: Group | None = None) -> Any:
    """Contribute zeros to the allreduces of the others until every member has joined; for a rank that has no more data.
    Return the rank that joined last, as a tensor of int32."""
    members = resolve_group(group)
    if tf.executing_eagerly():
        return tf.constant(members.join(), tf.int32)
    return add_number(GraphOperation("join", group=members.id))


@without_autograph
def rank_op() -> Any:
    """Return this process's rank as a tensor of int32. In a graph it is that of the round in which the graph runs."""
    return _number("rank", None)


@without_autograph
def size_op(*, group: Group | None = None) -> Any:
    """Return the number of ranks, or of the members of a group, as rank_op() does."""
    return _number("size", group)


@without_autograph
def local_rank_op() -> Any:
    """Return the number of this rank among those of its host, as rank_op() does."""
    return _number("local_rank", None)


@without_autograph
def local_size_op() -> Any:
    """Return the number of ranks on this host, as rank_op() does."""
    return _number("local_size", None)


# --- allreduce -------------------------------------------------------------------------------------------------------


def _allreduce_list(members: Group, xs: list[Any], options: GraphOperation) -> list[Any]:
    name = _name_of("allreduce", options.name or None)
    results: list[Any] = [None] * len(xs)
    by_dtype: dict[Any, list[int]] = {}
    for index, x in enumerate(xs):
        if isinstance(x, tf.IndexedSlices):
            part = name if name is None or len(xs) == 1 else f"{name}.{index}"
            results[index] = allreduce_slices(members, x, options, part)
        else:
            xs[index] = _as_tensor(x, "allreduce")
            by_dtype.setdefault(xs[index].dtype, []).append(index)
    for dtype, indices in by_dtype.items():
        part = name if name is None or len(by_dtype) == 1 else f"{name}.{dtype.name}"
        reduced = _allreduce(members, [xs[index] for index in indices], options, part)
        for index, y in zip(indices, reduced, strict=True):
            results[index] = y
    return results


def _allreduce(members: Group, xs: list[Any], options: GraphOperation, name: str | None) -> list[Any]:
    if not tf.executing_eagerly() and get_graph_ops() is not None:
        return add_same_shape(_with_name(options, name), xs)  # whose gradient is registered below

    def forward(*tensors: Any) -> tuple[list[Any], Any]:
        def backward(*grads: Any) -> list[Any]:
            return _allreduce_gradients(members, list(grads), options, name)

        return _run_allreduce(members, tensors, options, name), backward

    return list(differentiable(forward, xs))


def _allreduce_gradients(members: Group, grads: list[Any], options: GraphOperation, name: str | None) -> list[Any]:
    if options.op not in ("sum", "mean"):
        raise NotImplementedError(
            f"allreduce with op={options.op!r} has no gradient; use tf.stop_gradient(x), or op='sum' or 'mean'"
        )
    return _allreduce(members, grads, options, backward_name(name))


# Not tf.custom_gradient, as for the others: it keeps every graph in which it is used for as long as the process lives.
@tf.RegisterGradient("RondeAllreduce")  # type: ignore[untyped-decorator]  # TensorFlow has no types
def _allreduce_gradients_of_node(node: Any, *grads: Any) -> list[Any]:
    options = msgspec.json.decode(node.get_attr("operation"), type=GraphOperation)
    given = [
        tf.zeros_like(x) if grad is None else tf.convert_to_tensor(grad)
        for grad, x in zip(grads, node.inputs, strict=True)
    ]
    return _allreduce_gradients(group_of(options), given, options, options.name)


def _run_allreduce(members: Group, xs: Sequence[Any], options: GraphOperation, name: str | None) -> list[Any]:
    if not tf.executing_eagerly():
        return add_same_shape(_with_name(options, name), xs)
    arrays = [as_array(x) for x in xs]
    scales: dict[str, Any] = {"prescale": options.prescale, "postscale": options.postscale}
    if len(arrays) == 1:
        return [as_tensor(members.allreduce(arrays[0], op=options.op, name=name, **scales), xs[0])]
    reduced = members.allreduce(arrays, op=options.op, name=name, **scales)
    return [as_tensor(array, x) for array, x in zip(reduced, xs, strict=True)]


def allreduce_slices(members: Group, x: Any, options: GraphOperation, name: str | None) -> Any:
    """The sum or mean of IndexedSlices: those of all members. An index may occur several times."""
    if options.op not in ("sum", "mean"):
        raise ValueError(f"allreduce of IndexedSlices knows sum and mean, got {options.op}; use tf.convert_to_tensor")
    values, indices = tf.convert_to_tensor(x.values), tf.convert_to_tensor(x.indices)
    is_scaled = (options.op, options.prescale, options.postscale) != ("sum", 1.0, 1.0)
    if is_scaled and values.dtype.is_integer:
        return _allreduce_whole_slices(members, tf.IndexedSlices(values, indices, x.dense_shape), options, name)
    if options.prescale != 1.0:
        values = values * tf.cast(options.prescale, values.dtype)
    values = _allgather(members, values, name and f"{name}.values")
    indices = _allgather(members, indices, name and f"{name}.indices")
    if options.postscale != 1.0:
        values = values * tf.cast(options.postscale, values.dtype)
    if options.op == "mean":
        values = values / tf.cast(_number("size", members), values.dtype)
    return tf.IndexedSlices(values, indices, x.dense_shape)


def _allreduce_whole_slices(members: Group, x: Any, options: GraphOperation, name: str | None) -> Any:
    """The same of whole numbers that are averaged or scaled. As in dense tensors, sums are exact, and what they are
    multiplied with or divided by truncates; so the rows of an index are added first."""
    dtype = x.values.dtype
    values, indices = _add_rows_of_indices(tf.cast(x.values, tf.int64), x.indices)
    values = _allgather(members, _scale_whole(values, options.prescale), name and f"{name}.values")
    indices = _allgather(members, indices, name and f"{name}.indices")
    values, indices = _add_rows_of_indices(values, indices)
    if options.op == "mean":
        values = tf.truncatediv(values, tf.cast(_number("size", members), tf.int64))
    return tf.IndexedSlices(tf.cast(_scale_whole(values, options.postscale), dtype), indices, x.dense_shape)


def _add_rows_of_indices(values: Any, indices: Any) -> tuple[Any, Any]:
    found, positions = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, positions, tf.size(found)), found


def _scale_whole(values: Any, factor: float) -> Any:
    return values if factor == 1.0 else tf.cast(tf.cast(values, tf.float64) * factor, tf.int64)


# --- the others ------------------------------------------------------------------------------------------------------


def _allgather(members: Group, x: Any, name: str | None) -> Any:
    x = _as_tensor(x, "allgather")
    if x.shape.rank == 0:
        x = tf.reshape(x, [1])

    def forward(tensor: Any) -> tuple[Any, Any]:
        def backward(grad: Any) -> Any:
            own_name = backward_name(name)
            num_rows = tf.shape(tensor, tf.int64)[:1]
            rows = _allgather(members, num_rows, own_name and f"{own_name}.rows")
            start = tf.reduce_sum(rows[: _number("group_rank", members)])
            options = GraphOperation("allreduce", group=members.id)
            total = _allreduce(members, [grad], options, own_name)[0]
            return total[start : start + num_rows[0]]

        if not tf.executing_eagerly():
            return add_rows(GraphOperation("allgather", name or "", members.id), tensor), backward
        return as_tensor(members.allgather(as_array(tensor), name=name), tensor), backward

    return differentiable(forward, [x])


def _broadcast(members: Group, x: Any, root: int, name: str | None) -> Any:
    x = _as_tensor(x, "broadcast")

    def forward(tensor: Any) -> tuple[Any, Any]:
        def backward(grad: Any) -> Any:
            return _reduce_to_root(members, grad, root, backward_name(name))

        if not tf.executing_eagerly():
            if root not in members.ranks:
                ranks = format_ranks(members.ranks)
                raise ValueError(f"broadcast: root must be a member of group {members.id} ({ranks}), got {root!r}")
            operation = GraphOperation("broadcast", name or "", members.id, root=int(root))
            return add_same_shape(operation, [tensor])[0], backward
        return as_tensor(members.broadcast(as_array(tensor), root=root, name=name), tensor), backward

    return differentiable(forward, [x])


def _reduce_to_root(members: Group, x: Any, root: int, name: str | None) -> Any:
    """The sum on the root, zeros elsewhere. Every member has it in its graph, so all take part in its gradient."""

    def forward(tensor: Any) -> tuple[Any, Any]:
        options = GraphOperation("allreduce", group=members.id)
        total = _run_allreduce(members, [tensor], options, name)[0]
        is_root = tf.equal(_number("rank", None), root)
        kept = tf.where(is_root, total, tf.zeros_like(total))
        return kept, lambda grad: _broadcast(members, grad, root, backward_name(name))

    return differentiable(forward, [x])


def _reduce_scatter(members: Group, x: Any, op: Op, prescale: float, postscale: float, name: str | None) -> Any:
    x = _as_tensor(x, "reduce_scatter")

    def forward(tensor: Any) -> tuple[Any, Any]:
        def backward(grad: Any) -> Any:
            if op not in (Op.SUM, Op.MEAN):
                raise NotImplementedError(
                    f"reduce_scatter with op={op.name.lower()!r} has no gradient; use tf.stop_gradient(x), or op='sum' "
                    "or 'mean'"
                )
            gathered = _allgather(members, grad, backward_name(name)) * tf.cast(prescale * postscale, grad.dtype)
            return gathered / tf.cast(_number("size", members), grad.dtype) if op is Op.MEAN else gathered

        if not tf.executing_eagerly():
            scales = (prescale, postscale)
            operation = GraphOperation("reduce_scatter", name or "", members.id, op.name.lower(), *scales)
            return add_rows(operation, tensor), backward
        array = as_array(tensor)
        share = members.reduce_scatter(array, op=op, name=name, prescale=prescale, postscale=postscale)
        return as_tensor(share, tensor), backward

    return differentiable(forward, [x])


def _alltoall(members: Group, x: Any, splits: Any, name: str | None) -> tuple[Any, Any]:
    wanted = tf.zeros([0], tf.int64) if splits is None else tf.cast(tf.convert_to_tensor(splits), tf.int64)

    def forward(tensor: Any) -> tuple[Any, Any]:
        def backward(grad: Any, _: Any) -> Any:
            mine, _ = _alltoall(members, grad, received, backward_name(name))
            unsent = tf.shape(tensor)[0] - tf.shape(mine)[0]  # rows that no split asked for
            rest = tf.zeros(tf.concat([[unsent], tf.shape(tensor)[1:]], 0), mine.dtype)
            return tf.concat([mine, rest], 0)

        if tf.executing_eagerly():
            given = None if splits is None else wanted.numpy()
            rows, counts = members.alltoall(as_array(tensor), splits=given, name=name)
            rows, received = as_tensor(rows, tensor), tf.constant(np.asarray(counts, np.int64))
        else:
            operation = GraphOperation("alltoall", name or "", members.id)
            rows, received = add_alltoall(operation, tensor, wanted)
        return (rows, received), backward

    rows, received = differentiable(forward, [x])
    return rows, received


# --- moments, for batch normalization -------------------------------------------------------------------------------


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective."""

    @without_autograph
    def combine(count: Any, mean: Any, variance: Any) -> Any:
        exact = [tf.cast(each, tf.float64) for each in (count, mean, variance)]
        total_count, total_mean, total_variance = unweigh(allreduce(tf.stack(weigh(*exact)), group=group), tf.maximum)

        @without_autograph
        def backward(*grads: Any) -> Any:
            summed = allreduce(tf.cast(tf.stack(grads), tf.float64), group=group)
            own = backpropagate(exact[:2], (total_count, total_mean), tf.unstack(summed))
            return None, *(tf.cast(each, mean.dtype) for each in own)

        return (tf.cast(total_mean, mean.dtype), tf.cast(total_variance, mean.dtype)), backward

    return tf.custom_gradient(combine)(count, mean, variance)


# --- tensors ---------------------------------------------------------------------------------------------------------


def as_array(tensor: Any) -> Any:
    """The numbers of an eager tensor, without a copy if it is on the CPU."""
    if tensor.shape.rank == 0:  # NumPy cannot convert a scalar of bfloat16
        return np.asarray(tensor.numpy())
    return np.asarray(tensor)


def as_tensor(array: Any, like: Any) -> Any:
    """An eager tensor with these numbers and the dtype of another one."""
    return tf.convert_to_tensor(array, dtype=like.dtype)


def _as_tensor(x: Any, what: str) -> Any:
    tensor = tf.convert_to_tensor(x)
    if tensor.dtype.name not in DTYPES:
        raise TypeError(
            f"{what}: dtype {tensor.dtype.name} is not supported; supported are {', '.join(sorted(DTYPES))}"
        )
    return tensor


def differentiable(forward: Any, xs: Sequence[Any]) -> Any:
    """forward(*xs)[0], differentiable if the tensors are of real numbers."""
    if not any(x.dtype.is_floating for x in xs):
        return forward(*xs)[0]
    return tf.custom_gradient(forward)(*xs)


def _number(kind: str, group: Group | None) -> Any:
    operation = GraphOperation(kind, group=resolve_group(group).id)
    return tf.constant(read_number(operation), tf.int32) if tf.executing_eagerly() else add_number(operation)


def _check_name(name: object) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"name must be a text that is not empty, got {name!r}")


def _name_of(kind: str, name: str | None) -> str | None:
    """The name of an operation: eager, only if the caller gives one."""
    _check_name(name)
    return name if tf.executing_eagerly() else operation_name(kind, name)


def _with_name(operation: GraphOperation, name: str | None) -> GraphOperation:
    assert name, "operations of graphs have names"
    return GraphOperation(
        operation.kind, name, operation.group, operation.op, operation.prescale, operation.postscale, operation.root
    )


def _for_each(x: Any, kind: str, name: str | None, run: Any) -> Any:
    """run(tensor, name) for a tensor, or for each of a list."""
    own_name = _name_of(kind, name)
    if not isinstance(x, list | tuple):
        return run(x, own_name)
    if not x:
        raise ValueError(f"{kind}: the list of tensors is empty")
    return [run(each, own_name and f"{own_name}.{index}") for index, each in enumerate(x)]
