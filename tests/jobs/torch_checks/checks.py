"""The list of checks, and what most of them need: small models, a share of the batch, whether ranks agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ronde

BATCH = 16
"""Samples of a step, on all ranks together."""


class Check(NamedTuple):
    """Something to run on every rank of the jobs it names; what it returns is handed to the test."""

    body: Callable[[], Any]
    jobs: tuple[str, ...]


CHECKS: dict[str, Check] = {}


def on(*jobs: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Run it in these jobs."""

    def add(body: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS[f"{body.__module__.rpartition('.')[2]}.{body.__name__}"] = Check(body, jobs)
        return body

    return add


def perceptron(dtype: torch.dtype = torch.float64) -> Any:  # its layers are not just modules
    """The same small model on every rank; its middle is large enough for a hook of its own."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 100), nn.Tanh(), nn.Linear(100, 90), nn.Tanh(), nn.Linear(90, 3)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The samples of one step."""
    source = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 10, generator=source, dtype=dtype),
        torch.randn(BATCH, 3, generator=source, dtype=dtype),
    )


def mine(x: Tensor) -> Tensor:
    """This rank's rows."""
    share = len(x) // ronde.size()
    return x[ronde.rank() * share : (ronde.rank() + 1) * share]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Any:  # backward() has no types
    """The mean of squares."""
    return nn.functional.mse_loss(model(x), y)


def twin(model: nn.Module) -> Any:  # of the model's class
    """The same model, which learns from the whole batch by itself."""
    return copy.deepcopy(model)


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Number by number."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"tensor {index}: "
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=where.__add__)


def assert_same_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Bit by bit."""
    for index, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        gathered = ronde.allgather(bits.reshape(1, -1))
        assert (gathered == gathered[0]).all(), f"tensor {index} differs between ranks"


def grads(model: nn.Module) -> list[Tensor]:
    """All gradients; each has to be there."""
    found = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]
