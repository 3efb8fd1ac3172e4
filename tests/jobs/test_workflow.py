"""The tutorial from images to a service, command by command, and as one `ronde workflow` that is killed on its way."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ronde.types import Deadline
from tests.commands import PROGRAMS, ROOT, run_command
from tests.jobs.test_readme import blocks
from tests.limits import LONG_S, LONG_TEST_S

TUTORIAL = (ROOT / "docs/tutorials/from-images-to-service.md").read_text(encoding="utf-8")
ELSEWHERE = {"cd examples/imagenet"}
"""Of the shell's lines: that which changes the folder."""
ENVIRONMENT = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.timeout(LONG_TEST_S)


def write_photos(folder: Path, num_images: int = 12) -> None:
    """Two classes that are easy to tell apart: dark and light noise."""
    random = np.random.default_rng(1)
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for number in range(num_images):
            pixels = random.integers(0, 100, (70, 90, 3)) + 150 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number:03d}.jpg")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "imagenet"
    shutil.copytree(ROOT / "examples/imagenet", folder, ignore=shutil.ignore_patterns("__pycache__"))
    write_photos(folder / "photos")
    return folder


def run(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    return run_command(["bash", "-c", command], cwd=project, env=ENVIRONMENT, limit_s=LONG_S)


def read_predictions(project: Path) -> list[dict[str, str]]:
    with (project / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_job_file_is_the_one_of_the_tutorial() -> None:
    file = (ROOT / "examples/imagenet/job.yaml").read_text()
    for block in blocks(TUTORIAL, "yaml"):
        assert block.strip() in file


def kill_in_step(project: Path, command: str, step: str, *, with_command: bool) -> None:
    """Start a workflow and kill it, or it and the command that it has started, when it has begun this step."""
    words = shlex.split(command)
    with subprocess.Popen(words, cwd=project, env=ENVIRONMENT, start_new_session=True) as workflow:
        deadline = Deadline(LONG_S)
        record = project / "job.workflow.json"
        while True:
            known = json.loads(record.read_text())["steps"].get(step) if record.exists() else None
            if known and known["fingerprint"] and not known["is_done"]:
                break
            assert workflow.poll() is None, f"it has ended before it was killed in {step}"
            assert not deadline.expired
            time.sleep(0.05)
        if with_command:
            os.killpg(workflow.pid, signal.SIGKILL)
        else:
            workflow.kill()


def test_the_tutorial_works_and_its_workflow_survives_kills_in_every_step(project: Path) -> None:
    """All its commands run in their order, in one folder. The port of the service is another one, which is free."""
    commands = [line for block in blocks(TUTORIAL, "sh") for line in block.strip().splitlines()]
    assert sum(command.startswith("ronde ") for command in commands) == 8
    replies = []
    with contextlib.ExitStack() as opened:
        for command in commands:
            if command in ELSEWHERE:
                continue
            if command.startswith("ronde serve"):
                port = opened.enter_context(serving(project, command))
                continue
            if command.startswith("ronde workflow"):
                carry_out_with_kills(project, command)
                continue
            done = run(project, command.replace(":8000/", f":{port}/") if command.startswith("curl") else command)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            if command.startswith("curl"):
                replies.append(json.loads(done.stdout))
    rows = read_predictions(project)
    assert [int(row["row"]) for row in rows] == list(range(24))
    assert sum(row["class"] == row["predicted_label"] for row in rows) >= 20
    # The service says of the first photo what the batch prediction says.
    (reply,) = replies
    outputs = {output["name"]: output["data"] for output in reply["outputs"]}
    assert outputs["label"] == [rows[0]["predicted_label"]]
    assert 0.5 < outputs["probability"][0] <= 1.0


def carry_out_with_kills(project: Path, command: str) -> None:
    """Run the tutorial's workflow, after its commands were run one by one; it is killed in each step."""
    kill_in_step(project, command, "data", with_command=True)
    for step in ("search", "run", "export", "predict"):
        kill_in_step(project, "ronde workflow job.yaml", step, with_command=step != "run")
    # What a killed workflow has started may live on, as training did: then the next one waits for its end.
    done = run(project, "ronde workflow job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"\] (\w+): done before", done.stdout) == ["data", "search", "run", "export"]
    assert re.findall(r"\] (\w+): ronde ", done.stdout) == ["predict"]
    search = json.loads((project / "runs/search/trials.json").read_text())
    assert len(search["trials"]) == 4
    # It has trained with the learning rate that was found, and has not gone on with the one of the command.
    best = search["best"]["params"]["lr"]
    assert json.loads((project / "runs/photos/settings.json").read_text())["lr"] == str(best)


def test_a_step_is_done_again_when_what_it_depends_on_has_changed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print('trained with', sys.argv[1:])")
    (tmp_path / "tune.py").write_text("import sys; print('loss', sys.argv[sys.argv.index('--weight-decay') + 1])")
    (tmp_path / "rows.csv").write_text("x\n1\n2\n")
    text = f"""
data: {{input: rows.csv, output: rows}}
search:
  command: {sys.executable} tune.py
  metric: 'loss (.*)'
  space: {{weight-decay: [0.5, 0.25], nesterov: [true]}}
run:
  command: {sys.executable} train.py {{best.weight-decay}} {{best.nesterov}}
"""
    (tmp_path / "job.yaml").write_text(text)

    def carry_out(*flags: str) -> list[str]:
        """The steps that were carried out."""
        done = run(tmp_path, shlex.join(["ronde", "workflow", "job.yaml", *flags]))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "trained with" not in done.stdout or "trained with ['0.25', 'true']" in done.stdout
        return re.findall(r"\] (\w+): ronde ", done.stdout)

    assert carry_out() == ["data", "search", "run"]
    os.utime(tmp_path / "tune.py", (0, 0))  # its contents are the same
    assert carry_out() == []
    (tmp_path / "train.py").write_text("import sys; print('trained with', sys.argv[1:], 'again')")
    assert carry_out() == ["run"]
    assert carry_out("--from", "search") == ["search", "run"]
    (tmp_path / "rows.csv").write_text("x\n1\n2\n3\n")
    # Killed when it has written down that it is to replace the data, and before it has done so.
    record = json.loads((tmp_path / "job.workflow.json").read_text())
    kill_in_step(tmp_path, "ronde workflow job.yaml", "data", with_command=True)
    assert record != json.loads((tmp_path / "job.workflow.json").read_text())
    assert carry_out() == ["data", "search", "run"]
    assert json.loads((tmp_path / "rows/index.json").read_text())["splits"]["train"][0]["num_samples"] == 3
    # What was made by hand is not replaced, but with --from it is.
    (tmp_path / "job.workflow.json").unlink()
    (tmp_path / "rows.csv").write_text("x\n1\n")
    refused = run(tmp_path, "ronde workflow job.yaml")
    assert refused.returncode == 1
    assert "the same command goes on from here, and with --from data it replaces what is there" in refused.stderr
    assert carry_out("--from", "data") == ["data", "search", "run"]
    (tmp_path / "job.yaml").write_text(text.replace("metric:", "metrik:"))
    wrong = run(tmp_path, "ronde workflow job.yaml")
    assert wrong.returncode == 2
    (tmp_path / "job.yaml").write_text(text.replace("best.nesterov", "best.nestrov"))
    before_all = run(tmp_path, "ronde workflow job.yaml")
    assert (before_all.returncode, before_all.stdout) == (2, "")
    assert "the search has no parameter 'nestrov'; it has weight-decay, nesterov" in before_all.stderr
    assert "job.yaml, line 5: unknown key 'metrik' in the section 'search'; did you mean 'metric'?" in wrong.stderr


@contextlib.contextmanager
def serving(project: Path, command: str) -> Iterator[str]:
    """A context in which a service is ready: its port. It has to end well when it is asked to."""
    words = shlex.split(command.replace("--port 8000", "--port 0"))
    with subprocess.Popen(words, cwd=project, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as service:
        try:
            assert service.stderr is not None
            printed = ""
            while "[ronde] ready: " not in printed:
                line = service.stderr.readline()
                assert line, f"the service has ended:\n{printed}"
                printed += line
            (port,) = re.findall(r"ready: http://127.0.0.1:(\d+)/", printed)
            yield port
        finally:
            service.terminate()
            _, rest = service.communicate(timeout=LONG_S)
    assert service.returncode == 0, printed + rest
