"""Copies of models, one for each version that the service has loaded.

The folder of a model may be written to at any time, by the next export for example. A replica that starts again has to
load exactly the model that the others serve, so all of them load from a private copy, which lasts as long as its
version. Replicas of other hosts get the files of the copy from the front.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ronde.data.files import safe_name
from ronde.errors import DataError, ModelError
from ronde.serve.model import METADATA_NAME, ONNX_NAME, external_files, load_model_folder, sum_file

FILE_PIECE_BYTES = 4 * 1024 * 1024
COPY_PREFIX = "ronde-serve-"
LOCK_NAME = ".lock"
"""Held by the process that uses a copy. One that nobody holds was left by a process that was killed."""


class ModelCopy(msgspec.Struct, frozen=True):
    """The private copy of one version of a model."""

    version: int
    name: str
    """Of the model."""
    path: Path
    files: tuple[str, ...]
    """Names below the path, the most important one first."""
    entry: str
    """The file to load, of a model without metadata; empty if the folder is loaded."""
    fingerprint: str
    lock: BinaryIO

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()

    def read_pieces(self) -> Iterator[tuple[str, bytes]]:
        """All files in pieces, each with the file's name."""
        for name in self.files:
            with (self.path / name).open("rb") as file:
                yield name, file.read(FILE_PIECE_BYTES)
                while piece := file.read(FILE_PIECE_BYTES):
                    yield name, piece


def copy_model(source: str, version: int) -> ModelCopy:
    """Copy the model at a path: a folder, or a file of ONNX. ModelError if there is none, or if its files are damaged
    or are not to be trusted. The model itself is not loaded: it could end this process."""
    root = Path(source)
    entry, name = "", root.absolute().stem
    if root.is_file():
        root, entry = root.parent, root.name
    elif not (root / METADATA_NAME).is_file() and (root / ONNX_NAME).is_file():
        entry = ONNX_NAME
    if entry:
        names = [entry, *sorted(external_files(root / entry))]
    else:
        metadata = load_model_folder(root, verify=False).metadata
        names, name = [METADATA_NAME, *metadata.files], metadata.name
    target = Path(tempfile.mkdtemp(prefix=COPY_PREFIX))
    lock = (target / LOCK_NAME).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for each in names:
            _copy_file(root, each, target)
        if not entry:
            fingerprint = load_model_folder(target).fingerprint  # the copy is what is checked and what is loaded
        else:
            digests = [sum_file(target / each).sha256 for each in names]
            fingerprint = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        lock.close()
        raise
    return ModelCopy(version, name, target, tuple(names), entry, fingerprint, lock)


def remove_abandoned_copies() -> None:
    """Remove the copies of services of this user that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{COPY_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, in use, or gone by now
            if path.lstat().st_uid == os.getuid():
                with (path / LOCK_NAME).open("rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)


def _copy_file(root: Path, name: str, target: Path) -> None:
    try:
        source = root / safe_name(name)
        if not source.resolve().is_relative_to(root.resolve()):
            raise ModelError(f"{source} is refused: a link leads out of the folder of the model")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)
    except DataError as error:
        raise ModelError(f"{root}: {error}") from None
    except OSError as error:
        raise ModelError(f"{root / name} cannot be read: {error.strerror or error}") from None
