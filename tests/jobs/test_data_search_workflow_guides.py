"""The guides to data, search and workflows, each from an empty folder: all their blocks run as they are printed."""

from __future__ import annotations

import csv
import json
import os
import re
import warnings
from pathlib import Path

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from PIL import Image

from tests.commands import PROGRAMS, ROOT, run_command
from tests.jobs.test_readme import blocks
from tests.limits import LONG_S, LONG_TEST_S

pytestmark = pytest.mark.timeout(LONG_TEST_S)
DATA, SEARCH, WORKFLOW = (
    (ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8") for name in ("data", "search", "workflow")
)


def write_scripts(page: str, folder: Path) -> None:
    for block in blocks(page, "python"):
        found = re.match(r'"""(\w+\.py): ', block)
        assert found, f"this block does not name its file:\n{block}"
        (folder / found[1]).write_text(block, encoding="utf-8")


def run_shell(folder: Path, text: str) -> str:
    """What a block of shell prints."""
    env = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = run_command(["bash", "-ec", text], cwd=folder, env=env, limit_s=LONG_S)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_guide_to_data_works_from_photos_to_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 255, (30 + number, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    write_scripts(DATA, tmp_path)
    (section,) = blocks(DATA, "yaml")
    (tmp_path / "job.yaml").write_text(section, encoding="utf-8")
    prepare, from_file, shared, move, read, train = blocks(DATA, "sh")

    assert "data/photos: train: " in run_shell(tmp_path, prepare)
    assert "data/small: train: " in run_shell(tmp_path, from_file)
    assert "data/shared: train: 40 samples in 2 shards" in run_shell(tmp_path, shared)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        boto3.client("s3").create_bucket(Bucket="bucket")
        assert "s3://bucket/photos: all files are as they were written" in run_shell(tmp_path, move)
    finally:
        server.stop()
    assert (tmp_path / "scratch/photos/index.json").read_bytes() == (tmp_path / "data/photos/index.json").read_bytes()

    index = json.loads((tmp_path / "data/small/index.json").read_text())
    num_samples = sum(shard["num_samples"] for shard in index["splits"]["train"])
    printed = run_shell(tmp_path, read)
    counts = [
        int(count) for count in re.findall(r"has read (\d+) samples of \('cat', 'dog'\); epoch 1 is next", printed)
    ]
    assert counts[0] == num_samples and len(counts) == 3
    assert num_samples <= sum(counts[1:]) <= num_samples + 1  # with two ranks, the last batch may be padded

    printed = run_shell(tmp_path, train)
    assert re.findall(r"epoch (\d) of 3: loss", printed) == ["1", "2", "3"]
    assert "epoch" not in run_shell(tmp_path, train)  # its checkpoint is that of the end


def test_the_guide_to_search_works_with_objectives_on_two_ranks_and_with_scripts(tmp_path: Path) -> None:
    write_scripts(SEARCH, tmp_path)
    (tmp_path / "job.yaml").write_text(blocks(SEARCH, "yaml")[0], encoding="utf-8")
    (tmp_path / "scripts.yaml").write_text(blocks(SEARCH, "yaml")[1], encoding="utf-8")
    tune, pair, from_file, scripts = blocks(SEARCH, "sh")
    assert re.fullmatch(r"30 trials, the best x is \d\.\d\n", run_shell(tmp_path, tune))
    assert "the best learning rate is 0." in run_shell(tmp_path, pair)
    assert "12 trials (" in run_shell(tmp_path, from_file)
    folder = tmp_path / "runs/search"
    assert {"trials.csv", "trials.json", "report.html", "journal.log"} <= {path.name for path in folder.iterdir()}
    assert "4 trials (4 complete)" in run_shell(tmp_path, scripts)
    with (tmp_path / "runs/scripts/trials.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert {row["batch-size"] for row in rows} <= {"16", "32"} and min(float(row["value"]) for row in rows) > 5
    assert (tmp_path / "runs/scripts/output/trial-0003.txt").read_text().startswith("epoch 0: loss ")

    import optuna  # reads the journal as the guide says
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = str(folder / "journal.log")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.load_study(study_name="ronde", storage=JournalStorage(JournalFileBackend(path)))
    assert len(study.trials) == 12


def test_the_guide_to_workflows_trains_with_what_the_search_has_found_and_does_nothing_twice(tmp_path: Path) -> None:
    write_scripts(WORKFLOW, tmp_path)
    (section,), (shell,) = blocks(WORKFLOW, "yaml"), blocks(WORKFLOW, "sh")
    (tmp_path / "job.yaml").write_text(section, encoding="utf-8")
    (shown,) = re.findall(r"^```\n(\[1/2\] .*?)^```$", WORKFLOW, re.DOTALL | re.MULTILINE)

    def without_numbers_and_folder(text: str) -> str:
        return re.sub(r"[\d.]+|(?<=report: ).*(?=/search/)", "…", text)

    assert without_numbers_and_folder(run_shell(tmp_path, shell)) == without_numbers_and_folder(shown)
    assert run_shell(tmp_path, shell).count("done before, nothing has changed") == 2
