"""Learning rates for many ranks, and the factors of schedules step by step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ronde.comm.world import World
from ronde.torch.learning_rate import cosine, milestones, scale_lr, warmup
from ronde.training import learning_rate as schedule
from tests.conformance.ranks import run_threads


def test_the_rate_grows_with_ranks_and_passes_by_the_rule_that_is_asked_for() -> None:
    def body(world: World) -> None:
        assert scale_lr(0.1, group=world.group) == pytest.approx(0.2)
        assert scale_lr(0.1, passes=2, rule="sqrt", group=world.group) == pytest.approx(0.2)
        assert scale_lr(0.1, passes=2, rule="none", group=world.group) == 0.1
        with pytest.raises(ValueError, match="linear, sqrt, none"):
            scale_lr(0.1, rule="cubic", group=world.group)

    run_threads(2, body)


def test_warm_up_begins_with_the_rate_of_one_rank_and_resumes_where_it_was() -> None:
    def body(world: World) -> None:
        def made() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
            optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.4)
            return optimizer, warmup(optimizer, 4, after=cosine(4), group=world.group)

        optimizer, scheduler = made()
        rates = []
        for _ in range(9):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates[:5] == pytest.approx([0.2, 0.25, 0.3, 0.35, 0.4]) and rates[8] == pytest.approx(0.0)
        _, resumed = made()
        state = scheduler.state_dict()
        assert state["lr_lambdas"] == [None], "a checkpoint holds where it stands, not code"
        resumed.load_state_dict(state)
        assert resumed.last_epoch == 9

    run_threads(2, body)


def test_warm_up_goes_from_start_to_one_in_equal_parts_and_then_on() -> None:
    factor = schedule.warmup(4, start=0.2, after=milestones([2, 3], gamma=0.5))
    assert [factor(step) for step in range(9)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.5, 0.25, 0.25])
    assert schedule.warmup(0, start=0.5)(0) == 1.0


def test_a_cosine_ends_at_its_floor_and_stays_there() -> None:
    factor = cosine(10, floor=0.1)
    assert [factor(0), factor(5), factor(10), factor(99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedule.warmup(-1, start=0.1), "num_steps from 0"),
        (lambda: schedule.warmup(1, start=2.0), "start from 0 to 1"),
        (lambda: cosine(0), "num_steps from 1"),
        (lambda: milestones([3, 2]), "must ascend"),
    ],
)
def test_wrong_numbers_are_refused_when_the_schedule_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
