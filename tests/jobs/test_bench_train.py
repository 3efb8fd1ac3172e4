"""`ronde bench train` with real ranks: every way to train runs, and what it writes down is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ronde.cli.bench.models import MODELS
from ronde.cli.bench.runner import BenchmarkRunner, MeasurementBudget
from ronde.cli.bench.table import BenchmarkDisplay
from ronde.cli.bench.train import TrainingResult, TrainingSetup, measure_training
from tests.limits import LONG_S, LONG_TEST_S

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(LONG_TEST_S)
"""Each rank imports PyTorch: on a busy machine that takes its time."""


def test_the_command_trains_in_turn_and_writes_its_results_down(tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = (sys.executable, "-m", "ronde.cli.main", "bench", "train", "-np", "2", "--peers", "none")
    short = ("--models", "mlp", "--batch", "4", "--rounds", "2", "--steps", "3", "--json", str(results))
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run((*command, *short), capture_output=True, text=True, timeout=LONG_S, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    ranks = {record["impl"]: record["ranks"] for record in records}
    assert ranks == {"alone": 1, "apart": 2, "lockstep": 2, "ronde": 2}
    for record in records:
        assert set(record) == set(TrainingResult.__struct_fields__)
        assert (record["op"], record["model"], record["batch"], record["num_steps"]) == ("train", "mlp", 4, 6)
        assert 0 < record["backward_us"] < record["step_us"]
        assert 0 < record["memory_mb"] < record["rss_mb"]
        assert record["efficiency"] > 0
        assert record["vs_ddp"] is None
    assert all(words in done.stdout for words in ("samples/s", "2 ranks on", "784-512-512-10"))


@pytest.mark.parametrize(
    "setup",
    [
        TrainingSetup("hvd", "hvd"),
        TrainingSetup("ddp", "ddp", codec="float16"),
        TrainingSetup("ddp-view-1MB", "ddp", view=True, bucket_mb=1),
        TrainingSetup("ronde", "ronde", codec="bfloat16"),
    ],
    ids=lambda setup: setup.name,
)
def test_every_way_to_train_has_the_same_gradients_on_all_ranks(setup: TrainingSetup) -> None:
    if setup.name == "hvd":
        pytest.importorskip("horovod.torch")
    output = StringIO()
    display: BenchmarkDisplay[TrainingResult] = BenchmarkDisplay(Console(file=output), str, None)
    with display, BenchmarkRunner(MeasurementBudget(rounds=1, steps=2), display) as runner:
        results = measure_training(runner, MODELS["tiny"], 1, [setup])
    assert output.getvalue() == "", "there is no note"
    (result,) = results
    assert (result.impl, result.codec, result.num_steps) == (setup.name, setup.codec, 2)
    assert result.samples_per_s > 0


def test_the_command_measures_a_recovery_and_writes_it_down(tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = (sys.executable, "-m", "ronde.cli.main", "bench", "elastic")
    short = ("--what", "recovery,cost", "--sizes", "2", "--repeats", "1", "--seconds", "0.5", "--json", str(results))
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run((*command, *short), capture_output=True, text=True, timeout=LONG_S, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    recovery, *costs = [json.loads(line) for line in results.read_text().splitlines()]
    parts = [recovery[name] for name in ("notice_ms", "join_ms", "sync_ms", "step_ms")]
    assert (recovery["what"], recovery["ranks"]) == ("recovery", 2)
    assert min(parts) > 0 and recovery["total_ms"] == pytest.approx(sum(parts))
    assert [cost["network"] for cost in costs] == ["linear", "convolutional"]
    for cost in costs:
        assert (cost["what"], cost["ranks"]) == ("cost", 2)
        assert 0 < cost["low"] <= cost["ratio"] <= cost["high"]
        assert cost["elastic_operations"] == cost["plain_operations"] == 1
        assert min(cost["plain_calls"], cost["elastic_calls"]) > 100
