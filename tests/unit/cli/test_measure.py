"""Implementations are measured in turn; what fails is left out, unless it is ronde."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ronde.cli.bench.cases import parse_works
from ronde.cli.bench.peers import GlooImplementation, MpiImplementation
from ronde.cli.bench.runner import (
    TRIAL_STEPS,
    AllreduceCase,
    AllreduceImplementation,
    BenchmarkFailed,
    BenchmarkProcesses,
    BenchmarkResult,
    BenchmarkRunner,
    MeasurementBudget,
    RankPool,
    gigabits,
    lanes_of,
)
from ronde.types import Deadline


class FakeCrew:
    """Ranks that always take the same time, and write down what they were asked."""

    size = 2

    def __init__(self, name: str, took_ns: int = 1000, fails_at: str = "") -> None:
        self.name = name
        self.took_ns = took_ns
        self.fails_at = fails_at
        self.closed = False

    def ask(self, doing: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:  # as RankPool
        story.append((self.name, command))
        if command["do"] == self.fails_at:
            raise BenchmarkFailed(f"{self.name}: rank 1 ended while {doing}")
        return [{"took_ns": [self.took_ns] * command["num"]} if command["do"] == "burst" else {}, {}]

    def close(self) -> None:
        self.closed = True


class Rondes:
    name = "ronde"
    many_paths = ("many", "many-25MB")

    def start(self, directory: Path, size: int) -> BenchmarkProcesses:
        raise NotImplementedError


story: list[tuple[str, dict[str, Any]]] = []


@pytest.fixture(autouse=True)
def new_story() -> None:
    story.clear()


def field_of(*crews: FakeCrew, repeats: int = 3) -> tuple[BenchmarkRunner, list[str]]:
    notes: list[str] = []
    field = BenchmarkRunner(
        MeasurementBudget(repeats=repeats, seconds=repeats * 5e-6), notes.append, lambda doing: None
    )
    field.crews.extend(cast("list[RankPool]", crews))
    return field, notes


def lanes(field: BenchmarkRunner) -> list[AllreduceCase]:
    return [AllreduceCase(crew, "array", (1024,)) for crew in field.crews]


def test_all_take_turns_and_each_round_begins_with_another() -> None:
    field, _ = field_of(FakeCrew("ronde"), FakeCrew("gloo"), FakeCrew("mpich"))
    field.race("allreduce", 4096, lanes(field))
    bursts = [name for name, command in story if command["do"] == "burst"][3:]  # the first three are trials
    assert bursts == ["ronde", "gloo", "mpich", "gloo", "mpich", "ronde", "mpich", "ronde", "gloo"]


def test_a_burst_has_as_many_steps_as_fit_its_time() -> None:
    field, _ = field_of(FakeCrew("ronde", took_ns=1000), FakeCrew("gloo", took_ns=500))
    field.race("allreduce", 4096, lanes(field))
    steps = [(name, command["num"]) for name, command in story if command["do"] == "burst"]
    assert steps[:4] == [("ronde", TRIAL_STEPS), ("gloo", TRIAL_STEPS), ("ronde", 5), ("gloo", 10)]


def test_a_burst_has_exactly_the_steps_that_were_asked_for() -> None:
    assert [MeasurementBudget(steps=2).num_steps(step_s) for step_s in (1e-9, 100.0)] == [2, 2]


def test_memory_is_released_once_per_crew_after_the_last_burst() -> None:
    field, _ = field_of(FakeCrew("ronde"))
    field.race("allreduce", 4096, [AllreduceCase(field.crews[0], path, (1024,)) for path in ("array", "bucket")])
    assert [command["do"] for _, command in story].count("release") == 1
    assert story[-1] == ("ronde", {"do": "release"})


def test_a_peer_that_fails_is_left_out_with_a_note_and_the_others_go_on() -> None:
    bad = FakeCrew("gloo", fails_at="burst")
    field, notes = field_of(FakeCrew("ronde"), bad)
    records = field.race("allreduce", 4096, lanes(field))
    assert [record.impl for record in records] == ["ronde"]
    assert notes == ["gloo is left out from here on: gloo: rank 1 ended while running array"]
    assert bad.closed


def test_when_ronde_fails_there_is_nothing_left_to_measure() -> None:
    field, _ = field_of(FakeCrew("ronde", fails_at="prepare"), FakeCrew("gloo"))
    with pytest.raises(BenchmarkFailed):
        field.race("allreduce", 4096, lanes(field))


def test_a_record_says_median_fastest_and_gigabits_per_second() -> None:
    lane = AllreduceCase(cast("RankPool", FakeCrew("ronde")), "array", (1024,), took_ns=[4000, 1000, 2000, 9000, 2000])
    record = lane.record("allreduce", 4096)
    assert record == BenchmarkResult("ronde", "allreduce", "array", 2, 4096, median_us=2.0, min_us=1.0, gbps=16.384)
    assert msgspec.json.decode(msgspec.json.encode(record)) == {
        "impl": "ronde",
        "op": "allreduce",
        "path": "array",
        "ranks": 2,
        "bytes": 4096,
        "median_us": 2.0,
        "min_us": 1.0,
        "gbps": 16.384,
    }


def test_times_of_repeated_operations_are_per_operation() -> None:
    crew = cast("RankPool", FakeCrew("ronde"))
    lane = AllreduceCase(crew, "many", (1,), repeat=100, label="flight-100", took_ns=[500_000])
    record = lane.record("negotiation", 4)
    assert (record.path, record.median_us) == ("flight-100", 5.0)


def test_a_gigabit_is_a_thousand_million_bits() -> None:
    assert gigabits(125_000_000, 1e9) == 1.0


def test_peers_have_one_way_for_one_array_and_ronde_those_asked_for() -> None:
    kits: list[AllreduceImplementation] = [
        Rondes(),
        GlooImplementation(),
        MpiImplementation("mpich", "python", "mpiexec"),
    ]
    crews = cast("list[RankPool]", [FakeCrew(kit.name) for kit in kits])
    one, many = parse_works("1M,many")

    def paths(work_index: int, *asked: str) -> list[str]:
        work = (one, many)[work_index]
        return [lane.words for lane in lanes_of(crews, kits, work, asked)]

    assert paths(0, "bucket") == ["ronde bucket", "gloo array", "mpich array"]
    assert paths(0, "array", "bucket")[:2] == ["ronde array", "ronde bucket"]
    assert paths(1, "many")[:2] == ["ronde many", "ronde many-25MB"]
    assert paths(1, "many")[-1] == "mpich many-iallreduce"


def test_the_bucket_path_of_many_arrays_has_few_large_ones() -> None:
    (many,) = parse_works("many")
    (_, packed) = lanes_of([cast("RankPool", FakeCrew("ronde"))], [Rondes()], many, ("many",))
    assert len(packed.counts) == 5
    assert sum(packed.counts) == sum(many.counts)


@pytest.mark.parametrize(
    ("wrong", "words"), [({"repeats": 0}, "repeats"), ({"seconds": 0.0}, "seconds"), ({"steps": 0}, "steps")]
)
def test_a_pace_that_makes_no_sense_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MeasurementBudget(**wrong)
