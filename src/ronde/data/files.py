"""Folders with data, on this machine or on any file system that fsspec knows, and a cache of what is far away.

A name is a path below its folder, with slashes. Names come from archives, object stores and index files, so each goes
through safe_name() before it becomes a path. Every failure is a DataError with the whole path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import platform
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ronde.errors import DataError
from ronde.text import shorten

UNFINISHED_PREFIX = ".unfinished-"
"""How the name of a file begins that is still being written."""
MAX_OPEN_FILES = 128
MAX_NAME_CHARS = 1024


def safe_name(name: str) -> str:
    """Return the name if it is that of a file below a folder: relative, without `..`, and without what some system
    takes for more than a name. DataError otherwise."""
    parts = name.split("/")
    bad = (
        not name
        or len(name) > MAX_NAME_CHARS
        or any(part in ("", ".", "..") for part in parts)
        or any(char in "\\:\0" or not char.isprintable() for char in name)
    )
    if bad:
        raise DataError(
            f"the name {shorten(name)!r} is refused: a file of a data set is named by a relative path without `..`, "
            "backslashes, colons and control characters"
        )
    return name


class FileInfo(NamedTuple):
    """A file in a folder."""

    name: str
    num_bytes: int
    version: str
    """Changes when the file does: its time, or the ETag of an object."""


class ByteRange(Protocol):
    """Bytes of a file, at hand: in memory or in a file of this machine."""

    num_bytes: int

    def read(self, start: int, num_bytes: int) -> bytes:
        """So many bytes from `start` on; fewer behind the end."""


class MemoryRange:
    """A range that is held in memory."""

    def __init__(self, data: bytes) -> None:
        self.num_bytes = len(data)
        self._data = data

    def read(self, start: int, num_bytes: int) -> bytes:
        return self._data[start : start + num_bytes]


class OpenFile:
    """A descriptor that is closed when nobody uses it any more: neither the folder's table nor a reading thread."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, start: int, num_bytes: int) -> bytes:
        return os.pread(self._descriptor, num_bytes, start)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class FileRange:
    """A range of a file of this machine, read when it is needed."""

    def __init__(self, file: OpenFile, start: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._file = file
        self._start = start

    def read(self, start: int, num_bytes: int) -> bytes:
        return self._file.read(self._start + start, max(0, min(num_bytes, self.num_bytes - start)))


class DataFolder(Protocol):
    """A folder, or one file as a folder that holds only this file."""

    url: str
    is_local: bool

    def list_files(self) -> list[FileInfo]:
        """All files below the folder, by name, without hidden and unfinished ones."""

    def open_range(self, name: str, start: int, num_bytes: int) -> ByteRange:
        """A range of a file. What is far away is fetched now, as one."""

    def write(self, name: str, data: bytes | Path) -> None:
        """Create a file, from bytes or a file of this machine. It appears under its name when it is complete."""

    def remove(self, name: str) -> None: ...


def open_folder(path: str | os.PathLike[str]) -> DataFolder:
    """The folder at a path such as data/train, /data/train.csv, s3://bucket/train or memory://train."""
    text = os.fspath(path)
    scheme, found, rest = text.partition("://")
    if found and scheme not in ("file", "local"):
        return RemoteFolder(text)
    return LocalFolder(Path(rest if found else text))


def read_file(folder: DataFolder, name: str, *, limit_bytes: int) -> bytes:
    """The whole of a small file. DataError if it is larger than the limit."""
    data = folder.open_range(name, 0, limit_bytes + 1).read(0, limit_bytes + 1)
    if len(data) > limit_bytes:
        raise DataError(f"{folder.url}/{name} is larger than {limit_bytes} bytes")
    return data


class LocalFolder:
    """A folder of this machine, or one that is mounted."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self._only = path.name if path.is_file() else None
        self.root = (path.parent if self._only else path).absolute()
        self.url = str(self.root)
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "url": self.url, "_only": self._only}  # another process opens files itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _open=OrderedDict(), _lock=threading.Lock())

    def path_of(self, name: str) -> Path:
        """The path of a file. DataError if a link on its way leads out of the folder."""
        path = self.root / safe_name(name)
        if not path.parent.resolve().is_relative_to(self.root.resolve()):
            raise DataError(f"{path} is refused: a link on its way leads out of {self.root}")
        return path

    def identity(self) -> str:
        """Equal for ranks that see the same folder of the same machine."""
        state = self.root.stat()
        return f"{platform.node()}:{state.st_dev}:{state.st_ino}:{self._only or ''}"

    def list_files(self) -> list[FileInfo]:
        if self._only:
            return [_local_info(self._only, (self.root / self._only).stat())]
        if not self.root.is_dir():
            raise DataError(f"there is no folder or file {self.root}")
        found = []
        for directory, directories, names in os.walk(self.root):
            directories[:] = sorted(name for name in directories if not name.startswith("."))
            for name in sorted(names):
                if not name.startswith("."):
                    path = Path(directory, name)
                    found.append(_local_info(path.relative_to(self.root).as_posix(), path.stat()))
        return sorted(found)

    def open_range(self, name: str, start: int, num_bytes: int) -> FileRange:
        with self._lock:
            file = self._open.pop(name, None)
            if file is None:
                try:
                    file = OpenFile(str(self.root / safe_name(name)))
                except OSError as error:
                    raise DataError(f"cannot read {self.root / name}: {error.strerror}") from None
            self._open[name] = file
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)
        return FileRange(file, start, num_bytes)

    def write(self, name: str, data: bytes | Path) -> None:
        path = self.path_of(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path = self.path_of(name)  # its parents are there now
            with write_aside(path) as file:
                if isinstance(data, bytes):
                    file.write(data)
                else:
                    with data.open("rb") as source:
                        while chunk := source.read(1 << 20):
                            file.write(chunk)
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}") from None

    def remove(self, name: str) -> None:
        self.path_of(name).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove what killed processes have left. Nobody may be writing to the folder."""
        for path in self.root.rglob(f"{UNFINISHED_PREFIX}*"):
            path.unlink(missing_ok=True)


def _local_info(name: str, state: os.stat_result) -> FileInfo:
    return FileInfo(name, state.st_size, str(state.st_mtime_ns))


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[io.BufferedWriter]:
    """A context with a file that appears under its path, flushed to disk, when the context ends without an error."""
    descriptor, aside = tempfile.mkstemp(prefix=f"{UNFINISHED_PREFIX}{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
            os.fchmod(file.fileno(), 0o644)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)  # noqa: PTH105  # a text
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)  # noqa: PTH108
        raise


class RemoteFolder:
    """A folder of fsspec. An object appears when it is complete: object stores do it so, and elsewhere the index, which
    comes last, has checksums."""

    is_local = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._connect()

    def _connect(self) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it ships no types
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{self.url} needs fsspec: pip install ronde[data]") from error
        with self._as_data_error("open"):
            self._fs, folder = url_to_fs(self.url)
        self._root = folder.rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}  # another process makes its own connections

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.url = state["url"]
        self._connect()

    @contextlib.contextmanager
    def _as_data_error(self, verb: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except (DataError, ModuleNotFoundError):
            raise
        except Exception as error:  # fsspec raises errors of any class
            what = f"{self.url}/{name}".rstrip("/")
            raise DataError(f"cannot {verb} {what}: {type(error).__name__}: {shorten(str(error))}") from error

    def list_files(self) -> list[FileInfo]:
        with self._as_data_error("list"):
            self._fs.invalidate_cache()  # other processes may have changed the folder
            found = self._fs.find(self._root, detail=True)
        if not found:
            raise DataError(f"there is nothing at {self.url}")
        infos = []
        for path, facts in found.items():
            name = str(path).strip("/").removeprefix(self._root.strip("/")).lstrip("/") or self._root.rpartition("/")[2]
            if not any(part.startswith(".") and part != ".." for part in name.split("/")):
                version = (
                    facts.get("ETag") or facts.get("etag") or facts.get("mtime") or facts.get("LastModified") or ""
                )
                infos.append(FileInfo(safe_name(name), int(facts.get("size") or 0), str(version)))
        return sorted(infos)

    def _path_of(self, name: str) -> str:
        is_itself = name == self._root.rpartition("/")[2] and self._fs.isfile(self._root)
        return self._root if is_itself else f"{self._root}/{safe_name(name)}"

    def open_range(self, name: str, start: int, num_bytes: int) -> MemoryRange:
        with self._as_data_error("read", name):
            return MemoryRange(bytes(self._fs.cat_file(self._path_of(name), start=start, end=start + num_bytes)))

    def write(self, name: str, data: bytes | Path) -> None:
        path = f"{self._root}/{safe_name(name)}"
        with self._as_data_error("write", name):
            if isinstance(data, bytes):
                self._fs.pipe_file(path, data)
            else:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(data), path)

    def remove(self, name: str) -> None:
        with self._as_data_error("remove", name):
            if self._fs.exists(self._path_of(name)):
                self._fs.rm_file(self._path_of(name))


class CachedFolder:
    """A remote folder whose ranges are kept in files of this machine, at most so many bytes: those that were not used
    for longest go first. Processes of one machine share the cache."""

    is_local = True

    def __init__(self, folder: DataFolder, directory: Path, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"a cache needs room for at least one byte, got {limit_bytes}")
        self.url = folder.url
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._directory = directory.absolute()
        self._versions = {info.name: info.version for info in folder.list_files()}

    def list_files(self) -> list[FileInfo]:
        return self._folder.list_files()

    def write(self, name: str, data: bytes | Path) -> None:
        self._folder.write(name, data)

    def remove(self, name: str) -> None:
        self._folder.remove(name)

    def open_range(self, name: str, start: int, num_bytes: int) -> ByteRange:
        identity = f"{self.url}\0{name}\0{self._versions.get(name, '')}\0{start}\0{num_bytes}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        path = self._directory / digest[:2] / digest
        found = self._find(path)
        if found is not None:
            return found
        with self._lock(digest[:2]):
            found = self._find(path)
            if found is not None:  # another process has fetched it meanwhile
                return found
            fetched = self._folder.open_range(name, start, num_bytes)
            data = fetched.read(0, num_bytes)
            if len(data) > self._limit_bytes:
                return fetched
            path.parent.mkdir(exist_ok=True)
            with write_aside(path) as file:
                file.write(data)
        self._make_room()
        return self._find(path) or fetched

    def _find(self, path: Path) -> FileRange | None:
        try:
            file = OpenFile(str(path))
            os.utime(path)
            return FileRange(file, 0, path.stat().st_size)
        except FileNotFoundError:  # never there, or removed since: who has it open reads on
            return None

    @contextlib.contextmanager
    def _lock(self, part: str) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f".lock-{part}").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also if the process is killed
            yield

    def _make_room(self) -> None:
        with self._lock("all"):
            kept = []
            for path in self._directory.glob("??/*"):
                with contextlib.suppress(FileNotFoundError):
                    state = path.stat()
                    kept.append((state.st_mtime_ns, state.st_size, path))
            total = sum(size for _, size, _ in kept)
            for _, size, path in sorted(kept):
                if total <= self._limit_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= size


class RangeFile(io.RawIOBase):
    """A file object over a range, for libraries that want one. It can be read and sought."""

    def __init__(self, source: ByteRange) -> None:
        super().__init__()
        self._source = source
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._source.num_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class WholeFile:
    """A whole file as a range, of which parts are fetched when they are read: for scans, through a buffer."""

    def __init__(self, folder: DataFolder, info: FileInfo) -> None:
        self.num_bytes = info.num_bytes
        self._folder = folder
        self._name = info.name

    def read(self, start: int, num_bytes: int) -> bytes:
        num_bytes = max(0, min(num_bytes, self.num_bytes - start))
        return self._folder.open_range(self._name, start, num_bytes).read(0, num_bytes) if num_bytes else b""


def scan_file(folder: DataFolder, info: FileInfo) -> io.BufferedReader:
    """A file object for one pass over a file."""
    return io.BufferedReader(RangeFile(WholeFile(folder, info)), 1 << 16 if folder.is_local else 1 << 22)
