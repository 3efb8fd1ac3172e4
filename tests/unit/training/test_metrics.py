"""Weighted means of what ranks saw."""

from __future__ import annotations

import math

import pytest

from ronde.training.metrics import weighted_means, weighted_values


def test_a_mean_is_weighted_by_the_number_of_samples() -> None:
    parts = [weighted_values({"loss": 1.0, "accuracy": 0.5}, 30), weighted_values({"loss": 4.0, "accuracy": 1.0}, 10)]
    assert weighted_means(parts) == {"loss": 1.75, "accuracy": 0.625}


def test_every_metric_may_have_a_count_of_its_own() -> None:
    parts = [
        weighted_values({"a": 1.0, "b": 1.0}, {"a": 1, "b": 3}),
        weighted_values({"a": 3.0, "b": 5.0}, {"a": 1, "b": 1}),
    ]
    assert weighted_means(parts) == {"a": 2.0, "b": 2.0}


def test_a_rank_without_samples_does_not_count_even_if_its_mean_is_nan() -> None:
    assert weighted_means(
        [weighted_values({"loss": 2.0}, 5), weighted_values({"loss": math.nan}, 0), weighted_values({}, 0)]
    ) == {"loss": 2.0}


def test_a_metric_without_any_sample_is_nan_and_a_nan_that_counts_is_seen() -> None:
    assert math.isnan(weighted_means([weighted_values({"loss": 2.0}, 0)])["loss"])
    assert math.isnan(
        weighted_means([weighted_values({"loss": math.nan}, 1), weighted_values({"loss": 1.0}, 1)])["loss"]
    )


def test_mistakes_name_the_metric() -> None:
    with pytest.raises(ValueError, match="count of 'loss' must be 0 or more, got -1"):
        weighted_values({"loss": 1.0}, -1)
    with pytest.raises(ValueError, match="no count of 'loss', only of 'lost'"):
        weighted_values({"loss": 1.0}, {"lost": 1})
    with pytest.raises(TypeError, match="the metric 'loss' must be one number, got a str"):
        weighted_values({"loss": "low"}, 1)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="the count of 'loss' must be one number, got a list"):
        weighted_values({"loss": 1.0}, [1])  # type: ignore[arg-type]
