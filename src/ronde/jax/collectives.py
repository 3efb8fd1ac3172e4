"""The collectives on arrays of JAX and trees of them: as ronde's own of the same names, outside and inside of jit, and
differentiable in reverse mode.

Outside of jit members are matched by the order of their calls unless there is a name, and errors are ronde's own. In a
program they are matched by name, which is made of the place of the call if there is none, and errors are JAX's, in
which find_error() finds ronde's.

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

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from ronde.comm.group import Group
from ronde.jax.primitive import (
    backward_name,
    bind_operation,
    find_trace,
    operation_name,
    resolve_group,
    run_operation,
)
from ronde.text import format_ranks
from ronde.training.batch_moments import backpropagate
from ronde.training.graph_operations import GraphOperation, group_of
from ronde.types import DType, Op, parse_op

DTYPES = frozenset(dtype.name.lower() for dtype in DType)
MOMENTS_NAME = "ronde.jax.moments"


def allreduce(
    x: Any,  # an array, or a tree of them
    *,
    op: str | Op = "sum",
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Any:
    """Return postscale * op(prescale * x) over all members.

    op is sum, mean, min, max, product, adasum, or for whole numbers and bool bit_and, bit_or, bit_xor; sum and mean
    have gradients. The arrays of a tree that have one dtype are one operation.
    """
    members = resolve_group(group)
    scales = (parse_op(op).name.lower(), float(prescale), float(postscale))
    options = GraphOperation("allreduce", operation_name("allreduce", name), members.id, *scales)
    leaves, tree = flatten_arrays(x, "allreduce")
    by_dtype: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(index)
    results: list[Any] = [None] * len(leaves)
    for number, indices in enumerate(by_dtype.values()):
        # Not by dtype: ranks that differ in one have to meet, to see that.
        operation = _add_to_name(options, str(number)) if number else options
        for index, y in zip(indices, _allreduce([leaves[index] for index in indices], operation), strict=True):
            results[index] = y
    return jax.tree.unflatten(tree, results)


def allgather(x: Any, *, group: Group | None = None, name: str | None = None) -> Any:
    """Return the arrays of all members, concatenated along the first dimension. A scalar counts as one row. A tree
    gives a tree. Outside of jit members may differ in their numbers of rows."""
    options = GraphOperation("allgather", operation_name("allgather", name), resolve_group(group).id)
    return _for_each(x, options, lambda leaf, operation: _allgather(_as_rows(leaf), operation))


def broadcast(x: Any, *, root: int = 0, group: Group | None = None, name: str | None = None) -> Any:
    """Return the array of the root, a rank of the world. The arrays of the other ranks only give shape and dtype. A
    tree gives a tree."""
    members = resolve_group(group)
    if root not in members.ranks:
        ranks = format_ranks(members.ranks)
        raise ValueError(f"broadcast: root must be a member of group {members.id} ({ranks}), got {root!r}")
    options = GraphOperation("broadcast", operation_name("broadcast", name), members.id, root=int(root))
    return _for_each(x, options, _broadcast)


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
    first members get one more. A tree gives a tree."""
    members = resolve_group(group)
    scales = (parse_op(op).name.lower(), float(prescale), float(postscale))
    options = GraphOperation("reduce_scatter", operation_name("reduce_scatter", name), members.id, *scales)
    return _for_each(x, options, lambda leaf, operation: _reduce_scatter(leaf, operation, members.size))


def alltoall(x: Any, *, splits: Any = None, group: Group | None = None, name: str | None = None) -> tuple[Any, Any]:
    """Send splits[i] rows of x to member i (default: equal shares). Return the rows that this rank received, in the
    order of the members, and how many came from each. Inside of jit there are only equal shares."""
    members = resolve_group(group)
    operation = GraphOperation("alltoall", operation_name("alltoall", name), members.id)
    [array], _ = flatten_arrays([x], "alltoall")
    _check_rows(array, "alltoall")
    if find_trace() is not None:
        if splits is not None and not _are_equal_shares(splits, array.shape[0], members.size):
            raise ValueError(
                "alltoall: inside of jit the shapes of results are fixed, so every member sends equally many rows to "
                "each; leave splits away and fill up the rows, or call alltoall outside of jit"
            )
        splits = None
    if splits is None and array.shape[0] % members.size:
        raise ValueError(f"alltoall: {array.shape[0]} rows are no equal shares for {members.size} members; give splits")
    rows, received = _alltoall(array, operation, splits)
    return rows, received


def barrier(*, group: Group | None = None, name: str | None = None) -> None:
    """Wait until every member has called barrier(). In a program, whose parts run in any order, the end of the program
    waits."""
    members = resolve_group(group)
    if find_trace() is None:
        members.barrier(name=name)
    else:
        operation = GraphOperation("allreduce", operation_name("barrier", name), members.id)
        bind_operation(operation, [jnp.zeros(1, jnp.uint8)])


# --- with gradients --------------------------------------------------------------------------------------------------


def _allreduce(xs: Sequence[Any], operation: GraphOperation) -> list[Any]:
    def backward(grads: Sequence[Any]) -> list[Any]:
        _check_gradient(operation)
        return _allreduce(grads, with_name(operation, backward_name(operation.name)))

    return differentiable(lambda *arrays: bind_operation(operation, arrays), backward, xs)


def _allgather(x: Any, operation: GraphOperation, num_total: int | None = None) -> Any:
    """`num_total` is the number of rows of all members, if that is known: then they may differ, also in a program."""
    num_rows = x.shape[0]

    def backward(grads: Sequence[Any]) -> list[Any]:
        own = with_name(operation, backward_name(operation.name))
        if find_trace() is not None:
            return [_reduce_scatter(grads[0], _as_kind(own, "reduce_scatter"), group_of(operation).size)]
        [rows] = run_operation(_add_to_name(own, "rows"), [np.array([num_rows])])
        start = int(rows[: group_of(operation).rank or 0].sum())
        total = _allreduce(grads, _as_kind(own, "allreduce"))[0]
        return [total[start : start + num_rows]]

    return differentiable(lambda array: bind_operation(operation, [array], num_total), backward, [x])[0]


def _broadcast(x: Any, operation: GraphOperation) -> Any:
    def backward(grads: Sequence[Any]) -> list[Any]:
        own = _as_kind(with_name(operation, backward_name(operation.name)), "reduce")
        return [_reduce_to_root(grads[0], own)]

    return differentiable(lambda array: bind_operation(operation, [array]), backward, [x])[0]


def _reduce_to_root(x: Any, operation: GraphOperation) -> Any:
    """The sum on the root, zeros elsewhere. Every member has it in its program, so all take part in its gradient."""

    def backward(grads: Sequence[Any]) -> list[Any]:
        own = _as_kind(with_name(operation, backward_name(operation.name)), "broadcast")
        return [_broadcast(grads[0], own)]

    return differentiable(lambda array: bind_operation(operation, [array]), backward, [x])[0]


def _reduce_scatter(x: Any, operation: GraphOperation, size: int) -> Any:
    _check_rows(x, "reduce_scatter")
    num_rows = x.shape[0]

    def backward(grads: Sequence[Any]) -> list[Any]:
        _check_gradient(operation)
        own = _as_kind(with_name(operation, backward_name(operation.name)), "allgather")
        factor = operation.prescale * operation.postscale / (size if operation.op == "mean" else 1)
        gathered = _allgather(grads[0], own, num_rows)
        return [gathered if factor == 1.0 else gathered * jnp.asarray(factor, gathered.dtype)]

    return differentiable(lambda array: bind_operation(operation, [array]), backward, [x])[0]


def _alltoall(x: Any, operation: GraphOperation, splits: Any) -> tuple[Any, Any]:
    shape = x.shape
    received: list[Any] = []

    def forward(array: Any) -> list[Any]:
        if splits is None:
            return bind_operation(operation, [array])
        rows, counts = run_operation(operation, [np.asarray(array)], splits)
        received[:] = [counts]
        return [jnp.asarray(rows), jnp.asarray(counts)]

    def backward(grads: Sequence[Any]) -> list[Any]:
        own = with_name(operation, backward_name(operation.name))
        mine, _ = _alltoall(grads[0], own, received[0] if received else None)
        unsent = shape[0] - mine.shape[0]  # rows that no split asked for
        return [jnp.concatenate([mine, jnp.zeros((unsent, *shape[1:]), mine.dtype)]) if unsent else mine]

    rows, counts = differentiable(forward, backward, [x])
    return rows, counts


def differentiable(
    forward: Callable[..., Sequence[Any]], backward: Callable[[Sequence[Any]], Sequence[Any]], xs: Sequence[Any]
) -> list[Any]:
    """forward(*xs), whose gradients are backward(gradients of the results) if the arrays are of real numbers."""
    if not jnp.issubdtype(xs[0].dtype, jnp.inexact):
        return list(forward(*xs))

    def run_backward(_: None, grads: Any) -> tuple[Any, ...]:
        return tuple(backward(list(grads)))

    run = jax.custom_vjp(lambda *arrays: list(forward(*arrays)))
    run.defvjp(lambda *arrays: (run(*arrays), None), run_backward)
    return list(run(*xs))


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective. For batch
    normalization: ronde.training.batch_moments with arrays of JAX.

    JAX has 32 bits for its numbers, so variances are not the difference of two sums: the means come first, in an
    operation of their own, and then the squares around the mean of all members.
    """
    members = resolve_group(group).id
    name = operation_name("moments", MOMENTS_NAME)

    def add_up(stacked: Any, name: str) -> Any:
        [total] = bind_operation(GraphOperation("allreduce", name, members), [stacked])
        return total

    def forward(count: Any, mean: Any, variance: Any) -> Any:
        sums = add_up(jnp.stack([count, count * mean]), f"{name}.means")
        total_count = jnp.maximum(sums[0], 1.0)
        total_mean = sums[1] / total_count
        squares = add_up(count * (variance + jnp.square(mean - total_mean)), f"{name}.squares")
        return (total_mean, squares / total_count), ((count, mean), (total_count, total_mean))

    def backward(kept: Any, grads: Any) -> Any:
        own, combined = kept
        summed = add_up(jnp.stack(grads), backward_name(name))
        return jnp.zeros_like(own[0]), *backpropagate(own, combined, summed)

    combine = jax.custom_vjp(lambda *own: forward(*own)[0])
    combine.defvjp(forward, backward)
    return combine(count, mean, variance)


# --- arguments -------------------------------------------------------------------------------------------------------


def flatten_arrays(x: Any, what: str) -> tuple[list[Any], Any]:
    """The arrays of a tree, and its structure. Numbers become arrays."""
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        raise ValueError(f"{what}: the tree of arrays is empty")
    arrays = [leaf if isinstance(leaf, jax.Array) else _as_array(leaf, what) for leaf in leaves]
    for array in arrays:
        if array.dtype.name not in DTYPES:
            raise TypeError(
                f"{what}: dtype {array.dtype.name} is not supported; supported are {', '.join(sorted(DTYPES))}"
            )
    return arrays, tree


def _as_array(leaf: Any, what: str) -> Any:
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise TypeError(f"{what}: {error}; use broadcast_object or allgather_object for Python objects") from None


def _for_each(x: Any, options: GraphOperation, run: Callable[[Any, GraphOperation], Any]) -> Any:
    """run(array, operation) for each array of a tree."""
    leaves, tree = flatten_arrays(x, options.kind)
    if len(leaves) == 1:
        return jax.tree.unflatten(tree, [run(leaves[0], options)])
    results = [run(leaf, _add_to_name(options, str(index))) for index, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, results)


def with_name(operation: GraphOperation, name: str) -> GraphOperation:
    """The same operation under another name."""
    return msgspec.structs.replace(operation, name=name)


def _add_to_name(operation: GraphOperation, part: str) -> GraphOperation:
    return with_name(operation, operation.name and f"{operation.name}.{part}")


def _as_kind(operation: GraphOperation, kind: str) -> GraphOperation:
    root = operation.root if kind in ("broadcast", "reduce") else 0
    return GraphOperation(kind, operation.name, operation.group, root=root)


def _as_rows(x: Any) -> Any:
    return x.reshape(1) if x.ndim == 0 else x


def _check_rows(x: Any, what: str) -> None:
    if x.ndim == 0:
        raise ValueError(f"{what}: a scalar has no rows")


def _check_gradient(operation: GraphOperation) -> None:
    if operation.op not in ("sum", "mean"):
        raise NotImplementedError(
            f"{operation.kind} with op={operation.op!r} has no gradient; use jax.lax.stop_gradient(x), or op='sum' or "
            "'mean'"
        )


def _are_equal_shares(splits: Any, num_rows: int, size: int) -> bool:
    try:
        return list(np.asarray(splits)) == [num_rows // size] * size
    except jax.errors.TracerArrayConversionError:
        return False
