"""Gradients of PyTorch, averaged over ranks after the backward pass, for training loops that are not ours. Used by
ronde.keras; DistributedOptimizer of this package averages them while the backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ronde.comm.group import Group
from ronde.torch.tensors import ReduceOptions, allreduce_tensors


@torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch gives it no types
def call_outside_of_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that torch.compile() has to leave alone."""
    return function(*arguments)


@torch.no_grad()
def reduce_gradients(
    gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], *, group: Group, options: ReduceOptions
) -> list[Tensor | None]:
    """Return the gradients, reduced over the members of the group, in place where that is possible; collective.

    A member may lack some of the gradients: they count as zeros. One that all members lack stays None.
    """
    tensors = [
        torch.zeros_like(parameter) if gradient is None else gradient.detach().contiguous()
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]
    if not tensors:
        return []
    # Sent with the gradients: which of them this member has.
    flags = torch.tensor([float(gradient is not None) for gradient in gradients], dtype=tensors[0].dtype)
    sent = [*tensors, flags]
    allreduce_tensors(group, sent, sent, options, name=None, wait=True)
    return [tensor if flag else None for tensor, flag in zip(tensors, flags.tolist(), strict=True)]
