"""Batch prediction in one process: formats, bad rows, what a killed run leaves, and what refuses to go on."""

from __future__ import annotations

import csv
import io
import itertools
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ronde.data import decode_image
from ronde.data.files import LocalFolder
from ronde.errors import DataError, ModelError
from ronde.predict import PredictManifest, PredictOptions, predict
from ronde.predict.plan import choose_part_rows, cut_rows, order_parts
from ronde.predict.rows import fit_input
from ronde.serve.model import TensorInfo
from tests.limits import PATIENCE_S
from tests.unit.data.made_data import write_images
from tests.unit.serve.made_models import WEIGHTS, write_image_mean, write_linear


def write_csv(path: Path, num_rows: int, bad: dict[int, str] | None = None) -> np.ndarray:
    """Rows with an id, a note that holds newlines and quotes, and four numbers; `bad` lines stand in place of rows."""
    numbers = np.random.default_rng(3).integers(0, 100, (num_rows, 4))
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["id", "note", "a", "b", "c", "d"])
    for row in range(num_rows):
        if bad and row in bad:
            text.write(bad[row] + "\n")
        else:
            writer.writerow([row, 'two\nlines, "quoted"' if row % 3 == 0 else "plain", *numbers[row]])
    path.write_text(text.getvalue(), newline="")
    return numbers


@pytest.fixture
def options(tmp_path: Path) -> PredictOptions:
    write_linear(tmp_path / "model", labels=("ant", "bee", "cat"))
    return PredictOptions(
        model=str(tmp_path / "model"),
        input=str(tmp_path / "in.csv"),
        output=str(tmp_path / "out.csv"),
        columns={"x": ["a", "b", "c", "d"]},
        keep=["id", "note"],
        batch_size=4,
        part_rows=8,
    )


def read_rows(output: str) -> list[dict[str, Any]]:
    """The rows of an output of any format, with scores as lists."""
    path = Path(output)
    if path.is_dir():
        return [row for each in sorted(path.glob("part-*")) for row in read_rows(str(each))]
    match path.suffix:
        case ".csv":
            with path.open(newline="") as file:
                rows: list[dict[str, Any]] = list(csv.DictReader(file))
            return [{**row, "row": int(row["row"]), "scores": json.loads(row["scores"])} for row in rows]
        case ".jsonl":
            return [json.loads(line) for line in path.read_text().splitlines()]
    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet", "folder"])
def test_every_row_is_predicted_once_in_order_whatever_the_format(
    tmp_path: Path, options: PredictOptions, name: str
) -> None:
    bad = {5: "5,short,1", 9: "9,note,1,2,three,4", 11: '11,"x"y,1,2,3,4', 20: "20,,1,2,3,"}
    numbers = write_csv(tmp_path / "in.csv", 50, bad)
    options = msgspec.structs.replace(options, output=str(tmp_path / name))
    manifest = predict(options)
    rows = read_rows(options.output)
    errors_path = tmp_path / (f"{name}.errors.jsonl" if "." in name else f"{name}/errors.jsonl")
    errors = [json.loads(line) for line in errors_path.read_text().splitlines()]
    assert [each["row"] for each in errors] == sorted(bad)
    assert "has 3 values, but there are 6 columns" in errors[0]["reason"]
    assert "could not convert string to float" in errors[1]["reason"]
    assert [row["row"] for row in rows] == [row for row in range(50) if row not in bad]
    for row in rows:
        expected = numbers[row["row"]] @ WEIGHTS
        np.testing.assert_allclose(row["scores"], expected, rtol=1e-4)
        assert row["predicted_label"] == ("ant", "bee", "cat")[int(np.argmax(expected))]
        assert row["note"] == ('two\nlines, "quoted"' if row["row"] % 3 == 0 else "plain")
    assert (manifest.num_rows, manifest.num_errors, len(manifest.parts)) == (50, 4, 7)
    assert not [*tmp_path.rglob("*.work"), *tmp_path.rglob("_work"), *tmp_path.rglob(".unfinished*")]


def test_a_run_that_has_predicted_nothing_does_not_bind_the_next_one(tmp_path: Path, options: PredictOptions) -> None:
    write_csv(tmp_path / "in.csv", 20)
    wrong = msgspec.structs.replace(options, columns={"x": ["id", "note", "a", "b"]}, part_rows=10)
    with pytest.raises(ModelError, match="probably the settings do not fit the data"):
        predict(wrong)
    code = f"""
from ronde.predict.output import OutputFolder
from ronde.predict.plan import make_plan, PredictOptions
output = OutputFolder(make_plan(PredictOptions(**{msgspec.to_builtins(wrong)!r}))[0])
output.begin()
print("at work", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:  # the same, and it has not failed yet
        assert other.stdout is not None and other.stdout.readline() == "at work\n"
        with pytest.raises(DataError, match="unfinished predictions, and the settings changed"):
            predict(options)
        other.communicate("\n", timeout=PATIENCE_S)
    assert predict(options).num_errors == 0
    assert [row["row"] for row in read_rows(options.output)] == list(range(20))


def test_of_processes_that_begin_together_with_different_settings_one_goes_on(
    tmp_path: Path, options: PredictOptions
) -> None:
    write_csv(tmp_path / "in.csv", 20)
    code = """
import sys
from ronde.errors import DataError
from ronde.predict.output import OutputFolder
from ronde.predict.plan import make_plan, PredictOptions
output = OutputFolder(make_plan(PredictOptions(**eval(sys.argv[1])))[0])
print("here", flush=True)
input()
try:
    output.begin()
    print("begun", flush=True)
except DataError as error:
    print(error, flush=True)
input()
"""
    others = []
    for batch_size in (1, 2, 3):
        given = repr(msgspec.to_builtins(msgspec.structs.replace(options, batch_size=batch_size)))
        command = [sys.executable, "-c", code, given]
        others.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
    for other in others:
        assert other.stdout is not None and other.stdout.readline() == "here\n"
    for other in others:
        assert other.stdin is not None
        other.stdin.write("\n")
    found = [other.stdout.readline() for other in others if other.stdout is not None]
    for other in others:
        other.communicate("\n", timeout=PATIENCE_S)
    assert found.count("begun\n") == 1
    assert sum("the settings changed since" in line for line in found) == 2


def test_a_finished_run_is_not_done_again_and_a_changed_one_is_refused(tmp_path: Path, options: PredictOptions) -> None:
    write_csv(tmp_path / "in.csv", 20)
    predict(options)
    before = (tmp_path / "out.csv").stat().st_mtime_ns
    predict(msgspec.structs.replace(options, threads=2))
    assert (tmp_path / "out.csv").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="the settings changed"):
        predict(msgspec.structs.replace(options, keep=[]))
    write_linear(tmp_path / "model", labels=("ant", "bee", "dog"))
    with pytest.raises(DataError, match="the model changed"):
        predict(options)
    write_csv(tmp_path / "in.csv", 21)
    with pytest.raises(DataError, match="the input and the model changed"):
        predict(options)


def test_a_run_that_died_goes_on_with_the_parts_that_are_left(
    tmp_path: Path, options: PredictOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.py").write_text(
        "seen = []\nlimit = 18\n"
        "def note(outputs):\n"
        "    seen.append(1)\n"
        "    if len(seen) > limit: raise KeyboardInterrupt\n"
        "    return {'scores': outputs['scores']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    write_csv(tmp_path / "in.csv", 40)
    options = msgspec.structs.replace(options, postprocess="steps:note", output=str(tmp_path / "out.jsonl"))
    with pytest.raises(KeyboardInterrupt):
        predict(options)
    with pytest.raises(DataError, match="unfinished predictions, and the settings changed"):
        predict(msgspec.structs.replace(options, batch_size=5))
    steps: Any = sys.modules["steps"]
    steps.seen.clear()
    steps.limit = 1000
    predict(options)
    assert len(steps.seen) == 40 - 16  # two parts of eight rows had been finished
    assert [row["row"] for row in read_rows(options.output)] == list(range(40))


def test_ranks_that_run_at_the_same_time_make_one_output(tmp_path: Path, options: PredictOptions) -> None:
    write_csv(tmp_path / "in.csv", 200)
    manifests: list[PredictManifest] = []
    threads = [
        threading.Thread(target=lambda rank=rank: manifests.append(predict(options, rank=rank, size=3)))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(manifests) == 3
    assert manifests[0] == manifests[1] == manifests[2]
    assert [row["row"] for row in read_rows(options.output)] == list(range(200))
    assert not (tmp_path / "out.csv.work").exists()


def test_a_rank_that_others_overtake_at_the_end_returns_what_they_have_made(
    tmp_path: Path, options: PredictOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_csv(tmp_path / "in.csv", 60)
    write = LocalFolder.write

    def write_late(folder: LocalFolder, name: str, data: Any) -> None:
        """The first part is written when another rank has finished everything, and is removing the folder."""
        if "part-" in name:
            monkeypatch.setattr(LocalFolder, "write", write)
            predict(options)
            raise FileNotFoundError(name)
        write(folder, name, data)

    monkeypatch.setattr(LocalFolder, "write", write_late)
    assert predict(options).num_rows == 60
    assert [row["row"] for row in read_rows(options.output)] == list(range(60))
    assert not (tmp_path / "out.csv.work").exists()


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("int32", ["1", "2", "3", "-4"], ["1", "2", "3", str(2**40)]),
        ("uint8", [1, 2, 3, 255], [1, 2, 3, 256]),
        ("float16", ["1", "2", "nan", "-65504"], ["1", "2", "3", "1e6"]),
        ("float32", np.arange(4), np.array([1, 2, 3, 1e39])),
        ("bool", ["true", "False", "0", "1"], ["true", "no", "0", "1"]),
        ("int64", np.array([True, False, True, True]), np.array([1.0, 2, 3, 4])),
    ],
)
def test_numbers_that_an_input_cannot_hold_are_errors_and_never_other_numbers(dtype: str, good: Any, bad: Any) -> None:
    info = TensorInfo(name="x", dtype=dtype, shape=(None, 4))
    made = fit_input(info, good)
    assert made.dtype == dtype and made.shape == (4,)
    if dtype == "bool":
        assert made.tolist() == [True, False, False, True]
    else:
        np.testing.assert_array_equal(made.astype(np.float64), np.asarray(good).astype(np.float64))
    with pytest.raises(ValueError, match=r"cannot hold|neither true nor false|the model takes"):
        fit_input(info, bad)


def test_settings_that_do_not_fit_fail_at_once_and_name_the_reason(tmp_path: Path, options: PredictOptions) -> None:
    write_csv(tmp_path / "in.csv", 40)
    with pytest.raises(ModelError, match=r"row 0: .*there is no field 'e'; there are id, note, a"):
        predict(msgspec.structs.replace(options, columns={"x": ["a", "b", "c", "e"]}))
    with pytest.raises(ValueError, match="no input 'y'; it has x"):
        predict(msgspec.structs.replace(options, columns={"y": "a"}, output=str(tmp_path / "other.csv")))
    with pytest.raises(ValueError, match="keep: the output has a column 'scores' of its own"):
        predict(msgspec.structs.replace(options, keep=["scores"], output=str(tmp_path / "third.csv")))
    with pytest.raises(ValueError, match="an output ends with"):
        predict(msgspec.structs.replace(options, output="out.json"))


def test_images_are_preprocessed_as_the_model_says_and_outputs_may_be_far_away(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    write_images(tmp_path / "photos", {"ant": 5, "bee": 4})
    (tmp_path / "photos/bee/broken.jpg").write_bytes(b"no image")
    write_image_mean(tmp_path / "model")
    options = PredictOptions(
        model=str(tmp_path / "model"),
        input=str(tmp_path / "photos"),
        output="memory://predictions/out",
        keep=["class"],
        part_rows=4,
    )
    manifest = predict(options)
    assert (manifest.num_rows, manifest.num_errors) == (10, 1)
    files = fsspec.filesystem("memory")
    parts = sorted(name for name in files.find("/predictions/out") if name.endswith(".parquet"))
    rows = [row for name in parts for row in parquet.read_table(pa.BufferReader(files.cat(name))).to_pylist()]
    assert [row["class"] for row in rows] == ["ant"] * 5 + ["bee"] * 4
    good = [path for path in sorted((tmp_path / "photos").glob("*/*")) if path.name != "broken.jpg"]
    means = [decode_image(path.read_bytes()).mean() / 255 for path in good]
    np.testing.assert_allclose([row["mean"] for row in rows], means, atol=0.1)
    assert "cannot decode an image" in files.cat("/predictions/out/errors.jsonl").decode()
    assert not [name for name in files.find("/predictions/out") if "_work" in name]
    files.rm("/predictions", recursive=True)


def test_parts_are_those_of_the_input_alone_and_ranks_begin_far_from_each_other() -> None:
    parts = cut_rows(100_000, choose_part_rows(100_000, 64))
    assert (parts[0].start, parts[-1].stop) == (0, 100_000)
    assert all(before.stop == after.start for before, after in itertools.pairwise(parts))
    assert 100 <= len(parts) <= 128
    assert choose_part_rows(3, 64) == 64
    assert choose_part_rows(10**9, 64) == 65536
    assert order_parts(10, 0, 2)[:2] == [0, 1]
    assert order_parts(10, 1, 2)[:2] == [5, 6]
    assert sorted(order_parts(10, 2, 3)) == list(range(10))
