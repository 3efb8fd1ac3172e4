"""Horovod's collectives that wait, with Horovod's gradients.

They differ from those of ronde.torch: the gradient of an allgather or a broadcast is averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch import operations
from horovod.torch.compression import Compression, Compressor
from horovod.torch.operations import Average, Sum, handle_average_backwards_compatibility, synchronize

__all__ = [
    "HorovodAllgather",
    "HorovodAllreduce",
    "HorovodAlltoall",
    "HorovodBroadcast",
    "HorovodGroupedAllgather",
    "HorovodGroupedAllreduce",
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


class _ReduceArguments(NamedTuple):
    op: int
    prescale: float
    postscale: float
    process_set: ProcessSet


def _apply(function: type[Function], *args: Any) -> Any:  # as the function's forward()
    return function.apply(*args)


class HorovodAllreduce(Function):
    """Backward: the same reduction of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, arguments: _ReduceArguments) -> Tensor:
        ctx.arguments = arguments
        handle = operations.allreduce_async(
            tensor, None, name, arguments.op, arguments.prescale, arguments.postscale, arguments.process_set
        )
        reduced: Tensor = synchronize(handle)
        return reduced

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(HorovodAllreduce, grads[0], None, ctx.arguments), None, None


class HorovodGroupedAllreduce(Function):
    """Backward: the same reduction of the gradients, as one operation."""

    @staticmethod
    def forward(ctx: Any, name: str | None, arguments: _ReduceArguments, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        handle = operations.grouped_allreduce_async(
            tensors, None, name, arguments.op, arguments.prescale, arguments.postscale, arguments.process_set
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *_apply(HorovodGroupedAllreduce, None, ctx.arguments, *grads))


class HorovodAllgather(Function):
    """Backward: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        gathered: Tensor = synchronize(operations.allgather_async(tensor, name, process_set))
        ctx.num_rows, ctx.process_set = tensor.shape[0], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _my_rows(grads[0], ctx.num_rows, ctx.process_set), None, None


class HorovodGroupedAllgather(Function):
    """Backward: as of an allgather, for each tensor."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        gathered = tuple(synchronize(operations.grouped_allgather_async(tensors, name, process_set)))
        ctx.num_rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = [_my_rows(grad, num_rows, ctx.process_set) for grad, num_rows in zip(grads, ctx.num_rows, strict=True)]
        return (None, None, *rows)


def _my_rows(grad: Tensor, num_rows: int, process_set: ProcessSet) -> Tensor:
    averaged = allreduce(grad, op=Average, process_set=process_set)
    counts = allgather(torch.tensor([num_rows]), process_set=process_set)
    me = process_set.rank()
    assert me is not None
    start = int(counts[:me].sum())
    return averaged[start : start + num_rows]


class HorovodBroadcast(Function):
    """Backward: the average of the gradients for the root, zeros for the others."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        received: Tensor = synchronize(operations.broadcast_async(tensor, root_rank, name, process_set))
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        averaged = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        mine = averaged if operations._basics.rank() == ctx.root_rank else averaged * 0
        return mine, None, None, None


class HorovodAlltoall(Function):
    """Backward: the gradients go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        rows, received = synchronize(operations.alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.num_rows, ctx.process_set = received.to(device="cpu"), tensor.shape[0], process_set
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = _apply(HorovodAlltoall, grads[0], ctx.received, None, ctx.process_set)
        missing = ctx.num_rows - back.shape[0]
        if missing:
            back = torch.cat([back, back.new_zeros((missing, *back.shape[1:]))])
        return back, None, None, None


class HorovodReducescatter(Function):
    """Backward: all ranks' rows of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, arguments: _ReduceArguments) -> Tensor:
        ctx.arguments = arguments
        handle = operations.reducescatter_async(
            tensor, name, arguments.op, arguments.process_set, arguments.prescale, arguments.postscale
        )
        rows: Tensor = synchronize(handle)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = grads[0] * _scatter_factor(ctx.arguments)
        return allgather(scaled, process_set=ctx.arguments.process_set), None, None


class HorovodGroupedReducescatter(Function):
    """Backward: as of a reducescatter, for each tensor."""

    @staticmethod
    def forward(ctx: Any, name: str | None, arguments: _ReduceArguments, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.arguments = arguments
        handle = operations.grouped_reducescatter_async(
            tensors, name, arguments.op, arguments.process_set, arguments.prescale, arguments.postscale
        )
        return tuple(synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor = _scatter_factor(ctx.arguments)
        return (
            None,
            None,
            *grouped_allgather([grad * factor for grad in grads], process_set=ctx.arguments.process_set),
        )


def _scatter_factor(arguments: _ReduceArguments) -> float:
    size = arguments.process_set.size()
    assert size is not None
    return arguments.prescale * arguments.postscale * (size if arguments.op == Sum else 1)


# --- the functions -------------------------------------------------------------------------------------------------


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction over all processes of the set, as a new tensor. Differentiable."""
    arguments = _ReduceArguments(
        handle_average_backwards_compatibility(op, average), prescale_factor, postscale_factor, process_set
    )
    small, context = compression.compress(tensor)
    return compression.decompress(_apply(HorovodAllreduce, small, name, arguments), context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The reduction in place."""
    op = handle_average_backwards_compatibility(op, average)
    handle = operations.allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    reduced: Tensor = synchronize(handle)
    return reduced


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """The reductions of several tensors, as one operation. Differentiable."""
    arguments = _ReduceArguments(
        handle_average_backwards_compatibility(op, average), prescale_factor, postscale_factor, process_set
    )
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = _apply(HorovodGroupedAllreduce, name, arguments, *[small for small, _ in pairs])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """The reductions of several tensors in place."""
    op = handle_average_backwards_compatibility(op, average)
    handle = operations.grouped_allreduce_async_(
        tensors, None, name, op, prescale_factor, postscale_factor, process_set
    )
    return tuple(synchronize(handle))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """All ranks' rows, concatenated. Differentiable."""
    gathered: Tensor = _apply(HorovodAllgather, tensor, name, process_set)
    return gathered


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """All ranks' rows of several tensors. Differentiable."""
    return tuple(_apply(HorovodGroupedAllgather, name, process_set, *tensors))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, as a new one. Differentiable."""
    received: Tensor = _apply(HorovodBroadcast, tensor, root_rank, name, process_set)
    return received


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, in place."""
    received: Tensor = synchronize(operations.broadcast_async_(tensor, root_rank, name, process_set))
    return received


def alltoall(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """The received rows; with splits also how many came from each rank. Differentiable."""
    rows, received = _apply(HorovodAlltoall, tensor, splits, name, process_set)
    return rows if splits is None else (rows, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction. Differentiable."""
    small, context = compression.compress(tensor)
    arguments = _ReduceArguments(op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(_apply(HorovodReducescatter, small, name, arguments), context)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of the reductions of several tensors. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    arguments = _ReduceArguments(op, prescale_factor, postscale_factor, process_set)
    rows = _apply(HorovodGroupedReducescatter, name, arguments, *[small for small, _ in pairs])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(rows, pairs, strict=True)]
