from __future__ import annotations

from typing import Any

import pytest

from ronde.training.exchange import GradientSettings
from ronde.types import Op


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"op": "max"}, "op must be mean, sum or adasum for gradients, got 'max'"),
        ({"op": "median"}, "op must be mean, sum or adasum for gradients, got 'median'"),
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bucket_mb": "a"}, "bucket_mb must be a number, got 'a'"),
        ({"predivide": None}, "predivide must be a number, got None"),
        ({"overlap": "no"}, "overlap must be True or False, got 'no'"),
        ({"check_finite": None}, "check_finite must be True or False, got None"),
        ({"together": "ab"}, r"together must be sets of names, such as \[\('a', 'b'\)\], got 'ab'"),
        ({"together": ("a", "b")}, "together must be sets of names"),
        ({"together": ((1,),)}, "together must be sets of names"),
    ],
)
def test_values_of_the_wrong_kind_fail_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        GradientSettings(**wrong)


def test_a_mean_may_be_divided_before_and_behind_the_sum() -> None:
    assert GradientSettings().scales(1) == (1.0, 1.0)
    assert GradientSettings(predivide=4.0).scales(1) == (0.25, 4.0)


def test_passes_are_averaged_unless_told_otherwise() -> None:
    assert GradientSettings().scales(5) == (0.2, 1.0)
    assert GradientSettings(average_passes=False).scales(5) == (1.0, 1.0)


def test_sparse_sums_are_divided_by_a_ranks_own_passes_before_and_by_the_ranks_behind() -> None:
    assert GradientSettings().sparse_scales(2, 4) == (1 / 2, 1 / 4)
    assert GradientSettings(op="sum").sparse_scales(2, 4) == (1 / 2, 1.0)
    assert GradientSettings(average_passes=False).sparse_scales(2, 4) == (1.0, 1 / 4)
    with pytest.raises(ValueError, match="adasum does not know sparse gradients; set sparse_as_dense=True"):
        GradientSettings(op="adasum").sparse_scales(1, 2)


def test_names_of_no_parameter_are_refused() -> None:
    settings = GradientSettings(together=(("a", "b"), ["c"]))
    settings.check_names(["c", "b", "a", "d"])
    with pytest.raises(ValueError, match="together: no parameter of the optimizer is named 'b', 'c'"):
        settings.check_names(["a"])


def test_equal_settings_are_equal_in_words() -> None:
    assert GradientSettings(op="mean").describe() == GradientSettings(op=Op.MEAN).describe()
    assert GradientSettings(bucket_mb=2).describe()["bucket_mb"] == "2"
