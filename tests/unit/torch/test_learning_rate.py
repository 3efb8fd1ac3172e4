"""Scaling and warm-up as PyTorch sees them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ronde.comm.world import World
from ronde.torch.learning_rate import cosine, scale_lr, warmup
from tests.conformance.ranks import run_threads


def test_the_rate_is_scaled_by_ranks_and_passes() -> None:
    def body(world: World) -> None:
        assert scale_lr(0.1, group=world.group) == pytest.approx(0.2)
        assert scale_lr(0.1, passes=2, rule="sqrt", group=world.group) == pytest.approx(0.2)

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
