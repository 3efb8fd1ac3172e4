"""Steps in which something is not as usual: what ranks tell each other in the news, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.exchange import GradientSettings
from tests.conformance.ranks import run_threads
from tests.unit.training.arrays import ArrayTraining, Weight, weights


def test_step_without_backward_is_told_on_all_ranks() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights("a", "b"))
        with pytest.raises(ValueError, match=rf"rank {world.rank}: step\(\) without backward\(\): none of the 2 .*'a'"):
            training.training_step.synchronize()
        training.backward(a=1.0)
        assert training.grad("a") == 1.0
        training.training_step.close()

    run_threads(2, body)


def test_a_step_with_gradients_of_before_is_told_and_one_with_gradients_set_by_hand_is_not() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "table"))
        seen = []
        for _ in range(2):  # without an accord, and with it
            training.clear()
            training.adapter.weights[0].grad = np.full(4, world.rank, np.float32)
            training.adapter.weights[1].grad = {world.rank: 2.0}
            training.training_step.synchronize()
            training.training_step.step_done()
            seen += [training.grad("a"), training.grad("table")]
            with pytest.raises(ValueError, match=r"step\(\) without backward\(\)"):
                training.training_step.synchronize()
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[0.5, {0: 1.0, 1: 1.0}] * 2] * 2


def test_steps_without_backward_may_be_allowed() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights("a"), GradientSettings(idle_steps=True))
        training.training_step.synchronize()
        training.training_step.close()

    run_threads(2, body)


def test_gradients_that_are_not_finite_are_told_with_rank_and_parameter() -> None:
    def body(world: World) -> None:
        thawed = Weight("thawed", trains=False)
        training = ArrayTraining(
            world.group, [*weights("a", "b", "c", "table"), thawed], GradientSettings(check_finite=True)
        )
        odd = float("nan") if world.rank == 1 else 1.0

        def refused(words: str, **grads: float | dict[int, float]) -> None:
            training.clear()
            with pytest.raises(FloatingPointError, match=rf"not finite: rank 1: parameter {words}$"):
                training.backward(**grads)

        refused("'b'", a=1.0, b=odd)  # before there are buckets
        refused("'b' and 1 more", a=1.0, b=odd, c=odd)
        refused("'table'", a=1.0, table={0: odd})  # where a dense one was expected
        training.clear()
        training.backward(a=1.0, table={0: 3.0})
        refused("'table'", a=1.0, table={0: odd})
        thawed.trains = True
        refused("'thawed'", a=1.0, thawed=odd)
        training.clear()
        training.backward(a=1.0, b=3.0, table={0: 3.0}, thawed=world.rank)
        assert [training.grad(name) for name in ("b", "table", "thawed")] == [3.0, {0: 3.0}, 1.0]
        training.training_step.close()

    run_threads(3, body)


def test_parameters_that_are_frozen_later_or_train_later_lead_to_new_buckets() -> None:
    def body(world: World) -> list[list[object]]:
        frozen = Weight("b", trains=False)
        training = ArrayTraining(world.group, [Weight("a"), frozen, Weight("c")], GradientSettings(op="sum"))
        seen = []
        training.backward(c=1.0, a=1.0)
        training.clear()
        frozen.trains = True
        frozen.grad = np.full(4, world.rank, np.float32)  # came, but nobody listened for it
        training.backward(c=2.0, a=3.0)
        seen.append([training.grad(name) for name in "abc"])
        training.clear()
        training.backward(b=5.0, c=2.0, a=3.0)
        seen.append([training.grad(name) for name in "abc"])
        training.clear()
        training.adapter.weights[0].trains = False
        training.backward(c=1.0, b=1.0)
        training.clear()
        training.backward(b=2.0, c=3.0)
        seen.append([training.grad(name) for name in "abc"])
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[[6.0, 1.0, 4.0], [6.0, 10.0, 4.0], [None, 4.0, 6.0]]] * 2


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_in_which_only_parameters_are_used_that_did_not_train_before_count(passes: int) -> None:
    def body(world: World) -> list[object]:
        both = weights("a", "b")
        training = ArrayTraining(world.group, both, passes=passes)
        seen: list[object] = []
        for step in range(4):
            training.clear()
            used, idle = both[step % 2], both[1 - step % 2]
            used.trains, idle.trains = True, False
            for _ in range(passes):
                training.backward(**{used.name: step + world.rank})
            seen.append([training.grad("a"), training.grad("b")])
            training.training_step.synchronize()  # nothing is left to do
            training.training_step.step_done()
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[[0.5, None], [None, 1.5], [2.5, None], [None, 3.5]]] * 2


def test_a_model_may_be_frozen_at_first_or_for_a_while() -> None:
    def body(world: World) -> list[object]:
        weight = Weight("a", trains=False)
        training = ArrayTraining(world.group, [weight], GradientSettings(idle_steps=True))
        seen = []
        for trains in (False, True, False, True):
            training.clear()
            weight.trains = trains
            if trains:
                training.backward(a=world.rank)
            training.training_step.synchronize()
            training.training_step.step_done()
            seen.append(training.grad("a"))
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[None, 0.5, None, 0.5]] * 2


def test_parameters_that_are_added_are_heard_at_once() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a"), GradientSettings(op="sum"))
        training.backward(a=1.0)
        training.adapter.weights.append(Weight("b"))
        training.reducer.parameters_added()
        with pytest.raises(ValueError, match="a parameter that did not train before got a gradient on top of one"):
            training.backward(b=1.0)
        training.clear()
        training.backward(b=world.rank)
        training.training_step.close()
        return [training.grad("a"), training.grad("b")]

    assert run_threads(2, body) == [[None, 1.0]] * 2


def test_ranks_that_freeze_different_parameters_are_told() -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, weights("a", "b"))
        training.backward(a=1.0, b=1.0)
        training.clear()
        training.adapter.weights[1].trains = world.rank == 0
        with pytest.raises(Mismatch, match=r"rank 0 has 'b' float32\[4\]; rank 1 has no such parameter"):
            training.backward(a=1.0)
        training.training_step.close()

    run_threads(2, body)


def test_sparse_gradients_travel_by_themselves_and_are_in_no_bucket() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "table"))
        seen = []
        for _ in range(2):
            training.clear()
            training.backward(table={world.rank: 2.0, 3: 1.0}, a=world.rank)
            seen += [training.grad("a"), training.grad("table")]
        training.training_step.close()
        assert training.adapter.num_sparse_allreduces == 2
        return seen

    assert run_threads(2, body) == [[0.5, {0: 1.0, 1: 1.0, 3: 1.0}] * 2] * 2


def test_a_gradient_that_turns_out_to_be_sparse_is_so_for_all_from_then_on() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "table"))
        training.backward(a=1.0)
        training.clear()
        training.backward(**({"table": {2: 4.0}} if world.rank == 1 else {}), a=2.0)
        seen = [training.grad("a"), training.grad("table")]
        training.clear()
        training.backward(table={0: 2.0}, a=3.0)
        training.training_step.close()
        return [*seen, training.grad("a"), training.grad("table")]

    assert run_threads(2, body) == [[2.0, {2: 2.0}, 3.0, {0: 2.0}]] * 2


def test_sparse_gradients_are_means_of_the_passes_that_each_rank_had() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "table"), passes=2)
        for _ in range(2):
            training.clear()
            for _ in range(2 - world.rank):
                training.backward(a=1.0, table={world.rank: 1.0})
            training.training_step.synchronize()
            training.training_step.step_done()
        training.training_step.close()
        return [training.grad("a"), training.grad("table")]

    assert run_threads(2, body) == [[1.0, {0: 0.5, 1: 0.5}]] * 2


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another_is_the_sum_of_both() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.group, weights("a", "table"))
        training.backward(a=1.0, table=1.0)
        seen = []
        for _ in range(2):  # while all expect a dense one, and a sparse one
            training.clear()
            training.backward(a=1.0, table={0: 1.0} if world.rank == 0 else 1.0)
            seen.append(training.grad("table"))
        training.training_step.close()
        return seen

    assert run_threads(2, body) == [[{0: 1.0, 1: 0.5, 2: 0.5, 3: 0.5}] * 2] * 2


@pytest.mark.parametrize("what", ["a first step", "a sparse gradient", "another parameter"])
def test_what_a_rank_that_has_joined_cannot_do_is_told(what: str) -> None:
    def body(world: World) -> None:
        training = ArrayTraining(world.group, [*weights("a", "table"), Weight("b", trains=False)])
        if what != "a first step":
            training.backward(a=1.0)
            training.clear()
        training.adapter.weights[2].trains = what == "another parameter"
        with pytest.raises(Mismatch, match=r"join.*; who calls join\(\) takes part in allreduce only") as told:
            if world.rank == 0:
                training.backward(a=1.0, **({"table": {0: 1.0}} if what == "a sparse gradient" else {}))
            else:
                world.group.join()
        assert ("every rank needs a step before the first one joins" in str(told.value)) == (world.rank == 0)

    run_threads(2, body)
