"""Mean and variance over the members of a group, for batch normalization of Keras: ronde.training.moments with tensors.
SyncBatchNorm of this package is for models of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.torch.gradients import call_outside_of_graphs
from ronde.torch.tensors import ReduceOptions, allreduce_tensors
from ronde.training.moments import backpropagate, unweigh, weigh


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective."""
    return call_outside_of_graphs(_CombineFunction.apply, count, mean, variance, resolve_group(group))


class _CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: Tensor, mean: Tensor, variance: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        exact = [each.double() for each in (count, mean, variance)]
        total = _sum(torch.stack(weigh(*exact)), group)
        total_count, total_mean, total_variance = unweigh(total, lambda x, least: x.clamp(min=least))
        ctx.save_for_backward(*exact[:2], total_count, total_mean)
        ctx.group, ctx.dtype = group, mean.dtype
        return total_mean.to(mean.dtype), total_variance.to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count, mean, total_count, total_mean = ctx.saved_tensors
        summed = _sum(torch.stack([each.double() for each in grads]), ctx.group)
        own = backpropagate((count, mean), (total_count, total_mean), summed)
        return None, *(each.to(ctx.dtype) for each in own), None


def _sum(x: Tensor, group: Group) -> Tensor:
    total: Tensor = allreduce_tensors(group, [x], [None], ReduceOptions(), name=None, wait=True)[0]
    return total
