"""What the collectives do on the way back. Used by the public collectives for tensors that require a gradient.

The rules follow from one convention: the loss of the job is the sum of the members' losses. So the gradient of what one
member gave is what all members' losses say about it:

    allreduce        allreduce with the same op and scales
    allgather        my rows of the sum of everybody's gradients
    broadcast        the sum of everybody's gradients on the root, zeros elsewhere (and back: a broadcast)
    reduce_scatter   allgather, with the factors of the way there
    alltoall         alltoall with the numbers of rows that came

Backward is a collective as well: each member has to reach it, so the tensor requires a gradient on all of them or on
none. An operation with a name has one on the way back too (`<name>.backward`), so its order among others does not
matter there either. As the rules are written with these same functions, gradients of gradients work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ronde.comm.group import Group
from ronde.torch import transport
from ronde.torch.transport import Reduction
from ronde.types import Op, parse_op

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "reduce_scatter"]


def allreduce(group: Group, xs: list[Tensor], how: Reduction, name: str | None) -> list[Tensor]:
    """Differentiable sums."""
    return list(_Allreduce.apply(group, how, name, *xs))


def allgather(group: Group, x: Tensor, name: str | None) -> Tensor:
    """Differentiable rows of everybody."""
    gathered: Tensor = _Allgather.apply(group, name, x)
    return gathered


def broadcast(group: Group, x: Tensor, root: int, name: str | None) -> Tensor:
    """The root's tensor, differentiable."""
    given: Tensor = _Broadcast.apply(group, root, name, x)
    return given


def reduce_scatter(group: Group, x: Tensor, how: Reduction, name: str | None) -> Tensor:
    """My rows of the sum, differentiable."""
    rows: Tensor = _ReduceScatter.apply(group, how, name, x)
    return rows


def alltoall(group: Group, x: Tensor, splits: Any, name: str | None) -> tuple[Tensor, Tensor]:
    """Differentiable rows that came, and how many from whom."""
    rows, received = _Alltoall.apply(group, splits, name, x)
    return rows, received


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, how: Reduction, name: str | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.how, ctx.name = group, how, name
        return tuple(transport.allreduce(group, xs, [None] * len(xs), how, name=name, wait=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _must_be_linear("allreduce", ctx.how)
        return None, None, None, *allreduce(ctx.group, list(grads), ctx.how, _back(ctx.name))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.name, ctx.shape = group, name, x.shape
        gathered: Tensor = transport.allgather(group, [x], name=name, wait=True)[0]
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        group, name = ctx.group, _back(ctx.name)
        rows_name = f"{name}.rows" if name else None
        mine = torch.tensor([ctx.shape[0] if ctx.shape else 1])
        rows = transport.allgather(group, [mine], name=rows_name, wait=True)[0].tolist()
        if len(set(rows)) == 1:
            share = reduce_scatter(group, grad, Reduction(), name)
        else:
            start = sum(rows[: group.rank])
            share = allreduce(group, [grad], Reduction(), name)[0][start : start + rows[group.rank]]
        return None, None, share.reshape(ctx.shape)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, root: int, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.root, ctx.name = group, root, name
        given: Tensor = transport.broadcast(group, [x], [None], root, name=name, wait=True)[0]
        return given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, _Reduce.apply(ctx.group, ctx.root, _back(ctx.name), grad)


class _Reduce(torch.autograd.Function):
    """The sum on the root, zeros elsewhere. Every member is in the graph: all take part in the broadcast back."""

    @staticmethod
    def forward(ctx: Any, group: Group, root: int, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.root, ctx.name = group, root, name
        total: Tensor = transport.allreduce(group, [x], [None], Reduction(), name=name, wait=True)[0]
        is_root = group.rank is not None and group.ranks[group.rank] == root
        return total if is_root else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, broadcast(ctx.group, grad, ctx.root, _back(ctx.name))


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, how: Reduction, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.how, ctx.name = group, how, name
        rows: Tensor = transport.reduce_scatter(group, [x], how, name=name, wait=True)[0]
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        how = ctx.how
        _must_be_linear("reduce_scatter", how)
        factor = how.prescale * how.postscale / (ctx.group.size if parse_op(how.op) is Op.MEAN else 1)
        return None, None, None, allgather(ctx.group, grad, _back(ctx.name)) * factor


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: Any, name: str | None, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, received = transport.alltoall(group, x, splits, name=name, wait=True)
        ctx.mark_non_differentiable(received)
        ctx.group, ctx.name, ctx.num_rows, ctx.received = group, name, x.shape[0], received.tolist()
        return rows, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        mine, _ = alltoall(ctx.group, grad, ctx.received, _back(ctx.name))
        unsent = ctx.num_rows - mine.shape[0]  # rows that no split asked for
        if unsent:
            mine = torch.cat([mine, mine.new_zeros(unsent, *mine.shape[1:])])
        return None, None, None, mine


def _back(name: str | None) -> str | None:
    """The name of an operation on the way back."""
    return None if name is None else f"{name}.backward"


def _must_be_linear(what: str, how: Reduction) -> None:
    op = parse_op(how.op)
    if op not in (Op.SUM, Op.MEAN):
        raise NotImplementedError(
            f"{what} with op={op.name.lower()!r} has no gradient; detach() its input, or use op='sum' or 'mean'"
        )
