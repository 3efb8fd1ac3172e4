"""The list of checks, and what most of them need: small models, a share of the batch, whether ranks agree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ronde
from ronde.torch import DistributedOptimizer

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


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def distributed(model: nn.Module, **settings: Any) -> Any:
    """Its parameters in a distributed SGD."""
    return DistributedOptimizer(sgd(model.parameters()), **settings)


def backward(model: nn.Module, step: int, dtype: torch.dtype = torch.float64) -> None:
    """A pass over this rank's samples of a step."""
    x, y = batch(step, dtype)
    loss_of(model, mine(x), mine(y)).backward()


class Twins:
    """A model with a distributed optimizer, and the same model, which learns from the whole batch by itself."""

    def __init__(self, model: Any = None, make: Callable[[Any], Any] = sgd, **settings: Any) -> None:
        self.model = perceptron() if model is None else model
        self.alone = copy.deepcopy(self.model)
        plain = make(self.model.parameters())
        self.optimizer = DistributedOptimizer(plain, **settings)
        assert self.optimizer is plain
        self.reference = make(self.alone.parameters())

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.reference.zero_grad()

    def backward(self, step: int, dtype: torch.dtype = torch.float64, *, net: Any = None) -> None:
        """A pass of both over the samples of a step; `net` is what computes with the model's parameters."""
        x, y = batch(step, dtype)
        loss_of(net or self.model, mine(x), mine(y)).backward()
        loss_of(self.alone, x, y).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()

    def train(self, num_steps: int, *, net: Any = None) -> None:
        for step in range(num_steps):
            self.zero_grad()
            self.backward(step, net=net)
            self.assert_same_grads()
            self.step()

    def assert_same_grads(self, *, factor: float = 1.0) -> None:
        assert_close([grad / factor for grad in grads(self.model)], grads(self.alone))

    def close(self, **tolerance: float) -> None:
        """Both have learnt the same, and so has every rank."""
        assert_close(self.model.parameters(), self.alone.parameters(), **tolerance)
        assert_same_on_all_ranks(self.model.parameters())
        self.optimizer.close()


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
