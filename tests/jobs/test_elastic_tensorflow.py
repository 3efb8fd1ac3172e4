"""Training with TensorFlow and with fit() of Keras while workers are killed and come: every sample counts exactly once,
and functions of TensorFlow that were traced in one round are right in the next."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_command
from tests.jobs.kit import read_worker_results
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S
from tests.services import needs

PYTHON = ROOT / ".venv-tensorflow/bin/python"
RUN = (sys.executable, "-m", "ronde.cli.main", "run", *"--no-fold -np 3 --min-np 2 --cooldown 0.1 1".split())
WAIT = {"0 {} 12": "await 3 ranks", "2 {} 12": "await 3 ranks"}
"""Until the worker that takes the place of the killed one is there."""

pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),
    needs("TensorFlow", missing="" if PYTHON.exists() else "no .venv-tensorflow; `make build` makes it"),
]


def train(folder: Path, module: str, faults: dict[str, str], *words: str, **env: str) -> dict[int, dict[str, Any]]:
    """Run a script to its end; what its workers report that have trained and were not killed."""
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "RONDE_OPERATION_S": str(OPERATION_S),
        "TEST_FAULTS": json.dumps(faults),
        **env,
    }
    command: list[str | Path] = [*RUN, PYTHON, "-m", f"tests.jobs.scripts.{module}", folder, *words]
    done = run_command(command, env=variables, limit_s=2 * LONG_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return read_worker_results(folder)


def wait_at(place: str) -> dict[str, str]:
    return {key.format(place): what for key, what in WAIT.items()}


def test_a_function_of_tensorflow_goes_on_with_fewer_and_with_more_ranks(tmp_path: Path) -> None:
    """A worker is killed when some buckets of its gradients are reduced, and another one when variables are updated."""
    faults = {"1 graph 7": "kill", **wait_at("forward"), "2 update 20": "kill"}
    results = train(tmp_path, "elastic_tensorflow", faults)
    for worker, result in results.items():
        assert result["counts"] == [3.0], f"worker {worker}: {results}"
        assert result["others"] == [30.0] and result["forward"] == result["steps"] == 30, result
        assert result["traces"] == 1
    sizes = results[0]["sizes"]
    assert sizes[0] == 3 and 2 in sizes, "it may be 3 again before the others have noticed the loss"


def test_operations_through_python_survive_a_loss_too(tmp_path: Path) -> None:
    results = train(tmp_path, "elastic_tensorflow", {"1 graph 7": "kill"}, RONDE_TENSORFLOW_OPS="python")
    assert all(result["counts"] == [3.0] and result["others"] == [30.0] for result in results.values()), results


@pytest.mark.parametrize(
    ("backend", "kind", "faults"),
    [
        ("tensorflow", "dataset", {"1 begin 7": "kill", **wait_at("begin"), "0 end 18": "kill"}),
        ("torch", "arrays", {"1 begin 7": "kill", "0 test 20": "kill"}),
        ("jax", "arrays", {"1 end 7": "kill", **wait_at("begin"), "0 begin 18": "kill"}),
    ],
)
def test_fit_goes_on_in_the_middle_of_an_epoch(backend: str, kind: str, faults: dict[str, str], tmp_path: Path) -> None:
    results = train(tmp_path, "elastic_keras", faults, kind, "4", KERAS_BACKEND=backend)
    assert len(results) >= 2
    for worker, result in results.items():
        assert result["counts"] == [3.0], f"worker {worker}: {results}"
        assert result["forward"] == result["steps"] == result["iterations"] == 30, result
        assert result["epoch"] == [3, 0, 3], result


def test_a_worker_that_comes_later_may_use_optimizers_in_another_order(tmp_path: Path) -> None:
    faults = {"1 7": "kill", "0 9": "await 3 ranks", "2 9": "await 3 ranks"}
    results = train(tmp_path, "elastic_optimizers", faults, KERAS_BACKEND="tensorflow")
    assert 3 in results, "the one that came later"
    for result in results.values():
        assert result == results[3] and result["iterations"] == [4, 8, 1], results
        assert len(set(result["names"])) == 3
