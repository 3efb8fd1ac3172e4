"""PyTorch's optimizers on a parameter server, in ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ronde.comm.world import World
from ronde.ps import GradientNoise
from ronde.torch import AsyncOptimizer
from tests.conformance.ranks import run_threads

STEPS = 20

pytestmark = pytest.mark.slow


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model[0].bias.requires_grad_(False)
    return model


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(16, 20, generator=generator)
    return inputs, inputs[:, :4] ** 2


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, last = model[0], model[2]  # type: ignore[index]
    return [
        {"params": [first.weight, first.bias]},
        {"params": list(last.parameters()), "weight_decay": 0.0, "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.0625, momentum=0.5),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
}


@pytest.mark.parametrize("overlap", ["none", "backward", "backward and forward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sync_training_gives_what_the_mean_of_all_gradients_gives(name: str, overlap: str) -> None:
    """With a scheduler, and groups of parameters that differ in their options."""

    def body(world: World) -> None:
        model, reference = make_model(), make_model()
        plain = OPTIMIZERS[name](param_groups(reference))
        optimizer = AsyncOptimizer(
            OPTIMIZERS[name](param_groups(model)),
            mode="sync",
            overlap="backward" in overlap,
            module=model if "forward" in overlap else None,
            group=world.group,
        )
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 5, 0.5) for each in (plain, optimizer)]
        for step in range(STEPS):
            inputs, targets = make_batch(step, world.rank)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            for rank in range(world.size):  # the mean, as one process computes it
                inputs, targets = make_batch(step, rank)
                (nn.functional.mse_loss(reference(inputs), targets) / world.size).backward()
            plain.step()
            for scheduler in schedulers:
                scheduler.step()
        optimizer.finish_step()
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (own - expected).abs().max() <= 1e-6
        optimizer.close()

    run_threads(2, body)


@pytest.mark.parametrize("mode", ["bounded", "async"])
def test_asynchronous_training_learns_with_every_sample_used_once(mode: str) -> None:
    inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
    targets = inputs @ torch.randn(20, 4, generator=torch.Generator().manual_seed(2))

    def body(world: World) -> int:
        torch.manual_seed(world.rank)  # the parameters of the first rank count
        model = nn.Linear(20, 4)
        noise = GradientNoise(eta=1e-4)
        optimizer = AsyncOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.2), mode=mode, staleness=2, noise=noise, group=world.group
        )
        num_used = 0
        for epoch in range(20):
            for indices in optimizer.samples(len(inputs), 16, epoch=epoch):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs[indices]), targets[indices]).backward()
                optimizer.step()
                num_used += len(indices)
        optimizer.pull()
        assert nn.functional.mse_loss(model(inputs), targets) < 0.05
        optimizer.close()
        return num_used

    assert sum(run_threads(3, body)) == 20 * 256


def test_mistakes_are_named() -> None:
    def body(world: World) -> None:
        model = nn.Linear(3, 2)
        with pytest.raises(TypeError, match="knows SGD, Adam, AdamW, Adagrad, RMSprop, got LBFGS; give a server_optim"):
            AsyncOptimizer(torch.optim.LBFGS(model.parameters()), group=world.group)
        with pytest.raises(ValueError, match="do not have the option amsgrad of Adam"):
            AsyncOptimizer(torch.optim.Adam(model.parameters(), amsgrad=True), group=world.group)
        with pytest.raises(TypeError, match=r"parameter 0\.0 is torch.bfloat16; servers train float32 and float64"):
            AsyncOptimizer(torch.optim.SGD(nn.Linear(3, 2).bfloat16().parameters(), lr=0.1), group=world.group)
        with pytest.raises(ValueError, match=r"module does not have the parameter 0\.0"):
            optimizer = AsyncOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), module=nn.Linear(1, 1), group=world.group
            )
        optimizer = AsyncOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            overlap=True,
            named_parameters=model.named_parameters(),
            group=world.group,
        )
        model(torch.ones(3)).sum().backward()
        with pytest.raises(ValueError, match=r"the gradient of (weight|bias) came twice before step\(\)"):
            model(torch.ones(3)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(ValueError, match="has changed since it was sent in the backward pass"):
            optimizer.step()
        optimizer.close()

    run_threads(1, body)


def test_what_servers_would_not_train_or_save_is_refused() -> None:
    def body(world: World) -> None:
        model = nn.Linear(3, 2)
        model.bias.requires_grad_(False)
        optimizer = AsyncOptimizer(torch.optim.Adam(model.parameters()), group=world.group)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        assert not model.bias.equal(torch.zeros(2)) and model.bias.grad is None
        with pytest.raises(ValueError, match="servers would not train them; close it and make another one"):
            optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
        with pytest.raises(ValueError, match=r"is on the servers: one rank calls optimizer\.server\.state_dict\(\)"):
            optimizer.state_dict()
        with pytest.raises(ValueError, match=r"give AsyncOptimizer\(…, state=…\)"):
            optimizer.load_state_dict({})
        model.bias.requires_grad_(True)
        with pytest.raises(ValueError, match=r"parameter 0\.1 was frozen when AsyncOptimizer was made"):
            optimizer.step()
        optimizer.close()

    run_threads(1, body)
