"""Files under one folder, on this machine or on any file system that fsspec knows. Used by checkpoints.

A file appears under its name only when all of it is there. On this machine it is written under another name, flushed
to the disk, and renamed. Elsewhere it is made here and put there as a whole: object stores show it when they have all
of it; for those that do not, the manifest of a checkpoint, which comes last, holds a sum of its bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

__all__ = ["FolderStore", "RemoteStore", "Store", "open_store"]

UNFINISHED = ".unfinished-"
"""How the name of a file begins that is still being written."""


class Store(Protocol):
    """Files by name. Whatever goes wrong with them is an OSError."""

    def place(self, name: str) -> str:
        """The whole path of a file, for messages."""

    def write(self, name: str, fill: Callable[[Path], None]) -> None:
        """Make a file: fill() writes it at a path of this machine, then it appears under its name."""

    def reading(self, name: str) -> Any:  # a context manager of a Path
        """A context in which the file is at a path of this machine."""

    def names(self) -> list[str]:
        """What there is, unfinished files included."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""


def open_store(path: str | os.PathLike[str]) -> Store:
    """The folder of a path such as runs/7, file:///runs/7, s3://bucket/runs/7 or memory://runs."""
    text = os.fspath(path)
    scheme, found, rest = text.partition("://")
    if not found:
        return FolderStore(Path(text))
    if scheme in ("file", "local"):
        return FolderStore(Path(rest))
    return RemoteStore(text)


class FolderStore:
    """A folder of this machine, or one that is mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def place(self, name: str) -> str:
        """The whole path."""
        return str(self._folder / name)

    def write(self, name: str, fill: Callable[[Path], None]) -> None:
        """Write aside, flush, rename, and flush the folder, so that a crash leaves the old or the new."""
        self._folder.mkdir(parents=True, exist_ok=True)
        aside = self._folder / f"{UNFINISHED}{name}"
        try:
            fill(aside)
            _flush(aside)
            aside.replace(self._folder / name)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        _flush(self._folder)

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """The file where it is."""
        yield self._folder / name

    def names(self) -> list[str]:
        """What there is."""
        return sorted(path.name for path in self._folder.iterdir()) if self._folder.is_dir() else []

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        (self._folder / name).unlink(missing_ok=True)


class RemoteStore:
    """A folder on a file system of fsspec."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it ships no types
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{url} needs fsspec; install ronde[torch], or use a local folder") from error
        self._url = url.rstrip("/")
        self._fs, folder = url_to_fs(url)
        self._folder = folder.rstrip("/")

    def place(self, name: str) -> str:
        """The whole URL."""
        return f"{self._url}/{name}"

    def write(self, name: str, fill: Callable[[Path], None]) -> None:
        """Make it here and put it there."""
        with _told_as_os_error():
            self._fs.makedirs(self._folder, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ronde-") as folder:
            here = Path(folder) / name
            fill(here)
            with _told_as_os_error():
                self._fs.put_file(str(here), self._path(name))

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """A copy here."""
        with tempfile.TemporaryDirectory(prefix="ronde-") as folder:
            here = Path(folder) / name
            with _told_as_os_error():
                self._fs.get_file(self._path(name), str(here))
            yield here

    def names(self) -> list[str]:
        """What there is now: other processes may have changed it since it was last listed."""
        with _told_as_os_error():
            self._fs.invalidate_cache(self._folder)
            if not self._fs.isdir(self._folder):
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._folder, detail=False))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with _told_as_os_error():
            if self._fs.exists(self._path(name)):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


@contextmanager
def _told_as_os_error() -> Iterator[None]:
    """A file system of fsspec raises what the library behind it does: any class of error."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
