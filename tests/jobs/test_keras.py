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

from tests.commands import ROOT, run_command
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S
from tests.services import needs

PYTHON = ROOT / ".venv-tensorflow/bin/python"
CHECKS = [
    name
    for path in sorted((ROOT / "tests/jobs/keras_checks").glob("*.py"))
    for name in re.findall(r"^def (check_\w+)", path.read_text(), re.MULTILINE)
]
BACKENDS = ("tensorflow", "torch", "jax")

pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),  # the first test of a backend runs all of its checks
    needs("Keras", missing="" if PYTHON.exists() else "no .venv-tensorflow; `make build` makes it"),
]


@cache
def results(backend: str) -> tuple[list[dict[str, Any]], str]:
    """How the checks ended on each rank, and what the job printed."""
    run = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold", "-np", "2", "--operation-s", str(OPERATION_S))
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    env = {"KERAS_BACKEND": backend, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        done = run_command(
            [*run, PYTHON, "-m", "tests.jobs.scripts.keras_checks", folder], env={**os.environ, **env}, limit_s=LONG_S
        )
        files = [Path(folder) / f"rank{rank}.json" for rank in range(2)]
        ended = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return ended, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize(("backend", "name"), [(backend, name) for backend in BACKENDS for name in CHECKS])
def test_among_processes(backend: str, name: str) -> None:
    by_rank, printed = results(backend)
    for rank, ended in enumerate(by_rank):
        assert name in ended, f"rank {rank} did not come to it\n{printed}"
        assert "failed" not in ended[name], f"rank {rank}\n{ended[name]['failed']}"
