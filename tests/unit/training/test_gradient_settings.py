from __future__ import annotations

from typing import Any

import pytest

from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.types import Op


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"op": "max"}, ValueError, "op must be mean, sum or adasum for gradients, got 'max'"),
        ({"bucket_mb": 0}, ValueError, "bucket_mb must be above 0, got 0"),
        ({"predivide": 0.0}, ValueError, "predivide must be a finite number above 0"),
        ({"predivide": float("nan")}, ValueError, "predivide must be a finite number above 0"),
        ({"predivide": 2.0, "op": "sum"}, ValueError, "predivide is for op='mean', got op='sum'"),
        ({"compare_at_step": -1}, ValueError, "compare_at_step must be a whole number from 0, got -1"),
        ({"compare_at_step": True}, ValueError, "compare_at_step must be a whole number from 0, got True"),
        ({"together": (("a", "b"), ("b",))}, ValueError, "'b' cannot be in two sets"),
        ({"bucket_mb": "a"}, TypeError, "bucket_mb must be a number, got 'a'"),
        ({"predivide": None}, TypeError, "predivide must be a number, got None"),
        ({"overlap": "no"}, TypeError, "overlap must be True or False, got 'no'"),
        ({"check_finite": None}, TypeError, "check_finite must be True or False, got None"),
        ({"together": "ab"}, TypeError, r"together must be sets of names, such as \[\('a', 'b'\)\], got 'ab'"),
        ({"together": ("a", "b")}, TypeError, "together must be sets of names"),
        ({"together": ((1,),)}, TypeError, "together must be sets of names"),
    ],
)
def test_wrong_settings_fail_at_once(wrong: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        GradientSettings(**wrong)


def test_sparse_sums_are_divided_by_a_ranks_own_passes_before_and_by_the_ranks_after() -> None:
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


def test_equal_settings_are_described_equally() -> None:
    assert GradientSettings(op="mean").describe() == GradientSettings(op=Op.MEAN).describe()
