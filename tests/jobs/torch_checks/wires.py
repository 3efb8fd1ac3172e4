"""What travels and how it is combined: codecs, adasum, sums, groups of ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ronde
from ronde.comm.buffers import Array
from ronde.torch import DistributedOptimizer
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
)


@on("2 ranks", "2 hosts")
def fewer_bits_on_the_wire_are_fewer_bytes_and_nearly_the_same_gradients() -> None:
    sizes = {}
    for codec, rtol in ((None, 1e-5), ("float16", 2e-3), ("bfloat16", 2e-2)):
        both = Twins(perceptron(torch.float32), codec=codec, bucket_mb=0.02)
        for step in range(3):
            before = ronde.metrics().of(0, "bucket").bytes
            both.zero_grad()
            both.backward(step, torch.float32)
            sizes[codec] = ronde.metrics().of(0, "bucket").bytes - before
            assert_close(grads(both.model), grads(both.alone), rtol=rtol, atol=1e-3)
        assert_same_on_all_ranks(grads(both.model))
        both.close()
    assert sizes["float16"] == sizes["bfloat16"] < 0.51 * sizes[None]


class Strongest:
    """Sends only the larger half of each bucket, and keeps the rest for later: error feedback."""

    name = "strongest"

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> Kept:
        return Kept(bucket.count)


class Kept:
    def __init__(self, count: int) -> None:
        self.wires = (WireArray(count, "float32"),)
        self._rest = np.zeros(count, np.float32)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        self._rest += gradients
        strong = np.abs(self._rest) >= np.median(np.abs(self._rest))
        wires[0][:] = np.where(strong, self._rest, 0)
        self._rest[strong] = 0

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        gradients[:] = wires[0]


@on("2 ranks")
def a_codec_of_ones_own_may_keep_what_it_did_not_send() -> None:
    model = perceptron(torch.float32)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), codec=Strongest())
    losses = []
    x, y = batch(0, torch.float32)
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, mine(x), mine(y))
        loss.backward()
        assert sum(int((grad == 0).sum()) for grad in grads(model)) > 1000
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks", "2 hosts")
def adasum_weighs_each_gradient_by_itself() -> None:
    model = perceptron()
    optimizer = distributed(model, op="adasum")
    for step in range(2):
        x, y = batch(step)
        expected = []
        both = []
        for half in (slice(0, 8), slice(8, 16)):
            other = copy.deepcopy(model)
            other.zero_grad()
            loss_of(other, x[half], y[half]).backward()
            both.append(grads(other))
        for a, b in zip(*both, strict=True):
            dot = (a * b).sum()
            expected.append((1 - dot / (2 * a.pow(2).sum())) * a + (1 - dot / (2 * b.pow(2).sum())) * b)
        optimizer.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
        assert_close(grads(model), expected)
        optimizer.step()
    optimizer.close()


@on("4 ranks")
def adasum_of_four_ranks_is_the_same_on_all() -> None:
    model = perceptron(torch.float32)
    optimizer = distributed(model, op="adasum", bucket_mb=0.01)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, torch.float32)
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks")
def sums_and_means_divided_in_two_steps_are_what_they_say() -> None:
    cases: list[tuple[dict[str, Any], float]] = [
        ({"op": "sum"}, 3.0),
        ({"op": "mean", "predivide": 4.0}, 1.5),
        ({"op": "mean", "passes": 2}, 1.5),
        ({"op": "mean", "passes": 2, "average_passes": False}, 3.0),
        ({"op": "sum", "passes": 2}, 3.0),
        ({"op": "mean", "together": (("0.weight", "4.bias"),)}, 1.5),
    ]
    for settings, expected in cases:
        model = perceptron()
        named = model.named_parameters()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=named, **settings
        )
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(settings.get("passes", 1)):
                total: Any = sum(parameter.sum() for parameter in model.parameters())
                (total * (1 + ronde.rank())).backward()
            assert all(bool((grad == expected).all()) for grad in grads(model)), settings
        optimizer.close()


@on("4 ranks")
def a_trunk_averages_over_all_ranks_and_each_head_over_those_of_its_task() -> None:
    tasks = [ronde.add_group([0, 1]), ronde.add_group([2, 3])]
    task = ronde.rank() // 2
    torch.manual_seed(2)
    trunk, heads = nn.Linear(10, 6).double(), nn.ModuleList([nn.Linear(6, 3).double(), nn.Linear(6, 3).double()])
    whole: Any = copy.deepcopy(nn.ModuleList([trunk, heads]))
    parameters: list[dict[str, Any]] = [
        {"params": trunk.parameters()},
        *[{"params": head.parameters(), "group": group} for head, group in zip(heads, tasks, strict=True)],
    ]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = batch(step)
        if step == 2:
            optimizer.reset()  # agrees anew; the groups are those there are
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(heads[task], trunk(mine(x)), mine(y)).backward()
        halves = [
            nn.functional.mse_loss(whole[1][each](whole[0](x[rows])), y[rows])
            for each, rows in enumerate((slice(0, 8), slice(8, 16)))
        ]
        total: Any = sum(halves) / 2
        total.backward()
        theirs = [2 * grad for grad in grads(whole[1][task])]  # a head is an average over its own half
        assert_close([*grads(trunk), *grads(heads[task])], [*grads(whole[0]), *theirs])
        for parameter in whole[1].parameters():
            parameter.grad.mul_(2)
        optimizer.step()
        reference.step()
    assert_close(
        [*trunk.parameters(), *heads[task].parameters()], [*whole[0].parameters(), *whole[1][task].parameters()]
    )
    assert "group" not in optimizer.state_dict()["param_groups"][1]
    optimizer.close()
    for group in tasks:
        ronde.remove_group(group)
    with pytest.raises(
        ValueError, match=rf"<Group {tasks[0].id}: ranks 0, 1> no longer exists; close\(\) this optimizer"
    ):
        optimizer.reset()


@on("4 ranks")
def ranks_outside_of_the_group_train_by_themselves() -> None:
    group = ronde.add_group([1, 3])
    model = perceptron()
    optimizer = distributed(model, group=group)
    for _ in range(2):
        optimizer.zero_grad()
        total: Any = sum(parameter.sum() for parameter in model.parameters())
        (total * ronde.rank()).backward()
        expected = 2.0 if group.included else float(ronde.rank())
        assert all(bool((grad == expected).all()) for grad in grads(model))
        optimizer.step()
    optimizer.close()
    ronde.remove_group(group)
