"""`ronde predict` as people use it: ranks of their own or of `ronde run`, killed at any moment."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ronde.types import Deadline
from tests.commands import PROGRAMS, run_command
from tests.jobs.kit import SshHosts
from tests.limits import LONG_S, LONG_TEST_S, PATIENCE_S
from tests.unit.predict.test_predict import write_csv
from tests.unit.serve.made_models import write_linear

RONDE = str(PROGRAMS / "ronde")
NUM_ROWS = 20_000
NUM_KILLS = 5

pytestmark = pytest.mark.timeout(LONG_TEST_S)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_linear(tmp_path / "model")
    return tmp_path


def predict(*more: str) -> list[str]:
    flags = ["--model", "model", "--input", "in.csv", "--output", "out.csv", "--columns", "x=a,b,c,d", "--keep", "id"]
    return [RONDE, "predict", *flags, *more]


def check_output(project: Path, num_rows: int, bad: set[int]) -> None:
    """Output and errors hold every row of the input once, in order."""
    with (project / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    errors = [json.loads(line)["row"] for line in (project / "out.csv.errors.jsonl").read_text().splitlines()]
    assert errors == sorted(bad)
    assert [int(row["row"]) for row in rows] == [row for row in range(num_rows) if row not in bad]
    assert all(row["row"] == row["id"] for row in rows)
    left = [path.name for path in project.iterdir() if path.name.startswith((".unfinished", "out.csv.work"))]
    assert left == []


def test_ranks_that_are_killed_at_random_lose_and_repeat_no_row(project: Path) -> None:
    bad = {row: f"{row},note,1,2,no number,4" for row in range(17, NUM_ROWS, 1000)}
    write_csv(project / "in.csv", NUM_ROWS, bad)
    choose = random.Random(5)
    num_killed = 0
    with subprocess.Popen(
        predict("-np", "2", "--json"), cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        job = psutil.Process(process.pid)
        while process.poll() is None:
            ranks = [each for each in job.children(recursive=True) if _is_rank(each)]
            done = len(list((project / "out.csv.work").glob("part-*.json")))
            # Each kill waits until the parts have come further, so that some of them hit a rank in its work.
            if ranks and num_killed < NUM_KILLS and done >= 15 * num_killed:
                choose.choice(ranks).kill()
                num_killed += 1
            try:
                process.wait(choose.uniform(0.05, 0.3))
            except subprocess.TimeoutExpired:
                continue
        printed, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    assert num_killed == NUM_KILLS
    facts = json.loads(printed[printed.index("{") :])
    assert (facts["num_rows"], facts["num_errors"]) == (NUM_ROWS, len(bad))
    check_output(project, NUM_ROWS, set(bad))
    assert "rows/s" in complaints


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "function_rank" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_ranks_of_a_job_share_the_work_and_a_changed_model_refuses_to_go_on(project: Path) -> None:
    write_csv(project / "in.csv", 300, {7: "7,short"})
    words = [RONDE, "run", "-np", "2", *predict("--part-rows", "20")]
    done = run_command(words, cwd=project, limit_s=LONG_S)
    assert done.returncode == 0, done.stderr
    assert "out.csv: 299 rows" in done.stdout
    check_output(project, 300, {7})
    write_linear(project / "model", labels=("a", "b", "c"))
    refused = run_command(predict("--part-rows", "20"), cwd=project, limit_s=LONG_S)
    assert refused.returncode == 1
    assert "has predictions, and the model changed since" in refused.stderr
    forced = run_command(predict("--part-rows", "20", "--force"), cwd=project, limit_s=LONG_S)
    assert forced.returncode == 0, forced.stderr
    assert "row,id,predicted_label,scores" in (project / "out.csv").read_text()


def test_a_job_file_says_what_to_predict_and_a_wrong_key_is_named_with_its_line(project: Path) -> None:
    write_csv(project / "in.csv", 30)
    section = "predict:\n  model: model\n  input: in.csv\n  output: out\n  columns: {x: [a, b, c, d]}\n"
    (project / "job.yaml").write_text(section + "  format: jsonl\n")
    done = run_command([RONDE, "predict", "job.yaml"], cwd=project, limit_s=LONG_S)
    assert done.returncode == 0, done.stderr
    lines = [line for path in sorted((project / "out").glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [json.loads(line)["row"] for line in lines] == list(range(30))
    (project / "job.yaml").write_text(section + "  fromat: jsonl\n")
    done = run_command([RONDE, "predict", "job.yaml"], cwd=project, limit_s=LONG_S)
    assert done.returncode == 2
    assert "job.yaml, line 6: unknown key 'fromat' in the section 'predict'; did you mean 'format'?" in done.stderr


SLOW = """
import os, time
from pathlib import Path

def make(row):
    Path("seen", os.environ["WHO"] + "-" + str(os.getpid())).touch()
    time.sleep(0.01)
    return {"x": [float(row[name]) for name in "abcd"]}
"""


def test_ranks_of_several_hosts_share_the_work_and_outlive_a_killed_rank_and_a_lost_host(
    hosts: SshHosts, project: Path
) -> None:
    """The job file is in another folder, and so is the module that it names. It says how hosts are reached in the
    sections `run` and `predict`; flags say the rest."""
    _, b, c = hosts.addresses
    write_csv(project / "in.csv", 400, {7: "7,short,1,2,3,x"})
    (project / "seen").mkdir()
    elsewhere = project / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "slow_rows.py").write_text(SLOW)
    job = {
        "run": {"ssh_port": hosts.port, "ssh_option": [f"UserKnownHostsFile={hosts.folder / 'known'}"]},
        "predict": {
            **{"model": "model", "input": "in.csv", "output": "out.csv", "keep": ["id"], "part_rows": 5},
            **{"preprocess": "slow_rows:make", "ssh_option": ["IdentitiesOnly=yes"], "env": {"WHO": "rank"}},
        },
    }
    (elsewhere / "job.yaml").write_text(json.dumps(job))
    flags = ["-H", f"{b}:1,{c}:1", "--ssh-identity", str(hosts.folder / "user"), "--ssh-start-s", str(PATIENCE_S)]
    command = [*hosts.exec(0), sys.executable, "-m", "ronde.cli.main", "predict", str(elsewhere / "job.yaml"), *flags]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:

        def wait_for_parts(number: int) -> None:
            deadline = Deadline(LONG_S)
            while process.poll() is None and len(list((project / "out.csv.work").glob("part-*.json"))) < number:
                assert not deadline.expired
                time.sleep(0.02)

        wait_for_parts(10)
        killed = [each for each in hosts.processes(1) if _is_rank(each)]
        for each in killed:
            each.kill()
        wait_for_parts(30)
        hosts.hang_up(2)
        printed, complaints = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, complaints
    assert killed and "out.csv: 399 rows" in printed, complaints
    check_output(project, 400, {7})
    assert len(list((project / "seen").glob("rank-*"))) >= 3  # two ranks, and at least one in place of the killed ones
    hosts.await_nothing_left()
