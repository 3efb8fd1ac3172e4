"""`ronde data` as people use it: real processes, killed at bad moments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from ronde.data import open_dataset
from tests.commands import PROGRAMS, run_command
from tests.limits import PATIENCE_S
from tests.unit.data.made_data import write_images
from tests.unit.data.test_prepare import contents
from tests.unit.data.test_readers import read_all

RONDE = str(PROGRAMS / "ronde")

KILLER = '''
"""A transform that writes down which samples it has seen, and kills its process where a file says so."""

import os
import signal
from pathlib import Path

from ronde.data import shards

HERE = Path(__file__).parent
finish = shards.ShardWriter.finish
names, keys = [], []


def kill_at(point):
    wanted = HERE / "kill-at"
    if wanted.exists() and wanted.read_text() == point:
        wanted.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def finish_or_die(writer):
    names.append(writer._name)
    kill_at(f"shard {sum(name.startswith('train') for name in names)}")
    return finish(writer)


shards.ShardWriter.finish = finish_or_die


def transform(sample):
    with (HERE / "seen").open("a") as file:
        file.write(sample["__key__"] + "\\n")
    keys.append(sample["__key__"])
    kill_at(f"sample {len(keys)}")
    return sample
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", {"cat": 30, "ant": 18})
    (tmp_path / "killer.py").write_text(KILLER)
    return tmp_path


def prepare(project: Path, *more: str, num_ranks: int = 1) -> list[str]:
    start = [RONDE, "run", "-np", str(num_ranks)] if num_ranks > 1 else []
    return [*start, RONDE, "data", "prepare", "photos", "out", "--transform", "killer:transform", *more]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_run_goes_on_without_redoing_what_was_finished(project: Path, num_ranks: int) -> None:
    flags = ("--split", "train=0.8,val=0.2", "--shard-bytes", "700")
    expected = run_command(
        [*prepare(project, *flags)[:4], "whole", *prepare(project, *flags)[5:]], cwd=project, limit_s=PATIENCE_S
    )
    assert expected.returncode == 0, expected.stderr
    (project / "seen").unlink()
    for point in ("sample 4", "sample 5", "shard 1", "shard 2"):
        (project / "kill-at").write_text(point)
        killed = run_command(prepare(project, *flags, num_ranks=num_ranks), cwd=project, limit_s=PATIENCE_S)
        assert killed.returncode != 0, killed.stdout
        assert not (project / "kill-at").exists(), f"nobody came to {point}"
        assert not (project / "out/index.json").exists()
    done = run_command(prepare(project, *flags, "--json", num_ranks=num_ranks), cwd=project, limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout[done.stdout.index("{") :])
    assert sum(split["num_samples"] for split in facts["splits"].values()) == 48
    assert contents(project / "out") == contents(project / "whole")
    seen = Counter((project / "seen").read_text().split())
    assert set(seen) == {path.relative_to(project / "photos").as_posix() for path in project.glob("photos/*/*")}
    # A part has about three images; only parts that a kill has interrupted, on either rank, were done again.
    assert sum(count - 1 for count in seen.values()) <= 2 * num_ranks * 4


def test_a_job_file_says_what_to_prepare_and_a_wrong_key_is_named_with_its_line(project: Path) -> None:
    (project / "job.yaml").write_text(
        "run:\n  num_ranks: 2\ndata:\n  input: photos\n  output: out\n  by: class\n  split: {train: 0.5, val: 0.5}\n"
    )
    done = run_command([RONDE, "data", "prepare", "job.yaml"], cwd=project, limit_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "had been prepared" in run_command([RONDE, "data", "prepare", "job.yaml"], cwd=project).stdout
    flags = ("--force", "--transform", "killer:transform", "--transform-option", "size=3")
    wrong = run_command([RONDE, "data", "prepare", "job.yaml", *flags], cwd=project)
    assert wrong.returncode == 1
    assert "unexpected keyword argument 'size'" in wrong.stderr
    done = run_command([RONDE, "data", "prepare", "job.yaml"], cwd=project, limit_s=PATIENCE_S)
    assert "transform 15/15" in done.stderr
    assert len(read_all(open_dataset(project / "out", split="train"))) > 10
    (project / "job.yaml").write_text("data:\n  input: photos\n  outptu: out\n")
    done = run_command([RONDE, "data", "prepare", "job.yaml"], cwd=project, limit_s=PATIENCE_S)
    assert done.returncode == 2
    assert "job.yaml, line 3: unknown key 'outptu' in the section 'data'; did you mean 'output'?" in done.stderr
