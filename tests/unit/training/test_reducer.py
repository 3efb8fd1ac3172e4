"""Ranks are threads, each with an adapter over NumPy arrays: what is combined, when, and how it is told to all."""

from __future__ import annotations

import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.exchange import GradientSettings
from tests.conformance.ranks import run_threads
from tests.unit.training.arrays import ONE_EACH, ArrayTraining, Weight, weights


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("settings", [GradientSettings(), ONE_EACH, GradientSettings(predivide=8.0)])
def test_gradients_are_averaged_when_backward_returns(overlap: bool, settings: GradientSettings) -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b", "c"), settings, overlap=overlap)
        seen = []
        for step in range(3):
            training.clear()
            training.backward(c=step + world.rank, b=[1, 2, 3, 4 * world.rank], a=-world.rank)
            seen += [training.grad("a"), training.grad("b"), training.grad("c")]
            training.training_step.synchronize()  # as step() does: nothing is left to do
            training.training_step.step_done()
        training.training_step.close()
        return seen

    expected = [value for step in range(3) for value in (-1.0, [1.0, 2.0, 3.0, 4.0], step + 1.0)]
    assert run_threads(3, body) == [expected] * 3


def test_buckets_start_while_the_pass_runs_in_one_order_on_all_ranks() -> None:
    def body(world: World) -> list[tuple[str, ...]]:
        training = ArrayTraining(world.group, weights("a", "b", "c"), ONE_EACH)
        training.backward(c=1, a=1, b=1)  # rank 0's order is everybody's from now on
        training.clear()
        training.adapter.copied.clear()
        order = {"c": 1.0, "a": 1.0, "b": 1.0} if world.rank == 0 else {"a": 1.0, "b": 1.0, "c": 1.0}
        training.backward(**order)
        assert training.grad("a") == 1.0
        training.training_step.close()
        return [names for names in training.adapter.copied if names]

    assert run_threads(2, body) == [[("c",), ("a",), ("b",)]] * 2


def test_a_parameter_that_some_ranks_used_gets_the_average_over_all_and_one_that_none_used_stays_without() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b", "c"))
        for _ in range(2):
            training.clear()
            training.backward(**({"a": 1.0, "b": 4.0} if world.rank == 0 else {"a": 3.0}))
        seen = [training.grad(name) for name in "abc"]
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[2.0, 2.0, None]] * 2


def test_a_rank_without_a_backward_pass_takes_part_in_step() -> None:
    def body(world: World) -> object:
        training = ArrayTraining(world.group, weights("a"))
        for _ in range(2):
            training.clear()
            if world.rank == 0:
                training.backward(a=8.0)
            training.training_step.synchronize()
            training.training_step.step_done()
        training.training_step.close()
        return training.grad("a")

    assert run_threads(4, body) == [2.0] * 4


def test_nothing_travels_before_the_last_pass_of_a_step_and_passes_are_averaged() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b"), passes=3)
        seen: list[object] = []
        for _ in range(2):
            training.clear()
            before = world.recorder.metrics().total.operations
            training.backward(a=3.0 * world.rank, b=1.0)
            training.backward(a=3.0)  # b is not used in every pass
            seen.append(world.recorder.metrics().total.operations == before)
            training.backward(b=2.0, a=0.0)
            seen += [training.grad("a"), training.grad("b")]
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[True, 1.5, 1.0] * 2] * 2


def test_passes_are_summed_when_asked_to() -> None:
    def body(world: World) -> object:
        training = ArrayTraining(world.group, weights("a"), GradientSettings(average_passes=False), passes=2)
        training.backward(a=3.0)
        training.backward(a=world.rank)
        training.training_step.close()
        return training.grad("a")

    assert run_threads(2, body) == [3.5] * 2


def test_a_step_after_fewer_passes_averages_those_there_were() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a"), passes=4)
        seen = []
        for _ in range(2):
            training.clear()
            training.backward(a=1.0)
            training.backward(a=5.0)
            training.training_step.synchronize()
            seen.append(training.grad("a"))
            training.training_step.step_done()
        training.training_step.num_passes = 2
        training.clear()
        training.backward(a=1.0)
        training.backward(a=2.0)
        training.training_step.close()
        return [*seen, training.grad("a")]

    assert run_threads(2, body) == [[3.0, 3.0, 1.5]] * 2


def test_several_passes_without_clearing_add_up_for_a_mean() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b"))
        training.backward(a=2.0 * world.rank, b=1.0)
        training.backward(a=10.0 * world.rank)
        training.training_step.close()
        return [training.grad("a"), training.grad("b")]

    assert run_threads(2, body) == [[6.0, 1.0]] * 2


@pytest.mark.parametrize(("op", "passes"), [("sum", 1), ("mean", 2)])
@pytest.mark.parametrize("others", [{"a": 1.0}, {}])
def test_several_passes_without_clearing_are_refused_where_they_would_not_add_up(
    op: str, passes: int, others: dict[str, float]
) -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights(*others, "b"), GradientSettings(op=op), passes=passes)
        for _ in range(passes):
            training.backward(**others, b=1.0)
        with pytest.raises(ValueError, match=rf"rank {world.rank}: parameter 'b' got a gradient on top of one"):
            training.backward(b=1.0)
        training.clear()
        for _ in range(passes):
            training.backward(**others, b=1.0)
        assert training.grad("b") == (2.0 if op == "sum" else 1.0)
        training.training_step.close()

    run_threads(2, body)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pass_inside_of_another_leaves_the_end_to_the_outer_one(overlap: bool) -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "b"), passes=1, overlap=overlap)
        for _ in range(3):
            training.clear()
            training.backward_nested(b=world.rank)
            training.backward(a=world.rank)
        seen = [training.grad("a"), training.grad("b")]
        training.clear()
        training.backward_nested(a=4.0 * world.rank, b=2.0)  # and no gradient after it
        training.training_step.synchronize()
        training.training_step.close()
        return [*seen, training.grad("a"), training.grad("b")]

    assert run_threads(2, body) == [[0.5, 0.5, 2.0, 2.0]] * 2


def test_a_second_gradient_while_the_first_is_under_way_names_the_parameter() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights("a", "b"), ONE_EACH)
        training.backward(b=1.0, a=1.0)
        training.clear()
        training.backward_nested(b=1.0)
        with pytest.raises(
            ValueError, match=rf"rank {world.rank}: parameter 'b' got a second gradient in one backward"
        ):
            training.backward(b=1.0)
        training.clear()  # ends the pass that broke off
        training.backward(b=3.0, a=1.0)
        assert training.grad("b") == 3.0
        training.training_step.close()

    run_threads(2, body)


def test_models_that_differ_are_told_at_the_first_pass() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, [Weight("a"), Weight("b", count=4 + world.rank)])
        with pytest.raises(Mismatch, match=r"parameter 1 .*rank 0 has 'b' float32\[4\]; rank 1 has 'b' float32\[5\]"):
            training.backward(b=1.0, a=1.0)
        training.training_step.close()

    run_threads(2, body)


def test_a_rank_that_joins_gives_zeros() -> None:
    def body(world: World) -> object:
        training = ArrayTraining(world.group, weights("a"))
        for _ in range(3 if world.rank == 1 else 1):
            training.clear()
            training.backward(a=4.0)
        world.group.join()
        return training.grad("a")

    assert run_threads(2, body) == [4.0, 2.0]


def test_two_trainings_of_a_process_may_end_in_any_order() -> None:
    def body(world: World) -> object:
        first, second = ArrayTraining(world.group, weights("a")), ArrayTraining(world.group, weights("b"))
        both = [first, second]
        for training in both:
            training.backward(**{training.adapter.weights[0].name: 1.0})
            training.clear()
        for training in both if world.rank == 0 else reversed(both):
            training.adapter.on_ready(0)
        for training in both if world.rank == 0 else reversed(both):
            training.backward_pass.end_callbacks.pop(0)()
        for training in both if world.rank == 0 else reversed(both):
            training.backward_pass.run_end_callbacks()
        for training in both:
            training.training_step.close()
        return len(first.backward_pass.end_callbacks)

    assert run_threads(2, body) == [0, 0]


def test_after_a_reset_it_goes_on_with_another_group() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.groups[1], weights("a"))
        training.backward(a=world.rank)
        seen = [training.grad("a")]
        training.clear()
        training.reducer.reset(world.group)
        training.backward(a=10.0 * world.rank)
        training.training_step.close()
        return [*seen, training.grad("a")]

    assert run_threads(2, body, groups=((0, 1),)) == [[0.5, 5.0]] * 2


def test_a_single_rank_averages_its_passes() -> None:
    def body(world: World) -> object:
        training = ArrayTraining(world.group, weights("a"), passes=2)
        training.backward(a=1.0)
        training.backward(a=2.0)
        training.training_step.close()
        return training.grad("a")

    assert run_threads(1, body) == [1.5]
