"""The collectives on tensors. As ronde's own of the same names, and differentiable.

A tensor on the CPU travels from where it is, without a copy. A result is differentiable when the tensor that was given
requires a gradient (on all ranks or on none), the call waits and has no `out`; the rules are in ronde.torch.backward.
With `out`, or wait=False,
numbers are moved and autograd knows nothing of it, as under torch.no_grad().

A list of tensors gives a list. In an allreduce those of one dtype travel as a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ronde.comm.collectives import barrier
from ronde.comm.current import group_or_world
from ronde.comm.group import Group
from ronde.torch import backward, transport
from ronde.torch.sparse import allreduce_sparse
from ronde.torch.tensors import TensorWork
from ronde.torch.transport import Reduction
from ronde.types import Op

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "reduce_scatter"]


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
    """postscale * op(prescale * x) over all members, in a new tensor or in `out` (which may be x itself).

    op is sum, mean, min, max, product or adasum; sum and mean have gradients. Sparse tensors are summed or averaged by
    gathering their indices and values. With wait=False it returns a TensorWork at once. Without a name, members are
    matched by the order of their calls; with a name the order does not matter.
    """
    members, how = group_or_world(group), Reduction(op, prescale, postscale)
    if isinstance(x, Tensor) and x.is_sparse:
        if out is not None:
            raise ValueError("allreduce: the sum of sparse tensors is a new tensor; leave out= away")
        return allreduce_sparse(members, x, how, name=name, wait=wait)
    xs, many = _listed(x, "allreduce")
    if out is None and wait and _wants_gradient(xs):
        return _one_or_all(backward.allreduce(members, xs, how, name), many)
    if not many:
        return transport.allreduce_one(members, xs[0], out, how, name=name, wait=wait)
    return transport.allreduce(members, xs, _outs(out, xs, many, "allreduce"), how, name=name, wait=wait)


def allgather(
    x: Tensor | Sequence[Tensor], *, group: Group | None = None, name: str | None = None, wait: bool = True
) -> Any:
    """The members' tensors, one after the other along the first dimension, in which they may differ.

    A scalar counts as one row.
    """
    members = group_or_world(group)
    xs, many = _listed(x, "allgather")
    if wait and _wants_gradient(xs):
        names = _names(name, xs)
        return _one_or_all([backward.allgather(members, x, name) for x, name in zip(xs, names, strict=True)], many)
    return _one_or_all(transport.allgather(members, xs, name=name, wait=wait), many)


def broadcast(
    x: Tensor | Sequence[Tensor],
    *,
    root: int = 0,
    out: Any = None,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """The root's tensor for everybody, in a new tensor or in `out`. root is a rank of the job.

    For a gradient the others' tensors, which only say shape and dtype, have to require one as the root's does.
    """
    members = group_or_world(group)
    xs, many = _listed(x, "broadcast")
    outs = _outs(out, xs, many, "broadcast")
    if out is None and wait and _wants_gradient(xs):
        names = _names(name, xs)
        given = [backward.broadcast(members, x, root, name) for x, name in zip(xs, names, strict=True)]
        return _one_or_all(given, many)
    return _one_or_all(transport.broadcast(members, xs, outs, root, name=name, wait=wait), many)


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
    """My rows of the sum: the first dimension is shared out, the first members get one row more if need be."""
    members, how = group_or_world(group), Reduction(op, prescale, postscale)
    xs, many = _listed(x, "reduce_scatter")
    if wait and _wants_gradient(xs):
        names = _names(name, xs)
        rows = [backward.reduce_scatter(members, x, how, name) for x, name in zip(xs, names, strict=True)]
        return _one_or_all(rows, many)
    return _one_or_all(transport.reduce_scatter(members, xs, how, name=name, wait=wait), many)


def alltoall(
    x: Tensor,
    *,
    splits: Any = None,  # whole numbers: a sequence, an array or a tensor
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    """splits[i] of my rows go to member i (default: equal shares). The rows that came, and how many from each."""
    members = group_or_world(group)
    if wait and isinstance(x, Tensor) and _wants_gradient([x]):
        return backward.alltoall(members, x, splits, name)
    return transport.alltoall(members, x, splits, name=name, wait=wait)


def _listed(x: Tensor | Sequence[Tensor], what: str) -> tuple[list[Tensor], bool]:
    """The tensors, and whether the caller gave a list."""
    if isinstance(x, list | tuple):
        if not x:
            raise ValueError(f"{what}: the list of tensors is empty")
        return list(x), True
    return [x], False  # type: ignore[list-item]  # what is no tensor is refused where it is read


def _outs(out: Any, xs: list[Tensor], many: bool, what: str) -> list[Tensor | None]:
    if out is None:
        return [None] * len(xs)
    if many and (not isinstance(out, list | tuple) or len(out) != len(xs)):
        raise ValueError(f"{what}: out must be a list of {len(xs)} tensors, as x is")
    return list(out) if many else [out]


def _names(name: str | None, xs: list[Tensor]) -> list[str | None]:
    """As the transport names the tensors of a list."""
    return [f"{name}.{index}" if name and len(xs) > 1 else name for index in range(len(xs))]


def _wants_gradient(xs: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any([isinstance(x, Tensor) and x.requires_grad for x in xs])


def _one_or_all(outcome: Any, many: bool) -> Any:
    """A list for a list, one tensor for one; the same for what is under way."""
    if many:
        return outcome
    return outcome.then(lambda results: results[0]) if isinstance(outcome, TensorWork) else outcome[0]
