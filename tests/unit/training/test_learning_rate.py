"""Learning-rate factors, step by step."""

from __future__ import annotations

import pytest

from ronde.training.learning_rate import cosine, milestones, scaled_lr, warmup


def test_the_rate_grows_with_the_batch_by_the_rule_that_is_asked_for() -> None:
    assert scaled_lr(0.1, 4) == pytest.approx(0.4)
    assert scaled_lr(0.1, 4, rule="sqrt") == pytest.approx(0.2)
    assert scaled_lr(0.1, 4, rule="none") == 0.1
    with pytest.raises(ValueError, match="linear, sqrt, none"):
        scaled_lr(0.1, 4, rule="cubic")


def test_warm_up_goes_from_start_to_one_in_equal_parts_and_then_on() -> None:
    factor = warmup(4, start=0.2, after=milestones([2, 3], gamma=0.5))
    assert [factor(step) for step in range(9)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.5, 0.25, 0.25])
    assert warmup(0, start=0.5)(0) == 1.0


def test_a_cosine_ends_at_its_floor_and_stays_there() -> None:
    factor = cosine(10, floor=0.1)
    assert [factor(0), factor(5), factor(10), factor(99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: warmup(-1, start=0.1), "num_steps from 0"),
        (lambda: warmup(1, start=2.0), "start from 0 to 1"),
        (lambda: cosine(0), "num_steps from 1"),
        (lambda: milestones([3, 2]), "must ascend"),
    ],
)
def test_wrong_numbers_are_refused_when_the_schedule_is_made(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
