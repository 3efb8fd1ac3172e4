"""A stream in a DataLoader: the same batches with any number of workers, and what they load ahead does not count."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ronde
from ronde.comm.world import World
from ronde.data import Stream
from ronde.torch import DistributedOptimizer, StreamDataset
from tests.conformance.ranks import QUICK, join_in_process, run_threads
from tests.limits import LONG_TEST_S
from tests.unit.data.made_data import write_shards

LEAVES = pytest.mark.leaves(reason="the fork server of multiprocessing stays")


def choose_number(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": sample["number"]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_shards(tmp_path, [30, 7, 25], num_bytes=20)
    return tmp_path


def make(data: Path, group: Any) -> Stream:
    return Stream(data, global_batch=8, seed=2, transform=choose_number, group=group, num_threads=0)


def make_loader(dataset: StreamDataset, num_workers: int, **more: Any) -> DataLoader[Any]:
    context = None
    if num_workers:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ronde.torch", "tests.unit.torch.test_stream_dataset"])
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=context, **more)


def numbers(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        assert isinstance(batch["number"], torch.Tensor)
        found.append(batch["number"].tolist())
    return found


def test_a_position_behind_the_step_of_an_optimizer_has_the_present_batch(data: Path) -> None:
    ronde.init()
    try:
        stream = make(data, None)
        model = torch.nn.Linear(1, 1)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for step, batch in enumerate(stream.track(make_loader(StreamDataset(stream), 0))):
            optimizer.zero_grad()
            model(batch["number"].float().reshape(-1, 1)).mean().backward()
            assert stream.state_dict()["consumed"] == 8 * step
            optimizer.step()
            assert stream.state_dict()["consumed"] == 8 * (step + 1)
            if step == 2:
                break
    finally:
        ronde.shutdown()


def test_the_dataset_gives_the_batches_of_the_stream(data: Path) -> None:
    def body(world: Any) -> None:
        plain = [batch["number"].tolist() for batch in make(data, world.group)]
        stream = make(data, world.group)
        loader = make_loader(StreamDataset(stream), 0)
        assert numbers(stream.track(loader)) == plain
        assert (stream.epoch, stream.consumed) == (1, 0)
        assert numbers(stream.track(loader)) != plain

    run_threads(2, body)


@LEAVES
@pytest.mark.slow
@pytest.mark.timeout(LONG_TEST_S)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_give_the_same_batches_and_the_position_counts_what_was_used(data: Path, persistent: bool) -> None:
    # Workers import PyTorch, which takes long on a busy machine: no thread that has to end in time.
    world = World(join_in_process(1, (), QUICK)[0])
    try:
        plain = make(data, world.group)
        epochs = [[batch["number"].tolist() for batch in plain] for _ in range(2)]
        stream = make(data, world.group)
        loader = make_loader(StreamDataset(stream), 2, persistent_workers=persistent, prefetch_factor=2)
        first = []
        for batch in stream.track(loader):
            first.append(batch["number"].tolist())
            if len(first) == 3:
                break
        assert stream.consumed == 2 * 8  # of the third batch the loop's body has not come to its end
        assert first[:2] + numbers(stream.track(loader)) == epochs[0]
        assert numbers(stream.track(loader)) == epochs[1]
        del loader
    finally:
        world.close()


@pytest.mark.parametrize("num_batches", [0, 1, 4])
def test_the_protocol_of_stateful_data_loader_continues(data: Path, num_batches: int) -> None:
    def body(world: Any) -> None:
        whole = numbers(StreamDataset(make(data, world.group)))
        dataset = StreamDataset(make(data, world.group))
        iterator = iter(dataset)
        before = numbers(next(iterator) for _ in range(num_batches))
        state = dataset.state_dict()
        again = StreamDataset(make(data, world.group))
        again.load_state_dict(state)
        assert before + numbers(again) == whole
        assert numbers(again) == whole  # only the next iteration goes on

    run_threads(1, body)


def test_who_loops_over_the_loader_itself_again_is_warned(data: Path) -> None:
    def body(world: Any) -> None:
        stream = make(data, world.group)
        loader = make_loader(StreamDataset(stream), 0)
        first = numbers(loader)
        with pytest.warns(UserWarning, match=r"same batches .* loop over stream\.track\(loader\)"):
            assert numbers(loader) == first
        assert numbers(stream.track(loader)) == first  # nothing was counted
        assert numbers(stream.track(loader)) != first

    run_threads(1, body)


def test_mistakes_are_refused(data: Path) -> None:
    def body(world: Any) -> None:
        stream = make(data, world.group)
        with pytest.raises(ValueError, match="make the loader with"):
            stream.track(DataLoader([1, 2]))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"takes a ronde\.data\.Stream"):
            StreamDataset([1])  # type: ignore[arg-type]

    run_threads(1, body)
