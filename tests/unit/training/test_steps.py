"""Which backward passes make a step, and when it has all of them. Ranks are threads, over NumPy arrays."""

from __future__ import annotations

import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.gradient_settings import GradientSettings
from ronde.training.steps import TRANSITIONS, StepEvent, StepState, TrainingStep
from tests.unit.training.arrays import ONE_EACH, ArrayBackwardPass, ArrayTraining, Weight, run_training


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
