"""Gradients that come as they did not before: of parameters that begin to train, sparse ones, some set by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ronde
from ronde.torch import DistributedOptimizer, gradient_buckets
from tests.jobs.torch_checks.checks import (
    assert_same_on_all_ranks,
    batch,
    distributed,
    grads,
    loss_of,
    mine,
    on,
    perceptron,
)


@on("2 ranks")
def parts_of_a_model_may_take_turns() -> None:
    for passes, bucket_mb in ((1, None), (2, None), (1, 0.0001)):
        model = perceptron()
        model.requires_grad_(False)  # none trains when the optimizer is made
        optimizer = distributed(model, passes=passes, bucket_mb=bucket_mb, overlap=bucket_mb is not None)
        for step in range(4):
            part, other = (model[2], model[4]) if step % 2 else (model[4], model[2])
            part.requires_grad_(True)
            other.requires_grad_(False)
            optimizer.zero_grad()
            x, y = batch(step)
            for _ in range(passes):
                loss_of(model, mine(x), mine(y)).backward()
            assert_same_on_all_ranks(grads(part))  # when backward() returns
            assert other.weight.grad is None
            optimizer.step()
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@on("2 ranks")
def parameters_that_were_added_may_be_the_only_ones_that_are_used() -> None:
    model, more = perceptron(), nn.Linear(10, 1).double()
    optimizer = distributed(model)
    x, y = batch(0)
    loss_of(model, mine(x), mine(y)).backward()
    optimizer.step()
    optimizer.add_param_group({"params": more.parameters()})
    optimizer.zero_grad()
    more(mine(x)).sum().backward()
    assert_same_on_all_ranks(grads(more))
    optimizer.close()


@on("2 ranks")
def sparse_gradients_are_means_of_the_passes_of_each_rank() -> None:
    table = nn.Embedding(6, 3, sparse=True)
    nn.init.zeros_(table.weight)
    optimizer = DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), passes=2)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2 - ronde.rank()):
            table(torch.tensor([ronde.rank()])).sum().backward()
        optimizer.step()
    assert table.weight[:, 0].tolist() == [-1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    optimizer.close()


@on("2 ranks")
def a_gradient_may_be_sparse_on_one_rank_and_dense_on_another() -> None:
    for elsewhere in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_buckets, "is_on_device", lambda parameter: elsewhere)  # noqa: B023  # the host plays it
            weight = nn.Parameter(torch.zeros(4, 2))
            optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
            loss: Any = weight.sum()
            loss.backward()
            for _ in range(2):  # while all expect a dense one, and a sparse one
                optimizer.zero_grad()
                rows = nn.functional.embedding(torch.tensor([0]), weight, sparse=True)
                loss = (rows if ronde.rank() == 0 else weight).sum()
                loss.backward()
                assert weight.grad is not None
                assert weight.grad.to_dense()[:, 0].tolist() == [1.0, 0.5, 0.5, 0.5]
            optimizer.close()


@on("2 ranks")
def numbers_that_are_not_finite_are_found_in_all_gradients() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(5, 4, sparse=True), "head": nn.Linear(4, 2)})
    model["head"].bias.requires_grad_(False)
    named = model.named_parameters()
    optimizer = distributed(model, named_parameters=named, check_finite=True)

    def spoil(grad: Tensor) -> Tensor:
        return grad * (float("nan") if ronde.rank() == 1 else 1.0)

    for name in (
        "table.weight",
        "table.weight",
        "head.bias",
    ):  # before the ranks have agreed on buckets, after it, and a parameter that was frozen
        parameter: Any = model.get_parameter(name)
        parameter.requires_grad_(True)
        hook = parameter.register_hook(spoil)
        optimizer.zero_grad()
        loss: Any = model["head"](model["table"](torch.tensor([1]))).sum()
        with pytest.raises(FloatingPointError, match=rf"not finite: rank 1: parameter '{name}'$"):
            loss.backward()
        hook.remove()
        optimizer.zero_grad()
        loss = model["head"](model["table"](torch.tensor([1]))).sum()
        loss.backward()
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks")
def gradients_may_be_set_by_hand() -> None:
    model = perceptron()
    optimizer = distributed(model)
    for step in range(3):
        x, y = batch(step)
        found = torch.autograd.grad(loss_of(model, mine(x), mine(y)), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), found, strict=True):
            parameter.grad = grad
        optimizer.step()  # and nothing is cleared
        assert_same_on_all_ranks(grads(model))
    assert_same_on_all_ranks(model.parameters())
    with pytest.raises(ValueError, match=r"step\(\) without backward\(\).*idle_steps=True"):
        optimizer.step()  # these are those of before
    optimizer.close()


@on("2 ranks")
def a_gradient_on_top_of_one_that_was_combined_is_told_for_any_parameter() -> None:
    for elsewhere, size, sparse in [(False, 2, False), (False, 200, False), (True, 200, False), (False, 200, True)]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gradient_buckets, "is_on_device", lambda parameter: elsewhere)  # noqa: B023  # the host plays it
            table = nn.Embedding(200, size, sparse=sparse)  # small, and large enough for a hook of its own
            optimizer = distributed(table, op="sum")
            for _ in range(2):
                table(torch.tensor([1])).sum().backward()
                with pytest.raises(ValueError, match=rf"rank {ronde.rank()}: parameter .* on top of one"):
                    table(torch.tensor([1])).sum().backward()
                table.zero_grad()  # which the optimizer does not see
                table(torch.tensor([1])).sum().backward()
                grad: Any = table.weight.grad
                assert grad.to_dense()[1, 0] == 2.0
                optimizer.zero_grad()
            optimizer.close()


@on("2 ranks")
def gradients_may_be_cleared_by_the_model_also_when_a_step_has_several_passes() -> None:
    model = perceptron()
    optimizer = distributed(model, passes=2)
    for step in range(3):
        model.zero_grad()
        x, y = batch(step)
        for _ in range(2):
            loss_of(model, mine(x), mine(y)).backward()
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()
