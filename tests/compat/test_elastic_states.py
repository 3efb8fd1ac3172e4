"""hvd.elastic in one process: states, the sampler, and what the loop around a training function does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.common import elastic
from horovod.common.elastic import ObjectState, State, run_fn
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner.elastic.worker import HostUpdateResult
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import (
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)
from ronde.comm.world import current_world
from ronde.errors import Mismatch, PeerLost


@pytest.fixture
def alone() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


class Recorded(State):
    """Writes down what is done to it."""

    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda: 0)
        self.calls: list[str] = []
        self.register_reset_callbacks([lambda: self.calls.append("callback")])

    def save(self) -> None:
        self.calls.append("save")

    def restore(self) -> None:
        self.calls.append("restore")

    def sync(self) -> None:
        self.calls.append("sync")

    def reset(self) -> None:
        self.calls.append("reset")


def outcomes(state: Recorded, *raised: Exception) -> list[str]:
    """What the loop does with a function that raises these, one after the other, and then returns."""
    left = list(raised)

    def train(state: Recorded, word: str) -> str:
        state.calls.append("train")
        if left:
            raise left.pop(0)
        return word

    assert run_fn(train, lambda: state.calls.append("join"))(state, "done") == "done"
    return state.calls


def test_the_function_is_called_with_a_state_that_all_share() -> None:
    assert outcomes(Recorded()) == ["sync", "train"]


def test_an_internal_error_returns_to_the_last_commit() -> None:
    expected = ["sync", "train", "restore", "join", "reset", "callback", "sync", "train"]
    assert outcomes(Recorded(), HorovodInternalError("gone")) == expected
    assert outcomes(Recorded(), PeerLost(rank=0, peer=1)) == expected, "a backward pass raises ronde's own"


def test_a_change_of_hosts_goes_on_with_the_state_as_it_is() -> None:
    expected = ["sync", "train", "join", "reset", "callback", "sync", "train"]
    assert outcomes(Recorded(), HostsUpdatedInterrupt(skip_sync=False)) == expected
    assert outcomes(Recorded(), HostsUpdatedInterrupt(skip_sync=True)) == [*expected[:5], "train"]


@pytest.mark.usefixtures("alone")
def test_a_job_of_one_goes_on_too() -> None:
    state, left = TorchState(epoch=1), [HorovodInternalError("x"), HostsUpdatedInterrupt(skip_sync=False)]

    @hvd.elastic.run
    def train(state: TorchState) -> int:
        state.epoch += 1
        if left:
            raise left.pop()
        return int(state.epoch)

    assert train(state) == 2, "values that were not committed go back when the state is sent, and when it is restored"
    assert (hvd.rank(), hvd.size()) == (0, 1)


def test_an_error_after_hosts_were_removed_sends_the_state_again() -> None:
    calls = outcomes(Recorded(), HostsUpdatedInterrupt(skip_sync=True), HorovodInternalError("gone"))
    assert calls[-6:] == ["restore", "join", "reset", "callback", "sync", "train"]


def test_other_errors_end_the_script() -> None:
    for error in (KeyError("x"), Mismatch("ranks disagree")):
        state = Recorded()
        with pytest.raises((KeyError, HorovodInternalError)):
            outcomes(state, error)
        assert state.calls == ["sync", "train"]
    assert not elastic.notification_manager._listeners


def test_listeners_are_told_and_a_commit_raises() -> None:
    state = Recorded()
    elastic.notification_manager.register_listener(state)
    try:
        state.commit()
        for time, change, skip_sync in [(5, HostUpdateResult.removed, True), (6, HostUpdateResult.mixed, False)]:
            elastic.notification_manager.handle_hosts_updated(time, change)
            with pytest.raises(HostsUpdatedInterrupt) as raised:
                state.commit()
            assert raised.value.skip_sync is skip_sync
        elastic.notification_manager.handle_hosts_updated(6, HostUpdateResult.added)
        state.commit()  # not newer than what it knows
        elastic.notification_manager.handle_hosts_updated(7, HostUpdateResult.added)
        state.on_reset()
        state.commit()  # the new set of processes is the answer to it
    finally:
        elastic.notification_manager.remove_listener(state)


@pytest.mark.usefixtures("alone")
def test_a_change_that_ronde_wants_is_seen_once_in_a_round() -> None:
    state = Recorded()
    elastic.notification_manager.register_listener(state)
    try:
        assert state._host_messages.empty()
        current_world().change_wanted = True
        assert not state._host_messages.empty()
        with pytest.raises(HostsUpdatedInterrupt) as raised:
            state.check_host_updates()
        assert raised.value.skip_sync is False
        state.check_host_updates()
    finally:
        elastic.notification_manager.remove_listener(state)


def test_a_state_without_methods_says_so() -> None:
    state = State(lambda value: value, lambda: 0)
    for call in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            call()


def test_values_are_attributes() -> None:
    sent: list[dict[str, Any]] = []

    def from_rank_0(values: dict[str, Any]) -> dict[str, Any]:
        sent.append(values)
        return {"epoch": 7, "batch": 8}

    state = ObjectState(from_rank_0, lambda: 1, epoch=1, batch=2)
    state.epoch = 3
    state.restore()
    assert (state.epoch, state.batch) == (1, 2)
    state.epoch = 3
    state.save()
    state.epoch = 4
    state.sync()
    assert sent == [{"epoch": 3, "batch": 2}], "what was saved is sent"
    assert (state.epoch, state.batch) == (7, 8)


@pytest.mark.usefixtures("alone")
def test_models_and_optimizers_return_to_the_commit_as_often_as_needed() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TorchState(model, optimizer, epoch=1)

    def train() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state.epoch += 1

    train()
    state.commit()
    weight, momentum = model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()
    for _ in range(2):
        train()
        assert not torch.equal(model.weight, weight)
        state.restore()
        assert torch.equal(model.weight, weight)
        assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], momentum)
        assert state.epoch == 2


@pytest.mark.usefixtures("alone")
def test_what_was_sent_can_be_restored() -> None:
    model = nn.Linear(2, 1)
    state = TorchState(model)
    with torch.no_grad():
        model.weight.fill_(5.0)
    state.sync()
    with torch.no_grad():
        model.weight.fill_(6.0)
    state.restore()
    assert model.weight.tolist() == [[5.0, 5.0]]


@pytest.mark.usefixtures("alone")
def test_another_model_takes_the_place_of_the_first() -> None:
    state = TorchState(nn.Linear(1, 1), extra=nn.Linear(1, 1))
    second = nn.Linear(1, 1)
    state.extra = second
    weight = second.weight.detach().clone()
    with torch.no_grad():
        second.weight.add_(1.0)
    state.restore()
    assert state.extra is second
    assert torch.equal(second.weight, weight)
    assert state.optimizer is None


@pytest.mark.usefixtures("alone")
def test_further_types_may_have_handlers() -> None:
    class Counter:
        count = 0

    class CounterHandler(StateHandler):
        saved = 0

        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)

    before = get_handler_registry()
    set_handler_registry([(Counter, CounterHandler), *before])
    try:
        state = TorchState(counter=Counter())
    finally:
        set_handler_registry(before)
    state.counter.count = 3
    state.commit()
    state.counter.count = 4
    state.restore()
    assert state.counter.count == 3
    state.sync()


def sampler_of(rank: int, size: int, monkeypatch: pytest.MonkeyPatch, **state: int) -> ElasticSampler:
    from horovod.torch.elastic import sampler

    monkeypatch.setattr(sampler, "rank", lambda: rank)
    monkeypatch.setattr(sampler, "size", lambda: size)
    made = ElasticSampler(range(10), shuffle=False)
    if state:
        made.load_state_dict({"epoch": 0, "processed_num": 0, **state})
    return made


def test_the_sampler_divides_what_is_left_and_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [list(sampler_of(rank, 4, monkeypatch)) for rank in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    rest = [sampler_of(rank, 3, monkeypatch, processed_num=8) for rank in range(3)]
    assert [list(each) for each in rest] == [[8], [9], [8]]
    assert [len(each) for each in rest] == [1, 1, 1]
    assert rest[0].processed_indices == set(range(8))
    assert list(sampler_of(0, 2, monkeypatch, processed_num=10)) == []


def test_the_sampler_counts_batches_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(0, 2, monkeypatch)
    sampler.record_batch(0, 3)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 6}
    assert len(sampler) == 5, "the division changes only in reset()"
    sampler.reset()
    assert list(sampler) == [6, 8]
    sampler.set_epoch(1)
    assert (len(sampler), sampler.processed_num) == (5, 0)


def test_the_order_is_that_of_seed_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler_of(0, 1, monkeypatch)
    one, two = ElasticSampler(range(50), seed=1), ElasticSampler(range(50), seed=0)
    two.set_epoch(1)
    assert list(one) == list(two) != list(range(50))
    assert sorted(one) == list(range(50))
