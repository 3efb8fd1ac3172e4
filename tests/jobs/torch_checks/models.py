"""Models that do not keep still: branches, frozen parts, sparse tables, checkpoints, dtypes, several optimizers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde
from ronde.torch import DistributedOptimizer, adapter
from tests.jobs.torch_checks.checks import (
    assert_close,
    assert_same_on_all_ranks,
    batch,
    grads,
    loss_of,
    mine,
    on,
    perceptron,
    twin,
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
        model = Branches().double()
        alone = twin(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), bucket_mb=bucket_mb)
        reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            reference.zero_grad()
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
            optimizer.step()
            reference.step()
        assert_close(model.parameters(), alone.parameters())
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()


@on("2 ranks")
def frozen_parts_cost_nothing_and_may_thaw() -> None:
    model = perceptron()
    alone = twin(model)
    for net in (model, alone):
        net[0].requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    sizes = []
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(True)
            alone[0].requires_grad_(True)
        if step == 4:
            model[4].requires_grad_(False)
            alone[4].requires_grad_(False)
        x, y = batch(step)
        optimizer.zero_grad()
        reference.zero_grad()
        before = ronde.metrics().of(0, "bucket").bytes
        loss_of(model, mine(x), mine(y)).backward()
        sizes.append(ronde.metrics().of(0, "bucket").bytes - before)
        loss_of(alone, x, y).backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert_close(
            [p.grad for p in trained if p.grad is not None], [p.grad for p in alone.parameters() if p.grad is not None]
        )
        optimizer.step()
        reference.step()
    assert_close(model.parameters(), alone.parameters())
    first = sum(parameter.numel() for parameter in model[0].parameters())
    rest = sum(parameter.numel() for parameter in model[2:].parameters())
    assert 8 * rest <= sizes[1] < 8 * rest + 100
    assert 8 * (first + rest) <= sizes[3] < 8 * (first + rest) + 100
    assert sizes[5] < sizes[3]
    optimizer.close()


@on("2 ranks")
def a_group_of_parameters_may_be_added_later() -> None:
    model = perceptron()
    alone = twin(model)
    named = list(model.named_parameters())[:4]
    optimizer = DistributedOptimizer(torch.optim.SGD(model[:3].parameters(), lr=0.1), named_parameters=named)
    reference = torch.optim.SGD(alone[:3].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.2})
            reference.add_param_group({"params": alone[4].parameters(), "lr": 0.2})
        x, y = batch(step)
        model.zero_grad()
        alone.zero_grad()
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(alone, x, y).backward()
        optimizer.step()
        reference.step()
    assert_close(model.parameters(), alone.parameters())
    optimizer.close()


@on("2 ranks")
def two_losses_may_be_sent_back_one_after_the_other() -> None:
    model = perceptron()
    alone = twin(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        alone.zero_grad()
        for net, a, b in ((model, mine(x), mine(y)), (alone, x, y)):
            loss_of(net, a, b).backward()
            loss_of(net[2:4], net[:2](a).detach(), torch.zeros(len(a), 90, dtype=a.dtype)).backward()
        assert_close(grads(model), grads(alone))
    optimizer.close()


@on("2 ranks")
def two_optimizers_may_share_a_backward_pass() -> None:
    ours, theirs = [perceptron(), perceptron()[0]], []
    theirs = [twin(net) for net in ours]
    optimizers = [DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)) for net in ours]
    references = [torch.optim.SGD(net.parameters(), lr=0.1) for net in theirs]
    for step in range(4):
        x, y = batch(step)
        for each in (*optimizers, *references):
            each.zero_grad()
        order = (0, 1) if ronde.rank() == 0 else (1, 0)  # whose gradients come first differs between ranks
        losses = [loss_of(ours[0], mine(x), mine(y)), ours[1](mine(x)).pow(2).mean()]
        (losses[order[0]] + losses[order[1]]).backward()
        (loss_of(theirs[0], x, y) + theirs[1](x).pow(2).mean()).backward()
        for net, other in zip(ours, theirs, strict=True):
            assert_close(grads(net), grads(other))
        for each in (*optimizers, *references):
            each.step()
    for each in optimizers:
        each.close()


@on("2 ranks")
def gradients_that_were_combined_have_no_graph() -> None:
    model = perceptron()
    alone = twin(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    for _ in range(2):  # before there are buckets, and with them
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that graphs of gradients may keep memory: ours do not
            loss_of(model, mine(x), mine(y)).backward(create_graph=True)
        assert not any(grad.requires_grad for grad in grads(model))
    loss_of(alone, x, y).backward()
    assert_close(grads(model), grads(alone))
    optimizer.close()


@on("2 ranks")
def a_compiled_model_trains_too() -> None:
    for backend in ("eager", "aot_eager"):
        model = perceptron()
        alone = twin(model)
        compiled: Any = torch.compile(model, backend=backend)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            alone.zero_grad()
            loss_of(compiled, mine(x), mine(y)).backward()
            loss_of(alone, x, y).backward()
            assert_close(grads(model), grads(alone))
        optimizer.close()
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
            model = Checkpointed(perceptron(), reentrant)
            alone = twin(model)
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op="sum", bucket_mb=bucket_mb)
            for step in range(3):
                x, y = batch(step)
                optimizer.zero_grad()
                alone.zero_grad()
                loss_of(model, mine(x).requires_grad_(), mine(y)).backward()
                loss_of(alone, x.clone().requires_grad_(), y).backward()
                optimizer.synchronize()
                assert_close([grad / 2 for grad in grads(model)], grads(alone))
            optimizer.close()


@on("2 ranks", "2 hosts")
def dense_and_sparse_gradients_live_together() -> None:
    for as_dense in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"table": nn.Embedding(20, 4, sparse=True), "head": nn.Linear(4, 2)}).double()
        alone = twin(model)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(plain, passes=2, sparse_as_dense=as_dense)
        for step in range(3):
            words = torch.randint(0, 20, (16,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            alone.zero_grad()
            for half in (words[:8], words[8:]):
                model["head"](model["table"](mine(half))).pow(2).mean().backward()
            alone["head"](alone["table"](words)).pow(2).mean().backward()
            grad: Any = model["table"].weight.grad
            assert grad.is_sparse != as_dense
            assert_close([grad.to_dense()], [alone["table"].weight.grad.to_dense()])
            assert_close(grads(model["head"]), grads(alone["head"]))
            optimizer.step()
            with torch.no_grad():
                for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                    theirs.copy_(ours)
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()


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
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3, 8, 8) * (1 + ronde.rank())).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.stride() == model.weight.stride()
        assert_close([model.weight.grad], [torch.full((5, 3, 3, 3), 36 * 1.5)])
    optimizer.close()


@on("2 ranks")
def a_backward_pass_may_run_in_another_thread() -> None:
    model = perceptron()
    alone = twin(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        alone.zero_grad()
        loss = loss_of(model, mine(x), mine(y))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        loss_of(alone, x, y).backward()
        assert_close(grads(model), grads(alone))
    optimizer.close()


@on("2 ranks")
def gradients_on_another_device_travel_through_the_host() -> None:
    real = adapter.is_on_device
    adapter.is_on_device = lambda parameter: True  # the host plays the other device
    try:
        model = perceptron()
        alone = twin(model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.01)
        for step in range(2):
            x, y = batch(step)
            optimizer.zero_grad()
            alone.zero_grad()
            loss_of(model if ronde.rank() == 0 else model[:5], mine(x), mine(y)).backward()
            loss_of(alone, x, y).backward()
            assert_close(grads(model), grads(alone))
        optimizer.close()
    finally:
        adapter.is_on_device = real


@on("2 ranks")
def nothing_is_warned_about() -> None:
    model = perceptron()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        x, y = batch(0)
        loss_of(model, mine(x), mine(y)).backward()
        optimizer.step()
        optimizer.close()
