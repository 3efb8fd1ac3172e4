"""Models that do not keep still: branches, frozen parts, sparse tables, checkpoints, dtypes, several optimizers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde
from ronde.torch import DistributedOptimizer, gradient_buckets
from tests.jobs.torch_checks.checks import (
    Twins,
    assert_close,
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


class Branches(nn.Module):
    """Two ways through it, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Linear(10, 6)
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.nobody = nn.Linear(6, 3)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = (self.left if left else self.right)(self.trunk(x))
        return result


@on("2 ranks", "2 hosts")
def branches_that_some_ranks_do_not_use_just_work() -> None:
    for bucket_mb in (None, 0.0001):
        both = Twins(
            Branches().double(), lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), bucket_mb=bucket_mb
        )
        model, alone = both.model, both.alone
        for step in range(4):
            x, y = batch(step)
            both.zero_grad()
            turn = step % 3 == 0  # now and then all take the same way
            loss_of(lambda x: model(x, turn or ronde.rank() == 0), mine(x), mine(y)).backward()  # noqa: B023
            half = len(x) // 2
            first: Any = nn.functional.mse_loss(alone(x[:half], True), y[:half])
            second = nn.functional.mse_loss(alone(x[half:], turn), y[half:])
            ((first + second) / 2).backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                if ours.grad is not None:
                    assert_close([ours.grad], [theirs.grad])
            assert model.nobody.weight.grad is None
            both.step()
        both.close()


@on("2 ranks")
def frozen_parts_cost_nothing_and_may_thaw() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    both = Twins(model)
    sizes = []
    for step in range(6):
        for net in (model, both.alone):
            net[0].requires_grad_(step >= 2)
            net[4].requires_grad_(step < 4)
        both.zero_grad()
        before = ronde.metrics().of(0, "bucket").bytes
        both.backward(step)
        sizes.append(ronde.metrics().of(0, "bucket").bytes - before)
        found, expected = (
            [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
            for net in (model, both.alone)
        )
        assert_close(found, expected)
        both.step()
    first = sum(parameter.numel() for parameter in model[0].parameters())
    rest = sum(parameter.numel() for parameter in model[2:].parameters())
    assert 8 * rest <= sizes[1] < 8 * rest + 100
    assert 8 * (first + rest) <= sizes[3] < 8 * (first + rest) + 100
    assert sizes[5] < sizes[3]
    both.close()


@on("2 ranks")
def a_group_of_parameters_may_be_added_later() -> None:
    model = perceptron()
    named = list(model.named_parameters())[:4]
    both = Twins(model, lambda params: sgd(list(params)[:4]), named_parameters=named)
    for step in range(4):
        if step == 2:
            both.optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.2})
            both.reference.add_param_group({"params": both.alone[4].parameters(), "lr": 0.2})
        model.zero_grad()
        both.alone.zero_grad()
        both.backward(step)
        both.step()
    both.close()


@on("2 ranks")
def two_losses_may_be_sent_back_one_after_the_other() -> None:
    both = Twins()
    for step in range(2):
        x, y = batch(step)
        both.zero_grad()
        for net, a, b in ((both.model, mine(x), mine(y)), (both.alone, x, y)):
            loss_of(net, a, b).backward()
            loss_of(net[2:4], net[:2](a).detach(), torch.zeros(len(a), 90, dtype=a.dtype)).backward()
        both.assert_same_grads()
    both.close()


@on("2 ranks")
def two_optimizers_may_share_a_backward_pass() -> None:
    first, second = pairs = Twins(perceptron()), Twins(perceptron()[0])
    for step in range(4):
        x, y = batch(step)
        for both in pairs:
            both.zero_grad()
        order = (0, 1) if ronde.rank() == 0 else (1, 0)  # whose gradients come first differs between ranks
        losses = [loss_of(first.model, mine(x), mine(y)), second.model(mine(x)).pow(2).mean()]
        (losses[order[0]] + losses[order[1]]).backward()
        (loss_of(first.alone, x, y) + second.alone(x).pow(2).mean()).backward()
        for both in pairs:
            both.assert_same_grads()
            both.step()
    for both in pairs:
        both.close()


@on("2 ranks")
def gradients_that_were_combined_have_no_graph() -> None:
    both = Twins()
    x, y = batch(0)
    for _ in range(2):  # before there are buckets, and with them
        both.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that graphs of gradients may keep memory: ours do not
            loss_of(both.model, mine(x), mine(y)).backward(create_graph=True)
        assert not any(grad.requires_grad for grad in grads(both.model))
    loss_of(both.alone, x, y).backward()
    both.assert_same_grads()
    both.close()


@on("2 ranks")
def a_compiled_model_trains_too() -> None:
    for backend in ("eager", "aot_eager"):
        both = Twins()
        both.train(3, net=torch.compile(both.model, backend=backend))
        both.close()
    torch.compiler.reset()


class Checkpointed(nn.Module):
    """Its middle is computed again in backward."""

    def __init__(self, net: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.net = net
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.net[:2], x, use_reentrant=self.reentrant)
        again: Any = checkpoint(self.net[2:4], hidden, use_reentrant=self.reentrant)
        result: Tensor = self.net[4](again)
        return result


@on("2 ranks")
def checkpoints_of_both_kinds_work() -> None:
    for reentrant in (True, False):
        for bucket_mb in (None, 0.001):
            both = Twins(Checkpointed(perceptron(), reentrant), op="sum", bucket_mb=bucket_mb)
            for step in range(3):
                x, y = batch(step)
                both.zero_grad()
                loss_of(both.model, mine(x).requires_grad_(), mine(y)).backward()
                loss_of(both.alone, x.clone().requires_grad_(), y).backward()
                both.optimizer.synchronize()
                both.assert_same_grads(factor=2)
            both.close()


@on("2 ranks", "2 hosts")
def dense_and_sparse_gradients_live_together() -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        table, head = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)
        both = Twins(nn.ModuleList([table, head]).double(), passes=2, sparse_as_dense=as_dense)
        their_table, their_head = both.alone
        for step in range(3):
            words = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(step))
            both.zero_grad()
            for half in (words[:8], words[8:]):
                head(table(mine(half))).pow(2).mean().backward()
            their_head(their_table(words)).pow(2).mean().backward()
            grad: Any = table.weight.grad
            assert grad.is_sparse != as_dense
            assert_close([grad.to_dense()], [their_table.weight.grad.to_dense()])
            assert_close(grads(head), grads(their_head))
            both.optimizer.step()
            both.alone.load_state_dict(both.model.state_dict())
        both.close()


@on("2 ranks")
def parameters_of_all_kinds_of_numbers_travel() -> None:
    torch.manual_seed(0)
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
    ours = [nn.Parameter(torch.ones(3, 5, dtype=kind)) for kind in kinds]
    ours += [nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.empty(0, 3))]
    optimizer = DistributedOptimizer(torch.optim.SGD(ours, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        total: Any = sum((each * each.conj()).real.float().sum() for each in ours) * (1.0 + ronde.rank())
        total.backward()
        for each in ours:
            grad = each.grad
            assert grad is not None and grad.dtype is each.dtype
            assert torch.equal(grad, 3 * each.detach()), each.dtype
    optimizer.close()


@on("2 ranks")
def gradients_keep_the_order_of_their_parameters_in_memory() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = distributed(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3, 8, 8) * (1 + ronde.rank())).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.stride() == model.weight.stride()
        assert_close([model.weight.grad], [torch.full((5, 3, 3, 3), 36 * 1.5)])
    optimizer.close()


@on("2 ranks")
def a_backward_pass_may_run_in_another_thread() -> None:
    both = Twins()
    for step in range(2):
        x, y = batch(step)
        both.zero_grad()
        thread = threading.Thread(target=loss_of(both.model, mine(x), mine(y)).backward)
        thread.start()
        thread.join()
        loss_of(both.alone, x, y).backward()
        both.assert_same_grads()
    both.close()


@on("2 ranks")
def gradients_on_another_device_travel_through_the_host() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "is_on_device", lambda parameter: True)  # the host plays the other device
        both = Twins(bucket_mb=0.01)
        both.train(2, net=both.model if ronde.rank() == 0 else both.model[:5])
        both.close()


@on("2 ranks")
def nothing_is_warned_about() -> None:
    model = perceptron()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = distributed(model)
        backward(model, 0)
        optimizer.step()
        optimizer.close()
