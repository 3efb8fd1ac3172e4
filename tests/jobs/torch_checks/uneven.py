"""Batches that ranks do not divide evenly: gradients are those of the whole batch all the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ronde
from ronde.torch import convert_sync_batchnorm
from ronde.training.gradients.steps import set_sample_counts
from tests.jobs.torch_checks.checks import BATCH, Twins, assert_close, batch, loss_of, on, perceptron

DIVISIONS = [(11, 5), (8, 8), (16, 0), (0, 16), (1, 15)]
"""How many samples each rank has, step by step."""


def my_part(x: Tensor, counts: tuple[int, int]) -> Tensor:
    """This rank's rows. One without any computes something else, of which nothing may be seen."""
    start = sum(counts[: ronde.rank()])
    rows = x[start : start + counts[ronde.rank()]]
    return rows if len(rows) else torch.full_like(x[:1], float("nan"))


def backward_both(both: Twins, step: int, counts: tuple[int, int], num_passes: int = 1) -> None:
    x, y = batch(step)
    set_sample_counts(ronde.world(), counts)
    loss_of(both.model, my_part(x, counts), my_part(y, counts)).backward()
    (loss_of(both.alone, x, y) / num_passes).backward()


@on("2 ranks", "2 hosts")
def gradients_are_weighted_by_samples() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"overlap": True, "bucket_mb": 0.001},
        {"overlap": False},
        {"check_finite": True},
        {"predivide": 2.0},
    ]
    for options in settings:
        both = Twins(**options)
        for step, counts in enumerate(DIVISIONS):
            both.zero_grad()
            backward_both(both, step, counts)
            both.assert_same_grads()
            both.step()
        both.close()
        set_sample_counts(ronde.world(), (1, 1))


@on("2 ranks")
def batch_normalisation_over_ranks_is_that_of_the_whole_batch() -> None:
    torch.manual_seed(3)
    both = Twins(nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double())
    convert_sync_batchnorm(both.model)
    for step, counts in enumerate(DIVISIONS):
        both.zero_grad()
        backward_both(both, step, counts)
        both.assert_same_grads()
        assert_close(both.model.buffers(), both.alone.buffers())
        both.step()
    both.close()
    set_sample_counts(ronde.world(), (1, 1))


@on("2 ranks")
def each_pass_of_a_step_has_its_own_weight() -> None:
    for overlap in (True, False):
        both = Twins(passes=3, overlap=overlap)
        for step in range(len(DIVISIONS)):
            both.zero_grad()
            for number in range(3):
                backward_both(both, 3 * step + number, DIVISIONS[(step + 2 * number) % len(DIVISIONS)], num_passes=3)
            both.assert_same_grads()
            both.step()
        both.close()
    set_sample_counts(ronde.world(), (1, 1))


@on("2 ranks")
def gradients_that_a_user_has_kept_stay_what_they_were() -> None:
    both = Twins()
    kept: list[tuple[Tensor, Tensor]] = []
    for step, counts in enumerate(DIVISIONS):
        both.zero_grad()
        backward_both(both, step, counts)
        both.assert_same_grads()
        kept += [(p.grad, p.grad.clone()) for p in both.model.parameters()]
        both.step()
    assert all(torch.equal(grad, copy) for grad, copy in kept)
    both.close()
    set_sample_counts(ronde.world(), (1, 1))


@on("2 ranks")
def sparse_gradients_are_weighted_by_samples() -> None:
    for as_dense in (False, True):
        both = Twins(nn.Embedding(20, 4, sparse=True).double(), sparse_as_dense=as_dense)
        for step, counts in enumerate(DIVISIONS):
            both.zero_grad()
            words = torch.randint(20, (BATCH,), generator=torch.Generator().manual_seed(step))
            mine = words[: counts[0]] if ronde.rank() == 0 else words[counts[0] :]
            set_sample_counts(ronde.world(), counts)
            both.model(mine if len(mine) else words[:1]).square().sum(1).mean().backward()
            both.alone(words).square().sum(1).mean().backward()
            torch.testing.assert_close(both.model.weight.grad.to_dense(), both.alone.weight.grad.to_dense())
            both.step()
        both.close()
    set_sample_counts(ronde.world(), (1, 1))


@on("2 ranks")
def compressed_gradients_are_weighted_by_samples() -> None:
    both = Twins(perceptron(), codec="bfloat16")
    for step, counts in enumerate(DIVISIONS):
        both.zero_grad()
        backward_both(both, step, counts)
        for one, other in zip(both.model.parameters(), both.alone.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.01)
        both.step()
    both.optimizer.close()
    set_sample_counts(ronde.world(), (1, 1))
