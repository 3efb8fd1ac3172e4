"""ronde.jax on two ranks: the checks of tests/jobs/jax_checks, with native handlers and through Python, and what ranks
see when one of them is lost or does not come. Ranks run in the environment that has JAX."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, output_of, run_command
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S
from tests.services import needs

PYTHON = ROOT / ".venv-tensorflow/bin/python"
RUN: tuple[str | Path, ...] = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold", "-np", "2")
CHECKS = ROOT / "tests/jobs/jax_checks"
GUIDE = ROOT / "docs/guides/jax.md"
ONE_THREAD = {"NPROC": "1", "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
"""XLA has as many threads as NPROC says, or two, for each device one."""
pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),
    needs("JAX", missing="" if PYTHON.exists() else "no .venv-tensorflow; `make build` makes it"),
]


def environment(**more: str) -> dict[str, str]:
    fixed = {"JAX_PLATFORMS": "cpu", "RONDE_OPERATION_S": str(OPERATION_S)}
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **fixed, **more}


@pytest.mark.parametrize("ops", ["auto", "python"])
def test_the_checks_pass_with_handlers_and_through_python(ops: str) -> None:
    env = environment(RONDE_JAX_OPS=ops, **ONE_THREAD)
    done = run_command([*RUN, PYTHON, "-m", "tests.jobs.jax_checks"], env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    sources = [path.read_text() for path in CHECKS.glob("*_checks.py")]
    num_checks = sum(len(re.findall(r"^def check_", text, re.MULTILINE)) for text in sources)
    for rank in range(2):
        assert len(re.findall(rf"^\[{rank}\] passed ", done.stdout, re.MULTILINE)) == num_checks
    warned = "operations in JAX programs run through Python, which is slower: the setting jax_ops says so"
    assert (warned in done.stdout + done.stderr) == (ops == "python")


def test_a_rank_that_is_killed_in_a_step_is_named_by_the_error_of_the_program_within_a_second(tmp_path: Path) -> None:
    done = run_command([*RUN, PYTHON, "-m", "tests.jobs.jax_checks.faults", "step", tmp_path], env=environment())
    assert done.returncode != 0
    seen = (tmp_path / "rank-0").read_text()
    assert re.fullmatch(r"JaxRuntimeError PeerLost: rank 0 lost rank 1 .*killed by signal 9 \(SIGKILL\)[^\n]*", seen), (
        f"{seen}\n{done.stderr}"
    )
    assert " are allowed" not in seen, seen


def test_what_another_rank_does_not_come_to_ends_with_an_error_that_names_it(tmp_path: Path) -> None:
    words = [*RUN, PYTHON, "-m", "tests.jobs.jax_checks.faults", "timeout", tmp_path]
    output_of(words, env=environment(RONDE_OPERATION_S="5"), limit_s=LONG_S)
    seen = (tmp_path / "rank-0").read_text()
    assert "OperationTimeout: allreduce 'alone' of group 0 did not start within 5 s; it waits for rank 1" in seen


@pytest.mark.parametrize("ops", ["auto", "python"])
@pytest.mark.parametrize("case", ["shutdown", "exit"])
def test_programs_that_nobody_waits_for_are_finished_before_a_rank_leaves(case: str, ops: str, tmp_path: Path) -> None:
    env = environment(RONDE_JAX_OPS=ops)
    done = run_command([*RUN, PYTHON, "-m", "tests.jobs.jax_checks.faults", case, tmp_path], env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "rank-0").read_text() == "30.0"
    assert "Error" not in done.stdout + done.stderr


def test_compiled_programs_work_in_the_next_round_but_for_groups_of_the_one_before(tmp_path: Path) -> None:
    output_of([*RUN, PYTHON, "-m", "tests.jobs.jax_checks.faults", "rounds", tmp_path], env=environment())
    for rank in range(2):
        seen = (tmp_path / f"rank-{rank}").read_text()
        assert "ValueError: a compiled graph uses group 1, which this round does not have" in seen


@pytest.mark.parametrize("case", ["elastic", "donated"])
def test_an_elastic_job_goes_on_after_a_rank_has_died_in_a_step(case: str, tmp_path: Path) -> None:
    words = [*RUN[:-1], "3", "--min-np", "2", PYTHON, "-m", "tests.jobs.jax_checks.faults", case, tmp_path]
    output_of(words, env=environment(), limit_s=LONG_S)
    assert (tmp_path / "killed").exists()
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["6 steps, 0.4"] * 2


def test_a_script_of_jax_distributed_needs_one_line_also_in_a_job_of_slurm() -> None:
    """JAX knows the variables of Slurm, too: here those of the one task that runs `ronde run`."""
    step = {"STEP_NODELIST": "localhost", "STEP_NUM_NODES": "1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    slurm = {f"SLURM_{name}": value for name, value in {"JOB_ID": "7", **step}.items()}
    script = ROOT / "tests/jobs/scripts/jax_distributed.py"
    printed = output_of([*RUN, PYTHON, script], env=environment(**slurm), limit_s=LONG_S)
    for rank in range(2):
        assert f"process {rank} of 2: 6.0 [[3.0, 3.0]] [[3.0, 3.0]] [2.0]" in printed


def test_the_script_of_the_guide_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r'^```python\n(""".*?)^```$', GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(code)
    for start in (RUN, ()):
        printed = output_of([*start, PYTHON, tmp_path / "train.py"], env=environment(), limit_s=LONG_S)
        assert "found [1.0, -2.0, 0.5]" in printed


def accuracy_of(printed: str) -> float:
    found = re.search(r"test accuracy with 2 rank\(s\): ([\d.]+)%", printed)
    assert found, printed
    return float(found[1])


def test_the_example_in_plain_jax_learns_digits_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    words: list[str | Path] = [*RUN, PYTHON, ROOT / "examples/jax/digits.py", "--checkpoints", tmp_path]
    printed = output_of([*words, "--epochs", "6"], env=environment(), limit_s=LONG_S)
    assert "epoch 6: loss" in printed
    printed = output_of(words, env=environment(), limit_s=LONG_S)
    assert "going on after epoch 6" in printed and "epoch 6: loss" not in printed
    assert accuracy_of(printed) > 95


def test_the_example_in_equinox_learns_digits_in_an_elastic_job() -> None:
    words = [*RUN, "--min-np", "1", PYTHON, ROOT / "examples/jax/digits_equinox.py"]
    assert accuracy_of(output_of(words, env=environment(), limit_s=LONG_S)) > 95
