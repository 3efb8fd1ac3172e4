"""What users write as a space, and which points are in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from ronde.search.space import count_points, iterate_points, parse_point, parse_space, point_key


@pytest.mark.parametrize(
    ("written", "distribution"),
    [
        ({"low": 1e-4, "high": 0.1, "log": True}, FloatDistribution(1e-4, 0.1, log=True)),
        ({"low": "1e-4", "high": "1e-1"}, FloatDistribution(1e-4, 0.1)),  # as YAML reads it
        ({"low": 1, "high": 8}, IntDistribution(1, 8)),
        ({"low": 32, "high": 256, "step": 32}, IntDistribution(32, 256, step=32)),
        ({"low": 0, "high": 1, "type": "float"}, FloatDistribution(0.0, 1.0)),
        ({"low": 0, "high": 1, "step": 0.25}, FloatDistribution(0.0, 1.0, step=0.25)),
        (["relu", None, True, 3], CategoricalDistribution(("relu", None, True, 3))),
        ([np.int64(3), np.float32(0.5)], CategoricalDistribution((3, 0.5))),
        ({"low": np.int64(1), "high": np.int64(8)}, IntDistribution(1, 8)),
        (IntDistribution(1, 2), IntDistribution(1, 2)),
    ],
)
def test_a_parameter_has_ends_or_choices(written: Any, distribution: object) -> None:
    assert parse_space({"x": written}) == {"x": distribution}


@pytest.mark.parametrize(
    ("space", "problem"),
    [
        ({}, "at least one parameter"),
        ({"a b": [1]}, "the name of a parameter is a word"),
        ({"a\0b": [1]}, "the name of a parameter is a word"),
        ({"x": 3}, "x: write a list of choices"),
        ({"x": (0.0, 1.0)}, "x: write a list of choices"),  # are these choices, or ends?
        ({"x": []}, "x: there are no choices"),
        ({"x": [[1]]}, "x: a choice is a number"),
        ({"x": [1, 1]}, "x: a choice is there twice"),
        ({"x": {"low": 1}}, "x: high must be given"),
        ({"x": {"low": 1, "high": 2, "lgo": True}}, "x: unknown key 'lgo'; there are low, high"),
        ({"x": {"low": "a", "high": 2}}, "x: low must be a number, got 'a'"),
        ({"x": {"low": 1, "high": float("inf")}}, "x: high must be a number"),
        ({"x": {"low": 1, "high": 2, "log": 1}}, "x: log must be true or false"),
        ({"x": {"low": 1, "high": 2.5, "type": "int"}}, "x: the ends and the step"),
        ({"x": {"low": 3, "high": 2}}, "x: "),
        ({"x": {"low": 0.0, "high": 2.0, "log": True}}, "x: "),
    ],
)
def test_a_wrong_space_names_the_parameter(space: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_space(space)


def test_points_are_counted_and_listed_where_that_can_be_done() -> None:
    space = parse_space(
        {"a": [1, 2], "b": {"low": 1, "high": 9, "step": 4}, "c": {"low": 0.0, "high": 0.3, "step": 0.1}}
    )
    points = [*iterate_points(space)]
    assert count_points(space) == len(points) == 2 * 3 * 4
    assert len({point_key(point) for point in points}) == len(points)
    assert points[3] == {"a": 1, "b": 1, "c": pytest.approx(0.3)}
    assert count_points(parse_space({"a": [1], "b": {"low": 0.0, "high": 1.0}})) is None


def test_a_written_point_is_in_the_space() -> None:
    space = parse_space({"lr": {"low": 0, "high": 1, "type": "float"}, "n": {"low": 1, "high": 3}, "f": ["a", 1]})
    assert parse_point(space, {"lr": "1e-2", "n": 2.0, "f": "a"}) == {"lr": 0.01, "n": 2, "f": "a"}
    wrong_points: list[tuple[dict[str, Any], str]] = [
        ({"lr": 0.1, "n": 2}, "must have the parameters lr, n, f"),
        ({"lr": 2.0, "n": 2, "f": "a"}, "lr=2.0 is not in the space: 0 to 1"),
        ({"lr": 0.1, "n": 2.5, "f": "a"}, "n must be a whole number"),
        ({"lr": 0.1, "n": 2, "f": "b"}, "f='b' is not in the space: a | 1"),
    ]
    for wrong, problem in wrong_points:
        with pytest.raises(ValueError, match=problem.replace("|", r"\|")):
            parse_point(space, wrong)


def test_equal_points_have_equal_keys_and_true_is_not_one() -> None:
    assert point_key({"a": 0.1 + 0.2, "b": 1}) == point_key({"b": 1, "a": 0.3})
    assert point_key({"a": 1}) != point_key({"a": True}) != point_key({"a": 1.0})
