"""ronde.tensorflow on two ranks: the checks of tests/jobs/tensorflow_checks, with native kernels and through Python,
and what ranks see when one of them is lost or does not come. Ranks run in the environment that has TensorFlow."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, output_of, run_command
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S
from tests.services import needs

TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"
TENSORFLOW_2_20 = ROOT / ".venv-tensorflow-2.20/bin/python"
RUN: tuple[str | Path, ...] = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold", "-np", "2")
CHECKS = ROOT / "tests/jobs/tensorflow_checks"
needs_tensorflow = needs(
    "TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it"
)
needs_tensorflow_2_20 = needs(
    "TensorFlow 2.20",
    missing="" if TENSORFLOW_2_20.exists() else "no .venv-tensorflow-2.20; `make test-all` makes it",
)
pytestmark = pytest.mark.timeout(LONG_TEST_S)


def environment(**more: str) -> dict[str, str]:
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "RONDE_OPERATION_S": str(OPERATION_S)}
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **quiet, **more}


@pytest.mark.parametrize(
    ("python", "ops"),
    [
        pytest.param(TENSORFLOW, "auto", marks=needs_tensorflow, id="kernels"),
        pytest.param(TENSORFLOW, "python", marks=needs_tensorflow, id="python"),
        pytest.param(TENSORFLOW, "mixed", marks=needs_tensorflow, id="mixed"),
        pytest.param(TENSORFLOW_2_20, "auto", marks=needs_tensorflow_2_20, id="tensorflow-2.20"),
    ],
)
def test_the_checks_pass_with_kernels_and_through_python(python: Path, ops: str, tmp_path: Path) -> None:
    env = environment(RONDE_TENSORFLOW_OPS="auto" if ops == "mixed" else ops, XDG_CACHE_HOME=str(tmp_path))
    choose: list[str | Path] = [sys.executable, CHECKS / "mixed_ranks.py"] if ops == "mixed" else []
    done = run_command([*RUN, *choose, python, "-m", "tests.jobs.tensorflow_checks"], env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    sources = [path.read_text() for path in CHECKS.glob("*_checks.py")]
    num_checks = sum(len(re.findall(r"^@check\b", text, re.MULTILINE)) for text in sources)
    for rank in range(2):
        assert len(re.findall(rf"^\[{rank}\] passed ", done.stdout, re.MULTILINE)) == num_checks
    warned = "operations in TensorFlow graphs run through Python" in done.stdout + done.stderr
    assert warned == (ops in ("python", "mixed"))
    assert len(list(tmp_path.glob("ronde/tensorflow/*.json"))) == (0 if ops == "python" else 1), (
        "one self-test per host"
    )


@needs_tensorflow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_script_of_the_guide_runs(num_ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = (ROOT / "docs/guides/tensorflow.md").read_text()
    (code,) = re.findall(r'^```python\n(""".*?)^```$', text, re.DOTALL | re.MULTILINE)
    script.write_text(code)
    start = RUN if num_ranks == 2 else ()
    env = environment(KERAS_BACKEND="tensorflow")
    printed = output_of([*start, TENSORFLOW, script], cwd=tmp_path, env=env, limit_s=LONG_S)
    assert "found [1.0, -2.0, 0.5]" in printed


@needs_tensorflow
@pytest.mark.parametrize("case", ["step", "operation"])
def test_a_rank_that_is_killed_is_named_by_the_error_of_the_graph(case: str, tmp_path: Path) -> None:
    words = [*RUN, TENSORFLOW, "-m", "tests.jobs.tensorflow_checks.faults", case, tmp_path]
    done = run_command(words, env=environment(), limit_s=LONG_S)
    assert done.returncode != 0
    seen = (tmp_path / "rank-0").read_text()
    assert re.match(r"UnknownError PeerLost: rank 0 lost rank 1 .*killed by signal 9 \(SIGKILL\)", seen), done.stderr
    assert case != "step" or "during bucket" in seen


@needs_tensorflow
def test_what_others_do_not_come_to_ends_with_an_error_that_names_them(tmp_path: Path) -> None:
    words = [*RUN, TENSORFLOW, "-m", "tests.jobs.tensorflow_checks.faults", "timeout", tmp_path]
    output_of(words, env=environment(RONDE_OPERATION_S="5"), limit_s=LONG_S)
    operation, again, *gradients = (tmp_path / "rank-0").read_text().splitlines()
    late = "OperationTimeout: allreduce 'alone' of group 0 did not start within 5 s"
    assert f"{late}; it waits for rank 1" in operation
    assert f"{late}: the one before it, which has timed out, still waits for other ranks" in again
    for each in gradients:
        assert "rank 1 did not connect" in each and "within 5 s" in each
    seen = (tmp_path / "rank-1").read_text()
    assert "rank 0 did not come to open" in seen and "within 5 s" in seen and "join()" in seen


@needs_tensorflow
def test_what_runs_twice_at_once_or_was_abandoned_is_an_error_and_works_in_the_next_round(tmp_path: Path) -> None:
    words = [*RUN, TENSORFLOW, "-m", "tests.jobs.tensorflow_checks.faults", "rounds", tmp_path]
    output_of(words, env=environment(), limit_s=LONG_S)
    rank_0, rank_1 = ((tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(2))
    assert len(rank_0) == 8 and len(rank_1) == 6
    for each in (*rank_0[:2], rank_1[0]):
        assert "Mismatch: allreduce 'at once' of group 0: rank 0 runs it twice at once" in each and "name=" in each
    for each in rank_0[2:4]:
        assert "Mismatch: rank 0 reduces 'at once' twice at once" in each
    assert "PeerLost: rank 1 lost rank 0" in rank_1[1] and "rank 0 reduces 'at once' twice at once" in rank_1[1]
    assert "the data are bad" in rank_0[4] or "NoneType" in rank_0[4]
    for each in (*rank_0[5:7], *rank_1[3:5]):
        assert "the training step before was abandoned on rank 0" in each
    for each in (rank_0[7], rank_1[5]):
        assert "ValueError: a compiled graph uses group" in each and "of an earlier round" in each


@needs_tensorflow
def test_an_elastic_job_goes_on_after_a_rank_has_died_between_two_buckets(tmp_path: Path) -> None:
    words = [*RUN[:-1], "3", "--min-np", "2", TENSORFLOW, "-m", "tests.jobs.tensorflow_checks.faults"]
    output_of([*words, "elastic", tmp_path], env=environment(), limit_s=LONG_S)
    assert (tmp_path / "killed").exists()
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["6 steps"] * 2
