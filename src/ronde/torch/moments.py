"""Mean and variance over the members of a group, for batch normalization of Keras (ronde.keras.batch_norm)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ronde.comm.group import Group
from ronde.torch.tensors import ReduceOptions, allreduce_tensors


class CombineMoments(torch.autograd.Function):
    """Means and variances of all members, of each member's numbers of values, means and variances. How they are
    combined is up to the caller."""

    @staticmethod
    def forward(
        ctx: Any,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        group: Group,
        weigh: Callable[..., list[Any]],
        unweigh: Callable[..., tuple[Any, Any, Any]],
        backpropagate: Callable[..., tuple[Any, Any]],
    ) -> tuple[Tensor, Tensor]:
        exact = [each.double() for each in (count, mean, variance)]
        total = _sum(torch.stack(weigh(*exact)), group)
        total_count, total_mean, total_variance = unweigh(total, lambda x, least: x.clamp(min=least))
        ctx.save_for_backward(*exact[:2], total_count, total_mean)
        ctx.group, ctx.backpropagate, ctx.dtype = group, backpropagate, mean.dtype
        return total_mean.to(mean.dtype), total_variance.to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count, mean, total_count, total_mean = ctx.saved_tensors
        summed = _sum(torch.stack([each.double() for each in grads]), ctx.group)
        own = ctx.backpropagate((count, mean), (total_count, total_mean), summed)
        return None, *(each.to(ctx.dtype) for each in own), None, None, None, None


def _sum(x: Tensor, group: Group) -> Tensor:
    total: Tensor = allreduce_tensors(group, [x], [None], ReduceOptions(), name=None, wait=True)[0]
    return total
