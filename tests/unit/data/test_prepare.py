"""Preparing data: every sample is in one shard, the result does not depend on ranks or on kills."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.world import World
from ronde.data import open_dataset, preparation
from ronde.data.preparation import (
    PrepareOptions,
    PrepareProgress,
    PrepareResult,
    choose_split,
    cut_parts,
    parse_split,
    prepare,
)
from ronde.data.shards import INDEX_NAME
from ronde.errors import DataError, Mismatch
from tests.conformance.ranks import run_threads
from tests.unit.data.made_data import write_images
from tests.unit.data.test_readers import read_all

HERE = "tests.unit.data.test_prepare"


def resize(sample: dict[str, Any]) -> Any:
    """A transform: leaves out some samples, doubles others."""
    number = int(Path(sample["__key__"]).stem)
    if number == 1:
        return None
    made = {"pixels": np.full((2, 2), number, np.uint8), "label": sample["label"], "class": sample["class"]}
    return [made, made] if number == 2 else made


def fill(sample: dict[str, Any], size: int) -> dict[str, Any]:
    return {"pixels": np.zeros(size, np.uint8)}


def fail(sample: dict[str, Any]) -> Any:
    raise KeyError("no such thing")


def wrong(sample: dict[str, Any]) -> Any:
    return 3


def hundred() -> Iterator[dict[str, Any]]:
    for number in range(100):
        yield {"number": number, "patient": number // 10}


def run(options: PrepareOptions, size: int = 1) -> list[PrepareResult]:
    return run_threads(size, lambda world: prepare(options, group=world.group))


def run_one(**given: Any) -> PrepareResult:
    texts: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return run(PrepareOptions(**texts))[0]


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_images(tmp_path / "photos", {"cat": 30, "ant": 11, "bee": 9})
    return tmp_path / "photos"


@pytest.mark.parametrize("by", ["hash", "class", "size"])
def test_the_result_is_the_same_for_any_number_of_ranks(photos: Path, tmp_path: Path, by: str) -> None:
    made = []
    for size in (1, 3):
        options = PrepareOptions(
            input=str(photos), output=str(tmp_path / f"out{size}"), by=by, split="train=0.7,val=0.3", shard_bytes=1000
        )
        run(options, size)
        made.append(contents(tmp_path / f"out{size}"))
    assert made[0] == made[1]
    assert len(made[0]) > 5
    assert not any(name.startswith(".") for name in made[0])


@pytest.mark.parametrize("by", ["hash", "class", "size"])
def test_every_sample_is_in_one_shard(photos: Path, tmp_path: Path, by: str) -> None:
    result = run_one(input=photos, output=tmp_path / "out", by=by, split="train=0.5,val=0.5", shard_bytes=1000)
    names: Counter[str] = Counter()
    for split in ("train", "val"):
        for sample in read_all(open_dataset(tmp_path / "out", split=split)):
            assert choose_split(sample["__key__"], {"train": 0.5, "val": 0.5}) == split
            assert sample["image"] == (photos / sample["__key__"]).read_bytes()
            names[sample["__key__"]] += 1
    assert names == Counter(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    assert result.index.classes == ("ant", "bee", "cat")
    if by == "class":
        for shard in result.index.splits["train"]:
            rows = read_all(open_dataset(tmp_path / "out" / shard.name))
            assert len({row["class"] for row in rows}) == 1


def test_the_splits_of_a_folder_in_imagenets_layout_are_kept(tmp_path: Path) -> None:
    write_images(tmp_path / "in/train", {"cat": 3, "ant": 2})
    write_images(tmp_path / "in/val", {"cat": 1})
    result = run_one(input=tmp_path / "in", output=tmp_path / "out")
    assert {split: result.index.num_samples(split) for split in result.index.splits} == {"train": 5, "val": 1}
    assert result.index.classes == ("ant", "cat")


def test_a_transform_may_change_leave_out_and_multiply_samples(photos: Path, tmp_path: Path) -> None:
    run_one(input=photos, output=tmp_path / "out", transform=f"{HERE}:resize", threads=3)
    samples = read_all(open_dataset(tmp_path / "out"))
    counts = Counter(sample["__key__"] for sample in samples)
    assert counts["cat/001.png"] == 0
    assert counts["cat/002.png"] == 2
    assert len(samples) == 50
    assert {int(sample["pixels"][0, 0]) for sample in samples} == {*range(30)} - {1}


def test_a_transform_gets_its_options_and_others_are_another_result(photos: Path, tmp_path: Path) -> None:
    given = {"input": photos, "output": tmp_path / "out", "transform": f"{HERE}:fill"}
    run_one(**given, transform_options={"size": 5})
    assert {len(sample["pixels"]) for sample in read_all(open_dataset(tmp_path / "out"))} == {5}
    with pytest.raises(AssertionError, match="was prepared with another transform_options"):
        run_one(**given, transform_options={"size": 6})


def test_an_iterable_can_be_prepared_and_groups_stay_together(tmp_path: Path) -> None:
    run_one(input=f"{HERE}:hundred", output=tmp_path / "out", split="train=0.5,val=0.5", group_by="patient")
    patients = {
        split: {sample["patient"] for sample in read_all(open_dataset(tmp_path / "out", split=split))}
        for split in ("train", "val")
    }
    assert patients["train"] | patients["val"] == set(range(10))
    assert not patients["train"] & patients["val"]
    assert patients["val"]


def test_csv_is_prepared_by_a_key_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,text\n" + "".join(f"k{n},t{n}\n" for n in range(20)))
    run_one(input=tmp_path / "x.csv", output=tmp_path / "out", key="id")
    found = {sample["__key__"]: sample["text"] for sample in read_all(open_dataset(tmp_path / "out"))}
    assert found == {f"k{n}": f"t{n}" for n in range(20)}


def test_a_finished_run_is_not_done_again_and_another_input_is_refused(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_one(input=photos, output=out).num_carried_out > 0
    again = run_one(input=photos, output=out)
    assert (again.was_complete, again.num_carried_out) == (True, 0)
    with pytest.raises(AssertionError, match="was prepared with another by"):
        run_one(input=photos, output=out, by="class")
    (photos / "cat/new.png").write_bytes((photos / "cat/000.png").read_bytes())
    with pytest.raises(AssertionError, match="was prepared with another input_fingerprint"):
        run_one(input=photos, output=out)
    assert run_one(input=photos, output=out, by="class", force=True).index.num_samples("train") == 51
    assert not list(out.rglob(".*"))


def test_an_unfinished_run_keeps_finished_tasks_unless_the_options_change(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop(progress: PrepareProgress) -> None:
        if (progress.phase, progress.num_done) == ("transform", 5):
            raise KeyboardInterrupt

    def begin(world: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            prepare(PrepareOptions(input=str(photos), output=str(out)), group=world.group, on_progress=stop)

    run_threads(1, begin)
    assert not (out / INDEX_NAME).exists()
    num_tasks = run_one(input=photos, output=tmp_path / "undisturbed").num_carried_out
    done = run_one(input=photos, output=out)
    assert done.num_carried_out == num_tasks - 5
    assert done.index.num_samples("train") == 50


def test_prepared_data_are_split_anew_as_a_whole(photos: Path, tmp_path: Path) -> None:
    run_one(input=photos, output=tmp_path / "first", split="train=0.5,val=0.5")
    with pytest.raises(AssertionError, match="has the splits train, val: give --split to split all of it anew"):
        run_one(input=tmp_path / "first", output=tmp_path / "second")
    run_one(input=tmp_path / "first", output=tmp_path / "second", split="train=0.5,val=0.3,test=0.2")
    made = open_dataset(tmp_path / "second")
    assert made.classes == ("ant", "bee", "cat")
    names = [
        each["__key__"]
        for split in ("train", "val", "test")
        for each in read_all(open_dataset(tmp_path / "second", split=split))
    ]
    assert sorted(names) == sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))


def test_an_input_is_not_prepared_into_itself(photos: Path, tmp_path: Path) -> None:
    run_one(input=str(photos), output=str(tmp_path / "out"))
    before = contents(tmp_path / "out")
    for output in ("out", "out/again"):
        for source in (str(tmp_path / "out"), f"file://{tmp_path}/out"):
            with pytest.raises(AssertionError, match="is in the input"):
                run_one(input=source, output=str(tmp_path / output), split="a=0.5,b=0.5", force=True)
    assert contents(tmp_path / "out") == before


def test_other_options_on_a_rank_are_an_error_on_all(photos: Path, tmp_path: Path) -> None:
    def body(world: World) -> None:
        rule = "class" if world.group.rank else "hash"
        options = PrepareOptions(input=str(photos), output=str(tmp_path / "out"), by=rule)
        with pytest.raises(Mismatch, match="rank 0 gave by='hash'; rank 1 gave by='class'"):
            prepare(options, group=world.group)

    run_threads(2, body)
    assert not (tmp_path / "out").exists()


def test_two_runs_do_not_prepare_the_same_folder_at_a_time(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "LOCK_WAIT_S", 0.1)
    refused: list[object] = []

    def begin_another(progress: PrepareProgress) -> None:
        if not refused:
            with pytest.raises(AssertionError, match="another run is preparing") as caught:
                run_one(input=photos, output=tmp_path / "out", by="class")
            refused.append(caught)

    options = PrepareOptions(input=str(photos), output=str(tmp_path / "out"))
    (result,) = run_threads(1, lambda world: prepare(options, group=world.group, on_progress=begin_another))
    assert refused
    assert result.index.num_samples("train") == 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transform": f"{HERE}:fail"}, "fail failed for sample 'ant/000.png': KeyError: 'no such thing'"),
        ({"transform": f"{HERE}:wrong"}, "returned a int for sample 'ant/000.png'"),
        ({"transform": f"{HERE}:none"}, "has no none"),
        ({"transform": "nothing"}, "must be module:function"),
        ({"transform_options": {"size": 3}}, "transform_options are for a transform"),
        ({"by": "color"}, "by must be one of hash, class, size"),
        ({"split": "train"}, "split must be as in"),
        ({"split": "train=0,val=0"}, "at least one share must be above 0"),
        ({"split": "a/b=1"}, "split must be as in"),
        ({"group_by": "patient", "split": "train=1"}, "has no field 'patient'; it has "),
        ({"output": "s3://bucket/x"}, "ronde data upload"),
        ({"input": "/nowhere"}, "there is no folder or file /nowhere"),
    ],
)
def test_mistakes_are_named(photos: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_one(**{"input": photos, "output": tmp_path / "out", **changes})
    assert message in str(caught.value)
    assert not (tmp_path / "out" / INDEX_NAME).exists()


def test_a_mistake_is_raised_on_every_rank(tmp_path: Path) -> None:
    def body(world: Any) -> None:
        with pytest.raises(DataError, match="there is no folder"):
            prepare(PrepareOptions(input=str(tmp_path / "none"), output=str(tmp_path / "o")), group=world.group)

    run_threads(2, body)


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_parts_have_every_block_once(sizes: list[int], num_bytes: int) -> None:
    parts = cut_parts(sizes, num_bytes)
    assert [block for start, stop in parts for block in range(start, stop)] == list(range(len(sizes)))


def test_a_sample_stays_in_its_split_when_data_grow() -> None:
    shares = parse_split("train=0.8, val=0.1,test=0.1")
    assert shares == {"train": 0.8, "val": 0.1, "test": 0.1}
    counts = Counter(choose_split(f"cat/{n}.jpg", shares) for n in range(2000))
    assert 1500 < counts["train"] < 1700
    assert choose_split("cat/7.jpg", shares) == choose_split("cat/7.jpg", {"train": 8, "val": 1, "test": 1})
