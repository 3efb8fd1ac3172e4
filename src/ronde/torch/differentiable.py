"""The gradients of the collectives, for tensors that require one.

By convention the loss of the job is the sum of the members' losses. So the gradient of one member's input is the
gradient of the sum of all members' losses:

    allreduce        allreduce with the same op and scales
    allgather        this member's rows of the sum of all members' gradients
    broadcast        the sum of all members' gradients on the root, zeros elsewhere (its own gradient is a broadcast)
    reduce_scatter   allgather, with the same factors
    alltoall         alltoall with the received numbers of rows

Backward is a collective too: each member has to reach it, so the tensor requires a gradient on all of them or on none.
The gradient of an operation with a name has the name `<name>.backward`, so its order among others does not matter
either. As the gradients are computed by these same functions, gradients of gradients work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ronde.comm.group import Group
from ronde.torch.tensors import (
    ReduceOptions,
    allgather_tensors,
    allreduce_tensors,
    alltoall_tensor,
    broadcast_tensors,
    reduce_scatter_tensors,
)
from ronde.types import Op, parse_op


class AllreduceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, options: ReduceOptions, name: str | None, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.options, ctx.name = group, options, name
        return tuple(allreduce_tensors(group, xs, [None] * len(xs), options, name=name, wait=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        _check_has_gradient("allreduce", ctx.options)
        return None, None, None, *AllreduceFunction.apply(ctx.group, ctx.options, _backward_name(ctx.name), *grads)


class AllgatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.name, ctx.shape = group, name, x.shape
        gathered: Tensor = allgather_tensors(group, [x], name=name, wait=True)[0]
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        group, name = ctx.group, _backward_name(ctx.name)
        rows_name = f"{name}.rows" if name else None
        mine = torch.tensor([ctx.shape[0] if ctx.shape else 1])
        rows = allgather_tensors(group, [mine], name=rows_name, wait=True)[0].tolist()
        if len(set(rows)) == 1:
            share = ReduceScatterFunction.apply(group, ReduceOptions(), name, grad)
        else:
            start = sum(rows[: group.rank])
            share = AllreduceFunction.apply(group, ReduceOptions(), name, grad)[0][start : start + rows[group.rank]]
        return None, None, share.reshape(ctx.shape)


class BroadcastFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, root: int, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.root, ctx.name = group, root, name
        given: Tensor = broadcast_tensors(group, [x], [None], root, name=name, wait=True)[0]
        return given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, _ReduceToRootFunction.apply(ctx.group, ctx.root, _backward_name(ctx.name), grad)


class _ReduceToRootFunction(torch.autograd.Function):
    """The sum on the root, zeros elsewhere. Every member has it in its graph, so all take part in its gradient."""

    @staticmethod
    def forward(ctx: Any, group: Group, root: int, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.root, ctx.name = group, root, name
        total: Tensor = allreduce_tensors(group, [x], [None], ReduceOptions(), name=name, wait=True)[0]
        is_root = group.rank is not None and group.ranks[group.rank] == root
        return total if is_root else torch.zeros_like(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, None, None, BroadcastFunction.apply(ctx.group, ctx.root, _backward_name(ctx.name), grad)


class ReduceScatterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, options: ReduceOptions, name: str | None, x: Tensor) -> Tensor:
        ctx.group, ctx.options, ctx.name = group, options, name
        rows: Tensor = reduce_scatter_tensors(group, [x], options, name=name, wait=True)[0]
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        options = ctx.options
        _check_has_gradient("reduce_scatter", options)
        factor = options.prescale * options.postscale / (ctx.group.size if parse_op(options.op) is Op.MEAN else 1)
        return None, None, None, AllgatherFunction.apply(ctx.group, _backward_name(ctx.name), grad) * factor


class AlltoallFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, splits: Any, name: str | None, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, received = alltoall_tensor(group, x, splits, name=name, wait=True)
        ctx.mark_non_differentiable(received)
        ctx.group, ctx.name, ctx.num_rows, ctx.received = group, name, x.shape[0], received.tolist()
        return rows, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        mine, _ = AlltoallFunction.apply(ctx.group, ctx.received, _backward_name(ctx.name), grad)
        unsent = ctx.num_rows - mine.shape[0]  # rows that no split asked for
        if unsent:
            mine = torch.cat([mine, mine.new_zeros(unsent, *mine.shape[1:])])
        return None, None, None, mine


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


def _check_has_gradient(what: str, options: ReduceOptions) -> None:
    op = parse_op(options.op)
    if op not in (Op.SUM, Op.MEAN):
        raise NotImplementedError(
            f"{what} with op={op.name.lower()!r} has no gradient; detach() its input, or use op='sum' or 'mean'"
        )
