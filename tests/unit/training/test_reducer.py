"""Ranks are threads, each with an adapter over NumPy arrays: what is reduced, when, and how all ranks learn of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ronde.comm.buffers import Array
from ronde.comm.call import mismatch_error
from ronde.comm.plan import Plan
from ronde.comm.work import Work
from ronde.comm.world import World
from ronde.errors import Mismatch, OutOfSync, RoundEnded
from ronde.training.gradients.adapter import ParameterInfo
from ronde.training.gradients.bucket_assignment import GradientBucket
from ronde.training.gradients.compression import WireArray
from ronde.training.gradients.gradient_settings import GradientSettings
from ronde.training.gradients.reducer import _AgreedBuckets
from ronde.training.gradients.steps import TrainingStep
from tests.conformance.ranks import run_threads
from tests.unit.training.arrays import ONE_EACH, ArrayTraining, Weight, run_training


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("settings", [GradientSettings(), ONE_EACH, GradientSettings(predivide=8.0)])
def test_gradients_are_averaged_when_backward_returns(overlap: bool, settings: GradientSettings) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen = []
        for step in range(3):
            training.clear()
            training.backward(c=step + world.rank, b=[1, 2, 3, 4 * world.rank], a=-world.rank)
            seen += training.grads("abc")
            training.take_step()  # nothing is left to do
        return seen

    expected = [value for step in range(3) for value in (-1.0, [1.0, 2.0, 3.0, 4.0], step + 1.0)]
    assert run_training(3, body, "abc", settings, overlap=overlap) == [expected] * 3


def test_buckets_start_while_the_pass_runs_in_one_order_on_all_ranks() -> None:
    def body(training: ArrayTraining, world: World) -> list[tuple[str, ...]]:
        training.backward(c=1, a=1, b=1)  # rank 0's order is everybody's from now on
        training.clear()
        training.adapter.copied.clear()
        training.backward(**{name: 1.0 for name in ("cab" if world.rank == 0 else "abc")})
        assert training.grads("a") == [1.0]
        return [names for names in training.adapter.copied if names]

    assert run_training(2, body, "abc", ONE_EACH) == [[("c",), ("a",), ("b",)]] * 2


def test_a_rank_without_a_backward_pass_takes_part_in_step() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        for _ in range(2):
            training.clear()
            if world.rank == 0:
                training.backward(a=8.0)
            training.take_step()
        return training.grads("a")

    assert run_training(4, body, "a") == [[2.0]] * 4


def test_nothing_travels_before_the_last_pass_of_a_step_and_passes_are_averaged() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for _ in range(2):
            training.clear()
            before = world.recorder.metrics().total.operations
            training.backward(a=3.0 * world.rank, b=1.0)
            training.backward(a=3.0)  # b is not used in every pass
            seen.append(world.recorder.metrics().total.operations == before)
            training.backward(b=2.0, a=0.0)
            seen += training.grads("ab")
        return seen

    assert run_training(2, body, "ab", passes=3) == [[True, 1.5, 1.0] * 2] * 2


def test_a_step_after_fewer_passes_averages_those_there_were() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen = []
        for _ in range(2):
            training.clear()
            training.backward(a=1.0)
            training.backward(a=5.0)
            training.take_step()
            seen += training.grads("a")
        training.step.num_passes = 2
        training.clear()
        training.backward(a=1.0)
        training.backward(a=2.0)
        return [*seen, *training.grads("a")]

    assert run_training(2, body, "a", passes=4) == [[3.0, 3.0, 1.5]] * 2


def test_a_second_gradient_while_the_first_is_under_way_names_the_parameter() -> None:
    def body(training: ArrayTraining, world: World) -> None:
        training.backward(b=1.0, a=1.0)
        training.clear()
        training.backward_nested(b=1.0)
        with pytest.raises(ValueError, match=rf"rank {world.rank}: parameter 'b' got a second gradient in one back"):
            training.backward(b=1.0)
        training.clear()  # ends the pass that broke off
        training.backward(b=3.0, a=1.0)
        assert training.grads("b") == [3.0]

    run_training(2, body, "ab", ONE_EACH)


def test_a_rank_that_joins_gives_zeros() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        for _ in range(3 if world.rank == 1 else 1):
            training.clear()
            training.backward(a=4.0)
        world.group.join()
        return training.grads("a")

    assert run_training(2, body, "a") == [[4.0], [2.0]]


def test_two_trainings_of_a_process_may_end_in_any_order() -> None:
    def body(world: World) -> int:
        both = [ArrayTraining(world.group, [Weight("a")]) for _ in range(2)]
        for training in both:
            training.backward(a=1.0)
            training.clear()
        in_order = both if world.rank == 0 else both[::-1]
        for training in in_order:
            training.adapter.on_ready(0)
        for training in in_order:
            training.backward_pass.end_callbacks.pop(0)()
        for training in in_order:
            training.backward_pass.run_end_callbacks()
        for training in both:
            training.step.close()
        return len(both[0].backward_pass.end_callbacks)

    assert run_threads(2, body) == [0, 0]


def test_after_a_reset_it_goes_on_with_another_group() -> None:
    def body(world: World) -> list[object]:
        training = ArrayTraining(world.groups[1], [Weight("a")])
        training.backward(a=world.rank)
        seen = training.grads("a")
        training.clear()
        training.reducer.reset(world.group)
        training.backward(a=10.0 * world.rank)
        training.step.close()
        return [*seen, *training.grads("a")]

    assert run_threads(2, body, groups=((0, 1),)) == [[0.5, 5.0]] * 2


# --- flags -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def flags_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every rank reduces in its own thread, as one that is alone in its process. What is added to the list whenever a
    rank reduces its flags is its number of buckets."""
    monkeypatch.setattr(TrainingStep, "_may_run_inline", True)
    runs: list[int] = []
    finish = _AgreedBuckets.finish

    def count(buckets: _AgreedBuckets, number: int) -> None:
        if number == len(buckets.indices):
            runs.append(number)
        finish(buckets, number)

    monkeypatch.setattr(_AgreedBuckets, "finish", count)
    return runs


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "settings",
    [GradientSettings(), GradientSettings(op="sum"), GradientSettings(predivide=8.0), ONE_EACH],
    ids=["mean", "sum", "predivide", "one each"],
)
def test_flags_travel_when_a_single_rank_needs_them_and_not_in_a_usual_step(
    flags_runs: list[int], settings: GradientSettings, overlap: bool
) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen: list[object] = []
        for step in range(6):
            training.clear()
            world.group.barrier()
            before = len(flags_runs)
            world.group.barrier()
            grads = {"a": 2.0, "b": 4.0}
            if step == 2 and world.rank == 1:
                del grads["b"]
            if step == 4 and world.rank == 2:
                grads = {}
            if grads:
                training.backward(**grads)
            training.take_step()
            world.group.barrier()
            seen += [len(flags_runs) - before, *training.grads("ab")]
        return seen

    unit = 3.0 if settings.op == "sum" else 1.0
    usual = [0, 2 * unit, 4 * unit]
    third = unit / 3
    expected = [3, *usual[1:], *usual, 3, 2 * unit, 4 * 2 * third, *usual, 3, 2 * 2 * third, 4 * 2 * third, *usual]
    for seen in run_training(3, body, "ab", settings, overlap=overlap):
        assert seen == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float16", GradientSettings()),
        ("float32", GradientSettings(op="adasum")),
        ("float32", GradientSettings(predivide=1e7)),
    ],
    ids=["float16", "adasum", "predivide"],
)
def test_flags_travel_in_every_step_where_a_bucket_cannot_ask_for_them(
    flags_runs: list[int], dtype: str, settings: GradientSettings
) -> None:
    def body(training: ArrayTraining, world: World) -> None:
        for _ in range(3):
            training.clear()
            training.backward(a=1.0)

    run_training(2, body, [Weight("a", dtype=dtype)], settings)
    assert len(flags_runs) == 2 * 3


def test_a_rank_that_may_not_wait_in_its_own_thread_always_asks_for_the_flags(
    flags_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    main_step: list[TrainingStep] = []
    monkeypatch.setattr(TrainingStep, "_may_run_inline", property(lambda step: step in main_step))

    def body(training: ArrayTraining, world: World) -> list[object]:
        if world.rank == 0:
            main_step.append(training.step)
        world.group.barrier()
        for _ in range(4):
            training.clear()
            training.backward(a=2.0, b=4.0 * world.rank)
        return training.grads("ab")

    assert run_training(2, body, "ab", ONE_EACH) == [[2.0, 2.0]] * 2
    assert len(flags_runs) == 2 * 4


def test_a_bucket_that_is_under_way_is_not_written_when_its_rank_becomes_alone_in_its_process(
    flags_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inline: dict[TrainingStep, bool] = {}
    monkeypatch.setattr(TrainingStep, "_may_run_inline", property(lambda step: inline.get(step, True)))

    def body(training: ArrayTraining, world: World) -> list[object]:
        training.backward(a=1.0, b=1.0)
        inline[training.step] = False
        training.clear()
        training.backward(a=1.0, b=1.0)  # prepares a pass in which all buckets start early
        training.clear()
        world.group.barrier()
        before = len(flags_runs)
        world.group.barrier()
        training.adapter.weights[0].grad = np.full(4, 2.0 * world.rank, np.float32)
        training.adapter.on_ready(0)
        training.adapter.weights[1].grad = np.full(4, 4.0 * world.rank, np.float32)
        training.adapter.on_ready(1)
        inline[training.step] = True
        training.backward_pass.run_end_callbacks()
        world.group.barrier()
        return [len(flags_runs) - before, *training.grads("ab")]

    assert run_training(2, body, "ab", ONE_EACH) == [[2, 1.0, 2.0]] * 2


# --- codecs -----------------------------------------------------------------------------------------------------------


class Halving:
    """Two wires: first the mean size, then the gradients in units of it; keeps what rounding to whole units lost."""

    name = "halving"

    def open(self, bucket: GradientBucket, parameters: Sequence[ParameterInfo]) -> HalvingEncoder:
        return HalvingEncoder(bucket.count)


class HalvingEncoder:
    def __init__(self, count: int) -> None:
        self.wires = (WireArray(1, "float32"), WireArray(count, "float32"))
        self._lost = np.zeros(count, np.float32)

    def encode(self, number: int, gradients: Array, wires: Sequence[Array]) -> None:
        if number == 0:
            wires[0][0] = np.abs(gradients).mean() or 1.0
        else:
            wanted = gradients / wires[0][0] + self._lost
            np.round(wanted, out=wires[1])
            self._lost = wanted - wires[1]

    def decode(self, wires: Sequence[Array], gradients: Array) -> None:
        gradients[:] = wires[1] * wires[0][0]


def test_a_codec_may_use_several_wires_and_remember_what_it_lost() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen = []
        for _ in range(2):
            training.clear()
            training.backward(b=2.0 + world.rank, a=[4.0, 2.8, 0.0, 1.2])
            seen += training.grads("ab")
        return seen

    first, second = run_training(2, body, "ab", ONE_EACH, codec=Halving())
    assert first == second
    assert first[0] == [4.0, 2.0, 0.0, 2.0]
    assert first[2] == [4.0, 4.0, 0.0, 0.0]  # together with the first step: on average what was given


# --- what users keep --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("codec", [None, Halving()])
def test_each_rank_leaves_the_memory_alone_that_its_user_has_kept(codec: Halving | None, overlap: bool) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        kept: list[tuple[Array, object]] = []
        seen: list[object] = []
        for step in range(4):
            training.clear()
            training.adapter.kept = {"a"} if kept else set()
            training.backward(b=float(step), a=2.0 * step)
            seen += training.grads("ab")
            grad = training.weights["a"].grad
            if step >= world.rank and isinstance(grad, np.ndarray):  # each rank begins in another step
                kept.append((grad, training.grads("a")))
        assert all(np.unique(grad).tolist() == value for grad, value in kept)
        return seen

    expected = [value for step in range(4) for value in (2.0 * step, float(step))]
    assert run_training(3, body, "ab", ONE_EACH, codec=codec, overlap=overlap) == [expected] * 3


# --- what ranks start with --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_step", [1, 2])
def test_parameters_are_compared_at_one_step_and_the_error_says_what_to_call(at_step: int) -> None:
    def body(training: ArrayTraining, world: World) -> str:
        training.weights["b"].value[1] = world.rank // 2
        for step in range(1, at_step + 1):
            training.clear()
            if step < at_step:
                training.backward(a=1.0, b=1.0)
                continue
            with pytest.raises(OutOfSync) as caught:
                training.backward(a=1.0, b=1.0)
        training.weights["b"].value[1] = 0.0  # as broadcast_parameters() does
        for _ in range(2):
            training.clear()
            training.backward(a=world.rank, b=1.0)
            assert training.grads("ab") == [1.0, 1.0]
            training.weights["b"].value[1] = world.rank  # it is not compared any more
        return str(caught.value)

    told = run_training(3, body, "ab", GradientSettings(compare_at_step=at_step))
    assert len(set(told)) == 1
    assert "'b': rank 2 differs from ranks 0, 1, which agree (1 of 2 tensors differ). Call broadcast_" in told[0]
    assert "compare_at_step=0 or RONDE_COMPARE_AT_STEP=0" in told[0]


def test_ranks_that_are_meant_to_differ_are_not_compared() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.weights["a"].value[0] = world.rank
        training.backward(a=world.rank)
        return training.grads("a")

    assert run_training(2, body, "a", GradientSettings(compare_at_step=0)) == [[0.5]] * 2


@pytest.mark.parametrize("differ", [False, True])
def test_parameters_are_compared_while_a_rank_is_in_join(differ: bool) -> None:
    def body(training: ArrayTraining, world: World) -> None:
        training.backward(a=1.0)
        training.clear()
        training.weights["a"].value[0] = world.rank if differ else world.rank > 0  # that of rank 0 does not count
        if world.rank and differ:
            with pytest.raises(OutOfSync, match=r"cannot be told while rank 0 is in join\(\)\. Call broadcast_"):
                training.backward(a=1.0)
        elif differ:
            with pytest.raises((Mismatch, RoundEnded)):
                world.group.join()
        else:
            if world.rank:
                training.backward(a=1.0)
            world.group.join()

    run_training(3, body, "a", GradientSettings(compare_at_step=2))


# --- what the flags report --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, Halving()])
def test_parameters_that_are_frozen_later_or_train_later_lead_to_new_buckets(codec: Halving | None) -> None:
    def body(training: ArrayTraining, world: World) -> list[list[object]]:
        frozen, seen = training.weights["b"], []
        training.backward(c=1.0, a=1.0)
        training.clear()
        frozen.trains = True
        frozen.grad = np.full(4, 2.0, np.float32)  # came, but nobody listened for it
        training.backward(c=2.0, a=3.0)
        seen.append(training.grads("abc"))
        training.clear()
        training.backward(b=5.0, c=2.0, a=3.0)
        seen.append(training.grads("abc"))
        training.clear()
        training.weights["a"].trains = False
        training.backward(c=1.0, b=1.0)
        training.clear()
        training.backward(b=2.0, c=3.0)
        return [*seen, training.grads("abc")]

    given = [Weight("a"), Weight("b", trains=False), Weight("c")]
    expected = [[3.0, 2.0, 2.0], [3.0, 5.0, 2.0], [None, 2.0, 3.0]]
    assert run_training(2, body, given, ONE_EACH, codec=codec) == [expected] * 2


def test_a_model_may_be_frozen_at_first_or_for_a_while() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        seen = []
        for trains in (False, True, False, True):
            training.clear()
            training.weights["a"].trains = trains
            if trains:
                training.backward(a=world.rank)
            training.take_step()
            seen += training.grads("a")
        return seen

    given = [Weight("a", trains=False)]
    assert run_training(2, body, given, GradientSettings(idle_steps=True)) == [[None, 0.5, None, 0.5]] * 2


def test_a_gradient_of_a_parameter_that_was_added_may_not_be_on_top_of_results_either() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.backward(a=1.0)
        training.weights["b"] = Weight("b")
        training.adapter.weights.append(training.weights["b"])
        training.reducer.parameters_added()
        with pytest.raises(ValueError, match="a parameter that did not train before got a gradient on top of one"):
            training.backward(b=1.0)
        training.clear()
        training.backward(b=world.rank)
        return training.grads("ab")

    assert run_training(2, body, "a", GradientSettings(op="sum")) == [[None, 1.0]] * 2


def test_a_gradient_that_turns_out_to_be_sparse_is_reduced_by_itself_from_then_on() -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.backward(a=1.0)
        training.clear()
        training.backward(**({"t": {2: 4.0}} if world.rank == 1 else {}), a=2.0)
        seen = training.grads("at")
        for _ in range(2):
            training.clear()
            training.backward(t={world.rank: 2.0, 3: 1.0}, a=world.rank)
            seen += training.grads("at")
        assert training.adapter.num_sparse_allreduces == 3
        return seen

    assert run_training(2, body, "at") == [[2.0, {2: 2.0}, *[0.5, {0: 1.0, 1: 1.0, 3: 1.0}] * 2]] * 2


@pytest.mark.parametrize("what", ["a first step", "a sparse gradient", "another parameter"])
def test_what_a_rank_that_has_joined_cannot_do_is_refused(what: str) -> None:
    def body(training: ArrayTraining, world: World) -> None:
        if what != "a first step":
            training.backward(a=1.0)
            training.clear()
        training.weights["b"].trains = what == "another parameter"
        if world.rank == 0:
            words = r"join.* takes part only in .*every rank needs a step before the first one joins"
            with pytest.raises(Mismatch, match=words):
                training.backward(a=1.0, **({"t": {0: 1.0}} if what == "a sparse gradient" else {}))
        else:
            with pytest.raises(RoundEnded):  # it stays joined, until the other one has left
                world.group.join()

    run_training(2, body, [*"at", Weight("b", trains=False)])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bucket_that_a_joined_rank_cannot_take_part_in_says_why(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(training: ArrayTraining, world: World) -> list[object]:
        training.backward(a=1.0, b=2.0)
        training.clear()

        def refuse(*_: object, **__: object) -> None:
            raise mismatch_error({0: "join", 1: "allreduce adasum float32[4]"}, joined=(0,))

        with monkeypatch.context() as patch:
            patch.setattr(Work, "wait", refuse)
            patch.setattr(Plan, "run", refuse)
            with pytest.raises(Mismatch, match=r"rank 0: join; .*only with op mean or sum.*equally many steps"):
                training.backward(a=1.0, b=2.0)
        training.clear()
        training.backward(a=3.0, b=4.0)  # nothing is left of the buckets that were refused
        return training.grads("ab")

    settings = GradientSettings(op="adasum", bucket_mb=1e-5)
    assert run_training(1, body, "ab", settings, overlap=overlap) == [[3.0, 4.0]]
