"""What a step is made of: several passes or none, passes inside of others, clipping; and all of it compiled."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde
from ronde.torch import DistributedOptimizer
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


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@on("2 ranks")
def a_step_that_was_given_up_does_not_count() -> None:
    model, judge = perceptron(), nn.Linear(3, 1).double()
    alone = twin(model)
    optimizer = DistributedOptimizer(sgd(model), passes=2)
    other = DistributedOptimizer(sgd(judge))
    for step in range(3):
        x, y = batch(step)
        judge(model(mine(x))).sum().backward()  # for the judge, but it reaches the model
        other.step()
        other.zero_grad()
        optimizer.zero_grad()
        alone.zero_grad()
        for _ in range(2):
            loss_of(model, mine(x), mine(y)).backward()
        loss_of(alone, x, y).backward()
        assert_close(grads(model), grads(alone))
        optimizer.step()
        optimizer.zero_grad()
        alone.load_state_dict(model.state_dict())
    optimizer.close()
    other.close()


class Whole(nn.Module):
    """A model of which every part is computed again in backward, by reentrant checkpoints."""

    def __init__(self, net: nn.Sequential, way: str) -> None:
        super().__init__()
        self.net = net
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "one":
            return self._again(self.net, x)
        if self.way == "nested":
            return self._again(lambda x: self.net[2:](self._again(self.net[:2], x)), x)
        for part in (self.net[:2], self.net[2:4], self.net[4:]):
            x = self._again(part, x)
        return x

    def _again(self, part: Any, x: Tensor) -> Tensor:  # anything that can be called
        result: Tensor = checkpoint(part, x, use_reentrant=True)
        return result


@on("2 ranks")
def everything_may_be_inside_of_checkpoints() -> None:
    for way in ("one", "three", "nested"):
        for passes, bucket_mb in ((1, None), (2, None), (1, 0.001)):
            model = Whole(perceptron(), way)
            alone = twin(model)
            optimizer = DistributedOptimizer(sgd(model), op="sum", passes=passes, bucket_mb=bucket_mb)
            for step in range(3):
                x, y = batch(step)
                optimizer.zero_grad()
                alone.zero_grad()
                for _ in range(passes):
                    loss_of(model, mine(x).requires_grad_(), mine(y)).backward()
                loss_of(alone, x.clone().requires_grad_(), y).backward()
                assert_close([grad / 2 for grad in grads(model)], grads(alone))  # when backward() returns
                optimizer.step()
                alone.load_state_dict(model.state_dict())
            assert_same_on_all_ranks(model.parameters())
            optimizer.close()


@on("2 ranks")
def an_overflow_inside_of_checkpoints_skips_the_step_on_all() -> None:
    model = Whole(perceptron(torch.float32), "three")
    optimizer = DistributedOptimizer(sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        x, y = batch(step, torch.float32)
        optimizer.zero_grad()
        loss = loss_of(model, mine(x).requires_grad_(), mine(y))
        scaler.scale(loss * float("inf") if (step, ronde.rank()) == (1, 1) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks")
def a_step_that_ends_early_is_clipped_after_synchronize() -> None:
    for scaled in (False, True):
        for counts in ((2, 2), (3, 1), *([] if scaled else [(1, 0)])):  # of 3 passes, on the two ranks
            model = perceptron()
            alone = twin(model)
            optimizer = DistributedOptimizer(sgd(model), passes=3)
            reference = sgd(alone)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
            for step in range(2):
                x, y = batch(step)
                optimizer.zero_grad()
                reference.zero_grad()
                for _ in range(counts[ronde.rank()]):
                    scaler.scale(loss_of(model, mine(x), mine(y))).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                half = len(x) // 2
                shares = [loss_of(alone, x[:half], y[:half]), loss_of(alone, x[half:], y[half:])]
                (sum(share for share, count in zip(shares, counts, strict=True) if count) / 2).backward()
                nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                reference.step()
            assert_close(model.parameters(), alone.parameters(), rtol=1e-6)
            assert_same_on_all_ranks(model.parameters())
            optimizer.close()


@on("2 ranks")
def a_whole_step_may_be_compiled() -> None:
    for backend, passes in (("eager", 1), ("aot_eager", 2)):
        model = perceptron()
        alone = twin(model)
        optimizer = DistributedOptimizer(sgd(model), passes=passes)
        reference = sgd(alone)

        def train(x: Tensor, y: Tensor, own: Any = optimizer, net: Any = model, passes: int = passes) -> None:
            own.zero_grad()
            for _ in range(passes):
                loss_of(net, x, y).backward()
            own.step()

        compiled: Any = torch.compile(train, backend=backend)
        for step in range(3):
            x, y = batch(step)
            reference.zero_grad()
            if step == 1 and ronde.rank() == 1:  # a rank may also have no pass
                optimizer.zero_grad()
                optimizer.step()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch's own, of its own parts
                    compiled(mine(x), mine(y))
            rows = slice(len(x) // 2) if step == 1 else slice(None)
            loss: Any = loss_of(alone, x[rows], y[rows])
            (loss / 2 if step == 1 else loss).backward()
            reference.step()
        assert_close(model.parameters(), alone.parameters())
        assert_same_on_all_ranks(model.parameters())
        optimizer.close()
    torch.compiler.reset()
