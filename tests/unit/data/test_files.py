"""Folders: names stay inside of them, files appear whole, and the cache keeps its limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import pytest

from ronde.data import files
from ronde.data.files import CachedFolder, LocalFolder, RemoteFolder, open_folder, read_file, safe_name, write_aside
from ronde.errors import DataError
from tests.unit.data.made_data import CountingFolder

BAD_NAMES = [
    "",
    "..",
    "../x",
    "a/../x",
    "/etc/passwd",
    "a//b",
    "./a",
    "a/",
    "C:\\x",
    "a\\b",
    "a\0b",
    "a\nb",
    "x" * 2000,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is refused"):
        safe_name(name)
    with pytest.raises(DataError, match="is refused"):
        LocalFolder(tmp_path / "data").write(name, b"x")
    assert list(tmp_path.iterdir()) == []


def test_ordinary_names_are_accepted() -> None:
    names = ["a", "a/b.c", "..a", "é/ü", "a b", "2026-01-01T10:00:00.jpg"]
    assert [safe_name(name) for name in names] == names


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    for name in ("x" * 255, "日" * 85):
        LocalFolder(tmp_path).write(name, b"whole")
        assert (tmp_path / name).read_bytes() == b"whole"


def test_nothing_is_written_through_a_link_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    with pytest.raises(DataError, match="leads out of"):
        LocalFolder(inside).write("link/x", b"x")
    assert list(outside.iterdir()) == []


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.write("a/b", b"first")
    with pytest.raises(RuntimeError, match="crash"), write_aside(tmp_path / "a/b") as file:
        file.write(b"half")
        raise RuntimeError("crash")
    assert (tmp_path / "a/b").read_bytes() == b"first"
    (tmp_path / "a/.unfinished-c").write_bytes(b"left by a killed process")
    assert [(info.name, info.num_bytes) for info in folder.list_files()] == [("a/b", 5)]


def test_what_another_process_is_writing_is_not_removed_as_unfinished(tmp_path: Path) -> None:
    (tmp_path / f"{files.UNFINISHED_PREFIX}left.by.a.killed.process").write_bytes(b"ha")
    with write_aside(tmp_path / "file") as file:
        file.write(b"whole")
        LocalFolder(tmp_path).remove_unfinished()
        assert len(list(tmp_path.iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_single_file_is_a_folder_with_this_file(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"abc")
    (tmp_path / "y.csv").write_bytes(b"def")
    assert [info.name for info in open_folder(tmp_path / "x.csv").list_files()] == ["x.csv"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"there is no folder or file {tmp_path}/none"):
        open_folder(tmp_path / "none").list_files()
    with pytest.raises(DataError, match=r"cannot read .*/x: No such file"):
        open_folder(tmp_path).open_range("x", 0, 1)


def test_a_remote_folder_has_the_same_calls() -> None:
    folder = open_folder("memory://files-test/data")
    assert isinstance(folder, RemoteFolder)
    folder.write("a/b", b"0123456789")
    try:
        assert [(info.name, info.num_bytes) for info in folder.list_files()] == [("a/b", 10)]
        assert folder.open_range("a/b", 2, 3).read(0, 99) == b"234"
        assert read_file(folder, "a/b", limit_bytes=10) == b"0123456789"
        with pytest.raises(DataError, match="larger than 9 bytes"):
            read_file(folder, "a/b", limit_bytes=9)
        with pytest.raises(DataError, match="is refused"):
            folder.write("../b", b"x")
    finally:
        folder.remove("a/b")
    with pytest.raises(DataError, match="there is nothing at memory://files-test/data"):
        folder.list_files()


def cache_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("??/*"))


def test_the_cache_fetches_a_range_once_and_keeps_its_limit(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(bytes(range(100)))
    far = CountingFolder(tmp_path / "data", is_far=True)
    folder = CachedFolder(far, tmp_path / "cache", 45)  # of three ranges, with their checksums
    for _ in range(3):
        assert folder.open_range("x", 10, 10).read(2, 3) == bytes([12, 13, 14])
    assert far.num_bytes == 10
    kept = folder.open_range("x", 0, 10)
    for start in range(20, 100, 10):
        assert folder.open_range("x", start, 10).read(0, 10) == bytes(range(start, start + 10))
        assert 20 < cache_size(tmp_path / "cache") <= 45
    assert kept.read(0, 10) == bytes(range(10))  # removed from the cache, and still read to its end
    assert far.num_bytes == 100
    assert folder.open_range("x", 0, 50).read(0, 50) == bytes(range(50))  # does not fit
    assert cache_size(tmp_path / "cache") <= 45


def test_what_is_damaged_in_the_cache_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(bytes(range(100)))
    far = CountingFolder(tmp_path / "data", is_far=True)
    folder = CachedFolder(far, tmp_path / "cache", 1000)
    folder.open_range("x", 0, 50)
    (kept,) = (tmp_path / "cache").glob("??/*")
    whole = kept.read_bytes()
    for damaged in (b"", whole[:3], whole[:-1], whole + b"\0", b"\1" + whole[1:], whole[:-1] + b"\0"):
        kept.write_bytes(damaged)
        caplog.clear()
        assert folder.open_range("x", 0, 50).read(0, 99) == bytes(range(50))
        assert f"{kept} in the cache is damaged" in caplog.text
        assert kept.read_bytes() == whole
    assert folder.open_range("x", 0, 50).read(0, 99) == bytes(range(50))
    assert far.num_bytes == 7 * 50


def test_data_are_read_without_the_cache_when_its_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(bytes(range(100)))
    (tmp_path / "file").touch()
    far = CountingFolder(tmp_path / "data", is_far=True)
    assert CachedFolder(far, tmp_path / "file/cache", 1000).open_range("x", 0, 9).read(0, 9) == bytes(range(9))

    def write_nothing(path: Path, *, sync: bool) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = CachedFolder(far, tmp_path / "cache", 1000)
    monkeypatch.setattr(files, "write_aside", write_nothing)
    caplog.clear()
    for start in (0, 10, 20):
        assert folder.open_range("x", start, 10).read(0, 10) == bytes(range(start, start + 10))
    assert caplog.text.count("No space left on device") == 1


def test_data_are_read_without_the_cache_while_a_stopped_process_has_it_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(bytes(range(100)))
    far = CountingFolder(tmp_path / "data", is_far=True)
    folder = CachedFolder(far, tmp_path / "cache", 1000)
    folder.open_range("x", 0, 10)
    monkeypatch.setattr(files, "CACHE_LOCK_S", 0.01)
    with contextlib.ExitStack() as locked:
        for path in (tmp_path / "cache").glob(".lock-*"):
            file = locked.enter_context(path.open())
            fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(2):
            assert folder.open_range("x", 0, 10).read(0, 10) == bytes(range(10))
            assert folder.open_range("x", 50, 10).read(0, 10) == bytes(range(50, 60))
        assert caplog.text.count("another process has locked") == 1
    assert folder.open_range("x", 70, 10).read(0, 10) == bytes(range(70, 80))


def test_folders_behind_links_belong_to_the_data_and_circles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/1.jpg").write_bytes(b"x")
    (tmp_path / "data/ant").mkdir(parents=True)
    (tmp_path / "data/ant/2.jpg").write_bytes(b"x")
    (tmp_path / "data/cat").symlink_to(tmp_path / "elsewhere")
    assert [info.name for info in LocalFolder(tmp_path / "data").list_files()] == ["ant/2.jpg", "cat/1.jpg"]
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    with pytest.raises(DataError, match="is a link to a folder that it is in"):
        LocalFolder(tmp_path / "data").list_files()
    (tmp_path / "elsewhere/back").unlink()
    (tmp_path / "data/3.jpg").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"cannot list .*3.jpg: No such file"):
        LocalFolder(tmp_path / "data").list_files()


def test_the_cache_does_not_give_a_former_version_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_bytes(b"old")
    far = CountingFolder(tmp_path / "data", is_far=True)
    assert CachedFolder(far, tmp_path / "cache", 99).open_range("x", 0, 3).read(0, 3) == b"old"
    (tmp_path / "data/y").write_bytes(b"new")
    (tmp_path / "data/y").replace(tmp_path / "data/x")
    far = CountingFolder(tmp_path / "data", is_far=True)
    assert CachedFolder(far, tmp_path / "cache", 99).open_range("x", 0, 3).read(0, 3) == b"new"
