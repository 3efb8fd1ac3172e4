"""`ronde data` as people use it: real processes, killed at bad moments."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from ronde.data import open_dataset
from tests.commands import PROGRAMS, run_command
from tests.limits import LONG_S, PATIENCE_S
from tests.unit.data.made_data import write_images, write_shards
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


ELASTIC = """
import json, os, signal
from pathlib import Path
import torch
import ronde, ronde.elastic, ronde.torch
from ronde.data import Stream

ronde.init()
model = torch.nn.Linear(1, 1)
optimizer = ronde.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
stream = Stream("data", global_batch=12, seed=1)
state = ronde.elastic.State(model=model, optimizer=optimizer, data=stream)
log = Path(f"used-{os.getpid()}").open("w")
killed = Path("killed")

@ronde.elastic.run
def train(state):
    while stream.epoch < 2:
        for batch in stream:
            numbers = torch.from_numpy(batch["number"]).float()
            optimizer.zero_grad()
            model(numbers.reshape(-1, 1)).mean().backward()
            optimizer.step()
            log.write(json.dumps([stream.epoch, stream.consumed, batch["number"].tolist()]) + "\\n")
            log.flush()
            if ronde.rank() == 1 and stream.consumed == 96 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

train(state)
"""


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


def test_a_rank_that_is_killed_in_the_middle_of_an_epoch_costs_no_sample(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [240], num_bytes=10)
    (tmp_path / "train.py").write_text(ELASTIC)
    command = [RONDE, "run", "-np", "3", "--min-np", "2", sys.executable, "train.py"]
    done = run_command(command, cwd=tmp_path, limit_s=LONG_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    used: Counter[tuple[int, int, int]] = Counter()
    for path in tmp_path.glob("used-*"):
        for epoch, consumed, numbers in map(json.loads, path.read_text().splitlines()):
            used.update((epoch, consumed, number) for number in numbers)
    # The killed rank may have finished its last step alone: then the others have done it again.
    assert {each for each, count in used.items() if count > 1} <= {each for each in used if each[:2] == (0, 96)}
    assert Counter((epoch, number) for epoch, _, number in used) == Counter(
        (epoch, number) for epoch in range(2) for number in range(240)
    )
