"""ronde.torch, for the collective cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ronde.torch
from ronde.types import DType
from tests.conformance.frameworks.framework import Value


class TorchFramework:
    """Functions are called with tensors."""

    collectives = ronde.torch
    dtypes = tuple(DType)
    fixed_shapes = False

    def run(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        found = function(*map(_as_tensor, inputs))
        return [_as_value(each) for each in (found if isinstance(found, list) else [found])]

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        xs = [_as_tensor(each).requires_grad_() for each in inputs]
        return [_as_value(each) for each in torch.autograd.grad(function(*xs).sum(), xs)]

    def second_gradients(self, function: Callable[..., Any], inputs: Sequence[Value]) -> list[Value]:
        xs = [_as_tensor(each).requires_grad_() for each in inputs]
        first = torch.autograd.grad(function(*xs).sum(), xs, create_graph=True)
        return [_as_value(each) for each in torch.autograd.grad([each.sum() for each in first], xs)]

    def find_error(self, error: Exception) -> Exception:
        return error


def _as_tensor(value: Value) -> torch.Tensor:
    tensor = torch.tensor(value.array)
    return tensor.view(torch.bfloat16) if value.dtype is DType.BFLOAT16 else tensor


def _as_value(tensor: Any) -> Value:
    dtype = DType[str(tensor.dtype).removeprefix("torch.").upper()]
    bits = tensor.view(torch.uint16) if dtype is DType.BFLOAT16 else tensor
    return Value(bits.detach().numpy(), dtype)


FRAMEWORKS = {"eager": TorchFramework}
