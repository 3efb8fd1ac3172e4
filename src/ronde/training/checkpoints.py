"""Checkpoints in a folder, on this machine or on any file system that fsspec knows: each is written whole or not at
all, the last few are kept, and the latest valid one is found. The frameworks' packages know what goes into the file.

A checkpoint of step 1200 is two files: step-000000001200.data, and step-000000001200.json, its manifest with the size
and a CRC of the data. A checkpoint is never written over: a step that is saved again gets the next version
(step-000000001200-1.data and .json), and the version before goes when that is whole. The manifest comes last when one
is written and goes first when one is removed, so at any moment:

    data   manifest   what it is
    no     no         nothing
    part   no         a crash while writing: it does not count, and the next save() removes it
    yes    no         a crash before the manifest, or while removing: as above
    yes    yes        a checkpoint, if size and CRC agree; otherwise a damaged one, which is skipped with a warning
"""

from __future__ import annotations

import io
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.world import current_world, is_initialized
from ronde.elastic.training_loop import is_loss
from ronde.errors import CheckpointError, RoundEnded

logger = logging.getLogger("ronde.checkpoint")

FORMAT = 1
CHUNK_BYTES = 4 << 20
BROADCAST_BYTES = 64 << 20
"""Rank 0 broadcasts a checkpoint in pieces of this size."""
UNFINISHED_PREFIX = ".unfinished-"
"""How the name of a file begins that is still being written."""
FILE_PATTERN = re.compile(rf"({re.escape(UNFINISHED_PREFIX)})?step-(\d{{12}})(?:-(\d+))?\.(data|json)")


def open_storage(path: str | os.PathLike[str]) -> CheckpointStorage:
    """The storage of a path such as runs/7, file:///runs/7, s3://bucket/runs/7 or memory://runs."""
    text = os.fspath(path)
    scheme, found, rest = text.partition("://")
    if found and scheme not in ("file", "local"):
        return FsspecStorage(text)
    return LocalStorage(Path(rest if found else text))


class LocalStorage:
    """A folder of this machine, or one that is mounted. A file is written under another name, flushed, and renamed.
    Every failure is an OSError."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    def path_of(self, name: str) -> str:
        """The whole path of a file, for messages."""
        return str(self._directory / name)

    def write(self, name: str, fill: Callable[[Path], object]) -> None:
        """Create a file: fill() writes it at a path of this machine, then it appears under its name, complete."""
        self._directory.mkdir(parents=True, exist_ok=True)
        unfinished = self._directory / f"{UNFINISHED_PREFIX}{name}"
        try:
            fill(unfinished)
            _fsync(unfinished)
            unfinished.replace(self._directory / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _fsync(self._directory)

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        """A context in which the file is at a path of this machine."""
        yield self._directory / name

    def names(self) -> list[str]:
        """All files, unfinished ones included."""
        return sorted(path.name for path in self._directory.iterdir()) if self._directory.is_dir() else []

    def remove(self, name: str) -> None:
        (self._directory / name).unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FsspecStorage:
    """The same on a file system of fsspec. A file is written here and uploaded as a whole: object stores show it when
    it is complete; for those that do not, there is the checksum in the manifest."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it ships no types
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{url} needs fsspec: pip install fsspec, or use a local folder") from error
        self._url = url.rstrip("/")
        self._fs, folder = url_to_fs(url)
        self._directory = folder.rstrip("/")

    def path_of(self, name: str) -> str:
        return f"{self._url}/{name}"

    def write(self, name: str, fill: Callable[[Path], object]) -> None:
        with _as_os_error():
            self._fs.makedirs(self._directory, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="ronde-") as folder:
            here = Path(folder) / name
            fill(here)
            with _as_os_error():
                self._fs.put_file(str(here), f"{self._directory}/{name}")

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="ronde-") as folder:
            here = Path(folder) / name
            with _as_os_error():
                self._fs.get_file(f"{self._directory}/{name}", str(here))
            yield here

    def names(self) -> list[str]:
        with _as_os_error():  # without the cache: other processes may have changed the folder
            self._fs.invalidate_cache(self._directory)
            if not self._fs.isdir(self._directory):
                return []
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._directory, detail=False))

    def remove(self, name: str) -> None:
        with _as_os_error():
            if self._fs.exists(f"{self._directory}/{name}"):
                self._fs.rm_file(f"{self._directory}/{name}")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Around calls of fsspec, which raise errors of any class."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


CheckpointStorage: TypeAlias = LocalStorage | FsspecStorage


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a manifest file."""

    step: int
    num_bytes: int
    crc32: int
    format: int = FORMAT


class CheckpointId(NamedTuple):
    """Step and version of a checkpoint. A later one is greater."""

    step: int
    version: int = 0
    """From 0, counted up when a step is saved again."""

    @property
    def data_file(self) -> str:
        return f"step-{self.step:012d}" + (f"-{self.version}" if self.version else "") + ".data"

    @property
    def manifest_file(self) -> str:
        return self.data_file.removesuffix(".data") + ".json"


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was checked. Its data, or a copy, is at local_path on this machine."""

    step: int
    full_path: str
    local_path: Path
    num_bytes: int


def save(storage: CheckpointStorage, step: int, fill: Callable[[Path], object], *, keep: int) -> str:
    """Write a checkpoint, then remove all but the last `keep` and what crashes left. Returns its path."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step must be from 0 to 10**12 - 1, got {step}")
    written: list[tuple[int, int]] = []

    def fill_and_sum(path: Path) -> None:
        fill(path)
        written.append(_size_and_crc(path))

    checkpoint_id = CheckpointId(step)
    try:
        # An older checkpoint of this step stays until the new one is complete: it may be the only one.
        versions = [found.version for found in list_checkpoints(storage.names()) if found.step == step]
        checkpoint_id = CheckpointId(step, max(versions) + 1 if versions else 0)
        storage.write(checkpoint_id.data_file, fill_and_sum)
        num_bytes, crc = written[-1]
        manifest = msgspec.json.encode(CheckpointManifest(step=step, num_bytes=num_bytes, crc32=crc))
        storage.write(checkpoint_id.manifest_file, lambda path: path.write_bytes(manifest))
    except OSError as error:
        path = storage.path_of(checkpoint_id.data_file)
        raise CheckpointError(f"cannot write the checkpoint {path}: {error}") from error
    _delete_old(storage, keep, checkpoint_id)
    return storage.path_of(checkpoint_id.data_file)


def clear(storage: CheckpointStorage) -> None:
    """Remove all checkpoints, and what crashes left."""
    try:
        for name in _checkpoint_files(storage.names()):
            storage.remove(name)
    except OSError as error:
        raise CheckpointError(f"cannot remove the checkpoints in {storage.path_of('')}: {error}") from error


def list_checkpoints(names: list[str]) -> list[CheckpointId]:
    """The checkpoints that have a manifest, in order."""
    found = (match for match in map(FILE_PATTERN.fullmatch, names) if match and not match[1] and match[4] == "json")
    return sorted(CheckpointId(int(match[2]), int(match[3] or 0)) for match in found)


def _checkpoint_files(names: list[str]) -> list[str]:
    """The files of checkpoints, manifests first."""
    return sorted(filter(FILE_PATTERN.fullmatch, names), key=lambda name: (not name.endswith(".json"), name))


def _delete_old(storage: CheckpointStorage, keep: int, newest: CheckpointId) -> None:
    """Remove all but the last `keep` checkpoints up to the newest; earlier versions of a step; data without a manifest.
    Checkpoints of later steps belong to another run and are kept. The newest is complete, so an error is only logged.
    """
    path = storage.path_of(newest.data_file)
    try:
        names = [*storage.names(), newest.manifest_file]  # also where a new file is listed late
        ids = list_checkpoints(names)
        last_versions = {each.step: each for each in ids if each.step <= newest.step}
        kept_ids = [*list(last_versions.values())[-keep:], *(each for each in ids if each.step > newest.step)]
        kept = {name for each in kept_ids for name in (each.data_file, each.manifest_file)}
        for name in _checkpoint_files(names):
            if name not in kept:
                storage.remove(name)
    except OSError as error:
        logger.warning("cannot remove old checkpoints beside %s: %s", path, error)
        return
    if ids[-1].step > newest.step:
        logger.warning(
            "%s is not the latest there: a restart takes step %d, of an earlier run; remove it or use another folder",
            path,
            ids[-1].step,
        )


@contextmanager
def open_latest(storage: CheckpointStorage, step: int | None = None) -> Iterator[FoundCheckpoint | None]:
    """A context with the latest valid checkpoint (of a step), its data at a path of this machine; None if there is no
    checkpoint at all. Damaged ones are skipped with a warning.

    CheckpointError if all are damaged, or there is none of that step: training must not start over unasked.
    """
    with _as_checkpoint_error(storage.path_of("")):
        existing = list_checkpoints(storage.names())
    ids = [checkpoint_id for checkpoint_id in existing if step in (None, checkpoint_id.step)]
    if step is not None and not ids:
        steps = ", ".join(str(each) for each in sorted({checkpoint_id.step for checkpoint_id in existing})) or "none"
        raise CheckpointError(f"there is no checkpoint of step {step} in {storage.path_of('')}; those there: {steps}")
    damaged = []
    for checkpoint_id in reversed(ids):
        with ExitStack() as opening:
            try:
                found = opening.enter_context(_open_checked(storage, checkpoint_id))
            except CheckpointError as error:
                logger.warning("%s; it is skipped", error)
                damaged.append(str(error))
                continue
            yield found
            return
    if damaged:
        raise CheckpointError(f"no checkpoint can be used: {'; '.join(damaged)}")
    yield None


@contextmanager
def _open_checked(storage: CheckpointStorage, checkpoint_id: CheckpointId) -> Iterator[FoundCheckpoint]:
    full_path = storage.path_of(checkpoint_id.data_file)
    with ExitStack() as reading:
        with _as_checkpoint_error(full_path):
            with storage.local_copy(checkpoint_id.manifest_file) as path:
                manifest = msgspec.json.decode(path.read_bytes(), type=CheckpointManifest)
            path = reading.enter_context(storage.local_copy(checkpoint_id.data_file))
            found = _size_and_crc(path)
        if manifest.format != FORMAT:
            raise CheckpointError(f"the checkpoint {full_path} has format {manifest.format}, this ronde reads {FORMAT}")
        if found != (manifest.num_bytes, manifest.crc32):
            raise CheckpointError(
                f"the checkpoint {full_path} is damaged: {found[0]} bytes with CRC {found[1]:08x}, "
                f"but {manifest.num_bytes} with {manifest.crc32:08x} were written"
            )
        yield FoundCheckpoint(checkpoint_id.step, full_path, path, manifest.num_bytes)


@contextmanager
def _as_checkpoint_error(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error


def _size_and_crc(path: Path) -> tuple[int, int]:
    crc = num_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
            num_bytes += len(chunk)
    return num_bytes, crc


# --- on all ranks ----------------------------------------------------------------------------------------------------


@contextmanager
def open_on_all_ranks(
    storage: CheckpointStorage, members: Group, step: int | None = None
) -> Iterator[tuple[FoundCheckpoint, Path | io.BytesIO] | None]:
    """The latest valid checkpoint (or that of a step), and its file: rank 0 reads, the others get it from there. None
    if there is none, and on the others also if a rank of an elastic job is lost meanwhile. Collective."""
    with ExitStack() as reading:
        found: FoundCheckpoint | str | None = None  # or an error message for all ranks
        if members.rank == 0:
            try:
                found = reading.enter_context(open_latest(storage, step))
            except CheckpointError as error:
                found = str(error)
        source: Path | io.BytesIO | None = found.local_path if isinstance(found, FoundCheckpoint) else None
        if members.size > 1:
            try:
                found = objects.broadcast(found, members.ranks[0], group=members)
                if isinstance(found, FoundCheckpoint):
                    source = _broadcast_file(members, found)
            except RoundEnded as error:
                world = current_world()
                if not (world.settings.elastic and is_loss(error)):
                    raise
                if members.rank != 0:  # ronde.elastic.run() lets it get the state of rank 0, if that is not lost
                    logger.warning("%s; no checkpoint is loaded here", error)
                    world.has_state = False
                    found = None
        if isinstance(found, str):
            raise CheckpointError(found)
        yield None if found is None or source is None else (found, source)


def is_candidate() -> bool:
    """Whether this process has come to a running elastic job: until it joins that, it is rank 0 of a group of its own,
    and the checkpoints are those of the others."""
    return is_initialized() and current_world().is_candidate


def _broadcast_file(members: Group, found: FoundCheckpoint) -> Path | io.BytesIO:
    """Broadcast rank 0's file. Returns its path on rank 0, and a copy in memory on the others."""
    root, starts = members.ranks[0], range(0, found.num_bytes, BROADCAST_BYTES)
    if members.rank == 0:
        data = np.memmap(found.local_path, np.uint8, "r")
        for start in starts:
            members.broadcast(data[start : start + BROADCAST_BYTES], root=root)
        return found.local_path
    buffer = io.BytesIO()
    for start in starts:
        piece = np.empty(min(BROADCAST_BYTES, found.num_bytes - start), np.uint8)
        buffer.write(members.broadcast(piece, root=root, out=piece).data)
    buffer.seek(0)
    return buffer
