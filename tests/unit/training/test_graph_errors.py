"""Errors of ronde inside of those of a framework."""

from __future__ import annotations

import weakref

import pytest

from ronde.errors import RondeError
from ronde.training.graph_errors import describe_error, find_error


class Result:
    """Stands for the arrays of an operation."""


def test_an_error_is_found_by_the_text_of_another() -> None:
    error = RondeError("rank 1 is lost")
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(f"INTERNAL: {describe_error(error)}")
    assert find_error(raised.value) is error
    assert find_error(RuntimeError("another one")) is None


def test_an_error_that_is_kept_does_not_keep_the_results_of_the_operation() -> None:
    def fail() -> tuple[str, weakref.ref[Result]]:
        result = Result()
        try:
            raise RondeError("rank 1 is lost")
        except RondeError as error:
            return describe_error(error), weakref.ref(result)

    text, result = fail()
    assert result() is None
    assert isinstance(find_error(RuntimeError(text)), RondeError)
