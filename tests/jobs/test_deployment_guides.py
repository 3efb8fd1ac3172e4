"""The guides to export, batch prediction and serving, one after the other from an empty folder: their blocks run as
they are printed, but for the port and the path of the token."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from ronde.launch.config import read_section
from ronde.serve.export import ExportOptions
from ronde.serve.service import ServeOptions
from tests.commands import PROGRAMS, ROOT, run_command
from tests.jobs.service import TOKEN, serving
from tests.jobs.test_readme import blocks
from tests.limits import LONG_S, LONG_TEST_S

pytestmark = pytest.mark.timeout(LONG_TEST_S)
EXPORT, PREDICT, SERVING = (
    (ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8") for name in ("export", "predict", "serving")
)


def run_shell(folder: Path, text: str) -> str:
    """What a block of shell prints."""
    env = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = run_command(["bash", "-ec", text], cwd=folder, env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_photo_handler_of_the_guide_answers(tmp_path: Path) -> None:
    _, _, start, ask = blocks(SERVING, "sh")
    shutil.copytree(
        ROOT / "examples/serving", tmp_path / "examples/serving", ignore=shutil.ignore_patterns("__pycache__")
    )
    path = f"PATH={PROGRAMS}:{os.environ['PATH']}"
    # The shell becomes the service, so that it can be told to end.
    text = start.replace("/tmp/", f"{tmp_path}/").replace("ronde serve", "exec ronde serve").rstrip() + " --port 0"
    with serving(tmp_path, command=["env", path, "bash", "-ec", text]) as service:
        text = ask.replace("/tmp/", f"{tmp_path}/").replace("localhost:8000", f"localhost:{service.port}")
        found = {
            each["name"]: each["data"] for each in json.loads(run_shell(tmp_path, f"TOKEN={TOKEN}\n{text}"))["outputs"]
        }
    assert found["label"] == ["red"] and 0.9 < found["probability"][0] <= 1


def test_a_newcomer_gets_from_a_network_to_served_predictions_with_the_guides_alone(tmp_path: Path) -> None:
    python, _ = blocks(EXPORT, "python")  # the second is of JAX: tests/jobs/test_export.py
    (tmp_path / "mymodels.py").write_text(python, encoding="utf-8")
    shell, _ = blocks(EXPORT, "sh")
    assert "models/net: onnx, differs from the original by at most" in run_shell(tmp_path, shell)
    (section,) = blocks(EXPORT, "yaml")
    (tmp_path / "export.yaml").write_text(section, encoding="utf-8")
    assert read_section(str(tmp_path / "export.yaml"), "export", ExportOptions).preprocessing["image"].resize == 256

    (shell,) = blocks(PREDICT, "sh")
    assert "scores.csv: 3 rows" in run_shell(tmp_path, shell)
    with (tmp_path / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["row"], row["id"]) for row in rows] == [("0", "0"), ("1", "1"), ("2", "2")]
    (section,) = blocks(PREDICT, "yaml")
    (tmp_path / "job.yaml").write_text(section, encoding="utf-8")
    assert "scores.csv: 3 rows" in run_shell(tmp_path, "ronde predict job.yaml")  # it is done already

    start, curl, _, _ = blocks(SERVING, "sh")
    (section,) = blocks(SERVING, "yaml")
    (tmp_path / "serve.yaml").write_text(section, encoding="utf-8")
    assert read_section(str(tmp_path / "serve.yaml"), "serve", ServeOptions).model == "models/net"
    (python,) = blocks(SERVING, "python")
    (tmp_path / "token").write_text(TOKEN + "\n")
    with serving(tmp_path, command=[str(PROGRAMS / "ronde"), *shlex.split(start)[1:], "--port", "0"]) as service:

        def here(text: str) -> str:
            text = text.replace("/run/user/1000/ronde/serve-8000.token", str(tmp_path / "token"))
            return text.replace("localhost:8000", f"localhost:{service.port}")

        (tmp_path / "ask.py").write_text(here(python), encoding="utf-8")
        printed = run_shell(tmp_path, f"{sys.executable} ask.py")
        found = [float(number) for number in re.findall(r"-?\d[\d.e+-]*", printed)]
        reply = json.loads(run_shell(tmp_path, here(curl)))["outputs"][0]
    assert reply["name"] == "scores"
    expected = pytest.approx(json.loads(rows[0]["scores"]), rel=1e-4)
    assert reply["data"] == expected and found == expected
