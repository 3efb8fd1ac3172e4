"""Folders with data, on this machine or on any file system that fsspec knows, and a cache of what is far away.

A name is a path below its folder, with slashes. Names come from archives, object stores and index files, so each goes
through safe_name() before it becomes a path. Every failure is a DataError with the whole path.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import platform
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ronde.data.checksums import crc32
from ronde.errors import DataError
from ronde.text import shorten
from ronde.types import Deadline

logger = logging.getLogger("ronde.data")

UNFINISHED_PREFIX = ".unfinished-"
"""How the name of a file begins that is still being written."""
MAX_OPEN_FILES = 128
MAX_NAME_CHARS = 1024
FIRST_LOCK_POLL_S, LAST_LOCK_POLL_S = 0.001, 0.05
CACHE_LOCK_S = 60.0
"""How long a process waits for another one that fetches into the cache, and may be stopped. Then it fetches itself."""
CRC_BYTES = 4
"""At the end of a file in the cache: the CRC-32 of all before."""
CRC_CHUNK_BYTES = 1 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ROOM_SHARE = 0.9
"""A full cache is emptied to this share of its limit, so that it is searched for old files only now and then."""


class DiskFull(DataError):
    """There is no room left for a file of this machine: trying again is of no use."""


def safe_name(name: str) -> str:
    """Return the name if it is that of a file below a folder: relative, without `..`, and without what some system
    takes for more than a name. DataError otherwise."""
    parts = name.split("/")
    bad = (
        not name
        or len(name) > MAX_NAME_CHARS
        or any(part in ("", ".", "..") for part in parts)
        or any(char == "\\" or not char.isprintable() for char in name)
    )
    if bad:
        raise DataError(
            f"the name {shorten(name)!r} is refused: a file of a data set is named by a relative path without `..`, "
            "backslashes and control characters"
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
        if num_bytes > self.num_bytes - start:
            num_bytes = max(0, self.num_bytes - start)
        return self._file.read(self._start + start, num_bytes)


class PartialRange:
    """A range of a file that is far away, of which only parts are fetched and kept. What is read besides is fetched
    when it is read."""

    def __init__(self, folder: DataFolder, name: str, start: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._folder = folder
        self._name = name
        self._start = start
        self._parts: list[tuple[int, bytes]] = []
        """Offset and contents, by offset."""

    def fetch(self, parts: Sequence[tuple[int, int]]) -> None:
        """Fetch and keep parts, given as offset and number of bytes."""
        ranges = [(self._start + offset, num_bytes) for offset, num_bytes in parts]
        fetched = self._folder.read_ranges(self._name, ranges)
        self._parts += [(offset, data) for (offset, _), data in zip(parts, fetched, strict=True)]
        self._parts.sort(key=_offset_of)

    def read(self, start: int, num_bytes: int) -> bytes:
        num_bytes = max(0, min(num_bytes, self.num_bytes - start))
        if not num_bytes:
            return b""
        index = bisect.bisect_right(self._parts, start, key=_offset_of) - 1
        if index >= 0:
            offset, data = self._parts[index]
            if start + num_bytes <= offset + len(data):
                return data[start - offset : start - offset + num_bytes]
        return self._folder.open_range(self._name, self._start + start, num_bytes).read(0, num_bytes)


def _offset_of(part: tuple[int, bytes]) -> int:
    return part[0]


class DataFolder(Protocol):
    """A folder, or one file as a folder that holds only this file."""

    url: str
    is_local: bool

    def where(self, name: str) -> str:
        """The whole path of a file, for messages."""

    def list_files(self) -> list[FileInfo]:
        """All files below the folder, by name, without hidden and unfinished ones."""

    def open_range(self, name: str, start: int, num_bytes: int) -> ByteRange:
        """A range of a file. What is far away is fetched now, as one."""

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Ranges of a file, given as start and number of bytes. What is far away is fetched by one request for each,
        several at a time."""

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
        raise DataError(f"{folder.where(name)} is larger than {limit_bytes} bytes")
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

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def identity(self) -> str:
        """Equal for ranks that see the same folder of the same machine."""
        state = self.root.stat()
        return f"{platform.node()}:{state.st_dev}:{state.st_ino}:{self._only or ''}"

    def list_files(self) -> list[FileInfo]:
        if self._only:
            return [_local_info(self._only, (self.root / self._only).stat())]
        if not self.root.is_dir():
            raise DataError(f"there is no folder or file {self.root}")
        try:
            return sorted(_list_below(self.url, "", frozenset()))
        except OSError as error:  # nothing is left out in silence
            raise DataError(f"cannot list {error.filename or self.root}: {error.strerror}") from None

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

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.open_range(name, start, num_bytes).read(0, num_bytes) for start, num_bytes in ranges]

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
        """Remove what killed processes have left. What others are writing stays: they have it locked."""
        for path in self.root.rglob(f"{UNFINISHED_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                with contextlib.suppress(OSError):  # not all file systems have locks
                    if not wait_for_lock(file.fileno(), 0.0):
                        continue
                path.unlink()


def _list_below(directory: str, prefix: str, above: frozenset[str]) -> Iterator[FileInfo]:
    """The files of a folder and of those in it, also through links; `above` are the folders that it is in."""
    real = os.path.realpath(directory)
    if real in above:
        raise DataError(f"{directory} is a link to a folder that it is in; remove it")
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from _list_below(entry.path, f"{prefix}{entry.name}/", above | {real})
            else:
                yield _local_info(prefix + entry.name, entry.stat())


def _local_info(name: str, state: os.stat_result) -> FileInfo:
    return FileInfo(name, state.st_size, str(state.st_mtime_ns))


def wait_for_lock(descriptor: int, timeout_s: float) -> bool:
    """Take an exclusive lock on an open file or folder, and return whether that was possible in so many seconds. The
    kernel releases it when the file is closed, also if the process is killed."""
    deadline, poll_s = Deadline(timeout_s), FIRST_LOCK_POLL_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if deadline.expired:
                return False
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LAST_LOCK_POLL_S)


@contextlib.contextmanager
def write_aside(path: Path, *, sync: bool = True) -> Iterator[io.BufferedWriter]:
    """A context with a file that appears under its path, flushed to disk if `sync`, when the context ends without an
    error. DiskFull if there is no room for it."""
    aside = ""
    try:
        # A name has at most 255 bytes, and a character up to four.
        descriptor, aside = tempfile.mkstemp(prefix=f"{UNFINISHED_PREFIX}{path.name[:40]}.", dir=path.parent)
        with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
            with contextlib.suppress(OSError):  # not all file systems have locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see remove_unfinished()
            os.fchmod(file.fileno(), 0o644)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.replace(aside, path)  # noqa: PTH105  # a text
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(aside)  # noqa: PTH108
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise DiskFull(
                f"there is no room for {path.name} in {path.parent.absolute()}: {error.strerror}; make room there "
                "(df -h, df -i), and run the same command again"
            ) from error
        raise


class RemoteFolder:
    """A folder of fsspec. An object appears when it is complete: object stores do it so, and elsewhere the index, which
    comes last, has checksums."""

    is_local = False

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._only: str | None = None
        """The name of the file that the URL is; empty if it is a folder, None while that is not known."""
        self._connect()

    def _connect(self) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it ships no types
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{self.url} needs fsspec: pip install ronde[data]") from error
        with self._as_data_error("open"):
            self._connection, folder = url_to_fs(self.url)
        self._pid = os.getpid()
        self._root = folder.rstrip("/")

    @property
    def _fs(self) -> Any:
        """The file system of fsspec; a forked process, such as a worker of a DataLoader, makes its own connections."""
        if self._pid != os.getpid():
            self._connect()
        return self._connection

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_only": self._only}  # another process makes its own connections

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def where(self, name: str) -> str:
        return self.url if not name or name == self._only else f"{self.url}/{name}"

    @contextlib.contextmanager
    def _as_data_error(self, verb: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except (DataError, ModuleNotFoundError):
            raise
        except Exception as error:  # fsspec raises errors of any class
            raise DataError(
                f"cannot {verb} {self.where(name)}: {type(error).__name__}: {shorten(str(error))}"
            ) from error

    def list_files(self) -> list[FileInfo]:
        with self._as_data_error("list"):
            self._fs.invalidate_cache()  # other processes may have changed the folder
            found = self._fs.find(self._root, detail=True)
        if not found:
            raise DataError(f"there is nothing at {self.url}")
        infos = []
        last = self._root.rpartition("/")[2]
        self._only = last if [str(path).strip("/") for path in found] == [self._root.strip("/")] else ""
        for path, facts in found.items():
            name = str(path).strip("/").removeprefix(self._root.strip("/")).lstrip("/") or last
            if not any(part.startswith(".") and part != ".." for part in name.split("/")):
                version = (
                    facts.get("ETag") or facts.get("etag") or facts.get("mtime") or facts.get("LastModified") or ""
                )
                infos.append(FileInfo(safe_name(name), int(facts.get("size") or 0), str(version)))
        return sorted(infos)

    def _path_of(self, name: str) -> str:
        if self._only is None and name == self._root.rpartition("/")[2]:
            self._only = name if self._fs.isfile(self._root) else ""
        return self._root if name == self._only else f"{self._root}/{safe_name(name)}"

    def open_range(self, name: str, start: int, num_bytes: int) -> MemoryRange:
        with self._as_data_error("read", name):
            return MemoryRange(bytes(self._fs.cat_file(self._path_of(name), start=start, end=start + num_bytes)))

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._as_data_error("read", name):
            starts, ends = [start for start, _ in ranges], [start + num_bytes for start, num_bytes in ranges]
            found = self._fs.cat_ranges([self._path_of(name)] * len(ranges), starts, ends, on_error="return")
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return [bytes(data) for data in found]

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
    for longest go first. Processes of one machine share the cache. What is damaged there is fetched again, and where
    nothing can be written, as on a full disk, ranges are only fetched."""

    is_local = True

    def __init__(self, folder: DataFolder, directory: Path, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise ValueError(f"a cache needs room for at least one byte, got {limit_bytes}")
        self.url = folder.url
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._directory = directory.absolute()
        self._versions = {info.name: info.version for info in folder.list_files()}
        self._has_warned = False

    def where(self, name: str) -> str:
        return self._folder.where(name)

    def list_files(self) -> list[FileInfo]:
        return self._folder.list_files()

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.open_range(name, start, num_bytes).read(0, num_bytes) for start, num_bytes in ranges]

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
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(self._lock(digest[:2]))
                found = self._find(path)
                if found is not None:  # another process has fetched it meanwhile
                    return found
            except OSError as error:
                self._warn(error)
            fetched = self._folder.open_range(name, start, num_bytes)
            data = fetched.read(0, num_bytes)
            if len(data) + CRC_BYTES > self._limit_bytes:
                return fetched
            try:
                path.parent.mkdir(exist_ok=True)
                with write_aside(path, sync=False) as file:  # a checksum tells what a crash has left of it
                    file.write(data)
                    file.write(crc32(data).to_bytes(CRC_BYTES, "little"))
                self._make_room(len(data) + CRC_BYTES)
            except (OSError, DiskFull) as error:
                self._warn(error)
                return fetched
        return self._find(path) or fetched

    def _find(self, path: Path) -> FileRange | None:
        try:
            file = OpenFile(str(path))
        except OSError:  # never there, or removed since: who has it open reads on
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        size, crc, rest = 0, 0, b""
        with contextlib.suppress(OSError):  # a bad disk
            while chunk := file.read(size, CRC_CHUNK_BYTES):
                size += len(chunk)
                rest += chunk
                crc = crc32(rest[:-CRC_BYTES], crc)
                rest = rest[-CRC_BYTES:]
        if len(rest) == CRC_BYTES and int.from_bytes(rest, "little") == crc:
            return FileRange(file, 0, size - CRC_BYTES)
        logger.warning("%s in the cache is damaged; it is fetched again", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            cause = error.__cause__ if isinstance(error, DiskFull) else error
            text = getattr(cause, "strerror", None) or str(error)
            logger.warning(
                "the cache %s cannot be written to: %s; what is not in it is fetched each time", self._directory, text
            )

    @contextlib.contextmanager
    def _lock(self, part: str) -> Iterator[io.BufferedRandom]:
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._directory / f".lock-{part}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with open(descriptor, "r+b") as file:  # noqa: PTH123  # a descriptor
            if not wait_for_lock(file.fileno(), CACHE_LOCK_S):
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process has locked {self._directory} for {CACHE_LOCK_S:g} s"
                )
            yield file

    def _make_room(self, num_new_bytes: int) -> None:
        """Count a new file; remove the oldest ones if there is too much. The lock file has the count."""
        with self._lock("all") as file:
            known = file.read()
            total = int(known) + num_new_bytes if known.isdigit() else self._limit_bytes + 1
            if total > self._limit_bytes:
                total = self._remove_oldest()
            file.seek(0)
            file.truncate()
            file.write(str(total).encode())

    def _remove_oldest(self) -> int:
        """Return how many bytes are left."""
        kept = []
        for path in self._directory.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                state = path.stat()
                kept.append((state.st_mtime_ns, state.st_size, path))
        total = sum(size for _, size, _ in kept)
        wanted = total if total <= self._limit_bytes else int(self._limit_bytes * ROOM_SHARE)
        for _, size, path in sorted(kept):
            if total <= wanted:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total


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
