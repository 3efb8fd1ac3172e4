"""hvd for TensorFlow and Keras among two real processes, started by horovodrun. One job runs all checks; its ranks have
an environment of their own, and here there is no TensorFlow."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.commands import PROGRAMS, ROOT, run_command
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

NUM_RANKS = 2
PYTHON = ROOT / ".venv-tensorflow/bin/python"
KERAS_2 = [*PYTHON.parents[1].glob("lib/python3*/site-packages/tf_keras")]
needs_keras_2 = needs("tf-keras", missing="" if any(KERAS_2) else "tf-keras is not installed in .venv-tensorflow")
CHECKS = [
    f"{path.stem}.{name}"
    for path in sorted((ROOT / "tests/compat/tensorflow_checks").glob("*.py"))
    for name in re.findall(r"^@check\ndef (\w+)", path.read_text(), re.MULTILINE)
]

pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),  # the first test waits for the job
    needs("TensorFlow", missing="" if PYTHON.exists() else "no .venv-tensorflow; `make build` makes it"),
]


def environment() -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "compat/horovod/src", ROOT)))
    return {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@cache
def traces() -> dict[str, list[str]]:
    """By check and rank: what went wrong."""
    start = (PROGRAMS / "horovodrun", "-np", str(NUM_RANKS), PYTHON)
    done = run_command([*start, "-m", "tests.compat.tensorflow_checks"], env=environment(), limit_s=LONG_S)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        label, _, said = line.partition(":")
        if label.endswith("<stdout>") and said.startswith("{"):
            told = json.loads(said)
            found.setdefault(told["check"], []).append(told["trace"])
    found["the end"] = ["" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stderr}"]
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    told = traces().get(name, [])
    assert not any(told), "\n".join(told)
    assert len(told) == NUM_RANKS, f"not run to its end:\n{traces()['the end'][0]}"


def test_the_job_ends_well() -> None:
    assert traces()["the end"] == [""]


class ElasticJob:
    """A job of one of the scripts, which has ended well, and what its processes wrote."""

    def __init__(self, log: Path, script: str, *arguments: str, legacy: bool = False) -> None:
        start: list[str | Path] = [PROGRAMS / "horovodrun", "-np", "2", "--min-np", "1", "--max-np", "2", PYTHON]
        env = {**environment(), "TF_USE_LEGACY_KERAS": str(int(legacy))}
        command = [*start, ROOT / "tests/compat/scripts" / script, log, *arguments]
        done = run_command(command, env=env, limit_s=LONG_S)
        self.said = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, self.said
        self.events: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]

    def of(self, event: str, worker: int, field: str = "batch") -> list[Any]:
        """This field of a worker's events of one kind."""
        return [each[field] for each in self.events if (each["event"], each["worker"]) == (event, worker)]


@pytest.mark.parametrize("kind", ["variables", "keras"])
def test_a_killed_process_costs_the_batches_since_the_commit(kind: str, tmp_path: Path) -> None:
    job = ElasticJob(tmp_path / "log", "elastic_tensorflow.py", kind)
    began = job.of("train", 0)
    assert began[0] == 0
    assert 4 in began, f"the last commit was that of batch 4\n{job.events}\n{job.said}"
    assert all(each["weight"] == -each["batch"] for each in job.events), job.events
    assert job.of("end", 0, "weight") == [-10.0], job.events


@pytest.mark.parametrize("legacy", [False, pytest.param(True, marks=needs_keras_2)], ids=["Keras 3", "tf-keras"])
def test_fit_goes_on_from_the_last_epoch_and_with_a_new_process(legacy: bool, tmp_path: Path) -> None:
    job = ElasticJob(tmp_path / "log", "elastic_keras.py", legacy=legacy)
    began = job.of("train", 0)
    assert began[0] == 0 and began[-1] == 8, job.events
    assert 4 in began, f"epoch 2 is done again\n{job.events}\n{job.said}"
    assert all(each["weight"] == -each["batch"] for each in job.events), job.events
    newest = max(each["worker"] for each in job.events)
    assert newest > 1
    for worker in (0, newest):
        assert (job.of("end", worker, "weight"), job.of("end", worker, "size")) == ([-10.0], [2]), job.events
    assert job.of("train", newest, "weight")[-1] == -8.0, "it has taken the state of the other one"
    assert job.of("end", newest, "lr") == [1.0], "also that of the optimizer"


@needs_keras_2
@pytest.mark.parametrize("name", ["keras2_training.py", "keras2_graph.py"])
def test_scripts_for_keras_2_run_with_tf_keras(name: str, tmp_path: Path) -> None:
    start: list[str | Path] = [PROGRAMS / "horovodrun", "-np", str(NUM_RANKS), PYTHON]
    script = ROOT / "tests/compat/scripts" / name
    env = {**environment(), "TF_USE_LEGACY_KERAS": "1"}
    done = run_command([*start, script, tmp_path], env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = sorted(line for line in done.stdout.splitlines() if line.endswith(":ok"))
    assert said == ["[0]<stdout>:ok", "[1]<stdout>:ok"]
