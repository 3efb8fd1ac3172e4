"""Checkpoints survive crashes at every moment, on a disk and on file systems of fsspec."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from ronde.errors import CheckpointError
from ronde.training.checkpoints import (
    UNFINISHED_PREFIX,
    CheckpointId,
    CheckpointStorage,
    FsspecStorage,
    LocalStorage,
    clear,
    list_checkpoints,
    open_latest,
    open_storage,
    save,
)


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStorage]:
    yield open_storage(tmp_path / "runs" / "7" if request.param == "folder" else "memory://runs/7/")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def put(store: CheckpointStorage, step: int, text: str = "", keep: int = 3) -> str:
    return save(store, step, lambda path: path.write_text(text or f"contents of {step}"), keep=keep)


def found(store: CheckpointStorage, step: int | None = None) -> tuple[int, str] | None:
    with open_latest(store, step) as newest:
        return None if newest is None else (newest.step, newest.local_path.read_text())


def steps(store: CheckpointStorage) -> list[int]:
    return [label.step for label in list_checkpoints(store.names())]


def spoil(store: CheckpointStorage, name: str, text: str) -> None:
    store.write(name, lambda path: path.write_text(text))


def test_the_latest_is_found_and_the_last_few_are_kept(store: CheckpointStorage) -> None:
    assert found(store) is None
    for step in (5, 10, 15, 20):
        assert put(store, step) == store.path_of(CheckpointId(step).data_file)
    assert steps(store) == [10, 15, 20]
    assert len(store.names()) == 6
    assert found(store) == (20, "contents of 20")
    assert found(store, 10) == (10, "contents of 10")


def test_saving_a_step_again_replaces_it(store: CheckpointStorage) -> None:
    for text in ("first", "second", "third"):
        put(store, 5, text)
        assert found(store) == (5, text)
    assert len(store.names()) == 2


class Killed(BaseException):
    """What nothing survives."""


def die_at_change(store: CheckpointStorage, num_changes: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die in the middle of the so-many-th change of the storage."""
    write, remove, changes = store.write, store.remove, itertools.count(1)

    def write_or_die(name: str, fill: Callable[[Path], object]) -> None:
        dies = next(changes) == num_changes

        def fill_half(path: Path) -> None:  # not every file system hides what it does not have whole
            fill(path)
            if dies:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

        write(name, fill_half)
        if dies:
            raise Killed

    def remove_or_die(name: str) -> None:
        if next(changes) == num_changes:
            raise Killed
        remove(name)

    patch.setattr(store, "write", write_or_die)
    patch.setattr(store, "remove", remove_or_die)


@pytest.mark.parametrize("num_changes", [1, 2, 3, 4])
def test_a_death_at_any_moment_of_saving_a_step_again_leaves_the_old_or_the_new(
    store: CheckpointStorage, num_changes: int
) -> None:
    put(store, 5, "old", keep=1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        die_at_change(store, num_changes, patch)
        put(store, 5, "new", keep=1)
    assert found(store) == (5, "old" if num_changes <= 2 else "new")
    put(store, 5, "newer", keep=1)
    assert found(store) == (5, "newer")
    assert len(store.names()) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CheckpointId(10).data_file, "contents", "is damaged: 8 bytes"),
        (CheckpointId(10).data_file, "contents of 99", "is damaged: 14 bytes"),
        (CheckpointId(10).manifest_file, '{"step": 10', "cannot read"),
        (CheckpointId(10).manifest_file, '{"step":10,"num_bytes":1,"crc32":2,"format":99}', "has format 99"),
    ],
    ids=["short", "changed", "torn manifest", "of another version"],
)
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture, name: str, text: str, message: str
) -> None:
    put(store, 5)
    put(store, 10)
    spoil(store, name, text)
    with caplog.at_level(logging.WARNING):
        assert found(store) == (5, "contents of 5")
    assert message in caplog.text and store.path_of(CheckpointId(10).data_file) in caplog.text
    with pytest.raises(CheckpointError, match="step-000000000010"):
        found(store, 10)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7 in .*; those there: 5, 10"):
        found(store, 7)


def test_a_crash_while_writing_leaves_the_one_before(store: CheckpointStorage) -> None:
    put(store, 5)

    def crash(path: Path) -> None:
        path.write_text("half of the con")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(store, 10, crash, keep=3)
    assert found(store) == (5, "contents of 5")
    assert len(store.names()) == 2


@pytest.mark.parametrize(
    "left", [f"{UNFINISHED_PREFIX}{CheckpointId(10).data_file}", CheckpointId(10).data_file, CheckpointId(30).data_file]
)
def test_what_a_killed_writer_left_does_not_count_and_is_removed_by_the_next(
    store: CheckpointStorage, left: str
) -> None:
    put(store, 5)
    spoil(store, left, "half of the con")
    assert found(store) == (5, "contents of 5")
    put(store, 20)
    assert left not in store.names()
    assert found(store) == (20, "contents of 20")


def test_a_new_run_in_an_old_folder_removes_nothing_later_and_says_so(
    store: CheckpointStorage, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 900)
    for step in (1, 2, 3):
        put(store, step, keep=2)
    assert steps(store) == [2, 3, 900]
    assert "a restart takes step 900" in caplog.text


def test_files_of_others_are_left_alone(store: CheckpointStorage) -> None:
    spoil(store, "notes.txt", "mine")
    put(store, 5, keep=1)
    put(store, 6, keep=1)
    assert store.names() == ["notes.txt", CheckpointId(6).data_file, CheckpointId(6).manifest_file]
    spoil(store, f"{UNFINISHED_PREFIX}{CheckpointId(7, 2).data_file}", "half of the con")
    clear(store)
    assert store.names() == ["notes.txt"] and found(store) is None


def test_a_path_that_cannot_be_written_and_a_wrong_step_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_storage(tmp_path / "file" / "run")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*/file/run/step-000000000001.data"):
        put(store, 1)
    with pytest.raises(ValueError, match="step must be"):
        put(store, -1)


def test_a_file_system_may_raise_what_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_storage("memory://denied")

    class Denied:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"{name} is denied")

    monkeypatch.setattr(store, "_fs", Denied())
    with pytest.raises(CheckpointError, match=r"cannot write .*memory://denied/step-0.*RuntimeError: \w+ is denied"):
        put(store, 1)
    with pytest.raises(CheckpointError, match=r"cannot read .*memory://denied.*RuntimeError: \w+ is denied"):
        found(store)
    with pytest.raises(CheckpointError, match=r"cannot remove .*memory://denied.*RuntimeError: \w+ is denied"):
        clear(store)


def test_an_old_one_that_cannot_be_removed_stops_nobody(
    store: CheckpointStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 1, keep=1)

    def refuse(name: str) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(store, "remove", refuse)
    put(store, 2, keep=1)
    assert found(store) == (2, "contents of 2")


def test_paths_of_this_machine_need_no_fsspec() -> None:
    assert isinstance(open_storage("runs"), LocalStorage)
    assert isinstance(open_storage("file:///runs"), LocalStorage)
    assert isinstance(open_storage("memory://runs"), FsspecStorage)
