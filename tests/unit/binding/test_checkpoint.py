"""Checkpoints survive crashes at every moment, on a disk and on file systems of fsspec."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ronde.binding import checkpoint
from ronde.binding.checkpoint import data_name, latest, manifest_name, opened, save, saved_steps, superfluous
from ronde.binding.store import UNFINISHED, FolderStore, RemoteStore, Store, open_store
from ronde.errors import CheckpointError


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "folder":
        yield open_store(tmp_path / "runs" / "7")
        return
    from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

    yield open_store(f"memory://{uuid.uuid4().hex}/runs/")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def put(store: Store, step: int, text: str = "", keep: int = 3) -> str:
    return save(store, step, lambda path: _write(path, text or f"contents of {step}"), keep=keep)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def found(store: Store) -> tuple[int, str] | None:
    with latest(store) as newest:
        return None if newest is None else (newest[0], newest[1].read_text())


def spoil(store: Store, name: str, text: str) -> None:
    store.write(name, lambda path: _write(path, text))


def test_the_latest_is_found_and_the_last_few_are_kept(store: Store) -> None:
    assert found(store) is None
    for step in (5, 10, 15, 20):
        assert put(store, step) == store.place(data_name(step))
    assert saved_steps(store.names()) == [10, 15, 20]
    assert len(store.names()) == 6
    assert found(store) == (20, "contents of 20")
    with opened(store, 10) as path:
        assert path.read_text() == "contents of 10"


def test_saving_a_step_again_replaces_it(store: Store) -> None:
    put(store, 5, "old")
    put(store, 5, "new")
    assert found(store) == (5, "new")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (data_name(10), "contents", "is damaged: 8 bytes"),
        (data_name(10), "contents of 99", "is damaged: 14 bytes"),
        (manifest_name(10), '{"step": 10', "cannot read"),
        (manifest_name(10), '{"step":10,"num_bytes":1,"crc32":2,"format":99}', "has format 99"),
    ],
    ids=["short", "changed", "torn manifest", "of another version"],
)
def test_a_damaged_one_is_passed_over_with_a_warning_that_names_it(
    store: Store, caplog: pytest.LogCaptureFixture, name: str, text: str, message: str
) -> None:
    put(store, 5)
    put(store, 10)
    spoil(store, name, text)
    with caplog.at_level(logging.WARNING):
        assert found(store) == (5, "contents of 5")
    assert message in caplog.text and store.place(data_name(10)) in caplog.text
    with pytest.raises(CheckpointError, match="step-000000000010"), opened(store, 10):
        pass


def test_data_that_are_gone_count_as_damage(store: Store) -> None:
    put(store, 5)
    store.remove(data_name(5))
    with pytest.raises(CheckpointError, match=r"no checkpoint can be used: cannot read .*step-000000000005"):
        found(store)


def test_a_crash_while_writing_leaves_the_one_before(store: Store) -> None:
    put(store, 5)

    def crash(path: Path) -> None:
        path.write_text("half of the con")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(store, 10, crash, keep=3)
    assert found(store) == (5, "contents of 5")
    assert len(store.names()) == 2


@pytest.mark.parametrize("left", [f"{UNFINISHED}{data_name(10)}", data_name(10), data_name(30)])
def test_what_a_killed_writer_left_does_not_count_and_is_removed_by_the_next(store: Store, left: str) -> None:
    put(store, 5)
    spoil(store, left, "half of the con")
    assert found(store) == (5, "contents of 5")
    put(store, 20)
    assert left not in store.names()
    assert found(store) == (20, "contents of 20")


def test_a_new_run_in_an_old_folder_removes_nothing_later_and_says_so(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 900)
    for step in (1, 2, 3):
        put(store, step, keep=2)
    assert saved_steps(store.names()) == [2, 3, 900]
    assert "a restart takes step 900" in caplog.text


def test_manifests_are_removed_before_their_data() -> None:
    names = [name for step in (1, 2) for name in (data_name(step), manifest_name(step))]
    assert superfluous([*names, "notes.txt"], keep=1, newest=2) == [manifest_name(1), data_name(1)]


def test_files_of_others_are_left_alone(store: Store) -> None:
    spoil(store, "notes.txt", "mine")
    put(store, 5, keep=1)
    put(store, 6, keep=1)
    assert store.names() == ["notes.txt", data_name(6), manifest_name(6)]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*/file/run/step-000000000001.data"):
        put(open_store(tmp_path / "file" / "run"), 1)


def test_an_old_one_that_cannot_be_removed_stops_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1, keep=1)

    def refuse(names: list[str], keep: int, newest: int) -> list[str]:
        raise PermissionError("read-only")

    monkeypatch.setattr(checkpoint, "superfluous", refuse)
    put(store, 2, keep=1)
    assert found(store) == (2, "contents of 2")


def test_a_wrong_step_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="step must be"):
        put(store, -1)


def test_paths_of_this_machine_need_no_fsspec() -> None:
    assert isinstance(open_store("runs"), FolderStore)
    assert isinstance(open_store("file:///runs"), FolderStore)
    assert isinstance(open_store("memory://runs"), RemoteStore)
