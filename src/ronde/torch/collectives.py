"""The collectives on tensors: as ronde's own of the same names, and differentiable.

A tensor on the CPU is used where it is, without a copy. A result is differentiable when the tensor that was given
requires a gradient (on all ranks or on none), the call waits and has no `out`; the rules are in
ronde.torch.differentiable. With `out`, or wait=False, autograd does not see the operation, as under torch.no_grad().

A list of tensors gives a list. In an allreduce those of one dtype are one operation. A sparse COO tensor, such as the
gradient of an embedding with sparse=True, is summed by gathering every member's indices and values.

reduce, gather and scatter have no gradients, because only the root has all of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ronde.comm.collectives import barrier
from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.errors import Mismatch
from ronde.torch.differentiable import (
    AllgatherFunction,
    AllreduceFunction,
    AlltoallFunction,
    BroadcastFunction,
    ReduceScatterFunction,
)
from ronde.torch.tensors import (
    ReduceOptions,
    TensorWork,
    allgather_tensors,
    allreduce_tensor,
    allreduce_tensors,
    alltoall_tensor,
    broadcast_tensors,
    gather_tensors,
    operation_names,
    reduce_scatter_tensors,
    reduce_tensors,
    scatter_tensors,
)
from ronde.types import Op, parse_op

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_sparse",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def allreduce_sparse(group: Group, x: Tensor, options: ReduceOptions, *, name: str | None, wait: bool) -> Any:
    """The coalesced sum or mean of sparse tensors of one shape; with wait=False a TensorWork."""
    op = parse_op(options.op)
    if op not in (Op.SUM, Op.MEAN):
        raise ValueError(f"allreduce of sparse tensors knows sum and mean, got {op.name.lower()}; use x.to_dense()")
    x = x.detach().coalesce()
    factor = options.postscale / (group.size if op is Op.MEAN else 1)
    if x.sparse_dim() == 0:
        raise ValueError("allreduce of sparse tensors needs at least one sparse dimension; use x.to_dense()")
    # Before they are gathered: members may have different factors.
    values = x.values() if options.prescale == 1.0 else x.values() * options.prescale
    # Before the indices, a row with the shape as negative numbers, for the members to compare.
    shape = torch.tensor([x.shape[: x.sparse_dim()]], dtype=torch.int64, device=x.device)
    gathered = allgather_tensors(group, [torch.cat([-1 - shape, x.indices().t()]), values], name=name, wait=wait)

    def sum_equal_indices(parts: list[Tensor]) -> Tensor:
        rows, values = parts
        is_shape = rows[:, 0] < 0
        shapes = (-1 - rows[is_shape]).tolist()
        if any(shape != shapes[0] for shape in shapes):
            text = "; ".join(f"member {index}: {shape}" for index, shape in enumerate(shapes))
            raise Mismatch(f"allreduce: the sparse tensors differ in shape: {text}")
        if factor != 1.0:
            values = values * factor
        return torch.sparse_coo_tensor(rows[~is_shape].t(), values, x.shape, check_invariants=False).coalesce()

    return gathered.convert(sum_equal_indices) if isinstance(gathered, TensorWork) else sum_equal_indices(gathered)


def allreduce(
    x: Tensor | Sequence[Tensor],
    *,
    op: str | Op = "sum",
    out: Any = None,  # a tensor, or a list of them as x is
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wait: bool = True,
) -> Any:  # a tensor, a list of them, or a TensorWork
    """Return postscale * op(prescale * x) over all members, in a new tensor or in `out` (which may be x itself).

    op is sum, mean, min, max, product, adasum, or for whole numbers and bool bit_and, bit_or, bit_xor; sum and mean
    have gradients. Sparse tensors are summed or averaged by gathering their indices and values. With wait=False it
    returns a TensorWork at once. Without a name, members are matched by the order of their calls; with a name the order
    does not matter.
    """
    members, options = resolve_group(group), ReduceOptions(op, prescale, postscale)
    if isinstance(x, Tensor) and x.is_sparse:
        if out is not None:
            raise ValueError("allreduce: the sum of sparse tensors is a new tensor; leave out= away")
        return allreduce_sparse(members, x, options, name=name, wait=wait)
    xs, many = _as_list(x, "allreduce")
    if out is None and wait and _needs_gradient(xs):
        return _unwrap_single(list(AllreduceFunction.apply(members, options, name, *xs)), many)
    if not many:
        return allreduce_tensor(members, xs[0], out, options, name=name, wait=wait)
    return allreduce_tensors(members, xs, _output_list(out, xs, many, "allreduce"), options, name=name, wait=wait)


def allgather(
    x: Tensor | Sequence[Tensor], *, group: Group | None = None, name: str | None = None, wait: bool = True
) -> Any:
    """Return the tensors of all members, concatenated along the first dimension, in which they may differ.

    A scalar counts as one row. Without a name, wait=False still waits until every member has called, because only then
    is the size of the result known.
    """
    members = resolve_group(group)
    xs, many = _as_list(x, "allgather")
    if wait and _needs_gradient(xs):
        named = zip(xs, operation_names(name, len(xs)), strict=True)
        return _unwrap_single([AllgatherFunction.apply(members, name, x) for x, name in named], many)
    return _unwrap_single(allgather_tensors(members, xs, name=name, wait=wait), many)


def broadcast(
    x: Tensor | Sequence[Tensor],
    *,
    root: int = 0,
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Return the tensor of the root, a rank of the world, in a new tensor or in `out`.

    The tensors of the other ranks only give shape and dtype. They must require a gradient if the root's does.
    """
    members = resolve_group(group)
    xs, many = _as_list(x, "broadcast")
    outs = _output_list(out, xs, many, "broadcast")
    if out is None and wait and _needs_gradient(xs):
        named = zip(xs, operation_names(name, len(xs)), strict=True)
        return _unwrap_single([BroadcastFunction.apply(members, root, name, x) for x, name in named], many)
    return _unwrap_single(broadcast_tensors(members, xs, outs, root, name=name, wait=wait), many)


def reduce_scatter(
    x: Tensor | Sequence[Tensor],
    *,
    op: str | Op = "sum",
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wait: bool = True,
) -> Any:
    """Reduce x over all members and return this rank's share of the rows. If the rows cannot be divided evenly, the
    first members get one more."""
    members, options = resolve_group(group), ReduceOptions(op, prescale, postscale)
    xs, many = _as_list(x, "reduce_scatter")
    if wait and _needs_gradient(xs):
        named = zip(xs, operation_names(name, len(xs)), strict=True)
        return _unwrap_single([ReduceScatterFunction.apply(members, options, name, x) for x, name in named], many)
    return _unwrap_single(reduce_scatter_tensors(members, xs, options, name=name, wait=wait), many)


def alltoall(
    x: Tensor,
    *,
    splits: Any = None,  # whole numbers: a sequence, an array or a tensor
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Send splits[i] rows of x to member i (default: equal shares). Return the rows that this rank received, in the
    order of the members, and how many came from each.

    Without a name, wait=False still waits until every member has called, as in allgather.
    """
    members = resolve_group(group)
    if wait and isinstance(x, Tensor) and _needs_gradient([x]):
        return AlltoallFunction.apply(members, splits, name, x)
    return alltoall_tensor(members, x, splits, name=name, wait=wait)


def reduce(
    x: Tensor | Sequence[Tensor],
    *,
    root: int = 0,
    op: str | Op = "sum",
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    wait: bool = True,
) -> Any:
    """Return postscale * op(prescale * x) over all members on the root, a rank of the world, in a new tensor or in
    `out`; None on the others. It has no gradient."""
    members, options = resolve_group(group), ReduceOptions(op, prescale, postscale)
    xs, many = _as_list(x, "reduce")
    _check_no_gradient(xs, "reduce")
    outs = _output_list(out, xs, many, "reduce")
    return _unwrap_single(reduce_tensors(members, xs, outs, root, options, name=name, wait=wait), many)


def gather(
    x: Tensor | Sequence[Tensor],
    *,
    root: int = 0,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Return the tensors of all members on the root, a rank of the world, concatenated along the first dimension, in
    which they may differ; None on the others. It has no gradient.

    Without a name, wait=False still waits until every member has called, as in allgather.
    """
    members = resolve_group(group)
    xs, many = _as_list(x, "gather")
    _check_no_gradient(xs, "gather")
    return _unwrap_single(gather_tensors(members, xs, root, name=name, wait=wait), many)


def scatter(
    x: Tensor | Sequence[Tensor],
    *,
    root: int = 0,
    splits: Any = None,  # whole numbers: a sequence, an array or a tensor
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """Share out the rows of the root's tensor, and return those of this rank: splits[i] rows for member i. By default
    all get equally many, or the first members one more. It has no gradient.

    The tensors of the other ranks only give dtype and the shape of a row. Without a name, wait=False still waits until
    every member has called, as in allgather.
    """
    members = resolve_group(group)
    xs, many = _as_list(x, "scatter")
    _check_no_gradient(xs, "scatter")
    return _unwrap_single(scatter_tensors(members, xs, root, splits, name=name, wait=wait), many)


def _as_list(x: Tensor | Sequence[Tensor], what: str) -> tuple[list[Tensor], bool]:
    """The tensors, and whether the caller gave a list."""
    if isinstance(x, list | tuple):
        if not x:
            raise ValueError(f"{what}: the list of tensors is empty")
        return list(x), True
    return [x], False  # type: ignore[list-item]  # another type is refused by check_tensor()


def _output_list(out: Any, xs: list[Tensor], many: bool, what: str) -> list[Tensor | None]:
    if out is None:
        return [None] * len(xs)
    if many and (not isinstance(out, list | tuple) or len(out) != len(xs)):
        raise ValueError(f"{what}: out must be a list of {len(xs)} tensors, as x is")
    return list(out) if many else [out]


def _needs_gradient(xs: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in xs])


def _check_no_gradient(xs: list[Tensor], what: str) -> None:
    if _needs_gradient(xs):
        raise ValueError(f"{what} has no gradient; pass x.detach(), or call it under torch.no_grad()")


def _unwrap_single(outcome: Any, many: bool) -> Any:
    """The list, or its only tensor if the caller gave one; the same for a TensorWork."""
    if many:
        return outcome
    return outcome.convert(lambda results: results[0]) if isinstance(outcome, TensorWork) else outcome[0]
