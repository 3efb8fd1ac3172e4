"""What a step is made of: several passes or none, passes inside of others, clipping; and all of it compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ronde
from tests.jobs.torch_checks.checks import (
    Twins,
    assert_same_on_all_ranks,
    batch,
    distributed,
    loss_of,
    mine,
    on,
    perceptron,
)


@on("2 ranks")
def a_step_that_was_given_up_does_not_count() -> None:
    both, judge = Twins(passes=2), nn.Linear(3, 1).double()
    other = distributed(judge)
    for step in range(3):
        x, y = batch(step)
        judge(both.model(mine(x))).sum().backward()  # for the judge, but it reaches the model
        other.step()
        other.zero_grad()
        both.zero_grad()
        for _ in range(2):
            loss_of(both.model, mine(x), mine(y)).backward()
        loss_of(both.alone, x, y).backward()
        both.assert_same_grads()
        both.step()
        both.optimizer.zero_grad()
    both.close()
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
            both = Twins(Whole(perceptron(), way), op="sum", passes=passes, bucket_mb=bucket_mb)
            for step in range(3):
                x, y = batch(step)
                both.zero_grad()
                for _ in range(passes):
                    loss_of(both.model, mine(x).requires_grad_(), mine(y)).backward()
                loss_of(both.alone, x.clone().requires_grad_(), y).backward()
                both.assert_same_grads(factor=2)  # when backward() returns
                both.optimizer.step()
                both.alone.load_state_dict(both.model.state_dict())
            both.close()


@on("2 ranks")
def an_overflow_inside_of_checkpoints_skips_the_step_on_all() -> None:
    model = Whole(perceptron(torch.float32), "three")
    optimizer = distributed(model)
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
            both = Twins(passes=3)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
            for step in range(2):
                x, y = batch(step)
                both.zero_grad()
                for _ in range(counts[ronde.rank()]):
                    scaler.scale(loss_of(both.model, mine(x), mine(y))).backward()
                both.optimizer.synchronize()
                scaler.unscale_(both.optimizer)
                nn.utils.clip_grad_norm_(both.model.parameters(), 0.1)
                half = len(x) // 2
                shares = [loss_of(both.alone, x[:half], y[:half]), loss_of(both.alone, x[half:], y[half:])]
                (sum(share for share, count in zip(shares, counts, strict=True) if count) / 2).backward()
                nn.utils.clip_grad_norm_(both.alone.parameters(), 0.1)
                scaler.step(both.optimizer)
                scaler.update()
                both.reference.step()
            both.close(rtol=1e-6)


@on("2 ranks")
def a_whole_step_may_be_compiled() -> None:
    for backend, passes in (("eager", 1), ("aot_eager", 2)):
        both = Twins(passes=passes)

        def train(x: Tensor, y: Tensor, own: Any = both.optimizer, net: Any = both.model, passes: int = passes) -> None:
            own.zero_grad()
            for _ in range(passes):
                loss_of(net, x, y).backward()
            own.step()

        compiled: Any = torch.compile(train, backend=backend)
        for step in range(3):
            x, y = batch(step)
            both.reference.zero_grad()
            if step == 1 and ronde.rank() == 1:  # a rank may also have no pass
                both.optimizer.zero_grad()
                both.optimizer.step()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch's own, of its own parts
                    compiled(mine(x), mine(y))
            rows = slice(len(x) // 2) if step == 1 else slice(None)
            loss: Any = loss_of(both.alone, x[rows], y[rows])
            (loss / 2 if step == 1 else loss).backward()
            both.reference.step()
        both.close()
    torch.compiler.reset()


@on("2 ranks", "2 hosts")
def a_pass_that_failed_on_all_ranks_is_forgotten() -> None:
    for overlap in (False, True):
        both = Twins(overlap=overlap, bucket_mb=0.01)
        fails = [False]

        def fail(grad: Tensor, fails: list[bool] = fails) -> Tensor:
            if fails[0]:
                raise RuntimeError("on purpose")
            return grad

        both.model[0].weight.register_hook(fail)  # the last gradient of the pass
        for step in range(4):
            both.model.zero_grad()  # of which the optimizer learns nothing
            both.alone.zero_grad()
            fails[0] = step == 2
            if fails[0]:
                with pytest.raises(RuntimeError, match="on purpose"):
                    both.backward(step)
                continue
            both.backward(step)
            both.assert_same_grads()  # when backward() returns
            both.step()
        both.close()


@on("2 ranks", "2 hosts")
def passes_of_two_optimizers_may_end_in_any_order_from_the_first_step_on() -> None:
    words, rank = torch.arange(4), ronde.rank()
    for sparse in (False, True):
        torch.manual_seed(0)
        twins = [nn.Embedding(4, 1, sparse=sparse).double() for _ in range(2)]
        twins[1].load_state_dict(twins[0].state_dict())
        optimizers: list[Any] = [distributed(net) for net in twins]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses: list[Any] = []  # what is computed last gets its gradient first
            if rank == 0 and step == 2:
                losses.append(twins[0](words[2:3]).sum() * 0)
            losses.append(twins[1](words[1:2]).sum() * (1 + rank))
            if rank == 1:
                losses.append(twins[0](words[2:3]).sum() * 100)
            sum(losses).backward()
            for optimizer, net, row, value in zip(optimizers, twins, (2, 1), (50.0, 1.5), strict=True):
                optimizer.step()
                assert net.weight.grad is not None
                assert net.weight.grad.to_dense().flatten().tolist() == [value * (word == row) for word in range(4)]
        for optimizer, net in zip(optimizers, twins, strict=True):
            assert_same_on_all_ranks(net.parameters())
            optimizer.close()
