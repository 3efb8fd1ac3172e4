"""Metrics of the whole job."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ronde.comm.world import World
from ronde.training.metrics import average_metrics
from tests.conformance.ranks import run_threads

NAN = math.nan


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([({"loss": 1.0, "right": 0.5}, 30), ({"loss": 4.0, "right": 1.0}, 10)], {"loss": 1.75, "right": 0.625}),
        ([({"a": 1, "b": 1}, {"a": 1, "b": 3}), ({"a": 3, "b": 5}, {"a": 1, "b": 1})], {"a": 2.0, "b": 2.0}),
        ([({"loss": 2.0}, 5), ({"loss": NAN}, 0), ({}, 0)], {"loss": 2.0}),
        ([({"loss": 2.0}, 0)], {"loss": NAN}),
        ([({"loss": NAN}, 1), ({"loss": 1.0}, 1)], {"loss": NAN}),
        ([({"loss": torch.tensor(3.0, requires_grad=True)}, 2), ({"loss": 0.0}, 1)], {"loss": 2.0}),
    ],
    ids=["one count", "a count per metric", "ranks without samples", "no sample", "a NaN that counts", "a tensor"],
)
def test_every_rank_gets_the_means_weighted_by_samples(by_rank: list[Any], expected: dict[str, float]) -> None:
    def body(world: World) -> dict[str, float]:
        values, count = by_rank[world.rank]
        return average_metrics(values, count=count, group=world.group)

    assert run_threads(len(by_rank), body) == [pytest.approx(expected, nan_ok=True)] * len(by_rank)


@pytest.mark.parametrize(
    ("values", "count", "kind", "words"),
    [
        (0.5, 1, TypeError, r"values by name, such as \{'loss': loss\}, got a float"),
        ({"loss": torch.ones(2)}, 1, TypeError, "the metric 'loss' must be one number, got a Tensor"),
        ({"loss": "low"}, 1, TypeError, "the metric 'loss' must be one number, got a str"),
        ({"loss": 1.0}, [1], TypeError, "the count of 'loss' must be one number, got a list"),
        ({"loss": 1.0}, -1, ValueError, "count of 'loss' must be 0 or more, got -1"),
        ({"loss": 1.0}, {"lost": 1}, ValueError, "no count of 'loss', only of 'lost'"),
    ],
)
def test_mistakes_name_the_metric(values: Any, count: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        average_metrics(values, count=count)
