"""Gradients that a user keeps across steps keep their values; nothing is copied when nobody keeps any."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

import ronde
from ronde.comm.buffers import Array
from ronde.torch import DistributedOptimizer, gradient_buckets
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket
from ronde.training.gradients.compression import WireArray
from tests.jobs.torch_checks.checks import (
    Twins,
    assert_close,
    assert_same_on_all_ranks,
    backward,
    batch,
    distributed,
    grads,
    loss_of,
    mine,
    on,
    perceptron,
    sgd,
)


class Halves:
    """Sends each bucket as two arrays, one after the other."""

    name = "halves"

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> Halves:
        self.wires = tuple(WireArray(count, bucket.dtype) for count in (bucket.count // 2, -(-bucket.count // 2)))
        return copy.copy(self)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        middle = len(wires[0])
        wires[number][:] = gradients[middle:] if number else gradients[:middle]

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        gradients[:] = np.concatenate(wires)


def in_graph(grad: Tensor) -> Any:
    """What holds a gradient in the graph of something that was computed with it."""
    return (grad * torch.ones_like(grad, requires_grad=True)).grad_fn


def other_gradient(grad: Tensor) -> Tensor:
    """A parameter that has the same tensor as its gradient."""
    other = torch.zeros_like(grad, requires_grad=True)
    other.grad = grad
    return other


WAYS_TO_KEEP: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "the tensor": (lambda grad: grad, lambda kept: kept),
    "detach()": (lambda grad: grad.detach(), lambda kept: kept),
    "data": (lambda grad: grad.data, lambda kept: kept),
    "numpy()": (lambda grad: grad.numpy(), torch.from_numpy),
    "a slice": (lambda grad: grad[:1], lambda kept: kept),
    "a view": (lambda grad: grad.view(-1), lambda kept: kept),
    "a storage": (lambda grad: grad.untyped_storage(), lambda kept: torch.empty(0, dtype=torch.uint8).set_(kept)),
    "the gradient of another": (other_gradient, lambda kept: kept.grad),
    "a graph": (in_graph, lambda kept: kept._saved_self),
}
"""By name, how to keep a gradient, and how to see the numbers that were kept."""


class Keeper:
    """Keeps gradients, and their values at that time."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any, Tensor]] = []

    def keep(self, way: str, grad: Tensor) -> None:
        keep, see = WAYS_TO_KEEP[way]
        kept = keep(grad)
        self.kept.append((way, kept, see(kept).clone()))

    def check(self) -> None:
        for way, kept, value in self.kept:
            assert torch.equal(WAYS_TO_KEEP[way][1](kept), value), f"{way} has changed"


def use_spare(model: nn.Module, optimizer: Any) -> list[bool]:
    """Whether each gradient lies outside of the memory that its bucket hands out."""
    views = [view for own, _ in optimizer._reducers._reducers.values() for view in own._views]
    return [parameter.grad is not view for parameter, view in zip(model.parameters(), views, strict=True)]


@on("2 ranks", "2 hosts")
def what_is_kept_keeps_its_value_whatever_it_is() -> None:
    for way in WAYS_TO_KEEP:
        both, keeper = Twins(), Keeper()
        for step in range(5):
            both.zero_grad()
            both.backward(step)
            both.assert_same_grads()
            if step in (0, 1, 3):
                for parameter in both.model[2].parameters():  # one of them is large
                    keeper.keep(way, parameter.grad)
            both.step()
            keeper.check()
        both.close()


@on("2 ranks", "2 hosts")
def gradients_are_kept_whatever_the_buckets_are() -> None:
    cases: list[dict[str, Any]] = [
        {"bucket_mb": 0.005, "overlap": True},
        {"bucket_mb": 0.005, "overlap": False},
        {"op": "sum", "overlap": True},
        {"codec": "bfloat16"},
        {"codec": Halves()},
        {"check_finite": True},
        {"passes": 3},
    ]
    for settings in cases:
        both, keeper = Twins(**settings), Keeper()
        rounding = 0.03 if "codec" in settings else 1e-9
        for step in range(4):
            both.zero_grad()
            for _ in range(settings.get("passes", 1)):
                both.backward(step)
            factor = ronde.size() if settings.get("op") == "sum" else 1
            theirs = [grad / settings.get("passes", 1) for grad in grads(both.alone)]
            assert_close([grad / factor for grad in grads(both.model)], theirs, rtol=rounding, atol=rounding)
            for parameter in both.model.parameters():
                keeper.keep("detach()" if step % 2 else "the tensor", parameter.grad)
            both.optimizer.step()
            keeper.check()
            both.alone.load_state_dict(both.model.state_dict())
        both.close(rtol=1.0, atol=1.0)


@on("2 ranks", "2 hosts", "4 ranks")
def ranks_may_keep_different_gradients() -> None:
    both, keeper = Twins(bucket_mb=0.02), Keeper()
    for step in range(8):
        both.zero_grad()
        both.backward(step)
        both.assert_same_grads()
        parameters = list(both.model.parameters())
        if step % (ronde.rank() + 1) == 0:
            keeper.keep("detach()", parameters[(step + ronde.rank()) % len(parameters)].grad)
        if step % 3 == ronde.rank():
            keeper.kept.clear()
        both.step()
        keeper.check()
    both.close()


@on("2 ranks", "2 hosts")
def nothing_is_copied_while_nobody_keeps_anything() -> None:
    for settings in ({}, {"bucket_mb": 0.005, "overlap": True}, {"codec": "bfloat16"}, {"passes": 2}):
        model = perceptron()
        optimizer = distributed(model, **settings)
        places = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=step != 1)
            for _ in range(optimizer.passes):
                backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            places.append([grad.data_ptr() for grad in grads(model)])
            if step == 2:
                kept = [parameter.grad for parameter in model.parameters()]
            if step == 3:
                assert all(use_spare(model, optimizer))
                del kept  # what was kept in step 3 is not any more: the buckets are used again
            optimizer.step()
        assert places[0] == places[1] == places[2] == places[4] == places[5]
        assert not set(places[3]) & set(places[2])
        optimizer.close()


@on("2 ranks", "2 hosts")
def sharpness_aware_steps_may_keep_both_gradients() -> None:
    both = Twins()
    for step in range(4):
        first: dict[int, list[Tensor]] = {}
        values: dict[int, list[Tensor]] = {}
        both.zero_grad()
        both.backward(step)
        for number, net in enumerate((both.model, both.alone)):
            first[number] = grads(net)
            values[number] = [grad.clone() for grad in first[number]]
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(parameter.grad, alpha=0.05)
        both.zero_grad()
        both.backward(step)
        both.assert_same_grads()
        assert_close(first[0], values[0], rtol=0.0, atol=0.0)
        assert_close(first[0], first[1])
        for number, net in enumerate((both.model, both.alone)):
            with torch.no_grad():
                for parameter, grad in zip(net.parameters(), first[number], strict=True):
                    parameter.sub_(grad, alpha=0.05)
        both.step()
    both.close()


@on("2 ranks", "2 hosts")
def gradients_of_several_tasks_may_be_projected() -> None:
    both = Twins(idle_steps=True)
    for step in range(3):
        for net, own, tasks in (
            (both.model, both.optimizer, [tuple(map(mine, batch(10 * step + task))) for task in range(3)]),
            (both.alone, both.reference, [batch(10 * step + task) for task in range(3)]),
        ):
            found = []
            for x, y in tasks:
                own.zero_grad()
                loss_of(net, x, y).backward()
                found.append(grads(net))  # as they are, without a copy
            flat = [torch.cat([grad.flatten() for grad in each]) for each in found]
            for one in range(3):
                for other in range(3):
                    product = torch.dot(flat[one], flat[other])
                    if one != other and product < 0:
                        flat[one] = flat[one] - product / flat[other].norm() ** 2 * flat[other]
            parts = (flat[0] + flat[1] + flat[2]).split([parameter.numel() for parameter in net.parameters()])
            for parameter, part in zip(net.parameters(), parts, strict=True):
                parameter.grad = part.view_as(parameter)
            own.step()
    both.close(rtol=1e-7)


@on("2 ranks")
def a_gradient_that_is_not_cleared_stays_the_same_tensor_for_who_has_it() -> None:
    for kept_before in (False, True):
        both = Twins()
        both.backward(0)
        before = grads(both.model) if kept_before else []  # then there are copies from now on
        if kept_before:
            both.zero_grad()
            both.backward(0)
            assert all(use_spare(both.model, both.optimizer))
        held = grads(both.model)
        for step in range(1, 4):
            both.optimizer.zero_grad(set_to_none=False)
            both.reference.zero_grad(set_to_none=False)
            if step == 2:  # and some have none
                both.model[4].bias.grad = both.alone[4].bias.grad = None
            both.backward(step)
            both.assert_same_grads()
            still = [one is other for one, other in zip(held, grads(both.model), strict=True)]
            assert still == [True] * 5 + [step == 1], (kept_before, step)
            assert_close(held[:5], grads(both.alone)[:5])
            both.step()
        both.backward(3)  # on top of the results of before
        both.assert_same_grads()
        assert_close(held[:5], grads(both.alone)[:5])
        del before
        both.optimizer.close()


@on("2 ranks", "2 hosts")
def sparse_gradients_and_those_of_unused_parameters_are_kept() -> None:
    torch.manual_seed(4)
    model: Any = nn.ModuleDict(
        {
            "table": nn.Embedding(200, 50, sparse=True),
            "often": nn.Linear(50, 200),  # large
            "sometimes": nn.Linear(50, 4),
            "never": nn.Linear(50, 4),
        }
    ).double()
    alone, keeper = copy.deepcopy(model), Keeper()
    optimizer, reference = distributed(model), sgd(alone.parameters())
    held: list[tuple[Tensor, Tensor]] = []

    def loss(net: Any, rank: int, step: int) -> Any:
        x = net["table"](torch.tensor([rank, step, 7]))
        total = net["often"](x).pow(2).mean()
        return total + net["sometimes"](x).pow(2).mean() if (rank + step) % 2 else total

    for step in range(6):
        optimizer.zero_grad()
        reference.zero_grad()
        loss(model, ronde.rank(), step).backward()
        total: Any = sum(loss(alone, rank, step) for rank in range(ronde.size())) / ronde.size()
        total.backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                assert_close([ours.grad.to_dense()], [theirs.grad.to_dense()])
        held.append((model["table"].weight.grad, model["table"].weight.grad.clone()))
        for parameter in (*model["often"].parameters(), *model["sometimes"].parameters()):
            keeper.keep("the tensor", parameter.grad)
        optimizer.step()
        reference.step()
        keeper.check()
        for grad, value in held:
            assert torch.equal(grad.to_dense(), value.to_dense())
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks")
def all_dtypes_and_orders_of_elements_are_kept() -> None:
    torch.manual_seed(5)
    parameters = [
        nn.Parameter(torch.randn(3, dtype=torch.float32)),  # the next one begins in the middle of a complex number
        nn.Parameter(torch.randn(2, 5, dtype=torch.complex64)),
        nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(200, 100).t()),
        nn.Parameter(torch.randn(7, dtype=torch.bfloat16)),
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.randn(0, 3)),
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(4):
        optimizer.zero_grad()
        total: Any = sum((parameter.abs() ** 2).sum().float() for parameter in parameters)
        (total * (step + 1) * (ronde.rank() * 2 + 1)).backward()  # twice the gradient, on the mean of 2 ranks
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            expected = 4 * (step + 1) * parameter.detach()
            torch.testing.assert_close(parameter.grad, expected, rtol=0.02, atol=0.02)
            kept.append((parameter.grad, parameter.grad.clone()))
        optimizer.step()
        assert all(torch.equal(grad, value) for grad, value in kept)
    optimizer.close()


@on("2 ranks")
def what_was_kept_stays_when_other_parameters_train() -> None:
    model, keeper = perceptron(), Keeper()
    optimizer = distributed(model)
    for step in range(6):
        model[2].requires_grad_(step not in (2, 3))
        optimizer.zero_grad()
        backward(model, step)
        assert_same_on_all_ranks([grad for p in model.parameters() if (grad := p.grad) is not None])
        for parameter in model.parameters():
            if parameter.grad is not None:
                keeper.keep("detach()" if step % 2 else "the tensor", parameter.grad)
        optimizer.step()
        keeper.check()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks", "2 hosts")
def a_rank_that_joins_keeps_its_gradients() -> None:
    model = perceptron()
    optimizer = distributed(model)
    keeper = Keeper()
    for step in range(4 if ronde.rank() else 2):
        optimizer.zero_grad()
        backward(model, step)
        if step:
            keeper.keep("the tensor", model[2].weight.grad)
        optimizer.step()
    own = [grad.clone() for grad in grads(model)]
    ronde.join()
    keeper.check()
    assert_close(grads(model), own, rtol=0.0, atol=0.0)
    optimizer.close()


@on("2 ranks", "2 hosts")
def without_counts_of_references_gradients_are_never_memory_of_a_bucket() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "can_count_references", lambda: False)
        for settings in ({}, {"bucket_mb": 0.005, "overlap": True}, {"codec": Halves()}):
            both, keeper = Twins(**settings), Keeper()
            for step in range(4):
                both.model[0].requires_grad_(step != 2)
                both.alone[0].requires_grad_(step != 2)
                both.zero_grad()
                both.backward(step)
                ours = [parameter.grad for parameter in both.model.parameters() if parameter.grad is not None]
                theirs = [parameter.grad for parameter in both.alone.parameters() if parameter.grad is not None]
                assert_close(ours, theirs, rtol=0.01 if settings.get("codec") else 1e-9, atol=0.01)
                for grad in ours:
                    keeper.keep("numpy()", grad)
                both.step()
                keeper.check()
            both.close(rtol=0.01, atol=0.01)
        weight = nn.Parameter(torch.zeros(4))
        optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op="sum")
        loss: Any = weight.sum()
        loss.backward()
        with pytest.raises(ValueError, match="on top of one"):
            loss = weight.sum()
            loss.backward()
        optimizer.close()


@on("2 ranks", "2 hosts")
def gradients_that_are_set_by_hand_stay_as_they_were_set() -> None:
    model = perceptron()
    optimizer = distributed(model)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(4):
        x, y = batch(step)
        found = torch.autograd.grad(loss_of(model, mine(x), mine(y)), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), found, strict=True):
            parameter.grad = grad
            kept.append((grad, grad.clone()))
        optimizer.step()
        kept += [(grad, grad.clone()) for grad in grads(model)]  # the results
        assert all(torch.equal(grad, value) for grad, value in kept)
    optimizer.close()


@on("2 ranks", "2 hosts")
def the_memory_of_kept_gradients_is_bounded() -> None:
    weight = nn.Parameter(torch.zeros(1_000_000))
    small = nn.Parameter(torch.zeros(10))
    optimizer = DistributedOptimizer(torch.optim.SGD([weight, small], lr=0.1))
    kept: list[Any] = []
    sizes = []
    for step in range(50):
        optimizer.zero_grad()
        total: Any = weight.sum() * (ronde.rank() + step) + small.sum()
        total.backward()
        kept.append((weight.grad, small.grad))
        if step >= 20:
            kept[-1] = small.grad  # of all others only these few numbers
        del kept[:-2], total
        sizes.append(psutil.Process().memory_info().rss)
        assert np.isclose(float(optimizer.param_groups[0]["params"][0].grad[0]), (ronde.size() - 1) / 2 + step)
        optimizer.step()
    # The allocator keeps some of what was freed for a while, but not what is kept in every step.
    limit_bytes = 6 * weight.nbytes
    assert min(sizes[-5:]) - min(sizes[3:8]) < limit_bytes, sizes
    assert max(sizes[5:]) - sizes[4] < 2 * limit_bytes, sizes
    kept.clear()
    optimizer.close()
