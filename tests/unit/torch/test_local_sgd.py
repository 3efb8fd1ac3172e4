"""Local steps with averaged parameters in PyTorch, in ranks that are threads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ronde.comm.world import World
from ronde.torch import LocalSGD
from tests.conformance.ranks import run_threads

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("averaging", ["allreduce", "gossip"])
def test_ranks_with_data_of_their_own_come_to_one_model(averaging: str) -> None:
    """With momentum, a scheduler and a closure. Each rank sees one side of the data only."""
    inputs = torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    targets = inputs @ torch.randn(6, 2, generator=torch.Generator().manual_seed(2))

    def body(world: World) -> list[float]:
        torch.manual_seed(world.rank)  # the parameters of the first rank count
        model, own = nn.Linear(6, 2), slice(100 * world.rank, 100 * world.rank + 100)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        optimizer = LocalSGD(sgd, every=4, averaging=averaging, group=world.group)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)

        def loss_of_own() -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs[own]), targets[own])
            loss.backward()
            return float(loss.detach())

        first = optimizer.step(loss_of_own)
        num_steps = 200 if averaging == "allreduce" else 150 + 50 * world.rank
        for _ in range(num_steps):
            last = optimizer.step(loss_of_own)
            scheduler.step()
        assert first is not None and last is not None and last < first / 100
        assert sgd.param_groups[0]["lr"] < 0.1
        optimizer.finish()
        assert optimizer.weight == 1.0
        optimizer.close()
        assert nn.functional.mse_loss(model(inputs), targets) < 1e-3
        return [*model.weight.detach().reshape(-1).tolist(), *model.bias.detach().tolist()]

    results = run_threads(3, body)
    assert results[0] == results[1] == results[2]


def test_mistakes_are_named() -> None:
    with pytest.raises(TypeError, match="LocalSGD takes an optimizer of PyTorch, got Linear"):
        LocalSGD(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_state_is_that_of_the_optimizer_inside_and_parameters_cannot_be_added() -> None:
    def body(world: World) -> None:
        model = nn.Linear(2, 2)
        optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), group=world.group)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        assert state["state"][0]["momentum_buffer"].equal(torch.ones(2, 2))
        inside = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5)
        other = LocalSGD(inside, group=world.group)
        other.load_state_dict(state)
        assert other.param_groups is inside.param_groups and inside.param_groups[0]["lr"] == 0.1
        assert other.state_dict()["state"][0]["momentum_buffer"].equal(torch.ones(2, 2))
        with pytest.raises(ValueError, match="which would not average them"):
            other.add_param_group({"params": nn.Linear(1, 1).parameters()})
        optimizer.close()
        other.close()

    run_threads(1, body)
