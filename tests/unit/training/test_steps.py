"""Which backward passes make a step, and when it has all of them. Ranks are threads, over NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.gradients import steps
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.reducer import Reducer
from ronde.training.gradients.steps import TRANSITIONS, StepEvent, StepState, TrainingStep
from tests.conformance.ranks import run_threads
from tests.limits import OPERATION_S
from tests.unit.training.arrays import (
    ONE_EACH,
    ArrayAdapter,
    ArrayBackwardPass,
    ArrayTraining,
    Weight,
    backward_jointly,
    run_training,
)


def test_every_state_can_be_reached_and_closed() -> None:
    assert len(TRANSITIONS) == len(StepState) <= 8
    reached, found = {StepState.IDLE}, [StepState.IDLE]
    while found:
        following = set(TRANSITIONS[found.pop()].values()) - reached
        reached |= following
        found += following
    assert reached == set(StepState)
    assert all(TRANSITIONS[state][StepEvent.CLOSED] is StepState.CLOSED for state in reached - {StepState.CLOSED})


def test_a_step_goes_through_its_states() -> None:
    def body(training: ArrayTraining, world: World) -> list[str]:
        seen = []

        def look() -> None:
            seen.append(training.step.state.name)

        look()
        training.backward_nested(a=1.0)
        look()
        training.backward(a=1.0)
        look()
        training.backward()  # a pass without a gradient is none
        training.backward(a=1.0)
        look()
        training.take_step()
        look()
        training.clear()
        training.adapter.on_ready(0)
        look()
        training.clear()
        training.backward_pass.run_end_callbacks()  # of the pass that was cleared
        look()
        training.step.close()
        training.step.synchronize()
        look()
        return seen

    states = ["IDLE", "OUTER_BACKWARD", "ACCUMULATING", "REDUCED", "IDLE", "BACKWARD", "IDLE", "CLOSED"]
    assert run_training(1, body, "a", passes=2) == [states]


def test_ranks_that_could_not_agree_begin_the_next_step_anew() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.weights["a"].count = 4 + world.rank
        with pytest.raises(Mismatch):
            training.backward(a=1.0)
        assert training.step.state is StepState.IDLE
        training.weights["a"].count = 4
        training.clear()
        training.backward(a=world.rank)
        return training.grads("a")

    assert run_training(2, body, [Weight("a")]) == [[0.5]] * 2


@pytest.mark.parametrize("settings", [GradientSettings(), ONE_EACH])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_pass_of_which_all_gradients_came_inside_of_others_ends_with_the_outermost(
    settings: GradientSettings, num_passes: int
) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen = []
        for _ in range(3):
            training.clear()
            for _ in range(num_passes):
                training.backward_nested(b=4.0 * world.rank)
                training.backward_nested(a=world.rank)
                training.backward()  # goes on, without a gradient of its own
            seen += training.grads("ab")
        return seen

    assert run_training(2, body, "ab", settings, passes=num_passes) == [[0.5, 2.0] * 3] * 2


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "2"])
def test_the_number_of_passes_is_a_whole_number_from_1(given: int) -> None:
    with pytest.raises(ValueError, match=f"passes must be a whole number from 1, got {given!r}"):
        TrainingStep(ArrayBackwardPass(), given, gradient_version=object)


def test_the_number_of_passes_cannot_change_in_the_middle_of_a_step() -> None:
    def body(training: ArrayTraining, world: World) -> None:
        training.backward(a=1.0)
        with pytest.raises(ValueError, match="cannot change in the middle of a step, after 1"):
            training.step.num_passes = 3
        training.clear()
        training.step.num_passes = 3

    run_training(1, body, "a", passes=2)


# --- passes that an error ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_after_a_pass_that_an_error_ended_the_next_one_is_reduced(overlap: bool) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen = []
        for step in range(3):
            for weight in training.weights.values():
                weight.grad = None  # as model.zero_grad() does it: the optimizer learns nothing of it
            if step == 1:
                with pytest.raises(ZeroDivisionError):
                    backward_jointly((training, {"a": 5.0 * world.rank}), error=ZeroDivisionError())
                continue
            training.backward(a=world.rank, b=4.0 * world.rank)
            seen += training.grads("ab")
            training.take_step()
        return seen

    assert run_training(2, body, "ab", ONE_EACH, overlap=overlap) == [[0.5, 2.0] * 2] * 2


def test_a_pass_that_an_error_ended_begins_a_step() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.backward(a=1.0)
        training.weights["a"].grad = None
        with pytest.raises(ZeroDivisionError):
            backward_jointly((training, {"a": 1.0}), error=ZeroDivisionError())
        training.weights["a"].grad = None
        training.backward(a=world.rank)
        assert training.step.state is StepState.ACCUMULATING
        training.backward(a=3.0)
        return training.grads("a")

    assert run_training(2, body, "a", passes=2) == [[1.75]] * 2


def test_an_error_in_one_group_of_ranks_leaves_the_results_of_the_others() -> None:
    def body(world: World) -> list[object]:
        backward_pass, settings = ArrayBackwardPass(), GradientSettings(check_finite=True)
        step = TrainingStep(backward_pass, 1, gradient_version=lambda: None)
        adapters: dict[str, ArrayAdapter] = {}
        for name, group in zip("pq", world.groups[1:], strict=True):
            if group.included:
                adapter = adapters[name] = ArrayAdapter([Weight(name)])
                step.add_reducer(Reducer(adapter, group, settings, on_pass_started=step.pass_started))
        seen: list[Any] = []
        for number in range(3):
            for adapter in adapters.values():
                adapter.weights[0].grad = None
            step.gradients_cleared()
            values = {"p": np.nan if (number, world.rank) == (1, 1) else 1.0, "q": 2.0}
            given = "p" if world.rank == 0 else "pq"  # rank 0 does not use q, so it gets the result at the end
            grads = {name: np.full(4, values[name], np.float32) for name in adapters if name in given}
            parts = [(adapters[name], {name: grad}) for name, grad in grads.items()]
            if number == 1 and "p" in adapters:
                with pytest.raises(FloatingPointError, match="rank 1: parameter 'p'"):
                    backward_pass.run_jointly(parts)
            else:
                backward_pass.run_jointly(parts)
            seen += [adapters["q"].weights[0].grad] if "q" in adapters else []
        step.close()
        return [None if grad is None else np.unique(grad).tolist() for grad in seen]

    results = run_threads(3, body, groups=((0, 1), (0, 2)))
    assert results == [[[1.0]] * 3, [], [[1.0]] * 3]


# --- several optimizers -----------------------------------------------------------------------------------------------


def make_two(world: World, weights: Sequence[Weight], settings: GradientSettings | None = None) -> list[ArrayTraining]:
    """Two trainings of equal weights, whose gradients come in the same backward pass."""
    backward_pass = ArrayBackwardPass()
    return [
        ArrayTraining(world.group, list(map(replace, weights)), settings, backward_pass=backward_pass) for _ in range(2)
    ]


@pytest.mark.parametrize("what", ["dense", "sparse", "another parameter"])
@pytest.mark.parametrize("passes", ["in another order", "only of the second"])
def test_what_two_optimizers_exchange_never_gets_mixed_and_none_waits_for_the_other(what: str, passes: str) -> None:
    def body(world: World) -> list[object]:
        both = first, second = make_two(world, [Weight("w"), Weight("v", trains=False)])
        seen: list[object] = []
        for step in range(3):
            values = {"w": [100.0 * world.rank, 1.0 + world.rank]}
            if what == "another parameter" and step:
                values["v"] = [10.0, 20.0]
            for training in both:
                training.clear()
                training.weights["v"].trains = "v" in values
            grads: list[dict[str, Any]] = [{name: value[number] for name, value in values.items()} for number in (0, 1)]
            if what == "sparse":
                grads = [{"w": {number: each["w"]}} for number, each in enumerate(grads)]
            if world.rank == 1:
                backward_jointly((first, grads[0]), (second, grads[1]))
            elif passes == "only of the second":
                backward_jointly((second, grads[1]))
            else:
                backward_jointly((second, grads[1]), (first, grads[0]))
            for training in both:
                training.take_step()
                seen += training.grads("wv")
        for training in both:
            training.step.close()
        return seen

    own = 10.0 if passes == "in another order" else 5.0  # of v, of which rank 0 may have no gradient
    expected = {
        "dense": [50.0, None, 1.5, None] * 3,
        "sparse": [{0: 50.0}, None, {1: 1.5}, None] * 3,
        "another parameter": [50.0, None, 1.5, None, *[50.0, own, 1.5, 20.0] * 2],
    }[what]
    assert run_threads(2, body) == [expected] * 2


def test_an_error_of_one_optimizer_leaves_the_results_of_the_other() -> None:
    def body(world: World) -> list[object]:
        both = first, second = make_two(world, [Weight("w")], GradientSettings(check_finite=True))
        seen: list[object] = []
        for step in range(3):
            for training in both:
                training.clear()
            parts = (first, {"w": np.nan if step == 1 else 1.0}), (second, {"w": world.rank})
            if step == 1:
                with pytest.raises(FloatingPointError, match="rank 0: parameter 'w'; rank 1: parameter 'w'"):
                    backward_jointly(*parts)
            else:
                backward_jointly(*parts)
            seen += [training.step.state.name for training in both] + second.grads("w")
            second.take_step()
        for training in both:
            training.step.close()
        return seen

    usual = ["REDUCED", "REDUCED", 0.5]
    assert run_threads(2, body) == [[*usual, "IDLE", "REDUCED", 0.5, *usual]] * 2


def test_usual_steps_of_two_optimizers_need_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    monkeypatch.setattr(steps, "FINISH_IN_TURN_S", OPERATION_S)

    def start_thread(thread: threading.Thread) -> None:
        threads.append(thread)
        thread.start()

    monkeypatch.setattr(steps, "start_thread", start_thread)

    def body(world: World) -> int:
        both = make_two(world, [Weight("w")])
        num_threads = 0
        for step in range(3):
            for training in both:
                training.clear()
            backward_jointly(*[(training, {"w": world.rank}) for training in both])
            world.group.barrier()
            if step == 0:
                num_threads = len(threads)
        for training in both:
            assert training.grads("w") == [0.5]
            training.step.close()
        return len(threads) - num_threads

    assert run_threads(2, body) == [0, 0]
    assert threads
