"""Gradients of collectives against the truth: the Jacobian of the whole job, found by moving one number at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from ronde.comm.group import Group
from ronde.comm.world import World
from ronde.torch.collectives import allgather, allreduce, alltoall, broadcast, reduce_scatter
from tests.conformance.ranks import run_threads

Collective: TypeAlias = Callable[[Tensor, Group], Tensor]
STEP = 1e-6


def _splits(group: Group) -> list[int]:
    """Rank 0 sends 0, 1, 2 … rows, the others one each."""
    return list(range(group.size)) if group.rank == 0 else [1] * group.size


CASES: dict[str, tuple[Collective, tuple[int, int, int]]] = {
    "sum": (lambda x, g: allreduce(x, group=g), (4, 4, 4)),
    "mean, scaled": (lambda x, g: allreduce(x, op="mean", prescale=2.0, postscale=3.0, group=g), (4, 4, 4)),
    "named": (lambda x, g: allreduce(x, name="loss", group=g), (4, 4, 4)),
    "gather": (lambda x, g: allgather(x, group=g), (2, 2, 2)),
    "gather, uneven": (lambda x, g: allgather(x, name="rows", group=g), (1, 3, 0)),
    "gather scalars": (lambda x, g: allgather(x.sum(), group=g), (2, 2, 2)),
    "broadcast": (lambda x, g: broadcast(x, root=1, group=g), (3, 3, 3)),
    "scatter": (lambda x, g: reduce_scatter(x, op="mean", prescale=2.0, group=g), (5, 5, 5)),
    "exchange": (lambda x, g: alltoall(x, splits=_splits(g), group=g)[0], (4, 3, 4)),
    "list": (lambda x, g: torch.cat(allreduce([x, 2 * x], group=g)), (2, 2, 2)),
    "twice": (lambda x, g: allreduce(allgather(x, group=g) ** 2, group=g), (2, 2, 2)),
}


def _loss(collective: Collective, x: Tensor, weight: float, group: Group) -> Tensor:
    """A loss of this rank in which every number that came counts differently, and not linearly."""
    return _counted(torch.sin(collective(x, group))) * weight


def _gradient(collective: Collective, x: Tensor, weight: float, group: Group) -> Tensor:
    """The gradient of the losses as a loss of its own."""
    (gradient,) = torch.autograd.grad(_loss(collective, x, weight, group), x, create_graph=True)
    return _counted(gradient) * weight


def _counted(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)).sum()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("loss", [_loss, _gradient], ids=["first", "second"])
def test_the_gradient_is_that_of_the_sum_of_all_losses_also_when_gradients_are_the_losses(
    loss: Callable[[Collective, Tensor, float, Group], Tensor], case: str, size: int
) -> None:
    collective, rows = CASES[case]

    def body(world: World) -> None:
        group, rank = world.group, world.rank
        x = torch.linspace(0.1, 0.9, rows[rank] * 2, dtype=torch.float64).reshape(rows[rank], 2) + rank
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(collective, x, 1.0 + rank, group), x)
        for owner in range(size):
            for index in range(rows[owner] * 2):
                slope = _slope(lambda moved: loss(collective, moved, 1.0 + rank, group), x, owner, index, world)
                if owner == rank:
                    assert gradient.flatten()[index].item() == pytest.approx(slope, rel=1e-5, abs=1e-6)

    run_threads(size, body)


def _slope(loss: Callable[[Tensor], Tensor], x: Tensor, owner: int, index: int, world: World) -> float:
    """How much the sum of all losses grows with one number of one rank."""
    sums = []
    for sign in (1.0, -1.0):
        moved = x.detach().clone()
        if world.rank == owner:
            moved.view(-1)[index] += sign * STEP
        sums.append(allreduce(loss(moved.requires_grad_()).detach(), group=world.group).item())
    return float((sums[0] - sums[1]) / (2 * STEP))


def test_what_has_no_gradient_says_so_at_the_way_back() -> None:
    def body(world: World) -> None:
        x = torch.ones(2, requires_grad=True)
        highest = allreduce(x, op="max", group=world.group)
        with pytest.raises(NotImplementedError, match="op='max' has no gradient; detach"):
            highest.sum().backward()

    run_threads(1, body)


@pytest.mark.parametrize("options", [{"out": torch.zeros(2)}, {"wait": False}])
def test_without_waiting_or_with_out_autograd_knows_nothing(options: dict[str, Any]) -> None:
    def body(world: World) -> None:
        outcome = allreduce(torch.ones(2, requires_grad=True), group=world.group, **options)
        assert not (outcome if "out" in options else outcome.wait()).requires_grad
        with torch.no_grad():
            assert not allreduce(torch.ones(2, requires_grad=True), group=world.group).requires_grad

    run_threads(1, body)
