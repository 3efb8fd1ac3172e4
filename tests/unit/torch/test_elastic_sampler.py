"""Global batches for any number of ranks, counted when their steps have finished."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ronde
import ronde.elastic
from ronde.comm.world import World
from ronde.elastic import State
from ronde.torch import DistributedOptimizer, ElasticBatchSampler
from ronde.training.sample_sharding import epoch_order
from tests.conformance.ranks import run_threads
from tests.unit.elastic.thread_states import run_ranks
from tests.unit.training.arrays import ArrayTraining, Weight


def loader_of(sampler: ElasticBatchSampler, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(sampler.length)), batch_sampler=sampler, **options)


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank."""
    ronde.init()
    yield
    ronde.shutdown()


class Trained:
    """A model of one number with an optimizer."""

    def __init__(self, *, distributed: bool = True, **settings: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.0)
        if distributed:
            self.optimizer = DistributedOptimizer(self.optimizer, **settings)

    def backward(self, batch: list[torch.Tensor]) -> None:
        loss: Any = self.model(batch[0].float().reshape(-1, 1)).mean()
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_ranks_divide_every_global_batch_and_a_run_continues_with_another_number() -> None:
    order = epoch_order(23, epoch=0, seed=3, shuffle=True).tolist()

    def first(world: World) -> tuple[list[list[int]], dict[str, Any]]:
        sampler = ElasticBatchSampler(23, global_batch=6, seed=3, group=world.group)
        assert len(sampler) == 4
        seen: list[list[int]] = []
        for batch in sampler.track(loader_of(sampler)):
            seen.append(batch[0].tolist())
            if len(seen) == 3:  # this one is not finished
                break
        assert len(sampler) == 2
        return seen, sampler.state_dict()

    first_results = run_threads(3, first)
    states = [state for _, state in first_results]
    assert states[0] == states[1] == states[2]
    for step in range(3):
        parts = [seen[step] for seen, _ in first_results]
        assert sorted(chain(*parts)) == sorted(order[6 * step : 6 * step + 6])
        assert list(map(len, parts)) == [2, 2, 2]

    def second(world: World) -> list[list[int]]:
        sampler = ElasticBatchSampler(23, global_batch=6, seed=3, group=world.group)
        sampler.load_state_dict(states[0])
        seen = [batch[0].tolist() for batch in sampler.track(loader_of(sampler))]
        assert (sampler.epoch, sampler.consumed) == (1, 0)
        return seen

    second_results = run_threads(2, second)
    for step, expected in enumerate((order[12:18], order[18:])):
        assert sorted(chain(*(seen[step] for seen in second_results))) == sorted(expected)


def test_a_batch_per_rank_makes_global_batches_that_follow_the_number_of_ranks() -> None:
    def body(world: World) -> list[list[int]]:
        sampler = ElasticBatchSampler(11, per_rank_batch=2, shuffle=False, group=world.group)
        assert sampler.global_batch == 6
        return list(sampler)

    assert run_threads(3, body) == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10]]]


def test_a_plain_loop_goes_to_the_next_epoch_when_it_starts_again_after_its_end() -> None:
    def body(world: World) -> None:
        sampler = ElasticBatchSampler(20, global_batch=8, group=world.group)
        loader = loader_of(sampler)
        epochs = [[batch[0].tolist() for batch in loader] for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert sampler.epoch == 2
        sampler.set_epoch(7)
        assert (sampler.epoch, sampler.consumed) == (7, 0)

    run_threads(2, body)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    "workers",
    [
        {},
        pytest.param({"num_workers": 2, "prefetch_factor": 3}, marks=pytest.mark.slow),
        pytest.param({"num_workers": 1, "persistent_workers": True}, marks=pytest.mark.slow),
    ],
)
def test_a_batch_counts_from_the_step_of_its_optimizer_on(
    alone: None, workers: dict[str, Any], with_state: bool
) -> None:
    sampler = ElasticBatchSampler(22, global_batch=4, seed=1)
    trained, loader = Trained(distributed=not with_state), loader_of(sampler, **workers)
    state = State(optimizer=trained.optimizer, sampler=sampler) if with_state else None
    seen: list[int] = []
    for step, batch in enumerate(sampler.track(loader)):
        assert sampler.state_dict()["consumed"] == sampler.consumed == 4 * step
        trained.backward(batch)
        assert sampler.consumed == 4 * step
        trained.step()
        seen += batch[0].tolist()
        assert sampler.state_dict()["consumed"] == sampler.consumed == 4 * (step + 1)
        if step == 2:
            break
    assert sampler.consumed == 12
    for batch in sampler.track(loader):
        seen += batch[0].tolist()
        trained.backward(batch)
        trained.step()
    assert (sampler.epoch, sampler.consumed) == (1, 0)
    assert sorted(seen) == list(range(22))
    assert state is None or state.steps == 6


@pytest.mark.parametrize("with_state", [True, False])
def test_batches_that_make_one_step_count_together(alone: None, with_state: bool) -> None:
    sampler = ElasticBatchSampler(24, global_batch=4)
    trained = Trained(passes=2)
    state = State(optimizer=trained.optimizer, sampler=sampler) if with_state else None
    counted = []
    for number, batch in enumerate(sampler.track(loader_of(sampler)), start=1):
        trained.backward(batch)
        if number % 2 == 0:
            trained.step()
        counted.append(sampler.consumed)
    assert counted == [0, 8, 8, 16, 16, 24]
    assert sampler.epoch == 1
    assert state is None or state.steps == 3


def test_batches_of_an_epoch_whose_step_ends_in_the_next_one_count_with_it(alone: None) -> None:
    sampler = ElasticBatchSampler(20, global_batch=4)  # five batches, and two make a step
    trained = Trained(passes=2)
    state = State(optimizer=trained.optimizer, sampler=sampler, number=0, epoch=0)
    state.commit()

    def train_epoch() -> None:
        for batch in sampler.track(loader_of(sampler)):
            state.number += 1
            trained.backward(batch)
            if state.number % 2 == 0:
                trained.step()
        state.epoch += 1
        state.commit()

    train_epoch()
    assert (sampler.epoch, sampler.consumed, state.steps) == (1, 0, 2)
    assert sampler.state_dict()["consumed"] == 16, "the last batch is in no parameter"
    train_epoch()
    assert (sampler.epoch, state.steps) == (2, 5)
    assert sampler.position == (2, 0)


@pytest.mark.parametrize("sets_epoch", [True, False])
def test_a_commit_between_the_batches_of_a_step_is_made_at_its_end(alone: None, sets_epoch: bool) -> None:
    sampler = ElasticBatchSampler(20, global_batch=4)
    trained = Trained(passes=2)
    state = State(optimizer=trained.optimizer, sampler=sampler, number=0, epoch=0)
    state.commit()
    seen: list[int] = []

    def train(until: int) -> None:
        while state.epoch < 2:
            if sets_epoch:
                sampler.set_epoch(state.epoch)
            for batch in sampler.track(loader_of(sampler)):
                seen.extend(batch[0].tolist())
                state.number += 1
                trained.backward(batch)
                if state.number == until:
                    return
                if state.number % 2 == 0:
                    trained.step()
            state.epoch += 1
            state.commit()

    def where() -> tuple[object, ...]:
        return state.steps, state.number, state.epoch, sampler.position

    train(until=6)
    state.undo_step()  # as when a rank is lost in the second batch of the step
    state.reset()
    assert where() == (2, 4, 0, (0, 16))
    del seen[16:]
    train(until=8)
    state.restore()
    state.reset()
    assert where() == (3, 6, 1, (1, 4))
    del seen[24:]
    train(until=0)
    assert where() == (5, 10, 2, (2, 0))
    assert sorted(seen) == sorted([*range(20)] * 2)


def test_another_epoch_does_not_forget_batches_of_a_step_that_has_not_finished(alone: None) -> None:
    sampler = ElasticBatchSampler(4, global_batch=4)
    trained = Trained(passes=2)
    state = State(optimizer=trained.optimizer, sampler=sampler)
    for batch in sampler.track(loader_of(sampler)):
        trained.backward(batch)
    sampler.set_epoch(7)
    assert (sampler.epoch, sampler.position) == (7, (0, 0))
    state.undo_step()
    assert sampler.epoch == 0


def test_without_an_optimizer_a_batch_counts_when_the_next_is_asked_for(alone: None) -> None:
    sampler = ElasticBatchSampler(10, global_batch=4)
    assert [sampler.consumed for _ in sampler.track(loader_of(sampler))] == [0, 4, 8]
    assert sampler.epoch == 1


def test_a_commit_in_the_middle_of_a_step_does_not_count_its_batch(alone: None) -> None:
    sampler = ElasticBatchSampler(12, global_batch=4)
    trained = Trained()
    state = State(optimizer=trained.optimizer, sampler=sampler)
    for number, batch in enumerate(sampler.track(loader_of(sampler))):
        state.commit()
        assert sampler.consumed == 4 * number
        trained.backward(batch)
        trained.step()
    assert state.steps == 3


def train_on_uneven_batches(world: World, in_step: Callable[[], object] = lambda: None) -> list[object]:
    """The gradients of all steps, then one where every rank counts alike."""
    training = ArrayTraining(world.group, [Weight("a")])
    sampler = ElasticBatchSampler(7, global_batch=5, shuffle=False, group=world.group)
    seen: list[object] = []
    for batch in sampler.track(loader_of(sampler)):
        in_step()
        training.clear()
        training.backward(a=float(batch[0].double().mean()))
        seen += training.grads("a")
        training.take_step()
    training.clear()
    training.backward(a=float(world.rank))
    seen += training.grads("a")
    training.step.close()
    return seen


def test_the_gradients_of_an_uneven_batch_are_weighted() -> None:
    expected = [2.0, 5.5, 1.0]  # the means of 0 to 4, and of 5 and 6; then every rank counts alike again
    for seen in run_threads(3, train_on_uneven_batches):
        assert seen == pytest.approx(expected)


@pytest.mark.parametrize("num_evaluated", [1, 9])
def test_an_evaluation_in_a_step_does_not_change_how_its_gradients_are_weighted(num_evaluated: int) -> None:
    """The evaluation has uneven batches, too; with one of them it leaves its loop early."""

    def body(world: World) -> list[object]:
        evaluated = ElasticBatchSampler(4, global_batch=2, group=world.group)
        return train_on_uneven_batches(
            world, lambda: list(islice(evaluated.track(loader_of(evaluated)), num_evaluated))
        )

    for seen in run_threads(3, body):
        assert seen == pytest.approx([2.0, 5.5, 1.0])


def test_a_step_after_restore_counts(alone: None) -> None:
    sampler = ElasticBatchSampler(12, global_batch=4)
    trained = Trained()
    state = State(optimizer=trained.optimizer, sampler=sampler)
    state.commit()
    for restores, consumed in [(True, 4), (False, 4), (False, 8)]:
        for batch in sampler.track(loader_of(sampler)):
            trained.backward(batch)
            trained.step()
            break
        state.end_step()
        assert (sampler.consumed, state.steps) == (consumed, consumed // 4)
        if restores:
            state.restore()
            assert (sampler.consumed, state.steps) == (0, 0)


@pytest.mark.parametrize("how", ["restore", "load_state_dict", "another loop"])
def test_a_loop_whose_position_was_set_in_its_body_does_not_go_on(alone: None, how: str) -> None:
    sampler = ElasticBatchSampler(12, global_batch=4)
    trained = Trained()
    state = State(optimizer=trained.optimizer, sampler=sampler)
    state.commit()
    saved = sampler.state_dict()
    seen: list[int] = []
    with pytest.raises(ValueError, match="leave the loop, and begin"):
        for batch in sampler.track(loader_of(sampler)):
            seen += batch[0].tolist()
            trained.backward(batch)
            trained.step()
            if how == "restore":
                state.restore()
            elif how == "load_state_dict":
                sampler.load_state_dict(saved)
            else:
                iter(loader_of(sampler))
    assert len(seen) == 4


@pytest.mark.parametrize(("is_in_another", "told"), [(False, "in no State"), (True, "in another State than that of")])
def test_in_a_run_only_a_sampler_of_its_state_is_tracked(alone: None, is_in_another: bool, told: str) -> None:
    trained, sampler = Trained(), ElasticBatchSampler(12, global_batch=4)
    state = State(optimizer=trained.optimizer, **({"sampler": sampler} if is_in_another else {}))
    another = State(sampler=sampler) if is_in_another else None

    def train(state: State) -> None:
        with pytest.raises(ValueError, match=rf"track\(\): the sampler is {told}"):
            next(sampler.track(loader_of(sampler)))
        assert len(list(loader_of(sampler))) == 3, "a validation"

    ronde.elastic.run(train, state)
    del another
    assert len(list(sampler.track(loader_of(sampler)))) == 3, "behind the run"


@pytest.mark.parametrize(
    "other",
    [
        {"data": 11},
        {"seed": 2},
        {"shuffle": False},
        {"ends": "drop"},
        {"global_batch": 8},
        {"global_batch": None, "per_rank_batch": 4},
        {"shares": "speed"},
    ],
    ids=repr,
)
def test_ranks_with_different_samplers_are_refused(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> str:
        settings = {"data": 12, "global_batch": 4, **(other if world.rank else {})}
        state = State(sampler=ElasticBatchSampler(**settings))
        with pytest.raises(ronde.Mismatch) as raised:
            state.sync()
        return str(raised.value)

    first, second = run_ranks(monkeypatch, 2, body)
    assert first == second
    assert "sampler of the state differs between ranks: rank 0 gave length=12, seed=0, shuffle=True, " in first


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match="either global_batch or per_rank_batch"):
        ElasticBatchSampler(4)
    with pytest.raises(ValueError, match="either global_batch or per_rank_batch"):
        ElasticBatchSampler(4, global_batch=1, per_rank_batch=1)
    with pytest.raises(ValueError, match="whole numbers from 1, got 0"):
        ElasticBatchSampler(4, global_batch=0)
    with pytest.raises(ValueError, match=r"some samples twice.*'uneven'"):
        ElasticBatchSampler(4, global_batch=1, ends="pad")
    with pytest.raises(ValueError, match="got 'uneven' and 'fast'"):
        ElasticBatchSampler(4, global_batch=1, shares="fast")

    def body(world: World) -> None:
        sampler = ElasticBatchSampler(4, global_batch=2, group=world.group)
        with pytest.raises(ValueError, match="batch_sampler=sampler"):
            next(iter(sampler.track(DataLoader(TensorDataset(torch.arange(4)), batch_size=2))))
        if "in_order" in inspect.signature(DataLoader).parameters:
            with pytest.raises(ValueError, match="in_order=False"):
                next(iter(sampler.track(loader_of(sampler, num_workers=1, in_order=False))))
        with pytest.raises(ValueError, match="more batches than were drawn"):
            list(sampler.track([1, *loader_of(sampler)]))
        other = ElasticBatchSampler(4, global_batch=2, seed=9, group=world.group)
        saved = {**sampler.state_dict(), "consumed": 2}
        with pytest.raises(ValueError, match="seed=0, here 9"):
            other.load_state_dict(saved)

    run_threads(1, body)
