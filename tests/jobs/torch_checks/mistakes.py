"""Every mistake a user can make has an error that says which rank and which parameter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ronde
from ronde.torch import DistributedOptimizer
from tests.jobs.torch_checks.checks import backward, batch, distributed, grads, loss_of, mine, on, perceptron, sgd


@on("2 ranks")
def names_must_be_there_and_differ() -> None:
    model, rank = perceptron(), ronde.rank()
    pairs = list(model.named_parameters())
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([*pairs, ("0.bias", torch.zeros(1))], ValueError, rf"rank {rank}: .*two parameters named '0\.bias'"),
        (
            [*pairs, ("other", pairs[0][1])],
            ValueError,
            rf"rank {rank}: named_parameters has '0\.weight' again, as 'other'",
        ),
        (model.parameters(), TypeError, rf"rank {rank}: named_parameters must be pairs .*got Parameter"),
        (dict(pairs), TypeError, rf"rank {rank}: named_parameters must be pairs .*got 0\.weight"),
        (
            pairs[:-1],
            ValueError,
            rf"rank {rank}: named_parameters lacks parameter 5 of .*group 0 \(torch\.float64\[3\]\)",
        ),
        (copy.deepcopy(model).named_parameters(), ValueError, "build it after the model was moved or copied"),
    ]
    for named, kind, words in wrong:
        with pytest.raises(kind, match=words):
            distributed(model, named_parameters=named)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in model.parameters()], lr=0.1)
    for group in optimizer.param_groups:
        group["param_names"] = ["same"]
    with pytest.raises(ValueError, match=rf"rank {rank}: two parameters of the optimizer are named 'same'"):
        DistributedOptimizer(optimizer)


@on("2 ranks")
def wrong_arguments_are_refused() -> None:
    model = perceptron()
    optimizer: Any = sgd(model.parameters())
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"op": "max"}, ValueError, "op must be mean, sum or adasum for gradients, got 'max'"),
        ({"op": "avg"}, ValueError, "op must be mean, sum or adasum for gradients, got 'avg'"),
        ({"passes": 0}, ValueError, "passes must be a whole number from 1, got 0"),
        ({"passes": True}, ValueError, "passes must be a whole number from 1, got True"),
        ({"group": [0, 1]}, TypeError, r"must be a ronde\.Group, got list; ronde\.add_group\(ranks\) makes one"),
        ({"codec": "int8"}, ValueError, "codec must be one of none, float16, bfloat16"),
        ({"bucket_mb": -1}, ValueError, "bucket_mb must be above 0"),
        ({"bucket_mb": "a"}, TypeError, "bucket_mb must be a number, got 'a'"),
        ({"together": [("nope",)]}, ValueError, "together: no parameter of the optimizer is named 'nope'"),
        ({"predivide": 2, "op": "sum"}, ValueError, "predivide is for op='mean'"),
        ({"wings": 2}, TypeError, "wings"),
    ]
    for settings, kind, words in wrong:
        with pytest.raises(kind, match=words):
            DistributedOptimizer(optimizer, **settings)
    with pytest.raises(TypeError, match="takes an optimizer of PyTorch, got Sequential"):
        DistributedOptimizer(model)
    DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="distributed already"):
        DistributedOptimizer(optimizer)
    optimizer.close()
    with pytest.raises(TypeError, match=r"must be a ronde\.Group, got list"):
        DistributedOptimizer(torch.optim.SGD([{"params": model.parameters(), "group": [0, 1]}], lr=0.1))


@on("2 ranks")
def step_without_backward_is_told() -> None:
    model = perceptron()
    optimizer = distributed(model, named_parameters=model.named_parameters())
    with pytest.raises(ValueError, match=rf"rank {ronde.rank()}: step\(\) without backward\(\).* 6 .*'0\.weight'"):
        optimizer.step()
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match=r"step\(\) without backward\(\)"):
        optimizer.step()
    optimizer.close()


@on("2 ranks")
def an_optimizer_of_another_copy_of_the_model_is_told() -> None:
    old = perceptron()
    optimizer = distributed(old)
    model = copy.deepcopy(old)
    backward(model, 0)
    with pytest.raises(ValueError, match=r"'group0\.param0'.*build it after the model was moved, converted or copied"):
        optimizer.step()
    optimizer.close()


@on("2 ranks")
def a_model_that_is_converted_before_training_works_and_later_is_told() -> None:
    model = perceptron()
    named = model.named_parameters()
    optimizer = distributed(model, named_parameters=named, overlap=True, bucket_mb=0.01)
    model.float()
    for step in range(2):
        x, y = batch(step, torch.float32)
        optimizer.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
    model.double()
    optimizer.zero_grad()
    x, y = batch(2)
    was = rf"rank {ronde.rank()}: parameter '\d\.\w+' float32"
    with pytest.raises(ValueError, match=rf"{was}.* has become torch\.float64.*call optimizer\.reset\(\)"):
        loss_of(model, mine(x), mine(y)).backward()
    optimizer.reset()
    for _ in range(2):
        model.zero_grad()
        total: Any = sum(parameter.sum() for parameter in model.parameters())
        (total * (1 + ronde.rank())).backward()
        assert all(bool((grad == 1.5).all()) for grad in grads(model))
    optimizer.close()


@on("2 ranks")
def another_order_in_memory_is_told() -> None:
    model: Any = nn.Conv2d(3, 4, 3)
    optimizer = distributed(model, named_parameters=model.named_parameters())
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"'weight' float32\[4, 3, 3, 3\] has become .*\(channels last\) on cpu"):
        model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.close()


@on("2 ranks")
def different_models_are_told() -> None:
    model: Any = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 3 + ronde.rank())).double()
    optimizer = distributed(model, named_parameters=model.named_parameters())
    with pytest.raises(
        ronde.Mismatch,
        match=r"at parameter 2 .*rank 0 has '1\.weight' float64\[3, 4\]; rank 1 has '1\.weight' float64\[4, 4\]",
    ):
        model(torch.ones(1, 10).double()).sum().backward()
    optimizer.close()
    model = perceptron()
    optimizer = distributed(model, passes=1, bucket_mb=1 + ronde.rank())
    with pytest.raises(ronde.Mismatch, match=r"optimizers differ: rank 0 has bucket_mb=1; rank 1 has bucket_mb=2$"):
        model(torch.ones(1, 10).double()).sum().backward()
    optimizer.close()


@on("2 ranks")
def different_frozen_parts_are_told() -> None:
    model = perceptron()
    optimizer = distributed(model, named_parameters=model.named_parameters())
    x, y = batch(0)
    loss_of(model, mine(x), mine(y)).backward()
    if ronde.rank() == 1:
        model[4].bias.requires_grad_(False)
    optimizer.zero_grad()
    with pytest.raises(ronde.Mismatch, match=r"rank 0 has '4\.bias' float64\[3\]; rank 1 has no such parameter"):
        loss_of(model, mine(x), mine(y)).backward()
    optimizer.close()


@on("2 ranks")
def gradients_that_are_not_finite_are_told() -> None:
    model = perceptron()
    named = model.named_parameters()
    optimizer = distributed(model, named_parameters=named, check_finite=True, bucket_mb=0.01)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model, mine(x), mine(y))
        if step == 1:
            handle = model[2].weight.register_hook(lambda grad: grad * float("nan") if ronde.rank() == 1 else grad)
            with pytest.raises(FloatingPointError, match=r"not finite: rank 1: parameter '2\.weight'$"):
                loss.backward()
            handle.remove()
        else:
            loss.backward()
            optimizer.step()
            assert all(bool(grad.isfinite().all()) for grad in grads(model))
    optimizer.close()


@on("2 ranks")
def more_passes_than_a_step_has_are_told() -> None:
    model = perceptron()
    optimizer = distributed(model, named_parameters=model.named_parameters(), passes=2)
    x, y = batch(0)
    for _ in range(2):
        loss_of(model, mine(x), mine(y)).backward()
    with pytest.raises(ValueError, match=rf"rank {ronde.rank()}: parameter '\d\.\w+' got a gradient on top of one"):
        loss_of(model, mine(x), mine(y)).backward()
    optimizer.zero_grad()
    optimizer.passes = 1
    loss_of(model, mine(x), mine(y)).backward()
    optimizer.step()
    optimizer.close()


@on("2 ranks")
def a_parameter_that_was_replaced_is_told() -> None:
    model, rank = perceptron(), ronde.rank()
    optimizer = distributed(model, named_parameters=model.named_parameters())
    x, y = batch(0)
    group = optimizer.param_groups[0]["params"]
    for place, given, words in (
        (2, [nn.Parameter(model[2].weight.detach().clone())], r"parameter 2 of .*group 0, which was '2\.weight',"),
        (6, [nn.Parameter(torch.zeros(2))], r"parameter 6 of .*group 0 is not"),
        (5, [], r"parameter 5 of .*group 0, which was '4\.bias',"),
    ):
        optimizer.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
        before = group[:]
        group[place : place + 1] = given
        with pytest.raises(ValueError, match=rf"rank {rank}: {words}.* not combined"):
            optimizer.step()
        group[:] = before
        optimizer.step()
    optimizer.close()
    group.pop()
    optimizer.step()  # as any other


@on("2 ranks")
def a_group_that_cannot_be_added_is_not() -> None:
    model, more = perceptron(), nn.Linear(2, 2)
    optimizer = distributed(model, named_parameters=model.named_parameters())
    other = DistributedOptimizer(torch.optim.SGD([more.bias], lr=0.1))
    for group, kind, words in (
        ({"params": more.parameters(), "group": "some"}, TypeError, r"must be a ronde\.Group, got str"),
        ({"params": [more.weight, more.bias]}, ValueError, r"'group1\.param1' is in another distributed optimizer"),
        ({"params": nn.LazyLinear(2).parameters()}, ValueError, r"'group1\.param0' of a lazy module"),
    ):
        with pytest.raises(kind, match=words):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    other.close()
    optimizer.add_param_group({"params": more.parameters()})
    x, y = batch(0)
    (loss_of(model, mine(x), mine(y)) + more(torch.full((1, 2), 1.0 + ronde.rank())).sum()).backward()
    assert bool((grads(more)[0] == 1.5).all())
    optimizer.step()
    optimizer.close()


@on("2 ranks")
def two_optimizers_of_one_parameter_are_told() -> None:
    model, rank = perceptron(), ronde.rank()
    first: Any = distributed(model, named_parameters=model.named_parameters())
    first.itself = first  # as some schedulers do it: only the garbage collector finds out that nobody uses it
    words = rf"rank {rank}: parameter 'group0\.param0' is in another .*call close\(\) of that one"
    with pytest.raises(ValueError, match=words):
        DistributedOptimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))
    del first
    second: Any = distributed(model, op="sum")
    second.close()
    third = distributed(model, op="sum")
    backward(model, 0)
    third.step()
    third.close()


@on("2 ranks")
def gradients_that_change_before_they_are_combined_are_told() -> None:
    x, y = batch(0, torch.float32)
    for fused, scaled in ((False, False), (False, True), (True, True)):
        model = perceptron(torch.float32)
        optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), passes=3)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        for _ in range(2):
            scaler.scale(loss_of(model, mine(x), mine(y))).backward()
        if not scaled:
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        with pytest.raises(ValueError, match=r"changed after 2 of the 3 .* call optimizer\.synchronize\(\) before"):
            scaler.step(optimizer)
        optimizer.zero_grad()
        optimizer.close()


@on("2 ranks")
def a_parameter_whose_gradients_cannot_travel_is_told() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(TypeError, match=rf"rank {ronde.rank()}: parameter 'weight' is torch\.float32 on meta"):
        distributed(model, named_parameters=model.named_parameters())


@on("2 ranks")
def in_a_new_round_an_optimizer_goes_on_after_a_reset() -> None:
    model = perceptron()
    optimizer = distributed(model)
    backward(model, 0)
    optimizer.step()
    ronde.shutdown()
    with pytest.raises(ronde.NotInitialized):
        distributed(perceptron())
    ronde.init()
    optimizer.reset()
    for _ in range(2):
        optimizer.zero_grad()
        total: Any = sum(parameter.sum() for parameter in model.parameters())
        (total * (1 + ronde.rank())).backward()
        assert all(bool((grad == 1.5).all()) for grad in grads(model))
        optimizer.step()
    optimizer.close()
