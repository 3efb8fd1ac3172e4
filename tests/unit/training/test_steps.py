"""Which backward passes make a step, and when it has all of them. Ranks are threads, over NumPy arrays."""

from __future__ import annotations

import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.exchange import GradientSettings
from ronde.training.steps import TRANSITIONS, StepEvent, StepState, TrainingStep
from tests.conformance.ranks import run_threads
from tests.unit.training.arrays import ONE_EACH, ArrayBackwardPass, ArrayTraining, Weight, weights


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
    def body(world: World) -> list[StepState]:
        training = ArrayTraining(world.group, weights("a"), passes=2)
        step, seen = training.training_step, []

        def look() -> None:
            seen.append(step.state)

        look()
        training.backward_nested(a=1.0)
        look()
        training.backward(a=1.0)
        look()
        training.backward_pass.run(training.adapter, {})  # a pass without a gradient is none
        training.backward(a=1.0)
        look()
        step.synchronize()
        step.step_done()
        look()
        training.clear()
        training.adapter.on_ready(0)
        look()
        training.clear()
        training.backward_pass.run_end_callbacks()  # of the pass that was cleared
        look()
        step.close()
        step.synchronize()
        look()
        return seen

    (seen,) = run_threads(1, body)
    assert [state.name for state in seen] == [
        *("IDLE", "OUTER_BACKWARD", "ACCUMULATING", "REDUCED", "IDLE", "BACKWARD", "IDLE", "CLOSED")
    ]


def test_ranks_that_could_not_agree_begin_the_next_step_anew() -> None:
    def body(world: World) -> object:
        training = ArrayTraining(world.group, [Weight("a", count=4 + world.rank)])
        with pytest.raises(Mismatch):
            training.backward(a=1.0)
        assert training.training_step.state is StepState.IDLE
        training.adapter.weights[0].count = 4
        training.clear()
        training.backward(a=world.rank)
        training.training_step.close()
        return training.grad("a")

    assert run_threads(2, body) == [0.5] * 2


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("num_passes", [2, 3])
def test_clearing_in_the_middle_of_a_step_begins_it_anew(names: str, num_passes: int) -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights(*names), passes=num_passes)
        seen = []
        for _ in range(3):
            training.backward(**dict.fromkeys(names, 100.0))  # as at the end of an epoch, and left out
            training.clear()
            for _ in range(num_passes):
                training.backward(**dict.fromkeys(names, 2.0 * world.rank))
            seen.append(training.grad("a"))
            training.training_step.step_done()
            training.clear()
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[1.0] * 3] * 2


@pytest.mark.parametrize("settings", [GradientSettings(), ONE_EACH])
@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_pass_of_which_all_gradients_came_inside_of_others_ends_with_the_outermost(
    settings: GradientSettings, num_passes: int
) -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b"), settings, passes=num_passes)
        seen = []
        for _ in range(3):
            training.clear()
            for _ in range(num_passes):
                training.backward_nested(b=4.0 * world.rank)
                training.backward_nested(a=world.rank)
                training.backward()  # goes on, without a gradient of its own
            seen += [training.grad("a"), training.grad("b")]
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[0.5, 2.0] * 3] * 2


def test_gradients_that_were_changed_before_a_step_that_ends_early_are_told() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights("a"), passes=3)
        for early in (False, True):
            training.num_changes += 1  # before the passes it does not matter
            training.backward(a=1.0)
            training.backward(a=5.0 * world.rank)
            if early:
                training.num_changes += 1
                with pytest.raises(ValueError, match=r"changed after 2 of the 3 .*optimizer\.synchronize\(\) before"):
                    training.training_step.synchronize()
            else:
                training.training_step.synchronize()
                training.num_changes += 1
                training.training_step.synchronize()  # as step() does
                assert training.grad("a") == 1.75
            training.training_step.step_done()
            training.clear()
        training.training_step.close()

    run_threads(2, body)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "2"])
def test_the_number_of_passes_is_a_whole_number_from_1(given: int) -> None:
    with pytest.raises(ValueError, match=f"passes must be a whole number from 1, got {given!r}"):
        TrainingStep(ArrayBackwardPass(), given)


def test_the_number_of_passes_cannot_change_in_the_middle_of_a_step() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights("a"), passes=2)
        training.backward(a=1.0)
        with pytest.raises(ValueError, match="cannot change in the middle of a step, after 1"):
            training.training_step.num_passes = 3
        training.clear()
        training.training_step.num_passes = 3
        training.training_step.close()

    run_threads(1, body)
