"""All ranks start with the same parameters: what is told when they do not, and what makes it so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ronde
from ronde.comm.world import current_world
from ronde.torch import DistributedOptimizer, OutOfSync, broadcast_parameters
from tests.jobs.torch_checks.checks import (
    Twins,
    assert_same_on_all_ranks,
    backward,
    batch,
    distributed,
    loss_of,
    mine,
    on,
    perceptron,
)


def own_weights(model: Any = None) -> Any:  # as perceptron()
    """A model whose third layer is another on each rank."""
    model = perceptron() if model is None else model
    with torch.no_grad():
        model[4].weight.add_(ronde.rank() * 1e-6)
    return model


DIFFERS = (
    r"out of sync\. '4\.weight': ranks 0, 1 differ, with no majority \(1 of 6 tensors differ\)\. "
    r"Call ronde\.torch\.broadcast_parameters\(model\) before the first step, .*compare_at_step=0"
)


@on("2 ranks", "2 hosts")
def a_forgotten_broadcast_is_told_before_the_first_step() -> None:
    for settings in ({}, {"bucket_mb": 0.005, "overlap": True}, {"codec": "bfloat16"}, {"passes": 2}):
        model = own_weights()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = distributed(model, named_parameters=model.named_parameters(), **settings)
        for _ in range(2):  # it is told until it is mended
            optimizer.zero_grad()
            for _ in range(optimizer.passes - 1):
                backward(model, 0)
            with pytest.raises(OutOfSync, match=DIFFERS) as caught:
                backward(model, 0)
            assert (caught.value.tensor, caught.value.ranks) == ("4.weight", ())
        assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
        broadcast_parameters(model)
        for step in range(3):
            optimizer.zero_grad()
            for _ in range(optimizer.passes):
                backward(model, step)
            optimizer.step()
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()


@on("4 ranks")
def the_ranks_that_differ_are_named() -> None:
    model = perceptron()
    if ronde.rank() == 2:
        nn.init.zeros_(model[0].bias)
    optimizer = distributed(model, named_parameters=model.named_parameters())
    with pytest.raises(OutOfSync, match=r"'0\.bias': rank 2 differs from ranks 0, 1, 3, which agree") as caught:
        backward(model, 0)
    assert caught.value.ranks == (2,)
    optimizer.close()


@on("2 ranks")
def frozen_parameters_are_compared_too() -> None:
    model = own_weights()
    model[4].requires_grad_(False)
    optimizer = distributed(model, named_parameters=model.named_parameters())
    with pytest.raises(OutOfSync, match=DIFFERS):
        backward(model, 0)
    optimizer.close()


@on("2 ranks")
def frozen_parameters_without_plain_memory_are_not_compared() -> None:
    model = perceptron()
    odd = [
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.full((2,), float(ronde.rank())).to(torch.float8_e4m3fn),
    ]
    frozen = [nn.Parameter(tensor, requires_grad=False) for tensor in odd]
    optimizer = DistributedOptimizer(torch.optim.SGD([*model.parameters(), *frozen], lr=0.1))
    with pytest.raises(OutOfSync, match=r"'group0\.param9': ranks 0, 1 differ.* \(1 of 7 tensors differ\)"):
        backward(model, 0)
    optimizer.close()


@on("2 ranks")
def a_rank_without_a_backward_pass_is_compared_too() -> None:
    model = own_weights()
    optimizer = distributed(model, named_parameters=model.named_parameters())
    with pytest.raises(OutOfSync, match=DIFFERS):
        if ronde.rank() == 0:
            backward(model, 0)
        optimizer.step()
    optimizer.close()


@on("2 ranks", "2 hosts")
def who_wants_different_parameters_turns_it_off() -> None:
    world = current_world()
    usual = world.settings
    for argument, setting in ((0, 1), (None, 0)):
        world.settings = usual.replace(compare_at_step=setting)
        model = own_weights()
        optimizer = distributed(model, compare_at_step=argument)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        weights = model[4].weight.detach().numpy().ravel()
        first, second = ronde.allgather(weights.reshape(1, -1))
        assert np.allclose(second - first, 1e-6, atol=1e-9)
        optimizer.close()
    world.settings = usual
    model = perceptron()
    optimizer = distributed(model, compare_at_step=ronde.rank())
    with pytest.raises(ronde.Mismatch, match="rank 0 has compare_at_step=0; rank 1 has compare_at_step=1"):
        backward(model, 0)
    optimizer.close()


@on("2 ranks")
def scripts_that_broadcast_after_the_first_step_compare_at_the_second() -> None:
    for broadcasts in (True, False):
        model = own_weights()
        optimizer = distributed(model, named_parameters=model.named_parameters(), compare_at_step=2)
        backward(model, 0)
        optimizer.step()
        if broadcasts:
            broadcast_parameters(model)
        optimizer.zero_grad()
        if broadcasts:
            backward(model, 1)
            optimizer.step()
            assert_same_on_all_ranks(model.parameters())
        else:
            with pytest.raises(OutOfSync, match=DIFFERS):
                backward(model, 1)
        optimizer.close()


@on("2 ranks", "2 hosts")
def a_rank_may_have_joined_when_the_others_compare() -> None:
    model = perceptron()
    optimizer = distributed(model, compare_at_step=2)
    for step in range(3 if ronde.rank() else 1):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    ronde.join()
    broadcast_parameters(model, root=1)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks")
def parameters_that_are_added_are_compared_and_no_others() -> None:
    model, more = perceptron(), nn.Linear(10, 1).double()
    optimizer = distributed(model, named_parameters=model.named_parameters())
    x, _ = batch(0)
    backward(model, 0)
    optimizer.step()
    own_weights(model)  # they may drift apart, on different machines for example: that is for SyncCheck to tell
    nn.init.constant_(more.bias, ronde.rank())
    optimizer.add_param_group({"params": more.parameters()})
    optimizer.zero_grad()
    words = r"'4\.weight': .* differ.*2 of 8 tensors"
    with pytest.raises(OutOfSync, match=words):  # now that there is a difference, it names all
        (loss_of(model, mine(x), mine(x[:, :3])) + more(mine(x)).sum()).backward()
    broadcast_parameters(model)
    broadcast_parameters(more)
    optimizer.zero_grad()
    (loss_of(model, mine(x), mine(x[:, :3])) + more(mine(x)).sum()).backward()
    optimizer.step()
    optimizer.close()


@on("2 ranks")
def parameters_that_have_drifted_apart_do_not_end_a_later_agreement() -> None:
    model = perceptron()
    model[2].requires_grad_(False)
    optimizer = distributed(model)
    backward(model, 0)
    optimizer.step()
    own_weights(model)
    model[2].requires_grad_(True)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    optimizer.reset()  # as in a new round
    with pytest.raises(OutOfSync, match=r"'group0\.param4'"):
        backward(model, 0)
    optimizer.close()


@on("2 ranks", "2 hosts")
def parameters_can_be_broadcast_when_the_optimizer_is_made() -> None:
    both = Twins(own_weights(), broadcast_parameters=True)
    both.alone.load_state_dict(both.model.state_dict())
    assert_same_on_all_ranks(both.model.parameters())
    both.train(2)
    more = nn.Linear(3, 2).double()
    nn.init.constant_(more.bias, ronde.rank() + 1.0)
    both.optimizer.add_param_group({"params": more.parameters()})
    assert more.bias.tolist() == [1.0, 1.0]
    both.close()


@on("4 ranks")
def each_group_of_ranks_has_parameters_of_its_own() -> None:
    tasks = [ronde.add_group([0, 2]), ronde.add_group([1, 3])]
    task = ronde.rank() % 2
    for broadcasts in (True, False):
        trunk, head = perceptron(), nn.Linear(3, 2).double()
        nn.init.constant_(head.weight, task + 1.0)
        nn.init.constant_(head.bias, float(ronde.rank()))
        groups: list[dict[str, Any]] = [
            {"params": trunk.parameters()},
            *(
                {"params": head.parameters() if task == each else [nn.Parameter(torch.zeros(1))], "group": group}
                for each, group in enumerate(tasks)
            ),
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), broadcast_parameters=broadcasts)
        x, _ = batch(0)
        name = rf"'group{task + 1}\.param1': ranks {task}, {task + 2} differ"
        if broadcasts:
            assert head.bias.tolist() == [float(task)] * 2
            head(trunk(mine(x))).sum().backward()
            optimizer.step()
            assert_same_on_all_ranks(trunk.parameters())
        else:
            with pytest.raises(OutOfSync, match=name):
                head(trunk(mine(x))).sum().backward()
        optimizer.close()
    for group in tasks:
        ronde.remove_group(group)
