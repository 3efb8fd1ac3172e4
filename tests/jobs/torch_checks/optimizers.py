"""Every optimizer, and everything around one: closures, schedulers, scalers, clipping, states, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ronde
from ronde.comm.world import current_world
from ronde.torch import Distributed, DistributedOptimizer
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

SPECIAL = {"SparseAdam", "LBFGS", "Muon"}
"""Those that take other gradients or need a closure."""


def every_class() -> list[type[Optimizer]]:
    found = [each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer)]
    return [each for each in found if each is not Optimizer and each.__name__ not in SPECIAL]


@on("2 ranks")
def every_optimizer_of_torch_learns_what_it_would_from_the_whole_batch() -> None:
    kinds = every_class()
    assert len(kinds) >= 12
    for kind in kinds:
        make: Any = kind
        both = Twins(make=partial(make, lr=0.01))
        assert isinstance(both.optimizer, kind) and type(both.optimizer).__name__ == kind.__name__
        for step in range(3):
            both.zero_grad()
            both.backward(step)
            both.step()
        both.close(rtol=1e-6, atol=1e-8)


@on("2 ranks")
def muon_takes_the_matrices() -> None:
    if not hasattr(torch.optim, "Muon"):
        return
    both = Twins(make=lambda params: torch.optim.Muon([list(params)[2]], lr=0.01))
    for step in range(2):
        both.backward(step)
        both.step()
        both.zero_grad()
    ours, theirs = both.model[2].weight, both.alone[2].weight
    assert_same_on_all_ranks([ours])
    assert_close([ours], [theirs], rtol=1e-2, atol=1e-3)  # it computes in bfloat16
    both.optimizer.close()


@on("2 ranks", "2 hosts")
def lbfgs_calls_its_closure_equally_often_on_all_ranks() -> None:
    for line_search in (None, "strong_wolfe"):
        both = Twins(make=lambda params: torch.optim.LBFGS(params, max_iter=8, line_search_fn=line_search))  # noqa: B023
        x, y = batch(0)
        calls = [0, 0]

        def closure(
            index: int, own: Optimizer, net: nn.Module, x: Tensor, y: Tensor, calls: list[int] = calls
        ) -> Any:  # backward() has no types
            calls[index] += 1
            own.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()
            return loss

        first: Any = both.optimizer.step(lambda: closure(0, both.optimizer, both.model, mine(x), mine(y)))  # noqa: B023
        second = both.reference.step(lambda: closure(1, both.reference, both.alone, x, y))  # noqa: B023
        assert calls[0] == calls[1] > 2
        assert abs(first.item() - second.item()) < 1e-9
        both.close(rtol=1e-5, atol=1e-7)


@on("2 ranks", "2 hosts")
def sparse_adam_gets_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(50, 4, mode="sum", sparse=True).double()
    both = Twins(model, lambda params: torch.optim.SparseAdam(params, lr=0.1))
    for step in range(3):
        words = torch.randint(0, 50, (8, 3), generator=torch.Generator().manual_seed(step))
        both.zero_grad()
        model(mine(words)).pow(2).mean().backward()
        both.alone(words).pow(2).mean().backward()
        grad = model.weight.grad
        assert grad is not None and grad.is_sparse
        assert_close([grad.to_dense()], [both.alone.weight.grad.to_dense()])
        both.step()
    both.close()


@on("2 ranks")
def a_scheduler_may_come_before_or_after() -> None:
    for before in (True, False):
        schedules: list[Any] = []

        def make(params: Any, before: bool = before, schedules: list[Any] = schedules) -> torch.optim.SGD:
            made = sgd(params)
            if before:
                schedules.append(torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5))
            return made

        both = Twins(make=make)
        for optimizer in () if before else (both.optimizer, both.reference):
            schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        for step in range(3):
            both.zero_grad()
            both.backward(step)
            both.step()
            for schedule in schedules:
                schedule.step()
        assert both.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3
        both.close()


@on("2 ranks")
def gradients_can_be_clipped_right_after_backward() -> None:
    both = Twins(make=lambda params: torch.optim.SGD(params, lr=1.0))
    for step in range(3):
        both.zero_grad()
        both.backward(step)
        if step == 1:
            both.optimizer.synchronize()  # not needed, and does no harm
        ours = nn.utils.clip_grad_norm_(both.model.parameters(), 0.1)
        theirs = nn.utils.clip_grad_norm_(both.alone.parameters(), 0.1)
        assert_close([ours], [theirs])
        both.step()
    both.close()


@on("2 ranks")
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    model = perceptron(torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        x, y = batch(step, torch.float32)
        optimizer.zero_grad()
        loss = loss_of(model, mine(x), mine(y))
        if step != 1 and ronde.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = any(not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
        assert moved == (step > 0)
    assert scaler.get_scale() == 2.0**8
    assert_same_on_all_ranks(model.parameters())
    optimizer.close()


@on("2 ranks")
def gradients_may_be_set_to_zero_or_to_none() -> None:
    for to_none in (True, False):
        both = Twins(op="sum")
        places = []
        for step in range(3):
            both.backward(step)
            both.assert_same_grads(factor=2)
            places.append([grad.data_ptr() for grad in grads(both.model)])
            both.optimizer.step()
            both.optimizer.zero_grad(set_to_none=to_none)
            both.alone.zero_grad()
            both.alone.load_state_dict(both.model.state_dict())
            assert all((parameter.grad is None) == to_none for parameter in both.model.parameters())
        assert places[0] == places[1] == places[2], "gradients lie in their buckets"
        both.close()


@on("2 ranks")
def gradients_that_the_model_sets_to_zero_are_no_results() -> None:
    cases: list[tuple[dict[str, Any], float]] = [({"op": "sum"}, 2.0), ({"passes": 2}, 0.5)]
    for options, factor in cases:
        both = Twins(**options)
        for step in range(3):
            for net in (both.model, both.alone):
                net.zero_grad(set_to_none=False)  # of which the optimizer learns nothing
            for _ in range(both.optimizer.passes):
                both.backward(step)
            both.assert_same_grads(factor=factor)
            both.optimizer.step()
            both.alone.load_state_dict(both.model.state_dict())
        both.close()


@on("2 ranks", "2 hosts")
def gradients_may_get_other_data() -> None:
    for to_none in (True, False):
        for keep in (False, True):
            both = Twins()
            kept: list[tuple[Tensor, Tensor]] = []
            for step in range(4):
                both.optimizer.zero_grad(set_to_none=to_none)
                both.reference.zero_grad(set_to_none=to_none)
                both.backward(step)
                both.assert_same_grads()
                if keep:
                    kept += [(grad.detach(), grad.clone()) for grad in grads(both.model)]
                for grad in (*grads(both.model), *grads(both.alone)):
                    grad.data = grad.data.clamp(-0.01, 0.01)
                both.step()
            assert all(torch.equal(now, before) for now, before in kept)
            both.close()


@on("2 ranks")
def a_state_goes_out_and_in_again() -> None:
    model = perceptron()
    optimizer = DistributedOptimizer(
        torch.optim.Adam([{"params": model.parameters(), "group": ronde.world()}], lr=0.01)
    )

    def train(net: nn.Module, own: Optimizer, steps: range) -> None:
        for step in steps:
            x, y = batch(step)
            own.zero_grad()
            loss_of(net, mine(x), mine(y)).backward()
            own.step()

    train(model, optimizer, range(2))
    other = copy.deepcopy(model)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed = DistributedOptimizer(torch.optim.Adam(other.parameters(), lr=0.5))
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    train(model, optimizer, range(2, 4))
    train(other, resumed, range(2, 4))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    optimizer.close()
    resumed.close()


@on("2 ranks")
def copies_are_plain_optimizers() -> None:
    model = perceptron()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25))
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD and copied.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer, Distributed)
    optimizer.close()


@on("2 ranks")
def without_its_optimizer_a_model_is_like_any_other() -> None:
    model = perceptron()
    optimizer = distributed(model)
    x, y = batch(0)
    loss_of(model, mine(x), mine(y)).backward()
    for end in ("forgotten", "closed"):
        if end == "forgotten":
            del optimizer
            gc.collect()
        else:
            optimizer = distributed(model)
            loss_of(model, mine(x), mine(y)).backward()
            optimizer.close()
            optimizer.close()
        model.zero_grad()
        before = ronde.metrics().total.operations
        (loss_of(model, mine(x), mine(y)) * (ronde.rank() + 1)).backward()
        assert ronde.metrics().total.operations == before
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@on("2 ranks")
def steps_are_counted() -> None:
    model = perceptron()
    optimizer = distributed(model)
    before = current_world().recorder.steps
    for step in range(3):
        backward(model, step)
        optimizer.step()
    assert current_world().recorder.steps == before + 3
    optimizer.close()
