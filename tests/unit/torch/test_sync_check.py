"""A model that differs on one rank is found, and both are named; what may differ is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ronde.comm.world import World
from ronde.errors import OutOfSync
from ronde.torch.batch_norm import convert_sync_batchnorm
from ronde.torch.sync_check import SyncCheck, check_in_sync
from tests.conformance.ranks import run_threads


def same_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4).bfloat16(), nn.Linear(300, 300))
    model: Any = nn.Sequential(*layers)
    model[0].weight = nn.Parameter(model[0].weight.to(memory_format=torch.channels_last))
    model.register_buffer("table", torch.arange(5), persistent=False)
    return model


MODELS = [same_model() for _ in range(3)]
"""Made before the ranks start: torch's generator is shared by threads."""


def test_equal_models_pass_and_a_single_bit_is_found() -> None:
    def body(world: World) -> None:
        model = MODELS[world.rank]
        check_in_sync(model, group=world.group)
        with torch.no_grad():
            model[3].weight.view(torch.int32)[123, 45] ^= world.rank == 1
        with pytest.raises(OutOfSync, match=r"'3\.weight': rank 1 differs from ranks 0, 2") as caught:
            check_in_sync(model, group=world.group)
        assert caught.value.ranks == (1,)
        check_in_sync(model, skip=("3.*",), group=world.group)
        check_in_sync(dict(model[0].named_parameters()), group=world.group)

    run_threads(3, body)


def test_statistics_of_plain_batch_norm_may_differ_and_synchronised_ones_may_not() -> None:
    def body(world: World) -> None:
        model: Any = nn.Sequential(nn.BatchNorm1d(2))
        model[0].running_mean += world.rank
        check_in_sync(model, group=world.group)
        convert_sync_batchnorm(model, group=world.group)
        with pytest.raises(OutOfSync, match=r"'0\.running_mean'"):
            check_in_sync(model, group=world.group)

    run_threads(2, body)


def test_buffers_count() -> None:
    def body(world: World) -> None:
        model = nn.Module()
        model.register_buffer("table", torch.tensor([world.rank]), persistent=False)
        with pytest.raises(OutOfSync, match=r"'table'.*no majority"):
            check_in_sync(model, group=world.group)

    run_threads(2, body)


def test_an_object_checks_at_the_first_and_every_nth_call() -> None:
    def body(world: World) -> None:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        check = SyncCheck(model, every=3, group=world.group)
        assert [check() for _ in range(5)] == [True, False, False, True, False]
        with torch.no_grad():
            model.weight += world.rank
        assert not check()
        with pytest.raises(OutOfSync, match="'weight'"):
            check()

    run_threads(2, body)
    with pytest.raises(ValueError, match="at least 1"):
        SyncCheck(nn.Module(), every=0)
