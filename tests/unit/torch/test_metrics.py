"""Metrics of the whole job."""

from __future__ import annotations

import math

import pytest
import torch

from ronde.comm.world import World
from ronde.torch.metrics import average_metrics
from tests.conformance.ranks import run_threads


def test_every_rank_gets_the_mean_weighted_by_samples() -> None:
    def body(world: World) -> dict[str, float]:
        loss = torch.tensor(float(world.rank), requires_grad=True)
        return average_metrics({"loss": loss, "accuracy": 0.5}, count=world.rank + 1, group=world.group)

    assert run_threads(3, body) == [{"loss": 8 / 6, "accuracy": 0.5}] * 3


def test_a_rank_that_ran_out_of_data_takes_part_with_nothing() -> None:
    def body(world: World) -> dict[str, float]:
        if world.rank == 0:
            return average_metrics({}, count=0, group=world.group)
        return average_metrics({"loss": math.nan if world.rank == 1 else 3.0}, count=world.rank - 1, group=world.group)

    assert run_threads(3, body) == [{"loss": 3.0}] * 3


def test_mistakes_are_explained() -> None:
    with pytest.raises(TypeError, match=r"values by name, such as \{'loss': loss\}, got a float"):
        average_metrics(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the metric 'loss' must be one number, got a Tensor"):
        average_metrics({"loss": torch.ones(2)})
