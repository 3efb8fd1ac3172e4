"""Batch normalisation over the batches of all ranks together.

Forward: each member's number of values, mean and variance per channel are gathered and combined; backward: two sums per
channel are added up. Everything else stays local. Members may have batches of different sizes, also none at all.

Behind an ElasticBatchSampler, gradients are weighted by samples when they are reduced. So the sums of the backward pass
are, too, and a rank that only computes along, without a sample of its own, has no part in the statistics.

SyncBatchNorm is for models of PyTorch. The layer of ronde.keras has the same on each backend of Keras, with
combine_moments() of this one on PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from ronde.comm.group import Group
from ronde.comm.world import resolve_group
from ronde.torch.tensors import ReduceOptions, allgather_tensors, allreduce_tensors
from ronde.training.batch_moments import backpropagate, unweigh, weigh
from ronde.training.gradients.steps import gradient_weight


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d of torch.nn, with the statistics of all members of a group (default: all ranks).

    In eval mode nothing is sent. It can be differentiated once: a gradient of its gradients is an error. A copy keeps
    its group; a pickled one is for all ranks when it is loaded.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._layer_group = _LayerGroup(group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a tensor of (batch, channels, …)."""
        if x.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes (batch, channels, …), got a tensor of shape {list(x.shape)}")
        if x.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm has {self.num_features} channels, got a tensor of shape {list(x.shape)}")
        mean, variance, affine = self.running_mean, self.running_var, (self.weight, self.bias)
        if not self.training:
            return nn.functional.batch_norm(x, mean, variance, *affine, mean is None, 0.0, self.eps)
        group = resolve_group(self._layer_group.group)
        momentum = 0.0  # the weight of this batch in the running statistics
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if group.size == 1:
            tracked = (mean, variance) if self.track_running_stats else (None, None)
            return nn.functional.batch_norm(x, *tracked, *affine, True, momentum, self.eps)
        y, batch_mean, batch_variance, count = _NormalizeFunction.apply(x, *affine, self.eps, group)
        if self.track_running_stats and mean is not None and variance is not None:
            with torch.no_grad():
                unbiased = batch_variance * (count / (count - 1.0))
                mean.lerp_(batch_mean.to(mean.dtype), momentum)
                variance.lerp_(unbiased.to(variance.dtype), momentum)
        normalised: Tensor = y
        return normalised


class _LayerGroup:
    """The group of a layer. Copies of the layer share it, and it is not pickled: a group lives in one process."""

    __slots__ = ("group",)

    def __init__(self, group: Group | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerGroup:
        return self

    def __reduce__(self) -> tuple[type[_LayerGroup], tuple[None]]:
        return _LayerGroup, (None,)


class _NormalizeFunction(torch.autograd.Function):
    """y = (x - mean) * invstd * weight + bias, with mean and invstd over the values of all members.

    With xmu = x - mean and n values per channel in all, the gradient is

        dx = weight * invstd * (dy - sum(dy) / n - xmu * invstd² * sum(dy * xmu) / n)

    where the sums go over all members. Those of weight and bias stay local: the optimizer adds them up like all others.
    What it multiplies the gradients of a member with, if batches differ in size, is a factor of that member's dy in the
    sums; dx is multiplied by it later, so here the sums are divided by it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Group,
    ) -> tuple[Tensor, ...]:
        ctx.gradient_weight = gradient_weight(group)
        mean, variance, count = _statistics(x, group, has_samples=ctx.gradient_weight > 0)
        invstd = torch.rsqrt(variance + eps)
        scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
        shift = -mean * scale if bias is None else bias.to(invstd.dtype) - mean * scale
        y = torch.addcmul(_broadcast_channels(shift, x), x.to(scale.dtype), _broadcast_channels(scale, x)).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, invstd, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        dy, xmu = dy.to(mean.dtype), x.to(mean.dtype) - _broadcast_channels(mean, x)
        sums = torch.stack([dy.sum(dims), (dy * xmu).sum(dims)])
        mine_dy, mine_dy_xmu = sums.unbind()
        mine = sums * ctx.gradient_weight if ctx.gradient_weight else torch.zeros_like(sums)  # they may be infinite
        total = allreduce_tensors(ctx.group, [mine], [None], ReduceOptions(), name=None, wait=True)[0]
        total_dy, total_dy_xmu = total / (ctx.gradient_weight or 1.0)
        dx = None
        if ctx.needs_input_grad[0]:
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            slope = _broadcast_channels(-scale * invstd.square() * total_dy_xmu / count, x)
            offset = _broadcast_channels(-scale * total_dy / count, x)
            dx = torch.addcmul(torch.addcmul(offset, xmu, slope), dy, _broadcast_channels(scale, x)).to(x.dtype)
        dweight = (mine_dy_xmu * invstd).to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        dbias = mine_dy.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


def _statistics(x: Tensor, group: Group, *, has_samples: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance per channel, and the number of values behind them, of all members whose values count."""
    exact = torch.float64 if x.dtype is torch.float64 else torch.float32
    channels = x.shape[1]
    mine = x.new_zeros((1, 2 * channels + 1), dtype=torch.float64)
    if x.numel() and has_samples:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.to(exact), dims, correction=0)
        mine[0, :channels], mine[0, channels:-1], mine[0, -1] = mean, variance, x.numel() // channels
    gathered = allgather_tensors(group, [mine], name=None, wait=True)[0]
    means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:]
    total = counts.sum()
    if total <= 1:
        raise ValueError(f"SyncBatchNorm needs more than 1 value per channel to train, all ranks have {int(total)}")
    mean = (counts * means).sum(0) / total
    variance = (counts * (variances + (means - mean).square())).sum(0) / total
    return mean.to(exact), variance.to(exact), total.to(exact)


def _broadcast_channels(per_channel: Tensor, x: Tensor) -> Tensor:
    """One number per channel, in a shape that broadcasts over x."""
    return per_channel.view(1, -1, *([1] * (x.dim() - 2)))


def convert_sync_batchnorm(module: nn.Module, *, group: Group | None = None) -> nn.Module:
    """Replace every BatchNorm layer by a SyncBatchNorm with the same parameters and buffers, and return the module.

    It works in place, unless the module itself is a BatchNorm: use the returned module. Optimizers made before stay
    valid.
    """
    return _convert_layers(module, group, {})


def _convert_layers(module: nn.Module, group: Group | None, done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in done:
        return done[module]
    if isinstance(module, _LazyNormBase):
        raise ValueError("a lazy BatchNorm has no parameters yet; run the model once, then convert it")
    done[module] = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        affine, tracked = module.affine, module.track_running_stats
        new = SyncBatchNorm(
            module.num_features, module.eps, module.momentum, affine, tracked, group=group, device="meta"
        )
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            setattr(new, name, tensor)
        done[module] = new.train(module.training)
    else:
        for name, child in list(module._modules.items()):  # named_children() shows a layer used twice only once
            if child is not None:
                module._modules[name] = _convert_layers(child, group, done)
    return done[module]


# --- for Keras -------------------------------------------------------------------------------------------------------


def combine_moments(count: Any, mean: Any, variance: Any, group: Group | None) -> Any:
    """Mean and variance of all members, of each member's number of values, mean and variance; collective."""
    from ronde.torch.keras_gradients import call_outside_of_graphs  # imports torch._dynamo, which takes two seconds

    return call_outside_of_graphs(_CombineMoments.apply, count, mean, variance, resolve_group(group))


class _CombineMoments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: Tensor, mean: Tensor, variance: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        exact = [each.double() for each in (count, mean, variance)]
        total = _sum_over_members(torch.stack(weigh(*exact)), group)
        total_count, total_mean, total_variance = unweigh(total, lambda x, least: x.clamp(min=least))
        ctx.save_for_backward(*exact[:2], total_count, total_mean)
        ctx.group, ctx.dtype = group, mean.dtype
        return total_mean.to(mean.dtype), total_variance.to(mean.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count, mean, total_count, total_mean = ctx.saved_tensors
        summed = _sum_over_members(torch.stack([each.double() for each in grads]), ctx.group)
        own = backpropagate((count, mean), (total_count, total_mean), summed)
        return None, *(each.to(ctx.dtype) for each in own), None


def _sum_over_members(x: Tensor, group: Group) -> Tensor:
    total: Tensor = allreduce_tensors(group, [x], [None], ReduceOptions(), name=None, wait=True)[0]
    return total
