"""What the parts of an elastic State keep at a step end and in a commit, and return to. In a job of one rank."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import BatchSampler

import ronde
import ronde.elastic
from ronde.comm.world import World
from ronde.elastic import State
from ronde.errors import OutOfSync
from ronde.torch import DistributedOptimizer, ElasticBatchSampler, ShardedSampler, elastic_state
from ronde.torch.broadcast_state import assign_givers
from tests.unit.elastic.thread_states import run_ranks


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    ronde.init()
    yield
    ronde.shutdown()


class Noisy(nn.Module):
    """A forward pass changes buffers in place and by replacing them, and draws random numbers."""

    num_calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls = self.num_calls + 1
        self.seen = torch.cat([self.seen, x.mean().detach().reshape(1)])
        result: Tensor = self.layers(x)
        return result * float(np.random.uniform(0.9, 1.1)) * random.uniform(0.9, 1.1)


class Training:
    def __init__(self, *, distributed: bool = True, scaled: bool = False) -> None:
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        self.model = Noisy()
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.1)
        if distributed:
            self.optimizer = DistributedOptimizer(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        self.state = State(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler, epoch=0
        )

    def backward(self, factor: float = 1.0) -> float:
        """A pass over data that depends on the step alone; the loss depends on random numbers, too."""
        data = torch.randn(6, 4, generator=torch.Generator().manual_seed(self.state.steps))
        loss = self.model(data).square().mean()
        scaled: Any = self.scaler.scale(loss * factor)
        scaled.backward()
        return float(loss.detach())

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            losses.append(self.backward())
            self.finish()
            self.state.end_step()
        return losses

    def everything(self) -> Any:
        """All that training depends on."""
        parts = (self.model, self.optimizer, self.scheduler, self.scaler)
        states = copy.deepcopy([part.state_dict() for part in parts])
        return [*states, torch.get_rng_state(), np.random.get_state(), random.getstate(), self.state.epoch]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one[:5], other[:5], rtol=0, atol=0)
    np.testing.assert_equal(one[5:], other[5:])


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_interrupted_step_is_done_again_as_if_nothing_had_happened(distributed: bool, scaled: bool) -> None:
    undisturbed = Training(distributed=distributed, scaled=scaled).train(5)
    training = Training(distributed=distributed, scaled=scaled)
    losses = training.train(2)
    before = training.everything()
    for interrupted_at in ("forward", "backward", "unscale", "epoch"):
        if interrupted_at == "forward":
            training.model(torch.ones(6, 4))
        elif interrupted_at == "epoch":
            training.scheduler.step()
            training.state.epoch += 1
        else:
            training.backward()
            training.backward()  # accumulated
            if interrupted_at == "unscale":
                training.scaler.unscale_(training.optimizer)
        training.state.undo_step()
        assert_same(training.everything(), before)
        assert all(parameter.grad is None for parameter in training.model.parameters())
    losses += training.train(3)
    assert losses == undisturbed


def test_a_commit_is_returned_to_as_often_as_necessary() -> None:
    training = Training(scaled=True)
    training.train(2)
    training.state.commit()
    committed = training.everything()
    for _ in range(2):
        training.train(3)
        training.scheduler.step()
        training.state.epoch = 7
        training.backward()
        training.state.restore()
        assert_same(training.everything(), committed)


def test_a_buffer_that_is_replaced_several_times_in_a_step_may_change_its_shape() -> None:
    """The second new tensor often is where the first one was."""
    model = nn.Module()
    model.register_buffer("seen", torch.zeros(1))
    state = State(model=model)
    for size in range(2, 50, 2):
        for new_size in (size, size + 1):
            model.seen = torch.ones(new_size)
        state.end_step()
        model.seen = torch.zeros(1)
        state.undo_step()
        assert torch.equal(model.seen, torch.ones(size + 1))


class LazyBuffers(nn.Module):
    """The first forward pass makes one buffer where there was none, and registers another one."""

    count: Tensor | None
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.zeros(1))
        self.register_buffer("count", None)

    def forward(self) -> list[float]:
        self.count = torch.ones(1) if self.count is None else self.count + 1
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros(1))
        self.seen += 1
        return [float(self.count), float(self.seen)]


def test_buffers_that_a_forward_pass_has_made_return_to_the_step_end() -> None:
    model = LazyBuffers()
    state = State(model=model)
    state.sync()
    for _ in range(2):
        assert model.forward() == [1, 1]
        state.undo_step()
        assert model.count is None
    model.forward()
    state.end_step()
    for _ in range(2):
        assert model.forward() == [2, 2]
        state.undo_step()
    state.restore()
    assert model.forward() == [1, 1]


def test_a_rank_without_a_buffer_gets_it_from_one_that_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is lost in the first step: one of the others has finished it, the other one has not."""

    def body(world: World) -> float | None:
        model = LazyBuffers()
        del model.known
        state = State(model=model)
        if world.rank == 1:
            model.count = torch.full((1,), 5.0)
            state._end_step()
        state._is_survivor = True
        state.sync()
        return None if model.count is None else float(model.count)

    assert run_ranks(monkeypatch, 3, body) == [5.0] * 3


def test_an_average_of_weights_that_was_updated_behind_a_step_returns_to_its_end() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    state = State(average=average, model=model, optimizer=optimizer)
    state.sync()
    average.update_parameters(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.end_step()
    kept = copy.deepcopy(average.state_dict())
    for _ in range(2):
        average.update_parameters(model)
        state.undo_step()
        torch.testing.assert_close(average.state_dict(), kept, rtol=0, atol=0)


def replace_data(parameter: Tensor) -> None:
    parameter.data = parameter.data + 1


UPDATES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda parameter: parameter.detach().add_(1),
    "new data": replace_data,
    "data in place": lambda parameter: parameter.data.add_(1),
}


@pytest.mark.parametrize("update", UPDATES)
def test_parameters_of_a_model_that_no_optimizer_has_return_to_the_step_end(update: str) -> None:
    """A momentum encoder is a part of the model, and a forward pass changes it."""
    model = nn.ModuleDict({"encoder": nn.Linear(2, 1), "momentum": nn.Linear(2, 1).requires_grad_(False)})
    optimizer = torch.optim.SGD(model["encoder"].parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer)
    state.sync()

    def change() -> None:
        for parameter in model["momentum"].parameters():
            UPDATES[update](parameter)

    for _ in range(2):
        change()
        state.commit()
        committed = copy.deepcopy(model.state_dict())
        change()
        state.end_step()
        kept = copy.deepcopy(model.state_dict())
        for _ in range(2):
            change()
            change()
            state.undo_step()
            torch.testing.assert_close(model.state_dict(), kept, rtol=0, atol=0)
        state.restore()
        torch.testing.assert_close(model.state_dict(), committed, rtol=0, atol=0)


def test_frozen_parameters_are_not_copied_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    state = State(model=model, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1))
    state.sync()
    for copying in ("_copy", "_copy_tensors"):
        monkeypatch.setattr(elastic_state, copying, lambda *_: pytest.fail("a copy"))
    model(torch.ones(1, 2)).sum().backward()
    state.optimizer.step()
    state.end_step()


def test_a_value_with_a_graph_is_refused_by_its_name() -> None:
    state = State(best=torch.zeros(1))
    state.loss = nn.Linear(2, 1)(torch.ones(2)).sum()
    with pytest.raises(TypeError, match=r"the value 'loss' of the state cannot be copied .*loss\.item\(\)"):
        state.end_step()


def test_state_that_an_optimizer_has_got_since_a_commit_is_dropped() -> None:
    training = Training()
    training.state.commit()
    training.train(1)
    assert training.optimizer.state
    training.state.restore()
    assert not training.optimizer.state


@pytest.mark.parametrize("distributed", [True, False])
def test_only_an_optimizer_that_has_changed_parameters_has_stepped(distributed: bool) -> None:
    training = Training(distributed=distributed)
    assert not training.state.has_stepped()
    training.backward()
    assert not training.state.has_stepped()
    training.finish()
    assert training.state.has_stepped()
    training.state.end_step()
    assert not training.state.has_stepped()


def test_a_step_that_the_scaler_skips_is_a_step() -> None:
    training = Training(scaled=True)
    training.train(1)
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.backward(float("inf"))
    training.finish()
    assert all(map(torch.equal, before, training.model.parameters()))
    assert training.state.has_stepped()
    training.state.end_step()
    assert not training.state.has_stepped()


def test_an_optimizer_that_calls_its_closure_again_has_stepped_before_its_step_is_over() -> None:
    model = nn.Linear(3, 1)
    optimizer: Any = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=4))
    state = State(optimizer=optimizer)
    seen: list[bool] = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = (model(torch.ones(5, 3)) - 3).square().mean()
        loss.backward()
        seen.append(state.has_stepped())
        return loss

    optimizer.step(closure)
    assert len(seen) > 2
    assert seen == [False, *[True] * (len(seen) - 1)]
    assert state.has_stepped()


def test_other_objects_with_a_state_dict_are_kept_too() -> None:
    class Counter:
        def __init__(self) -> None:
            self.numbers: list[int] = []

        def state_dict(self) -> dict[str, Any]:
            return {"numbers": self.numbers}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.numbers = state["numbers"]

    counter = Counter()
    state = State(counter=counter)
    counter.numbers.append(1)
    state.end_step()
    counter.numbers.append(2)
    state.undo_step()
    assert state.counter is counter
    assert counter.numbers == [1]
    state.commit()
    for _ in range(2):
        counter.numbers.append(3)
        state.restore()
        assert counter.numbers == [1]


@pytest.mark.parametrize("value", [[1, (2.5, {3})], torch.ones(2), np.float64(1.5), len])
def test_what_a_state_dict_has_returns_as_it_was(value: Any) -> None:
    class Holder:
        def __init__(self) -> None:
            self.held = [value]

        def state_dict(self) -> dict[str, Any]:
            return vars(self)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    holder = Holder()
    state = State(holder=holder)
    for _ in range(2):
        holder.held.append(2)
        state.undo_step()
        assert repr(holder.held) == repr([value])


@given(sizes=st.lists(st.integers(0, 1000), max_size=30), num_givers=st.integers(1, 5))
def test_givers_send_about_equally_much(sizes: list[int], num_givers: int) -> None:
    givers = [2 * number + 1 for number in range(num_givers)]
    assigned = assign_givers(sizes, givers)
    loads = [sum(size for size, giver in zip(sizes, assigned, strict=True) if giver == each) for each in givers]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


# A double takes two words of a Mersenne Twister, so 312 of them leave its position as it was. Every second number of a
# normal distribution is in store.
DRAWS: dict[str, Sequence[Callable[[], object]]] = {
    "one number": (random.random, np.random.random_sample, lambda: torch.rand(1)),
    "a whole turn": (
        lambda: [random.random() for _ in range(312)],
        lambda: np.random.random_sample(312),
        lambda: torch.rand(624),
    ),
    "a normal number": (lambda: random.gauss(0, 1), np.random.standard_normal, lambda: torch.randn(1)),
    "three normal numbers": (
        lambda: [random.gauss(0, 1) for _ in range(3)],
        lambda: np.random.standard_normal(3),
        lambda: torch.randn(3, dtype=torch.float64),
    ),
    "a seed": (lambda: random.seed(7), lambda: np.random.seed(7), lambda: torch.manual_seed(7)),
    "nothing": (),
}


@pytest.mark.parametrize("finds_words", [True, False])
@pytest.mark.parametrize("drawn", DRAWS)
def test_random_numbers_return_to_the_step_end(drawn: str, finds_words: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not finds_words:
        monkeypatch.setattr(elastic_state, "_find_python_words", lambda generator: None)
    state = State()
    for _ in range(4):
        for draw in DRAWS[drawn]:
            draw()
        state.end_step()
        before = (torch.get_rng_state().numpy(), np.random.get_state(), random.getstate())
        for interrupting in DRAWS:
            for draw in DRAWS[interrupting]:
                draw()
            state.undo_step()
            after = (torch.get_rng_state().numpy(), np.random.get_state(), random.getstate())
            np.testing.assert_equal(after, before)


def test_states_that_take_long_to_read_are_read_anew_only_when_numbers_were_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = State()
    for module, name in ((np.random, "get_state"), (random, "getstate")):
        monkeypatch.setattr(module, name, lambda: pytest.fail("a state was read"))
    state.end_step()
    random.random()
    state.end_step()


def test_another_generator_of_numpy_is_noticed() -> None:
    of_numpy: Any = np.random
    if not hasattr(of_numpy, "set_bit_generator"):
        pytest.skip("this NumPy has one generator")
    state = State()
    former = of_numpy.get_bit_generator()
    try:
        of_numpy.set_bit_generator(np.random.MT19937(5))
        state.end_step()
        drawn = np.random.random_sample(3)
        state.undo_step()
        assert (np.random.random_sample(3) == drawn).all()
    finally:
        of_numpy.set_bit_generator(former)


def test_options_of_an_optimizer_return_to_the_step_end() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.5)
    state = State(optimizer=optimizer)
    (group,) = optimizer.param_groups
    for rate in (0.25, torch.tensor(0.125), torch.tensor([0.0625])):
        group["lr"] = rate
        group["params"] = list(second.parameters())  # others of the same shapes
        state.end_step()
        if isinstance(rate, Tensor):
            group["lr"].mul_(0.5)  # in place
            state.end_step()
            rate = rate.clone()
            group["lr"].mul_(0.5)
        group["lr"] = group["lr"] * 0.5
        group["momentum"] = 0.75
        state.undo_step()
        assert (float(group["lr"]), group["momentum"]) == (float(rate), 0)
        assert isinstance(group["lr"], type(rate))
        group["params"] = list(first.parameters())


def test_a_scaler_that_has_scaled_nothing_before_is_undone_as_often_as_necessary() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = State(scaler=scaler)
    for _ in range(2):
        scaler.scale(torch.ones(1))
        assert not state.has_stepped()
        scaler.set_growth_factor(4.0)
        state.undo_step()
        assert not state.has_stepped()
        assert (scaler.get_scale(), scaler.get_growth_factor()) == (8.0, 2.0)
    scaler.update(4.0)
    assert state.has_stepped()
    state.end_step()
    assert not state.has_stepped()


def test_an_elastic_step_calls_no_more_python_functions_than_a_plain_one() -> None:
    """Between two bodies of the loop; plain training draws its batches from a ShardedSampler."""
    model = nn.Linear(4, 1)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    sampler = ElasticBatchSampler(32 * 20, global_batch=32)
    state = State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    plain = BatchSampler(ShardedSampler(32 * 20), 32, drop_last=False)

    def count_calls(batches: Iterator[Any]) -> int:
        num_calls = 0

        def on_event(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event == "call"

        next(batches)
        gc.disable()  # it might call something
        try:
            for _ in range(10):
                optimizer._reducers.num_steps += 1  # as step() does
                sys.setprofile(on_event)
                next(batches)
                sys.setprofile(None)
        finally:
            gc.enable()
        return num_calls

    assert count_calls(sampler.track(sampler)) <= count_calls(iter(plain))
    assert state.steps == 10


def test_a_model_that_was_forgotten_in_the_state_is_named_when_ranks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(world: World) -> str:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, world.rank)
        nn.init.zeros_(model.bias)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        State(optimizer=optimizer).sync()
        loss: Any = model(torch.ones(1, 2)).sum()
        with pytest.raises(OutOfSync) as raised:
            loss.backward()
        optimizer.close()
        return str(raised.value)

    for told in run_ranks(monkeypatch, 2, body):
        assert "Call ronde.elastic.State(model=model, …) with the whole model before the first step" in told


def test_a_run_without_one_of_the_distributed_optimizers_in_its_state_is_refused() -> None:
    first, second = (DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 1).parameters())) for _ in range(2))
    with pytest.raises(ValueError, match=r"'group0\.param0' is not in the State.* give it to State\("):
        ronde.elastic.run(lambda state: None, State(first=first))
    second.close()
    assert ronde.elastic.run(lambda state: "done", State(first=first)) == "done"
