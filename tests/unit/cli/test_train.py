"""Training is measured in turn; what everybody came to is held against the others."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from ronde.cli.bench.cases import MODELS
from ronde.cli.bench.peers import APART, TrainingImplementation, TrainingSetup
from ronde.cli.bench.runner import BenchmarkFailed, MeasurementBudget, RankPool
from ronde.cli.bench.train import TimedRound, TrainingCase, TrainingResult, best_ddp, compare, needed_bytes, no_room
from ronde.types import Deadline


class FakeCrew:
    """Two ranks, the second one slower, that write down what they were asked."""

    def __init__(self, *digests: int) -> None:
        self.digests = digests or (7, 7)
        self.story: list[dict[str, Any]] = []

    def ask(self, doing: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:  # as RankPool
        self.story.append(command)
        match command["do"]:
            case "prepare":
                return [{"digest": digest} for digest in self.digests]
            case "burst":
                return [_times(command["num"], ms) for ms in (10, 20)]
            case _:
                return [{"memory_kb": 1024 * mb, "rss_kb": 0} for mb in (300, 500)]


def _times(num: int, ms: int) -> dict[str, list[int]]:
    return {"took_ns": [ms * 1_000_000] * num, "backward_ns": [ms * 500_000] * num}


def lane_of(crew: FakeCrew, kit: TrainingImplementation | None = None) -> TrainingCase:
    settings = TrainingSetup(codec="float16")
    return TrainingCase(
        cast("RankPool", crew), kit or TrainingImplementation("ronde", "ronde", 2, settings), MODELS["mlp"], 64
    )


def record(impl: str, samples_per_s: float, step_us: float = 100.0, ranks: int = 2) -> TrainingResult:
    return TrainingResult(
        impl=impl,
        model="mlp",
        ranks=ranks,
        batch=64,
        codec=None,
        num_steps=10,
        samples_per_s=samples_per_s,
        step_us=step_us,
        backward_us=step_us / 2,
    )


FIELD = [
    record("alone", 100, 80, ranks=1),
    record("apart", 200, 90),
    record("ronde", 180, 100),
    record("hvd", 171, 105),
    record("ddp", 120, 150),
    record("ddp-view-10MB", 150, 120),
]


def test_what_a_burst_yields_is_the_sum_of_what_each_rank_did_in_its_own_time() -> None:
    burst = TimedRound(((500_000_000, 500_000_000), (250_000_000, 250_000_000)), ((), ()))
    assert burst.samples_per_s(batch=10) == pytest.approx(10 * (2 + 4))


def test_a_lane_says_samples_per_second_times_and_memory() -> None:
    crew = FakeCrew()
    lane = lane_of(crew)
    lane.prepare()
    lane.settle(MeasurementBudget(steps=4))
    lane.run(MeasurementBudget())
    lane.run(MeasurementBudget())
    lane.weigh()
    found = lane.record()
    assert [command["do"] for command in crew.story] == ["prepare", "burst", "burst", "burst", "weigh"]
    assert crew.story[0]["settings"] == {"codec": "float16", "view": False, "bucket_mb": None}
    assert found.samples_per_s == pytest.approx(64 * (100 + 50))
    assert (found.num_steps, found.step_us, found.backward_us) == (8, 15_000, 7_500)
    assert (found.memory_mb, found.rss_mb, found.codec) == (400, None, "float16")


def test_ranks_with_different_gradients_are_an_error_unless_they_do_not_communicate() -> None:
    with pytest.raises(BenchmarkFailed, match="ranks have different gradients of mlp"):
        lane_of(FakeCrew(1, 2)).prepare()
    lane_of(FakeCrew(1, 2), TrainingImplementation(APART, APART, 2)).prepare()


def test_everybody_is_held_against_one_process_the_best_ddp_and_ronde() -> None:
    of = {each.impl: each for each in compare(FIELD)}
    assert of["ronde"].efficiency == 0.9
    assert of["ronde"].vs_ddp == 1.2
    assert of["hvd"].vs_ronde == 0.95
    assert of["ddp"].vs_ddp == 0.8
    assert of["apart"].efficiency == 1.0


def test_overhead_is_what_a_step_takes_beyond_one_without_communication() -> None:
    of = {each.impl: each.overhead_us for each in compare(FIELD)}
    assert of == {"alone": None, "apart": 0, "ronde": 10, "hvd": 15, "ddp": 60, "ddp-view-10MB": 30}


def test_without_the_others_nothing_is_compared() -> None:
    (found,) = compare([record("ddp", 1)])
    assert (found.efficiency, found.overhead_us, found.vs_ronde, found.vs_ddp) == (None, None, None, 1.0)
    assert best_ddp([record("ronde", 1)]) is None


def test_a_record_is_one_flat_json_object() -> None:
    found = msgspec.json.decode(msgspec.json.encode(record("ronde", 180)))
    assert found["op"] == "train"
    assert set(found) == set(TrainingResult.__struct_fields__)


def test_more_ranks_and_larger_networks_need_more_memory() -> None:
    two, four = TrainingImplementation("ronde", "ronde", 2), TrainingImplementation("ddp", "ddp", 4)
    assert needed_bytes(MODELS["mlp"], [two, four]) == 3 * needed_bytes(MODELS["mlp"], [two])
    assert needed_bytes(MODELS["alexnet"], [two]) > 2 * 4 * 244_000_000


def test_a_network_for_which_there_is_no_room_is_not_started() -> None:
    assert "GiB of memory" in no_room(MODELS["alexnet"], [TrainingImplementation("ronde", "ronde", 10_000)])
    assert no_room(MODELS["mlp"], []) == ""
