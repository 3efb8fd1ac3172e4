"""`ronde bench train` with real ranks: every way to train runs, and what it writes down is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ronde.cli.bench.models import MODELS
from ronde.cli.bench.runner import BenchmarkRunner, MeasurementBudget
from ronde.cli.bench.table import BenchmarkDisplay
from ronde.cli.bench.train import TrainingResult, TrainingSetup, measure_training
from tests.commands import ROOT
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(LONG_TEST_S)
"""Each rank imports PyTorch or TensorFlow: on a busy machine that takes its time."""

TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"


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
        assert (record["framework"], record["loop"], record["vs_custom_loop"]) == ("torch", "custom", None)
        assert record["cpu_us"] > 0
        assert 0 < record["backward_us"] < record["step_us"]
        assert 0 < record["memory_mb"] < record["rss_mb"]
        assert record["efficiency"] > 0
        assert record["vs_peer"] is None
    assert all(words in done.stdout for words in ("samples/s", "2 ranks on", "784-512-512-10"))


@needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
def test_keras_trains_in_its_own_loop_in_fit_and_beside_the_strategy(tmp_path: Path) -> None:
    """What TensorFlow does without Keras' optimizer is measured by the same code, but for the tape."""
    results = tmp_path / "results"
    command = (TENSORFLOW, "-m", "ronde.cli.main", "bench", "train", "-np", "2", "--framework", "keras")
    short = ("--models", "mlp", "--batch", "4", "--rounds", "1", "--steps", "3", "--json", str(results))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src")}
    env = {**os.environ, "COLUMNS": "200", **quiet}
    words = (*command, *short, "--peers", "mwms")
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG_TEST_S, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    records = {record["impl"]: record for record in map(json.loads, results.read_text().splitlines())}
    loops = {impl: record["loop"] for impl, record in records.items()}
    custom = dict.fromkeys(("alone", "apart", "lockstep", "ronde", "mwms"), "custom")
    assert loops == {**custom, "fit-alone": "fit", "fit": "fit"}
    for record in records.values():
        assert set(record) == set(TrainingResult.__struct_fields__)
        assert (record["framework"], record["num_steps"], record["backward_us"]) == ("keras", 3, None)
        assert 0 < record["memory_mb"] < record["rss_mb"]
        assert min(record["step_us"], record["cpu_us"], record["efficiency"], record["vs_peer"]) > 0
    assert records["fit"]["vs_custom_loop"] > 0
    assert all(words in done.stdout for words in ("keras, 2 ranks on", "784-512-512-10", "custom loop"))


@needs("JAX", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
def test_jax_trains_with_ronde_and_over_a_mesh(tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = (TENSORFLOW, "-m", "ronde.cli.main", "bench", "train", "-np", "2", "--framework", "jax")
    short = ("--models", "mlp", "--batch", "4", "--rounds", "1", "--steps", "3", "--json", str(results))
    env = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run((*command, *short), capture_output=True, text=True, timeout=LONG_TEST_S, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout
    records = {record["impl"]: record for record in map(json.loads, results.read_text().splitlines())}
    assert set(records) == {"alone", "apart", "lockstep", "ronde", "mesh"}
    for record in records.values():
        assert (record["framework"], record["num_steps"], record["backward_us"]) == ("jax", 3, None)
        assert min(record["step_us"], record["cpu_us"], record["efficiency"], record["vs_peer"]) > 0


@needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
@pytest.mark.parametrize("setup", [TrainingSetup("ronde", "ronde", codec="float16"), TrainingSetup("hvd", "hvd")])
def test_tensorflow_has_the_same_gradients_on_all_ranks(setup: TrainingSetup) -> None:
    output = StringIO()
    display: BenchmarkDisplay[TrainingResult] = BenchmarkDisplay(Console(file=output), str, None)
    with display, BenchmarkRunner(MeasurementBudget(rounds=1, steps=2), display) as runner:
        mine = replace(setup, framework="tensorflow", python=str(TENSORFLOW))
        (result,) = measure_training(runner, MODELS["mlp"], 4, [mine])
    assert output.getvalue() == "", "there is no note"
    assert (result.impl, result.framework, result.codec) == (setup.name, "tensorflow", setup.codec)


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
