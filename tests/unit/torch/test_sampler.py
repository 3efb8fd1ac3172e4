"""Each rank its share, through loaders that fetch ahead, early ends and restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from ronde.comm.world import World
from ronde.torch.samplers import ShardedSampler
from tests.conformance.ranks import run_threads


class EagerLoader:
    """Fetches three batches ahead, as workers do."""

    def __init__(self, sampler: ShardedSampler, batch_size: int) -> None:
        self.batch_size = batch_size
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        ahead: deque[list[int]] = deque()
        for batch in BatchSampler(self._sampler, self.batch_size, drop_last=False):
            ahead.append(batch)
            if len(ahead) > 3:
                yield ahead.popleft()
        yield from ahead


def loader_of(sampler: ShardedSampler, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(sampler.length)), sampler=sampler, **options)


def test_ranks_share_a_dataset_and_every_epoch_has_its_own_order() -> None:
    def body(world: World) -> list[list[int]]:
        sampler = ShardedSampler(10, seed=3, ends="uneven", group=world.group)
        seen = list(chain(*(batch[0].tolist() for batch in sampler.track(loader_of(sampler, batch_size=2)))))
        assert (sampler.epoch, sampler.consumed) == (1, 0)
        assert len(sampler) == (4 if world.rank == 0 else 3)
        return [seen, list(sampler)]

    results = run_threads(3, body)
    first, second = (list(chain(*(mine[epoch] for mine in results))) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert results[0][0] != results[0][1]


def test_plain_loops_have_a_new_order_in_every_epoch_and_looking_through_the_data_counts_for_nothing() -> None:
    def body(world: World) -> None:
        sampler = ShardedSampler(20, group=world.group)
        loader = loader_of(sampler, batch_size=4)
        epochs = [[batch[0].tolist() for batch in loader] for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert sampler.epoch == 2
        sampler.set_epoch(1)
        assert [[batch[0].tolist() for batch in loader] for _ in range(2)] == epochs[1:]
        sampler.set_epoch(0)
        next(iter(loader))
        if world.rank == 0:
            list(loader)
        assert [batch[0].tolist() for batch in sampler.track(loader)] == epochs[0]
        assert sampler.epoch == 1

    run_threads(2, body)


def test_only_batches_that_the_loop_got_count_whatever_was_fetched_ahead() -> None:
    def body(world: World) -> None:
        sampler = ShardedSampler(100, group=world.group)
        seen = []
        for number, _ in enumerate(sampler.track(EagerLoader(sampler, 4)), start=1):
            seen.append(sampler.state_dict()["consumed"])
            assert sampler.consumed == min(number * 4 * 2, 100)
        assert seen[0] == 8 and seen[-1] == 100
        resumed = ShardedSampler(100, group=world.group)
        resumed.load_state_dict({**sampler.state_dict(), "epoch": 0, "consumed": 100})  # of the last batch
        assert list(resumed.track(EagerLoader(resumed, 4))) == [] and resumed.epoch == 1
        assert sampler.state_dict() == {"epoch": 1, "consumed": 0, "length": 100, "seed": 0, "shuffle": True}

    run_threads(2, body)


def test_a_loop_that_is_left_early_goes_on_where_it_stopped() -> None:
    def body(world: World) -> None:
        sampler = ShardedSampler(12, shuffle=False, group=world.group)
        loader = loader_of(sampler, batch_size=2)
        first = next(iter(sampler.track(loader)))[0].tolist()
        rest = list(chain(*(batch[0].tolist() for batch in sampler.track(loader))))
        assert first + rest == list(range(12))
        sampler.advance(5)
        assert list(sampler) == list(range(5, 12)) and len(loader_of(sampler)) == 7

    run_threads(1, body)


@pytest.mark.parametrize(
    ("options", "size"),
    [({"batch_size": 3}, 3), ({"batch_size": None}, 1), ({"batch_size": 3, "drop_last": True}, 3)],
    ids=str,
)
def test_the_size_of_a_batch_is_that_of_the_loader(options: dict[str, Any], size: int) -> None:
    def body(world: World) -> None:
        sampler = ShardedSampler(10, group=world.group)
        next(iter(sampler.track(loader_of(sampler, **options))))
        assert sampler.consumed == size
        batches = BatchSampler(sampler, size, drop_last=False)
        next(iter(sampler.track(DataLoader(TensorDataset(torch.arange(10)), batch_sampler=batches))))
        assert sampler.consumed == 2 * size

    run_threads(1, body)


def test_mistakes_are_explained() -> None:
    def body(world: World) -> None:
        sampler = ShardedSampler([0] * 10, seed=1, group=world.group)
        with pytest.raises(ValueError, match="pass batch_size="):
            next(iter(sampler.track([1, 2, 3])))
        assert list(sampler.track([1, 2, 3], batch_size=4)) == [1, 2, 3]
        others: list[dict[str, Any]] = [{}, {"shuffle": True}, {"sampler": ShardedSampler(10)}, {"batch_size": None}]
        for options in others:
            with pytest.raises(ValueError, match=r"draws from a \w+Sampler, not from this sampler; make it with"):
                next(iter(sampler.track(DataLoader(TensorDataset(torch.arange(10)), **options))))
        with pytest.raises(ValueError, match=r"middle of epoch 2: the saved order had seed=5, here 1"):
            sampler.load_state_dict({"epoch": 2, "consumed": 4, "length": 10, "seed": 5, "shuffle": True})
        sampler.load_state_dict({"epoch": 2, "consumed": 0, "length": 10, "seed": 5, "shuffle": True})
        assert sampler.epoch == 2

    run_threads(1, body)
    with pytest.raises(ValueError, match="pad, drop, uneven, got 'odd'"):
        ShardedSampler(3, ends="odd")
    with pytest.raises(ValueError, match="0 or more"):
        ShardedSampler(-1)
