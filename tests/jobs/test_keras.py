"""Keras 3 on two ranks, on each of its backends. A job runs all checks of tests/jobs/keras_checks: starting one takes
long. The ranks have an environment of their own; here there is no Keras."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, output_of, run_command
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S
from tests.services import needs

PYTHON = ROOT / ".venv-tensorflow/bin/python"
CHECKS = [
    name
    for path in sorted((ROOT / "tests/jobs/keras_checks").glob("*.py"))
    for name in re.findall(r"^def (check_\w+)", path.read_text(), re.MULTILINE)
]
GUIDE = ROOT / "docs/guides/keras.md"
BACKENDS = ("tensorflow", "torch", "jax")

pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),  # the first test of a backend runs all of its checks
    needs("Keras", missing="" if PYTHON.exists() else "no .venv-tensorflow; `make build` makes it"),
]


RUN = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold", "-np", "2", "--operation-s", str(OPERATION_S))
TOO_EARLY = """
import keras
import numpy as np

import ronde
import ronde.keras

ronde.init()
num_batches = 4 if ronde.rank() == 0 else 2
x = np.zeros((8 * num_batches, 4), "float32")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(ronde.keras.DistributedOptimizer("sgd"), "mse")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
"""


def environment(backend: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **quiet, "KERAS_BACKEND": backend, "PYTHONPATH": path}


@cache
def results(backend: str) -> tuple[list[dict[str, Any]], str]:
    """How the checks ended on each rank, and what the job printed."""
    with tempfile.TemporaryDirectory() as folder:
        command: list[str | Path] = [*RUN, PYTHON, "-m", "tests.jobs.scripts.keras_checks", folder]
        done = run_command(command, env=environment(backend), limit_s=LONG_S)
        files = [Path(folder) / f"rank{rank}.json" for rank in range(2)]
        ended = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return ended, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize(("backend", "name"), [(backend, name) for backend in BACKENDS for name in CHECKS])
def test_among_processes(backend: str, name: str) -> None:
    by_rank, printed = results(backend)
    for rank, ended in enumerate(by_rank):
        assert name in ended, f"rank {rank} did not come to it\n{printed}"
        assert "failed" not in ended[name], f"rank {rank}\n{ended[name]['failed']}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_has_no_more_batches_and_leaves_ends_the_others_with_an_error(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TOO_EARLY)
    done = run_command([*RUN, PYTHON, script], env=environment(backend), limit_s=LONG_S)
    assert done.returncode != 0
    assert "rank 0 lost rank 1" in done.stderr


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_script_of_the_guide_runs(num_ranks: int, tmp_path: Path) -> None:
    script, backend = tmp_path / "train.py", BACKENDS[num_ranks]
    (code,) = re.findall(r'^```python\n(""".*?)^```$', GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    script.write_text(code)
    start = RUN if num_ranks == 2 else ()
    printed = output_of([*start, PYTHON, script], cwd=tmp_path, env=environment(backend), limit_s=LONG_S)
    assert "found [1.0, -2.0, 0.5]" in printed
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_digits_job_learns(backend: str) -> None:
    printed = output_of([*RUN, PYTHON, ROOT / "examples/keras/digits.py"], env=environment(backend), limit_s=LONG_S)
    accuracy = re.search(rf"test accuracy with 2 rank\(s\) on {backend}: ([\d.]+)%", printed)
    assert accuracy, printed
    assert float(accuracy[1]) > 95
