from __future__ import annotations

from typing import Any

import pytest

from ronde.binding.gradients import GradientSettings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"op": "max"}, "op must be mean, sum or adasum for gradients, got max"),
        ({"op": "median"}, "op must be one of"),
        ({"bucket_mb": 0}, "bucket_mb must be above 0, got 0"),
        ({"predivide": 0.0}, "predivide must be a finite number above 0"),
        ({"predivide": float("nan")}, "predivide must be a finite number above 0"),
        ({"predivide": 2.0, "op": "sum"}, "predivide is for op='mean', got op='sum'"),
        ({"together": (("a", "b"), ("b",))}, "'b' cannot be in two sets"),
    ],
)
def test_wrong_values_fail_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientSettings(**wrong)


def test_a_mean_may_be_divided_before_and_behind_the_sum() -> None:
    assert GradientSettings().scales(1) == (1.0, 1.0)
    assert GradientSettings(predivide=4.0).scales(1) == (0.25, 4.0)


def test_passes_are_averaged_unless_told_otherwise() -> None:
    assert GradientSettings().scales(5) == (0.2, 1.0)
    assert GradientSettings(average_passes=False).scales(5) == (1.0, 1.0)


def test_sparse_sums_are_divided_as_dense_ones() -> None:
    assert GradientSettings().sparse_factor(2, 4) == 1 / 8
    assert GradientSettings(op="sum").sparse_factor(2, 4) == 1 / 2
    with pytest.raises(ValueError, match="adasum does not know sparse gradients; set sparse_as_dense=True"):
        GradientSettings(op="adasum").sparse_factor(1, 2)
