"""Every example runs as its README says; the main job goes on, after it was killed, as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ronde.dash import RunHistory, read_log
from ronde.data import open_dataset
from tests.commands import PROGRAMS, ROOT, output_of, run_command
from tests.jobs.test_readme import PAGES, blocks
from tests.jobs.test_readme import run as run_page
from tests.limits import LONG_S, LONG_TEST_S
from tests.services import needs
from tests.unit.data.test_readers import read_all

EXAMPLES = ROOT / "examples"
TENSORFLOW = ROOT / ".venv-tensorflow/bin/python"
MXNET = ROOT / ".venv-mxnet/bin/python"

pytestmark = pytest.mark.timeout(LONG_TEST_S)
# Short and small, everything else as in a real run.
SHORT = ["--epochs", "3", "--batch-size", "8", "--width", "16", "--image-size", "64", "--checkpoint-s", "0", "--amp"]
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error::UserWarning"}


def command(program: Sequence[str | Path], num_ranks: int = 2) -> list[str]:
    start = [str(PROGRAMS / "ronde"), "run", "-np", str(num_ranks)] if num_ranks > 1 else []
    return [*start, sys.executable, *map(str, program)]


def run(program: Sequence[str | Path], num_ranks: int = 2) -> str:
    """What it prints; it has to end well."""
    return output_of(command(program, num_ranks), env=ENVIRONMENT, limit_s=LONG_S)


def losses(printed: str) -> list[tuple[float, float]]:
    return [(float(first), float(last)) for first, last in re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed)]


def test_fit_finds_the_weights_and_is_the_readmes() -> None:
    assert (EXAMPLES / "fit.py").read_text() in blocks(PAGES["README"], "python")
    assert "2 ranks found [1.0, -2.0, 0.5]" in run_page("README", "ronde run -np 2 python fit.py").stdout


def test_the_mlp_learns_digits() -> None:
    accuracy = re.search(r"test accuracy with 2 rank\(s\): ([\d.]+)%", run([EXAMPLES / "mlp.py"]))
    assert accuracy
    assert float(accuracy[1]) > 95


@needs("MXNet", missing="" if MXNET.exists() else "no .venv-mxnet; `make build` makes it")
@pytest.mark.parametrize("flags", [[], ["--fp16"]])
def test_gluon_of_mxnet_learns_digits(flags: list[str]) -> None:
    words: list[str | Path] = [PROGRAMS / "ronde", "run", "-np", "2", MXNET, EXAMPLES / "mxnet/digits.py", *flags]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    accuracy = re.search(r"test accuracy with 2 rank\(s\): ([\d.]+)%", output_of(words, env=env, limit_s=LONG_S))
    assert accuracy
    assert float(accuracy[1]) > 95


def test_passes_and_mixed_precision_learn() -> None:
    ((first, last),) = losses(run([EXAMPLES / "accumulation_amp.py"]))
    assert last < first / 3


def test_uneven_data_train_one_model() -> None:
    printed = run([EXAMPLES / "uneven_data.py"])
    assert "batches by rank: [10, 20]" in printed
    assert "found [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]" in printed


def test_prepared_data_are_read_and_every_sample_counts() -> None:
    printed = run([EXAMPLES / "stream.py"])
    found = re.search(r"accuracy ([\d.]+)% on (\d+) samples with 2 ranks", printed)
    assert found, printed
    assert float(found[1]) > 93
    num_train = re.search(r"(\d+) samples of \1, ", printed)
    assert num_train, printed
    assert int(num_train[1]) + int(found[2]) == 1797


def test_two_tasks_learn_with_a_common_trunk() -> None:
    for first, last in losses(run([EXAMPLES / "multi_task.py"])):
        assert last < first / 2


def test_asynchronous_training_learns_as_synchronous_training_does_and_does_not_wait_for_a_slow_rank(
    tmp_path: Path,
) -> None:
    printed = run([EXAMPLES / "async_digits.py", "--report", tmp_path / "report.html"], num_ranks=3)
    found = re.findall(r"(\w+): *([\d.]+)% after (\d+) updates in ([\d.]+) s.*by rank (\d+) (\d+) (\d+)", printed)
    results = {mode: [float(each) for each in numbers] for mode, *numbers in found}
    assert [*results] == ["sync", "bounded", "async", "gossip"], printed
    for mode, (accuracy, *_) in results.items():
        assert accuracy > (90 if mode == "gossip" else 93), printed
        assert mode == "gossip" or abs(accuracy - results["sync"][0]) < 3
    assert results["async"][1] == sum(results["async"][3:])  # every push was an update
    page = (tmp_path / "report.html").read_text()
    plots = json.loads(re.findall(r'<script type="application/json" id="plots">(.*?)</script>', page)[0])
    assert [plot["title"] for plot in plots][:2] == ["accuracy", "staleness with bounded"]
    assert {line["name"]: len(line["y"]) > 5 for line in plots[0]["lines"]} == dict.fromkeys(results, True)
    assert all(len(line["y"]) > 5 for plot in plots[1:] for line in plot["lines"])


def test_recommendations_from_tables_on_servers_are_better_than_means() -> None:
    printed = run([EXAMPLES / "embeddings.py"], num_ranks=3)
    error = re.search(r"error ([\d.]+) on new ratings, ([\d.]+) with the means", printed)
    assert error, printed
    assert float(error[1]) < 0.6 * float(error[2])


def test_a_search_finds_a_learning_rate_with_which_digits_are_learned(tmp_path: Path) -> None:
    words: list[str | Path] = [
        PROGRAMS / "ronde",
        "search",
        EXAMPLES / "search/job.yaml",
        "--parallel",
        "1",
        "--trials",
        "6",
    ]
    env = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    printed = output_of([*words, "--output", tmp_path, "--json"], env=env, limit_s=LONG_S)
    result = json.loads(printed)
    assert len(result["trials"]) == 6
    assert result["best"]["value"] > 0.8
    assert (tmp_path / "report.html").exists()


def test_elastic_training_survives_a_kill() -> None:
    start = (str(PROGRAMS / "ronde"), "run", "-np", "3", "--min-np", "1", sys.executable)
    done = run_command(
        [*start, str(EXAMPLES / "elastic/digits.py"), "--kill-at", "40"], env=ENVIRONMENT, limit_s=LONG_S
    )
    assert done.returncode == 0, done.stderr
    assert "worker 1 is lost: killed by signal 9 (SIGKILL)" in done.stderr
    accuracy = re.search(r"test accuracy ([\d.]+)% after 160 steps; ranks: 3 2( 3)?", done.stdout)
    assert accuracy, done.stdout + done.stderr
    assert float(accuracy[1]) > 95


def test_a_horovod_script_runs_with_no_change_of_a_character() -> None:
    start = (str(PROGRAMS / "horovodrun"), "-np", "2", sys.executable)
    done = run_command([*start, EXAMPLES / "horovod_mnist.py"], limit_s=LONG_S)
    accuracy = re.search(r"accuracy ([\d.]+)% with 2 processes", done.stdout)
    assert accuracy, done.stdout + done.stderr
    assert float(accuracy[1]) > 85


def test_every_example_is_listed_with_its_command() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert re.search(rf"`(?:ronde run|horovodrun) -np \d python examples/{path.name}`", page), path.name
    for path in (EXAMPLES / "imagenet").glob("*.py"):
        assert f"(imagenet/{path.name})" in page


# --- the main job ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark and bright images of different sizes and kinds, in ImageNet's layout."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for split, number in (("train", 32), ("val", 10), ("test", 9)):
        for index in range(number):
            name = ("dark", "bright")[index % 2]
            pixels = random.integers(0, 60, (40 + index % 3, 48, 3), np.uint8) + np.uint8(180 * (index % 2))
            path = root / split / name / f"{index:03d}.{('png', 'jpg')[index // 2 % 2]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root


def train(folder: Path, directory: Path, *more: str) -> list[str | Path]:
    return [
        *(EXAMPLES / "imagenet/train.py", "--data", folder, "--cache", directory / "cache", "--run", directory / "run"),
        *(*SHORT, *more),
    ]


def outcome(run: RunHistory) -> dict[str, object]:
    return {name: run.series(name) for name in ("val/loss", "val/accuracy", "test/loss", "test/accuracy")}


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that nobody disturbs: its directory, and what it printed."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(train(folder, directory))


def test_the_main_job_leaves_a_report_and_scalars(whole: tuple[Path, str]) -> None:
    directory, printed = whole
    report = re.search(r"report: (.*)", printed)
    assert report
    assert Path(report[1]).read_text().startswith("<!DOCTYPE html>")
    assert list((directory / "run/tensorboard").glob("events.out.tfevents.*"))
    log = read_log(directory / "run/log.jsonl")
    assert log.ranks() == [0, 1]
    assert sum(share.num_steps for _, share in log.breakdowns(1)) == 6
    assert [step for step, _ in log.series("val/accuracy")] == [2, 4, 6]
    assert log.series("test/accuracy") == [(6, 1.0)]  # black and white are not hard to tell


def test_the_main_job_goes_on_after_it_was_killed_as_if_nothing_had_been(
    folder: Path, whole: tuple[Path, str], tmp_path: Path
) -> None:
    with subprocess.Popen(
        command(train(folder, tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as job:
        assert job.stdout is not None
        before = []
        for line in job.stdout:
            before.append(line)
            if "epoch 1/3" in line:
                job.kill()
    assert "epoch 1/3" in "".join(before), "".join(before)
    assert not read_log(tmp_path / "run/log.jsonl").ended

    again = run(train(folder, tmp_path, "--resume", "--workers", "1"))
    went_on = re.search(r"going on after step (\d+) of 6", again)
    assert went_on, again
    assert int(went_on[1]) >= 2
    logs = [read_log(directory / "run/log.jsonl") for directory in (whole[0], tmp_path)]
    assert outcome(logs[0]) == outcome(logs[1])
    assert logs[1].num_resumes == 1


def split(source: Path, target: Path, *shares: str) -> subprocess.CompletedProcess[str]:
    program: list[str | Path] = [EXAMPLES / "imagenet/split.py", source, target, "--shares", *shares]
    return run_command(command(program, 1), limit_s=LONG_S)


def test_a_split_keeps_its_images_when_others_come(folder: Path, tmp_path: Path) -> None:
    photos, target = tmp_path / "photos", tmp_path / "split"
    shutil.copytree(folder / "train", photos)
    (photos / "dark/notes.txt").write_text("no image")
    done = split(photos, target, "2", "1", "1")
    counts = re.search(r"(\d+) train, (\d+) val, (\d+) test", done.stdout)
    assert counts, done.stderr
    before = {str(path.relative_to(target)) for path in target.rglob("*.*g")}
    assert [sum(name.startswith(each) for name in before) for each in ("train", "val", "test")] == [
        int(count) for count in counts.groups()
    ]
    assert len(before) == 32
    assert min(int(count) for count in counts.groups()) > 0

    shutil.copytree(folder / "test/bright", photos / "bright/", dirs_exist_ok=True)
    for path in (folder / "val/dark").iterdir():
        shutil.copy(path, photos / f"dark/new-{path.name}")
    assert split(photos, target, "2", "1", "1").returncode == 0
    after = {str(path.relative_to(target)) for path in target.rglob("*.*g")}
    assert before <= after
    assert len(after) == sum(path.suffix != ".txt" for path in photos.glob("*/*"))

    refused = split(photos, target, "0.1", "0.1", "0.8")
    assert refused.returncode == 1
    assert "give the shares that the folder was made with" in refused.stderr


@needs("TensorFlow", missing="" if TENSORFLOW.exists() else "no .venv-tensorflow; `make build` makes it")
def test_the_main_job_in_tensorflow_learns_and_does_a_lost_step_again_exactly(folder: Path, tmp_path: Path) -> None:
    assert split(folder / "train", tmp_path / "data", "2", "1", "1").returncode == 0
    given = [EXAMPLES / "imagenet/train_tensorflow.py", "--data", tmp_path / "data", "--run", tmp_path / "run"]
    program = [str(word) for word in (*given, *SHORT, "--amp", "float16")]
    start = [str(PROGRAMS / "ronde"), "run", "-np", "2", str(TENSORFLOW)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow"}
    with subprocess.Popen(
        [*start, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as job:
        assert job.stdout is not None
        before = []
        for line in job.stdout:
            before.append(line)
            if "epoch 3/3" in line:
                job.kill()
    assert "epoch 3/3" in "".join(before), "".join(before)
    first = read_log(tmp_path / "run/log.jsonl")
    (*_, (_, _), (num_steps, loss)) = first.series("val/loss")
    assert first.ranks() == [0, 1]
    assert all(sum(share.num_steps for _, share in first.breakdowns(rank)) == num_steps for rank in (0, 1))

    # Go on from the last checkpoint but one: a step is lost, and done again.
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / f"ckpt-{num_steps}.index").exists()
    (checkpoints / "checkpoint").write_text(f'model_checkpoint_path: "ckpt-{num_steps - 1}"\n')
    again = output_of([*start, *program, "--resume"], env=environment, limit_s=LONG_S)
    assert f"going on after step {num_steps - 1} of {num_steps}" in again
    report = re.search(r"report: (.*)", again)
    assert report, again
    assert Path(report[1]).read_text().startswith("<!DOCTYPE html>")
    log = read_log(tmp_path / "run/log.jsonl")
    assert log.ended
    assert log.num_resumes == 1
    assert log.series("val/loss")[-1] == (num_steps, loss)
    assert log.series("test/accuracy") == [(num_steps, 1.0)]
    assert list((tmp_path / "run/tensorboard").glob("events.out.tfevents.*"))


def test_images_are_prepared_once_and_a_bad_one_is_named(folder: Path, tmp_path: Path) -> None:
    cache, bad = tmp_path / "cache", folder / "train/dark/bad.png"
    program: list[str | Path] = [EXAMPLES / "imagenet/prepare.py", folder, cache, "--size", "32"]
    bad.write_text("not an image")
    try:
        done = run_command(command(program, 1), limit_s=LONG_S)
    finally:
        bad.unlink()
    assert done.returncode == 1
    assert "cut_image failed for sample 'train/dark/bad.png'" in done.stderr
    assert not list(cache.glob("*/index.json"))

    (made,) = re.findall(r"prepared: (.*)", run(program, 2))
    files = {path: path.stat().st_mtime_ns for path in Path(made).rglob("*")}
    assert {path.name for path in files} >= {"index.json", "train", "val", "test", "00000.shard"}
    run(program, 1)  # as many ranks as one likes
    assert {path: path.stat().st_mtime_ns for path in Path(made).rglob("*")} == files
    images = np.stack([sample["image"] for sample in read_all(open_dataset(made, split="train"))])
    assert images.shape == (32, 32, 32, 3)
    assert (images[:16].mean() > 150) and (images[16:].mean() < 100)  # bright before dark: classes by their names


def test_a_folder_of_another_layout_is_refused_with_words(tmp_path: Path) -> None:
    done = run_command(command([EXAMPLES / "imagenet/prepare.py", tmp_path, tmp_path / "cache"], 1), limit_s=LONG_S)
    assert done.returncode == 1
    assert f"{tmp_path} has no folder train and val" in done.stderr
