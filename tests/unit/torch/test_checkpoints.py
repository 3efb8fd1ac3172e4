"""A run goes on from its checkpoint on every rank as if nothing had happened."""

from __future__ import annotations

import copy
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ronde
import ronde.training.checkpoints
from ronde.comm.world import World, current_world
from ronde.errors import CheckpointError
from ronde.torch.checkpoints import Checkpoints
from ronde.torch.learning_rate import warmup
from ronde.torch.samplers import ShardedSampler
from tests.conformance.ranks import run_threads

MODELS = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
"""Different numbers on every rank."""


class Run:
    """All that a training run consists of."""

    def __init__(self, world: World, path: object, **options: Any) -> None:
        self.model = copy.deepcopy(MODELS[world.rank])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = warmup(self.optimizer, 10, start=0.1)
        self.milestones = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 4])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.sampler = ShardedSampler(40, group=world.group)
        self.parts = {
            name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "milestones", "scaler", "sampler")
        }
        self.checkpoints = Checkpoints(str(path), group=world.group, **options, **self.parts)

    def steps(self, count: int) -> list[float]:
        for step in range(count):
            self.optimizer.zero_grad()
            self.model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.milestones.step()
            self.sampler.advance(2)
        return [parameter.sum().item() for parameter in self.model.parameters()]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, so that several are needed."""
    monkeypatch.setattr(ronde.training.checkpoints, "CHUNK_BYTES", 1000)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.usefixtures("pieces")
def test_every_rank_goes_on_as_rank_0_was(size: int, tmp_path: Path) -> None:
    def body(world: World) -> tuple[list[float], dict[str, Any]]:
        run = Run(world, tmp_path / "run")
        assert run.checkpoints.restore() is None
        run.steps(3)
        path = run.checkpoints.save(3, extras={"best": 0.5, "names": ["a", ("b", 1)]})
        on = run.steps(2) if world.rank == 0 else []
        world.group.barrier()
        resumed = Run(world, tmp_path / "run")
        restored = resumed.checkpoints.restore()
        assert restored is not None and path == (restored.path if world.rank == 0 else None)
        assert (restored.step, restored.extras) == (3, {"best": 0.5, "names": ["a", ("b", 1)]})
        assert resumed.sampler.consumed == 3 * 2 * size
        assert resumed.scaler.get_scale() == run.scaler.get_scale()
        again = resumed.steps(2)
        assert world.rank != 0 or again == on
        return again, resumed.optimizer.state_dict()["param_groups"][0]

    results = run_threads(size, body)
    assert results == [results[0]] * size


def test_every_rank_gets_the_latest_whole_one_or_the_error_of_rank_0(tmp_path: Path) -> None:
    def body(world: World) -> None:
        run = Run(world, tmp_path, keep=2)
        for step in (1, 2, 3):
            run.checkpoints.save(step)
        if world.rank == 0:
            (tmp_path / "step-000000000003.data").write_bytes(b"half")
        world.group.barrier()
        assert run.checkpoints.steps() == [2, 3]
        restored = run.checkpoints.restore()
        assert restored is not None and restored.step == 2
        with pytest.raises(CheckpointError, match=r"step-000000000003.data is damaged"):
            run.checkpoints.restore(3)

    run_threads(2, body)


def test_starting_over_removes_what_there_was(tmp_path: Path) -> None:
    def body(world: World) -> None:
        run = Run(world, tmp_path)
        for step in (1, 1, 2):
            run.checkpoints.save(step)
        world.group.barrier()
        assert run.checkpoints.steps() == [1, 2]
        world.group.barrier()
        run.checkpoints.clear()
        assert run.checkpoints.restore() is None
        assert list(tmp_path.iterdir()) == []

    run_threads(2, body)


def test_when_the_disk_takes_no_more_the_reason_is_told_with_the_path(tmp_path: Path) -> None:
    def body(world: World) -> None:
        checkpoints = Checkpoints(tmp_path, group=world.group, model=nn.Linear(1, 1))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(CheckpointError, match=r"cannot write .*step-000000000001.data: .*File too large"):
                checkpoints.save(1, extras={"large": torch.ones(100_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []

    run_threads(1, body)


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    def body(world: World) -> None:
        run = Run(world, tmp_path)
        with pytest.raises(TypeError, match=r"more than tensors and plain values: .*numpy.*trusted=True"):
            run.checkpoints.save(1, extras={"best": np.float64(0.5)})
        assert run.checkpoints.steps() == [] and list(tmp_path.iterdir()) == []
        trusting = Run(world, tmp_path, trusted=True)
        trusting.checkpoints.save(1, extras={"best": np.float64(0.5)})
        restored = trusting.checkpoints.restore()
        assert restored is not None and restored.extras == {"best": 0.5}
        with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*step-000000000001.data"):
            run.checkpoints.restore()

    run_threads(1, body)


class Picky:
    """A part that takes nothing back."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise TypeError("bad type")


def test_a_part_that_is_missing_or_does_not_fit_is_named_with_the_path(tmp_path: Path) -> None:
    def body(world: World) -> None:
        group = world.group
        Checkpoints(tmp_path, group=group, model=nn.Linear(2, 2)).save(1)
        with pytest.raises(CheckpointError, match=r"step-000000000001.data has no optimizer; it has model"):
            optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
            Checkpoints(tmp_path, group=group, model=nn.Linear(2, 2), optimizer=optimizer).restore()
        with pytest.raises(
            CheckpointError, match=r"(?s)model of the checkpoint .*\.data does not fit: .*size mismatch"
        ):
            Checkpoints(tmp_path, group=group, model=nn.Linear(3, 2)).restore()
        parts: dict[str, Any] = {"model": nn.Linear(2, 2), "picky": Picky()}
        Checkpoints(tmp_path, group=group, **parts).save(2)
        with pytest.raises(
            CheckpointError, match=r"picky of .*\.data does not fit: TypeError: bad type \(loaded before it: model\)"
        ):
            Checkpoints(tmp_path, group=group, **parts).restore()
        with pytest.raises(TypeError, match="steps has no state_dict"):
            Checkpoints(tmp_path, steps=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="keep"):
            Checkpoints(tmp_path, keep=0)

    run_threads(1, body)


def test_a_process_that_comes_to_a_running_job_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    ronde.init()
    try:
        checkpoints = Checkpoints(tmp_path, model=nn.Linear(2, 2))
        checkpoints.save(1)
        current_world().is_candidate = True
        assert checkpoints.restore() is None
        assert checkpoints.save(2) is None
        checkpoints.clear()
        assert checkpoints.steps() == [1]
    finally:
        ronde.shutdown()
