"""Gradients of batches that are not divided evenly: the mean over ranks is the mean over all samples of the step."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from ronde.comm.world import World
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.reducer import Reducer
from ronde.training.gradients.steps import TrainingStep, inner_sample_counts, set_sample_counts
from tests.conformance.ranks import run_threads
from tests.unit.training.arrays import ONE_EACH, ArrayAdapter, ArrayTraining, Weight, run_training
from tests.unit.training.test_reducer import Halving


def mean_of(samples: list[float]) -> float:
    return sum(samples) / len(samples) if samples else float("nan")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("settings", [GradientSettings(), ONE_EACH, GradientSettings(check_finite=True)])
def test_a_rank_weighs_as_much_as_it_has_samples(overlap: bool, settings: GradientSettings) -> None:
    parts = [[4.0, 8.0], [6.0], [10.0]]

    def body(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for _ in range(3):
            training.clear()
            set_sample_counts(world.group, [2, 1, 1])
            mine = mean_of(parts[world.rank])
            training.backward(b=mine, a=-mine)
            seen += training.grads("ab")
            training.take_step()
        return seen

    assert run_training(3, body, "ab", settings, overlap=overlap) == [[-7.0, 7.0] * 3] * 3


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_rank_without_a_sample_gives_zeros_even_if_its_gradient_is_not_finite(op: str) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for step in range(3):
            training.clear()
            set_sample_counts(world.group, [1, 0] if step else [1, 1])
            training.backward(a=6.0 if world.rank == 0 else (np.nan if step else 2.0), b=1.0)
            seen += training.grads("ab")
            training.take_step()
        set_sample_counts(world.group, [3, 3])
        training.clear()
        training.backward(a=1.0 + 2.0 * world.rank, b=0.0)
        return [*seen, *training.grads("a")]

    first, last = ([4.0, 1.0], 2.0) if op == "mean" else ([8.0, 2.0], 4.0)
    settings = GradientSettings(op=op, check_finite=True)
    assert run_training(2, body, "ab", settings) == [[*first, 6.0, 1.0, 6.0, 1.0, last]] * 2


def test_the_sum_of_ranks_with_different_numbers_of_samples_is_not_weighted() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        set_sample_counts(world.group, [3, 1])
        training.backward(a=1.0 + world.rank)
        return training.grads("a")

    assert run_training(2, body, "a", GradientSettings(op="sum")) == [[3.0]] * 2


@pytest.mark.parametrize(
    "counts",
    [
        [[2, 1], [1, 2]],
        [[2, 1], [1, 0]],
        [[1, 0], [2, 1]],
        [[0, 1], [1, 0]],
        [[1, 0], [1, 0]],
        [[1, 1], [0, 1], [3, 1]],
        [[3, 1], [1, 0], [1, 0]],
    ],
)
@pytest.mark.parametrize("overlap", [True, False])
def test_each_pass_of_a_step_has_its_own_weight(counts: list[list[int]], overlap: bool) -> None:
    value = iter(range(100))
    samples = [[[float(next(value)) for _ in range(count)] for count in each] for each in counts]
    expected = sum(mean_of(list(chain(*each))) for each in samples) / len(counts)

    def body(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for _ in range(2):
            training.clear()
            for each, parts in zip(counts, samples, strict=True):
                set_sample_counts(world.group, each)
                training.backward(a=mean_of(parts[world.rank]), b=mean_of(parts[world.rank]))
            seen += training.grads("ab")
            training.take_step()
        return seen

    for seen in run_training(2, body, "ab", ONE_EACH, passes=len(counts), overlap=overlap):
        assert seen == pytest.approx([expected] * 4)


def test_a_step_that_was_given_up_leaves_nothing_that_was_set_aside() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.backward(a=100.0)
        set_sample_counts(world.group, [1, 0])
        training.clear()
        training.backward(a=4.0)
        training.backward(a=8.0)
        return training.grads("a")

    assert run_training(2, body, "a", passes=2) == [[6.0]] * 2


def test_sparse_gradients_and_codecs_are_weighted() -> None:
    def sparse(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for step in range(2):
            training.clear()
            set_sample_counts(world.group, [3, 1] if step else [1, 0])
            training.backward(a={world.rank: 4.0}, b=4.0)
            seen += training.grads("ab")
            training.take_step()
        return seen

    assert run_training(2, sparse, "ab") == [[{0: 4.0}, 4.0, {0: 3.0, 1: 1.0}, 4.0]] * 2

    def coded(training: ArrayTraining, world: World) -> list[object]:
        set_sample_counts(world.group, [3, 1])
        training.backward(a=8.0 - 4.0 * world.rank)  # weighted: 12 and 2, in units of 7
        return training.grads("a")

    assert run_training(2, coded, "a", codec=Halving()) == [[7.0]] * 2


def test_parameters_that_begin_to_train_are_weighted_at_once() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.weights["b"].trains = False
        training.backward(a=1.0)
        training.take_step()
        seen: list[object] = []
        training.weights["b"].trains = True
        for counts in ([1, 0], [3, 1]):
            training.clear()
            set_sample_counts(world.group, counts)
            training.backward(a=4.0 * world.rank, b=8.0 * world.rank)
            seen += training.grads("ab")
            training.take_step()
        return seen

    assert run_training(2, body, "ab") == [[0.0, 0.0, 1.0, 2.0]] * 2


def test_counts_that_were_told_before_are_told_again_when_others_came_between() -> None:
    equal, unequal = (2, 2), (3, 1)

    def body(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for counts in (equal, equal, unequal, unequal, equal, equal):
            training.clear()
            set_sample_counts(world.group, counts)
            if counts is unequal:
                with inner_sample_counts(world.group):
                    set_sample_counts(world.group, equal)
            training.backward(a=4.0 * world.rank)
            seen += training.grads("a")
            training.take_step()
        return seen

    assert run_training(2, body, "a") == [[2.0, 2.0, 1.0, 1.0, 2.0, 2.0]] * 2


def test_adasum_refuses_batches_that_are_not_divided_evenly() -> None:
    def body(training: ArrayTraining, world: World) -> None:
        set_sample_counts(world.group, [2, 2])
        with pytest.raises(ValueError, match=r"adasum.* 2, 1 .*ends='drop'"):
            set_sample_counts(world.group, [2, 1])

    run_training(2, body, "a", GradientSettings(op="adasum"))


def test_the_wish_for_a_change_of_the_round_is_known_to_all_ranks_at_the_end_of_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TrainingStep, "_may_run_inline", True)  # as in a process that is one rank

    def body(training: ArrayTraining, world: World) -> list[object]:
        world.change_wanted = world.change_agreed = world.change_checked = False
        training.reducer.reset(world.group, world)
        seen: list[object] = []
        for step in range(4):
            training.clear()
            world.change_wanted = world.rank == 1 and step == 2
            world.change_checked = False
            before = world.recorder.metrics().total.operations
            training.backward(a=1.0)
            num_operations = world.recorder.metrics().total.operations - before
            seen.append((world.change_agreed, world.change_checked, num_operations if step else None))
            training.take_step()
        return seen

    # One operation: the wish is in the bucket; only in the step in which one rank has it the flags travel, too.
    steps = [(False, True, None), (False, True, 1), (True, True, 2), (True, True, 1)]
    assert run_training(2, body, "a", GradientSettings(compare_at_step=0)) == [steps] * 2


def test_gradients_of_some_ranks_are_weighted_by_the_samples_of_these_ranks() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, [Weight("a")])
        head, parts = Weight("b"), [(training.adapter, {"a": np.full(4, 6.0 * world.rank)})]
        if world.rank < 2:
            adapter = ArrayAdapter([head])
            settings = GradientSettings()
            training.step.add_reducer(
                Reducer(adapter, world.groups[1], settings, on_pass_started=training.step.pass_started)
            )
            parts.append((adapter, {"b": np.full(4, 4.0 * world.rank)}))
        set_sample_counts(world.group, [1, 3, 2])
        training.backward_pass.run_jointly(parts)
        training.step.close()
        return [*training.grads("a"), head.grad.tolist()[0] if isinstance(head.grad, np.ndarray) else None]

    # The means of 0, 6 and 12 with weights 1, 3 and 2, and of 0 and 4 with weights 1 and 3.
    assert run_threads(3, body, groups=((0, 1),)) == [[7.0, 3.0], [7.0, 3.0], [7.0, None]]
