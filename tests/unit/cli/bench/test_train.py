"""`ronde bench train`: who trains, what is measured of them, how they compare, and what the table shows."""

from __future__ import annotations

import importlib.util
import json
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from ronde.cli.bench import peers
from ronde.cli.bench.runner import BenchmarkFailed, RankPool
from ronde.cli.bench.train import (
    TrainingCase,
    TrainingResult,
    TrainingSetup,
    compare,
    find_setups,
    render_training_tables,
)
from ronde.errors import RondeError
from ronde.types import Deadline
from tests.unit.cli.bench.test_allreduce import line_with

WITHOUT_GRADIENTS = ["alone", "apart", "lockstep"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that seem to be installed."""
    names = {"torch", "horovod", "tensorflow"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    return names


@pytest.mark.usefixtures("installed")
def test_ddp_takes_part_as_it_is_and_at_its_best() -> None:
    setups, notes = find_setups(4, None, None, (10, 100, 10))
    assert [setup.name for setup in setups] == [
        *(*WITHOUT_GRADIENTS, "ronde", "hvd", "ddp", "ddp-view", "ddp-view-10MB", "ddp-view-100MB"),
    ]
    assert [setup.size for setup in setups] == [1, *[4] * 8]
    assert (setups[-2].view, setups[-2].bucket_mb) == (True, 10)
    assert notes == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("peers", "chosen"), [("none", []), ("hvd", ["hvd"]), ("ddp", ["ddp", "ddp-view", "ddp-view-10MB"])]
)
def test_peers_can_be_chosen(peers: str, chosen: list[str]) -> None:
    names = [setup.name for setup in find_setups(2, None, peers, (10,))[0]]
    assert names == [*WITHOUT_GRADIENTS, "ronde", *chosen]


@pytest.mark.parametrize(
    ("framework", "more"),
    [("tensorflow", []), ("keras", [("fit-alone", "apart", 1, "fit"), ("fit", "ronde", 2, "fit")])],
)
def test_tensorflow_is_compared_with_its_strategy_and_keras_with_fit(
    framework: str, more: list[tuple[str, str, int, str]], installed: set[str]
) -> None:
    installed.remove("torch")
    setups, notes = find_setups(2, "float16", None, (10,), framework)
    found = [(setup.name, setup.library, setup.size, setup.loop) for setup in setups]
    without = [("alone", "apart", 1, "custom"), ("apart", "apart", 2, "custom"), ("lockstep", "lockstep", 2, "custom")]
    peers = [("hvd", "hvd", 2, "custom"), ("mwms", "mwms", 2, "custom")]
    assert found == [*without, ("ronde", "ronde", 2, "custom"), *more, *peers]
    assert {setup.framework for setup in setups} == {framework} and notes == []
    assert setups[3].options() == {"codec": "float16", "loop": "custom"}
    with pytest.raises(ValueError, match=f"no such peer of {framework}: 'ddp'; there are mwms, hvd, none"):
        find_setups(2, None, "ddp", (), framework)
    installed.remove("tensorflow")
    with pytest.raises(RondeError, match="pip install tensorflow"):
        find_setups(2, None, None, (), framework)


def test_ranks_of_a_strategy_get_a_tf_config_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_free_ports", lambda host, num_ports: tuple(range(5000, 5000 + num_ports)))
    commands = TrainingSetup("mwms", "mwms", framework="keras").commands(2)
    configs = [
        json.loads(word.removeprefix("TF_CONFIG=")) for command in commands for word in command if "TF_C" in word
    ]
    cluster = {"worker": ["127.0.0.1:5000", "127.0.0.1:5001"]}
    assert configs == [{"cluster": cluster, "task": {"type": "worker", "index": rank}} for rank in range(2)]
    assert [command[-3:] for command in commands] == [("mwms.keras", str(rank), "2") for rank in range(2)]


def test_fit_is_compared_with_fit_alone_and_its_scaling_with_that_of_the_custom_loop() -> None:
    fit = [replace(result_of("fit-alone", 80, ranks=1), loop="fit"), replace(result_of("fit", 136), loop="fit")]
    *_, alone, both = compare([*RESULTS[:3], *fit, result_of("mwms", 100)])[:5]
    assert (alone.efficiency, alone.overhead_us, alone.vs_custom_loop) == (1.0, None, None)
    assert (both.efficiency, both.overhead_us, both.vs_peer, both.vs_custom_loop) == (0.85, None, 1.36, 0.9444)
    assert "0.94 ×" in line_with(render_training_tables([both], width=200), "fit  ")


@pytest.mark.usefixtures("installed")
def test_peers_without_bfloat16_send_as_many_bits_another_way() -> None:
    setups, notes = find_setups(2, "bfloat16", None, ())
    codecs = {setup.name: setup.codec for setup in setups}
    expected = {"ronde": "bfloat16", "hvd": "float16", "ddp": "float16", "ddp-view": "float16"}
    assert codecs == {**dict.fromkeys(WITHOUT_GRADIENTS), **expected}
    assert "the others send float16" in notes[0]


def test_a_missing_package_is_noted_or_an_error_when_it_is_needed(installed: set[str]) -> None:
    installed.remove("horovod")
    assert find_setups(2, None, None, ())[1][0].startswith("hvd is left out: ronde-horovod is not installed")
    with pytest.raises(ValueError, match=r"pip install \./ronde/compat/horovod"):
        find_setups(2, None, "hvd", ())
    installed.remove("torch")
    with pytest.raises(RondeError, match="pip install torch"):
        find_setups(2, None, None, ())


class PoolOfDifferentRanks:
    def request(self, action: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:  # as RankPool
        return [{"checksum": rank, "memory_kb": 1024 * (300 + 200 * rank), "rss_kb": 0} for rank in range(2)]


def case_of(library: str, **more: Any) -> TrainingCase:
    setup = TrainingSetup(library, library, codec="float16")
    return TrainingCase(cast("RankPool", PoolOfDifferentRanks()), "mlp", setup, 64, **more)


def test_a_result_has_samples_per_second_times_and_memory_of_all_ranks() -> None:
    took_ns = [{"took_ns": [ms * 1_000_000] * 4, "backward_ns": [ms * 500_000] * 4} for ms in (10, 20)]
    case = case_of("ronde", rounds=[took_ns, took_ns])
    case.measure_memory()
    result = case.result()
    assert result.samples_per_s == pytest.approx(64 * (100 + 50))
    assert (result.num_steps, result.step_us, result.backward_us) == (8, 15_000, 7_500)
    assert (result.memory_mb, result.rss_mb, result.codec) == (400, None, "float16")


def test_ranks_with_different_gradients_are_an_error_unless_they_do_not_communicate() -> None:
    with pytest.raises(BenchmarkFailed, match="ranks have different gradients of mlp"):
        case_of("ronde").setup()
    case_of("apart").setup()


def result_of(impl: str, samples_per_s: float, step_us: float = 100.0, ranks: int = 2) -> TrainingResult:
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


RESULTS = [
    result_of("alone", 100, 80, ranks=1),
    result_of("apart", 200, 90),
    result_of("ronde", 180, 100),
    result_of("hvd", 171, 105),
    result_of("ddp", 120, 150),
    result_of("ddp-view-10MB", 150, 120),
]
TABLE = render_training_tables(compare(RESULTS), "2 ranks on 2 cores")


def test_all_are_compared_with_one_process_the_best_peer_and_ronde() -> None:
    of = {result.impl: result for result in compare(RESULTS)}
    assert (of["ronde"].efficiency, of["apart"].efficiency) == (0.9, 1.0)
    assert (of["ronde"].vs_peer, of["ddp"].vs_peer, of["hvd"].vs_ronde) == (1.2, 0.8, 0.95)
    overheads_us = {result.impl: result.overhead_us for result in of.values()}
    assert overheads_us == {"alone": None, "apart": 0, "ronde": 10, "hvd": 15, "ddp": 60, "ddp-view-10MB": 30}


def test_the_time_above_lockstep_is_compared_when_it_is_measured() -> None:
    rows = compare([*RESULTS, result_of("lockstep", 190, 96)])
    above_us = {row.impl: row.above_lockstep_us for row in rows}
    waiting = {"alone": None, "apart": None, "lockstep": 0}
    assert above_us == {**waiting, "ronde": 4, "hvd": 9, "ddp": 54, "ddp-view-10MB": 24}
    table = render_training_tables(rows, width=120)
    assert "lockstep" in line_with(table, "samples/s") and "4.0 µs" in line_with(table, "ronde  ")


def test_without_the_others_nothing_is_compared() -> None:
    (result,) = compare([result_of("ddp", 1)])
    assert (result.efficiency, result.overhead_us, result.vs_ronde, result.vs_peer) == (None, None, None, 1.0)


def test_the_table_compares_ronde_with_the_best_peer() -> None:
    line = line_with(TABLE, "ronde  ")
    assert all(text in line for text in ("180.0", "100.0 µs", "10.0 µs", "90%", "1.20 ×"))
    assert "best peer" in line_with(TABLE, "ddp-view-10MB")
    assert "best peer" not in line_with(TABLE, "ddp  ")
    assert all(text in line_with(TABLE, "hvd  ") for text in ("1.14 ×", "0.95 ×"))
    assert line_with(TABLE, "mlp: 784-512-512-10, batch 64") and line_with(TABLE, "2 ranks on 2 cores")


def test_a_column_without_values_is_left_out_and_an_overhead_below_zero_is_shown() -> None:
    rows = compare(RESULTS[:3])
    table = render_training_tables([*rows[:2], msgspec.structs.replace(rows[2], overhead_us=-1500.0)])
    heading = line_with(table, "samples/s")
    assert "RSS" not in heading and "peer" not in heading
    assert "-1.50 ms" in line_with(table, "ronde  ")
