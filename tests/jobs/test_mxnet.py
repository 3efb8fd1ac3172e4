"""ronde.mxnet on real ranks: the checks of tests/jobs/mxnet_checks in MXNet's engine and through Python, what ranks see
when one of them is lost or does not come, elastic training, and MXNet's own kvstore under `ronde run --dmlc`. Ranks run
in the environment that has MXNet."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import ROOT, output_of, run_command
from tests.jobs.kit import read_worker_results
from tests.limits import LONG_S, LONG_TEST_S, OPERATION_S, promised_s
from tests.services import needs

MXNET = ROOT / ".venv-mxnet/bin/python"
START: tuple[str | Path, ...] = (sys.executable, "-m", "ronde.cli.main", "run", "--no-fold")
RUN = (*START, "-np", "2")
PYTHON = (MXNET, "-W", "ignore")
CHECKS = ROOT / "tests/jobs/mxnet_checks"
GUIDE = ROOT / "docs/guides/mxnet.md"
pytestmark = [
    pytest.mark.timeout(LONG_TEST_S),
    needs("MXNet", missing="" if MXNET.exists() else "no .venv-mxnet; `make build` makes it"),
]


def environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "RONDE_OPERATION_S": str(OPERATION_S),
        "RONDE_MXNET_OPS": "auto",
        **more,
    }


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({}, ""),
        ({"RONDE_MXNET_OPS": "python"}, "are waited for: the setting mxnet_ops says so"),
        ({"MXNET_ENGINE_TYPE": "NaiveEngine"}, r"\(NaiveEngine\) runs one operation after the other"),
        ({"MXNET_CPU_PRIORITY_NTHREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1"}, ""),
    ],
    ids=["engine", "python", "naive-engine", "one-thread"],
)
def test_the_checks_pass_in_the_engine_and_through_python(
    variables: dict[str, str], warned: str, tmp_path: Path
) -> None:
    env = environment(XDG_CACHE_HOME=str(tmp_path), **variables)
    done = run_command([*RUN, *PYTHON, "-m", "tests.jobs.mxnet_checks"], env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    sources = [path.read_text() for path in CHECKS.glob("*_checks.py")]
    num_checks = sum(len(re.findall(r"^@check\b", text, re.MULTILINE)) for text in sources)
    for rank in range(2):
        assert len(re.findall(rf"^\[{rank}\] passed ", done.stdout, re.MULTILINE)) == num_checks
    output = done.stdout + done.stderr
    assert bool(re.search("asynchronous operations on MXNet arrays are waited for", output)) == bool(warned)
    assert re.search(warned, output)
    num_tests = 0 if "RONDE_MXNET_OPS" in variables else 1
    assert len(list(tmp_path.glob("ronde/mxnet/*.json"))) == num_tests, "one self-test per host"


@pytest.mark.parametrize("case", ["operation", "step"])
def test_a_rank_that_is_killed_is_named_at_once(case: str, tmp_path: Path) -> None:
    words = [*RUN, *PYTHON, "-m", "tests.jobs.mxnet_checks.faults", case, tmp_path]
    done = run_command(words, env=environment(), limit_s=LONG_S)
    assert done.returncode != 0
    elapsed, _, seen = (tmp_path / "rank-0").read_text().partition(" ")
    assert re.match(r"PeerLost: rank 0 lost rank 1 .*killed by signal 9 \(SIGKILL\)", seen), done.stderr
    assert case != "step" or "during bucket" in seen
    assert float(elapsed) < promised_s(1.0)


def test_what_others_do_not_come_to_ends_with_an_error_that_names_them(tmp_path: Path) -> None:
    words = [*RUN, *PYTHON, "-m", "tests.jobs.mxnet_checks.faults", "timeout", tmp_path]
    output_of(words, env=environment(RONDE_OPERATION_S="5"), limit_s=LONG_S)
    for rank in range(2):
        seen = (tmp_path / f"rank-{rank}").read_text()
        assert "allreduce 'alone' of group 0 did not start within 5 s; it waits for rank 1" in seen


@pytest.mark.parametrize(("case", "text"), [("stop", "all arrived"), ("leave", "ended"), ("shutdown", "all arrived")])
def test_a_rank_that_stands_still_or_leaves_harms_nobody(case: str, text: str, tmp_path: Path) -> None:
    output_of(
        [*RUN, *PYTHON, "-m", "tests.jobs.mxnet_checks.faults", case, tmp_path], env=environment(), limit_s=LONG_S
    )
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == [text] * 2


@pytest.mark.parametrize("ops", ["auto", "python"])
def test_elastic_training_uses_every_sample_once_although_workers_are_killed(ops: str, tmp_path: Path) -> None:
    wait = {f"{worker} forward 12": "await 3 ranks" for worker in (0, 2)}
    faults = {"1 backward 7": "kill", **wait, "2 update 20": "kill"}
    words = "-np 3 --min-np 2 --cooldown 0.1 1".split()
    done = run_command(
        [*START, *words, *PYTHON, "-m", "tests.jobs.scripts.elastic_mxnet", tmp_path],
        env=environment(TEST_FAULTS=json.dumps(faults), RONDE_MXNET_OPS=ops),
        limit_s=LONG_S,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    results = list(read_worker_results(tmp_path).values())
    assert len(results) >= 2
    for result in results:
        assert result["counts"] == [3.0] and result["others"] == [30], results
        assert result["forward"] == result["steps"] == result["updates"] == 30, results
    sizes = max((result["sizes"] for result in results), key=len)
    assert sizes[0] == 3 and 2 in sizes


def test_the_scripts_of_the_guide_run(tmp_path: Path) -> None:
    codes = re.findall(r'^```python\n("""(train\w*\.py):.*?)^```$', GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert [name for _, name in codes] == ["train.py", "train_elastic.py"]
    for code, name in codes:
        (tmp_path / name).write_text(code)
    starts = [(*RUN, "--min-np", "1"), RUN, ()]
    for start, name in zip(starts, ["train_elastic.py", "train.py", "train.py"], strict=True):
        printed = output_of([*start, *PYTHON, tmp_path / name], env=environment(), limit_s=LONG_S)
        assert "found [1.0, -2.0, 0.5]" in printed


# --- MXNet's own kvstore ---------------------------------------------------------------------------------------------

KVSTORE = """
import sys, time
import mxnet as mx
kv = mx.kv.create("dist_sync")
kv.init(3, mx.nd.zeros((4,)))
kv.push(3, mx.nd.ones((4,)) * (kv.rank + 1))
out = mx.nd.zeros((4,))
kv.pull(3, out=out)
print("worker", kv.rank, "of", kv.num_workers, out.asnumpy().tolist(), flush=True)
if sys.argv[1:] == ["fail"] and kv.rank == 0:
    sys.exit(3)
if sys.argv[1:] == ["stay"]:
    time.sleep(10_000)
"""


def kvstore_command(folder: Path, *words: str, options: str = "") -> list[str | Path]:
    script = folder / "kvstore.py"
    script.write_text(KVSTORE)
    return [*RUN, "--dmlc", *options.split(), *PYTHON, script, *words]


def find_roles(script: Path) -> dict[str, psutil.Process]:
    """The processes that run a script, by role and number."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if str(script) in process.cmdline() and (role := process.environ().get("DMLC_ROLE")):
                found[role] = process
        except psutil.Error:
            continue
    return found


def test_scripts_of_the_kvstore_run_unchanged_and_nothing_is_left_behind(tmp_path: Path) -> None:
    printed = output_of(kvstore_command(tmp_path), env=environment(), limit_s=LONG_S)
    assert sorted(re.findall(r"worker \d of 2 \[3\.0, 3\.0, 3\.0, 3\.0\]", printed)) == [
        f"worker {rank} of 2 [3.0, 3.0, 3.0, 3.0]" for rank in range(2)
    ]
    assert not find_roles(tmp_path / "kvstore.py")


def test_a_worker_that_fails_ends_scheduler_and_servers(tmp_path: Path) -> None:
    done = run_command(kvstore_command(tmp_path, "fail", options="--grace 1"), env=environment(), limit_s=LONG_S)
    assert done.returncode == 3
    assert re.search(r"rank \d on host localhost failed first: exited with code 3", done.stderr)
    assert not find_roles(tmp_path / "kvstore.py")


def test_servers_that_nobody_uses_are_ended_when_the_ranks_have(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import mxnet\nprint('no kvstore')\n")
    printed = output_of([*RUN, "--dmlc", *PYTHON, script], env=environment(), limit_s=LONG_S)
    assert printed.count("no kvstore") == 2
    assert not find_roles(script)


def test_a_server_that_dies_is_reported_like_a_rank(tmp_path: Path) -> None:
    import subprocess

    command = kvstore_command(tmp_path, "stay", options="--dmlc-servers 1 --grace 1")
    with subprocess.Popen(
        list(map(str, command)), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        for _ in range(2):
            assert "worker" in job.stdout.readline()
        find_roles(tmp_path / "kvstore.py")["server"].send_signal(signal.SIGKILL)
        _, errors = job.communicate(timeout=LONG_S)
    assert job.returncode == 128 + signal.SIGKILL
    assert "server 0 on host localhost failed first: killed by signal 9 (SIGKILL)" in errors
    assert "ranks 0, 1, the scheduler" in errors
    assert not find_roles(tmp_path / "kvstore.py")
