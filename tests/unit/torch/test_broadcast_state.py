"""One rank's parameters and optimizer state arrive on the others as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ronde.comm import objects
from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.torch.broadcast_state import (
    broadcast_optimizer_state,
    broadcast_parameters,
    sync_optimizer_state,
    sync_parameters,
)
from tests.conformance.ranks import run_threads


def small_model(seed: int) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)
    for dtype in (torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.bool):
        model.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(2, 3, dtype=dtype).t())
    model.register_parameter("waves", nn.Parameter(torch.zeros(4, dtype=torch.complex64)))
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad():
            tensor.copy_(torch.randint(1, 100, tensor.shape, generator=random) * (1j if tensor.is_complex() else 1))
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """torch.equal() does not know every type of numbers."""
    return tensor.detach().flatten().view(torch.uint8)


FORMS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "module": (lambda model: model, tensors),
    "state_dict": (lambda model: model.state_dict(), lambda model: model.state_dict()),
    "pairs": (lambda model: model.named_parameters(), lambda model: dict(model.named_parameters())),
}


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_all_forms_arrive_in_place(form: str) -> None:
    given, names = FORMS[form]
    root = small_model(1)

    def body(world: World) -> None:
        model, before = small_model(world.rank), tensors(small_model(world.rank))
        where = [parameter.data_ptr() for parameter in model.parameters()]
        broadcast_parameters(given(model), root=1, group=world.group)
        assert where == [parameter.data_ptr() for parameter in model.parameters()]
        expected = {**before, **{name: tensors(root)[name] for name in names(root)}}
        assert all(torch.equal(bits(tensor), bits(expected[name])) for name, tensor in tensors(model).items())

    run_threads(3, body)


def test_models_that_differ_are_told_apart_by_name() -> None:
    def body(world: World) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2 + (world.rank == 2)))
        with pytest.raises(Mismatch, match=r"ranks 0, 1: '1.weight': float32\[2, 2\]; rank 2: '1.weight'.*\[3, 2\]"):
            broadcast_parameters(model, group=world.group)

    run_threads(3, body)


def test_what_is_no_parameter_is_an_error() -> None:
    def body(world: World) -> None:
        with pytest.raises(TypeError, match="'extra' is no tensor but a dict"):
            broadcast_parameters({"extra": {}}, group=world.group)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"pass model\.named_parameters"):
            broadcast_parameters([torch.ones(1)], group=world.group)  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"got a float; pass model\.named_parameters"):
            broadcast_parameters(0.5, group=world.group)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'waves' is a view.*resolve_conj"):
            broadcast_parameters({"waves": torch.ones(1, dtype=torch.complex64).conj()}, group=world.group)
        with pytest.raises(TypeError, match="'empty': the tensor is on the meta device"):
            broadcast_parameters({"empty": torch.ones(1, device="meta")}, group=world.group)
        broadcast_parameters({}, group=world.group)

    run_threads(1, body)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adam with a tensor as lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        x = torch.linspace(0, 1, 6, dtype=next(model.parameters()).dtype).reshape(2, 3)
        loss = model(x).abs().square().sum()
        loss.backward()
        return float(loss.detach())

    for _ in range(num_steps):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in OPTIMIZERS), ("AdamW", torch.complex64)], ids=str
)
@pytest.mark.parametrize("others_steps", [0, 3], ids=["fresh", "stale"])
def test_every_optimizer_goes_on_everywhere_as_on_the_root(kind: str, dtype: torch.dtype, others_steps: int) -> None:
    torch.manual_seed(0)
    initial = nn.Linear(3, 2, dtype=dtype)

    def body(world: World) -> tuple[list[Any], str]:
        model = copy.deepcopy(initial)
        optimizer = OPTIMIZERS[kind](model.parameters())
        take_steps(model, optimizer, 2 if world.rank == 1 else others_steps)
        if world.rank == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
        before = [parameter.detach().clone() for parameter in model.parameters()]
        broadcast_optimizer_state(optimizer, root=1, group=world.group)
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old), "parameters are not touched"
        broadcast_parameters(model, root=1, group=world.group)
        take_steps(model, optimizer, 2)
        return [parameter.tolist() for parameter in model.parameters()], str(optimizer.state_dict())

    results = run_threads(2, body)
    assert results[0] == results[1]


def test_state_that_only_others_have_is_dropped() -> None:
    def body(world: World) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        if world.rank == 1:
            take_steps(model, optimizer, 1)
        broadcast_optimizer_state(optimizer, group=world.group)
        assert not optimizer.state

    run_threads(2, body)


def test_each_rank_keeps_its_own_groups_and_wide_state_stays_wide() -> None:
    def body(world: World) -> None:
        parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([{"params": [parameter], "group": world.group}], lr=0.1)
        if world.rank == 0:
            optimizer.state[parameter] = {"master": torch.ones(3, dtype=torch.float32), "names": ("a", [torch.ones(1)])}
        broadcast_optimizer_state(optimizer, group=world.group)
        assert optimizer.param_groups[0]["group"] is world.group
        state = optimizer.state[parameter]
        assert state["master"].dtype is torch.float32 and state["names"][1][0].item() == 1.0

    run_threads(2, body)


def test_optimizers_that_differ_are_told_apart() -> None:
    def body(world: World) -> None:
        kind = torch.optim.SGD if world.rank else torch.optim.Adam
        with pytest.raises(Mismatch, match="rank 0: Adam; rank 1: SGD"):
            broadcast_optimizer_state(kind(nn.Linear(1, 1).parameters(), lr=0.1), group=world.group)

    run_threads(2, body)


@pytest.mark.parametrize(("size", "givers"), [(4, (0, 1, 2)), (4, (1, 3)), (5, (1, 3)), (3, (2,)), (2, (0, 1))])
def test_several_givers_share_the_state_and_keep_their_own_buffers(size: int, givers: tuple[int, ...]) -> None:
    """To few takers it is sent directly, to many it is broadcast."""

    def body(world: World) -> None:
        is_giver = world.rank in givers
        model = small_model(7 if is_giver else world.rank + 100)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if is_giver else 0.1)
        if is_giver:  # the others have no state yet
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        dict(model.named_buffers())["1.running_mean"].fill_(world.rank)
        sync_parameters(model, givers, world.group)
        sync_optimizer_state(optimizer, givers, world.group)

        found = {name: bits(tensor).tolist() for name, tensor in tensors(model).items()}
        expected = torch.full((4,), float(world.rank if is_giver else givers[0]))
        assert found.pop("1.running_mean") == bits(expected).tolist()
        moments = [
            {name: bits(value).tolist() for name, value in optimizer.state[parameter].items()}
            for parameter in model.parameters()
        ]
        assert all(moments)
        everywhere = objects.allgather((found, moments, optimizer.param_groups[0]["lr"]), group=world.group)
        assert all(each == everywhere[givers[0]] for each in everywhere)
        assert everywhere[0][2] == 0.5

    run_threads(size, body)
