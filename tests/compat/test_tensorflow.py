"""hvd for TensorFlow and Keras among two real processes, started by horovodrun. One job runs all checks; its ranks have
an environment of their own, and here there is no TensorFlow."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

from tests.commands import PROGRAMS, ROOT, run_command
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs

NUM_RANKS = 2
PYTHON = ROOT / ".venv-tensorflow/bin/python"
KERAS_2 = [*PYTHON.parents[1].glob("lib/python3*/site-packages/tf_keras")]
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


@pytest.mark.parametrize("script", ["elastic_tensorflow.py", "elastic_keras.py"])
def test_a_killed_process_costs_the_batches_since_the_commit(script: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    start: list[str | Path] = [PROGRAMS / "horovodrun", "-np", "2", "--min-np", "1", "--max-np", "2", PYTHON]
    done = run_command([*start, ROOT / "tests/compat/scripts" / script, log], env=environment(), limit_s=LONG_S)
    said = f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    events = [json.loads(line) for line in log.read_text().splitlines()]
    began = [each["batch"] for each in events if (each["worker"], each["event"]) == (0, "train")]
    assert began[0] == 0
    assert 4 in began, f"the last commit was that of batch 4\n{events}\n{said}"
    assert all(each["weight"] == -each["batch"] for each in events), events
    assert events[-1]["event"] == "end" and events[-1]["weight"] == -10.0, events


@needs("tf-keras", missing="" if any(KERAS_2) else "tf-keras is not installed in .venv-tensorflow")
@pytest.mark.parametrize("name", ["keras2_training.py", "keras2_graph.py"])
def test_scripts_for_keras_2_run_with_tf_keras(name: str, tmp_path: Path) -> None:
    start: list[str | Path] = [PROGRAMS / "horovodrun", "-np", str(NUM_RANKS), PYTHON]
    script = ROOT / "tests/compat/scripts" / name
    env = {**environment(), "TF_USE_LEGACY_KERAS": "1"}
    done = run_command([*start, script, tmp_path], env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = sorted(line for line in done.stdout.splitlines() if line.endswith(":ok"))
    assert said == ["[0]<stdout>:ok", "[1]<stdout>:ok"]
