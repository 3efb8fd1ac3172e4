"""The tutorial from images to a service, command by command, and as one `ronde workflow` that is killed on its way."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.commands import PROGRAMS, ROOT, run_command
from tests.jobs.test_readme import blocks
from tests.limits import LONG_S, LONG_TEST_S

TUTORIAL = (ROOT / "docs/tutorials/from-images-to-service.md").read_text(encoding="utf-8")
ELSEWHERE = {"cd examples/imagenet", "ronde workflow job.yaml"}
"""Of the shell's lines: that which changes the folder, and that which the second test runs."""
HAS_SEARCH = importlib.util.find_spec("ronde.search") is not None
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
    if not HAS_SEARCH:
        text = (folder / "job.yaml").read_text()
        without = text[: text.index("search:")] + text[text.index("run:\n  num_ranks") :]
        (folder / "job.yaml").write_text(without.replace("{best.lr}", "0.0005"))
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


def test_a_workflow_that_is_killed_goes_on_where_it_was_and_does_nothing_twice(project: Path) -> None:
    with subprocess.Popen(["ronde", "workflow", "job.yaml"], cwd=project, env=ENVIRONMENT) as killed:
        deadline = time.monotonic() + LONG_S
        record = project / "job.workflow.json"
        while not (record.exists() and '"run"' in record.read_text()):
            assert killed.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        killed.send_signal(signal.SIGKILL)
    # What the killed workflow had started ends first; the next one waits for it.
    done = run(project, "ronde workflow job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\] data: done before", done.stdout)
    assert "] run: ronde run --config job.yaml" in done.stdout
    rows = read_predictions(project)
    assert [int(row["row"]) for row in rows] == list(range(24))
    assert sum(row["class"] == row["predicted_label"] for row in rows) >= 20

    again = run(project, "ronde workflow job.yaml")
    assert again.returncode == 0, again.stderr
    assert "ronde " not in again.stdout.replace("ronde workflow", "")
    assert again.stdout.count("done before, nothing has changed") == 4 + HAS_SEARCH

    # Another setting of a step repeats that step and those behind it.
    text = (project / "job.yaml").read_text()
    (project / "job.yaml").write_text(text.replace("keep: [class]", "keep: [class, label]"))
    changed = run(project, "ronde workflow job.yaml")
    assert changed.returncode == 0, changed.stderr
    assert "] export: done before" in changed.stdout
    assert "ronde predict job.yaml --force" in changed.stdout

    (project / "job.yaml").write_text(text.replace("outputs: [scores]", "output: [scores]\n  otputs: [scores]"))
    wrong = run(project, "ronde workflow job.yaml")
    assert wrong.returncode == 2
    assert "line" in wrong.stderr


def test_every_command_of_the_tutorial_runs(project: Path) -> None:
    commands = [line for block in blocks(TUTORIAL, "sh") for line in block.strip().splitlines()]
    assert len(commands) > 5
    for command in commands:
        if command not in ELSEWHERE and (HAS_SEARCH or not command.startswith("ronde search")):
            done = run(project, command)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert len(read_predictions(project)) == 24
