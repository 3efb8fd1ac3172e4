"""The output folder of a batch prediction: parts, entries, claims and the manifest. All that ranks know of each other
stands in it; used by worker.

A part is written aside and appears whole, then its entry does. A claim, a lock on one byte of a file, keeps two ranks
of the same storage from doing the same part; the kernel releases it when its holder dies. It only saves work: a part
that is done twice has the same bytes under the same name. The names of the files are in plan.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ronde.data.files import DataFolder, LocalFolder, open_folder, read_file
from ronde.errors import DataError
from ronde.predict.plan import (
    MANIFEST_FORMAT,
    PartEntry,
    PartRange,
    PredictManifest,
    PredictOptions,
    PredictPlan,
    describe_change,
    name_output,
)
from ronde.predict.rows import join_parts
from ronde.types import Deadline

MAX_MANIFEST_BYTES = 1 << 30
WORKING_BYTE = 1 << 40
"""Of the file of claims, behind those of all parts: every process at work holds a lock on it."""
BEGIN_BYTE = WORKING_BYTE + 1
"""Held by the process that compares or writes the plan."""
BEGIN_S = 30.0
"""How long that may take."""


class OutputFolder:
    """The files of one prediction: parts, entries, claims, manifest."""

    def __init__(self, plan: PredictPlan) -> None:
        self.plan = plan
        self._folder = open_folder(plan.names.folder)
        self._by_name = {part.name: part for part in plan.parts}
        self._claims: int | None = None
        self._local: Path | None = None
        if isinstance(self._folder, LocalFolder):
            self._local = Path(plan.names.folder.removeprefix("file://"), plan.names.work)

    # --- begin -----------------------------------------------------------------------------------------------------

    def read_complete(self) -> PredictManifest | None:
        """The manifest, if everything is done. DataError if it is of other data, another model or other settings."""
        found = read_manifest_at(self._folder, self.plan.names.manifest)
        if found is not None:
            self._refuse_change(describe_change(found.fingerprints, self.plan.fingerprints), "has predictions")
        return found

    def begin(self) -> None:
        """Write down what the work depends on, or compare it. DataError if it has changed. Every rank calls it."""
        if self._local is None:
            self._agree_on_plan()
            return
        with self._one_at_a_time():  # ranks with different settings may begin at the same moment
            self._agree_on_plan()
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.lockf(self._open_claims(), fcntl.LOCK_SH | fcntl.LOCK_NB, 1, WORKING_BYTE)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """DataError if another process takes too long."""
        deadline = Deadline(BEGIN_S)
        while True:
            try:
                fcntl.lockf(self._open_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, BEGIN_BYTE)
                break
            except (BlockingIOError, PermissionError):
                if deadline.expired:
                    raise DataError(f"another process holds {self._local}/claims; is it stopped?") from None
                time.sleep(0.01)
            except OSError:  # a file system without locks, or a folder that cannot be written: that is said later
                break
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._open_claims(), fcntl.LOCK_UN, 1, BEGIN_BYTE)

    def _agree_on_plan(self) -> None:
        name = f"{self.plan.names.work}/plan.json"
        data = msgspec.json.encode(self.plan)
        try:
            found = read_file(self._folder, name, limit_bytes=MAX_MANIFEST_BYTES)
        except (DataError, FileNotFoundError):
            if self._local is None and not self._has_nothing():
                raise
            self._folder.write(name, data)
            return
        try:
            before = msgspec.json.decode(found, type=PredictPlan)
        except msgspec.MsgspecError:
            raise DataError(f"{self.plan.names.folder}/{name} is damaged; remove {self.plan.names.work}") from None
        changed = describe_change(before.fingerprints, self.plan.fingerprints)
        if changed and not self._replace_plan(name, data):
            self._refuse_change(changed, "has unfinished predictions")

    def _replace_plan(self, name: str, data: bytes) -> bool:
        """Replace the plan of a run that has ended before anything was predicted, as far as files and locks tell.
        Return whether it was one."""
        if self._local is None:
            return False
        # In an output folder, parts are there before their entries.
        folders = [self._local] if self.plan.names.file else [self._local, self._local.parent]
        if any(path.name.startswith("part-") for folder in folders for path in folder.iterdir()):
            return False
        try:
            fcntl.lockf(self._open_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, WORKING_BYTE + 1)
        except OSError:  # another process is at work, or there are no locks
            return False
        self._folder.write(name, data)
        fcntl.lockf(self._open_claims(), fcntl.LOCK_UN, WORKING_BYTE + 1)
        return True

    def _open_claims(self) -> int:
        assert self._local is not None
        if self._claims is None:
            self._local.mkdir(parents=True, exist_ok=True)
            self._claims = os.open(self._local / "claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._claims

    def _has_nothing(self) -> bool:
        with contextlib.suppress(DataError):
            return not any(info.name.startswith(self.plan.names.work) for info in self._folder.list_files())
        return True

    def _refuse_change(self, changed: str, what: str) -> None:
        if changed:
            path = f"{self.plan.names.folder}/{self.plan.names.file}".rstrip("/")
            raise DataError(
                f"{path} {what}, and {changed} changed since: choose another output, or replace it with --force"
            )

    def clear(self) -> None:
        """Remove an output, finished or not. DataError if another process is writing to it, as far as locks tell."""
        names = self.plan.names
        if self._local is not None and (self._local / "claims").exists():
            with (self._local / "claims").open("r+b") as claims:
                try:
                    fcntl.lockf(claims, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    raise DataError(
                        f"another process is predicting to {names.folder}/{names.file or names.work}; end it, or wait"
                    ) from None
                except OSError:  # a file system without locks
                    pass
        with contextlib.suppress(DataError):
            self._folder.remove(names.manifest)  # first: without it nothing counts as complete
            for info in self._folder.list_files() if not names.file else []:
                stem, _, ending = info.name.rpartition(".")
                if ending == names.format and stem.startswith("part-") and stem[5:].replace("-", "").isdigit():
                    self._folder.remove(info.name)
        for name in (names.errors, names.file):
            if name:
                with contextlib.suppress(DataError):
                    self._folder.remove(name)
        self.remove_work()

    # --- parts -----------------------------------------------------------------------------------------------------

    def list_done(self) -> set[PartRange]:
        """The parts that have an entry."""
        if self._local is not None:
            try:
                names: Iterable[str] = [path.name for path in self._local.iterdir()]
            except FileNotFoundError:
                return set()
        else:
            try:
                listed = open_folder(f"{self.plan.names.folder}/{self.plan.names.work}").list_files()
            except DataError:
                return set()
            names = [info.name for info in listed]
        stems = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        return {self._by_name[stem] for stem in stems if stem in self._by_name}

    def claim(self, index: int) -> bool:
        """Try to claim a part: False if another process has it. Where there are no locks, always True."""
        if self._local is None:
            return True
        try:
            fcntl.lockf(self._open_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def release(self, index: int) -> None:
        if self._claims is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, index)

    def publish(self, part: PartRange, data: bytes, errors: bytes, num_errors: int) -> None:
        """Write a part, its errors, and last its entry."""
        names = self.plan.names
        if errors:
            self._folder.write(f"{names.work}/{part.name}.errors", errors)
        self._folder.write(names.part(part), data)
        entry = PartEntry(
            start=part.start,
            stop=part.stop,
            num_rows=part.stop - part.start - num_errors,
            num_errors=num_errors,
            num_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        self._folder.write(f"{names.work}/{part.name}.json", msgspec.json.encode(entry))

    # --- end -------------------------------------------------------------------------------------------------------

    def finish(self) -> PredictManifest:
        """Put together errors and, if the output is one file, parts; write the manifest; remove what was for the work.
        Any rank may do it when all parts are done, also several at a time."""
        names = self.plan.names
        entries = []
        try:
            for part in self.plan.parts:
                data = self._read(f"{names.work}/{part.name}.json")
                entries.append(msgspec.json.decode(data, type=PartEntry))
            with tempfile.TemporaryFile() as errors:
                for part, entry in zip(self.plan.parts, entries, strict=True):
                    if entry.num_errors:
                        errors.write(self._read(f"{names.work}/{part.name}.errors"))
                if any(entry.num_errors for entry in entries):
                    errors.seek(0)
                    self._folder.write(names.errors, errors.read())
            if names.file:
                self._join()
        except (DataError, OSError):
            complete = self.read_complete()  # another rank may have been faster, and have removed what was for the work
            if complete is None:
                raise
            return complete
        manifest = PredictManifest(
            output_format=names.format,
            num_rows=self.plan.num_rows,
            num_errors=sum(entry.num_errors for entry in entries),
            fingerprints=self.plan.fingerprints,
            parts=tuple(entries),
        )
        self._folder.write(names.manifest, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        self.remove_work()
        return manifest

    def _join(self) -> None:
        with tempfile.NamedTemporaryFile(prefix="ronde-") as file:
            join_parts(
                lambda: (self._read(self.plan.names.part(part)) for part in self.plan.parts),
                self.plan.names.format,
                file.write,
            )
            file.flush()
            self._folder.write(self.plan.names.file, Path(file.name))

    def _read(self, name: str) -> bytes:
        return read_file(self._folder, name, limit_bytes=MAX_MANIFEST_BYTES)

    def remove_work(self) -> None:
        """Remove plan, claims and entries. They are of no use when there is a manifest."""
        if self._local is not None:
            shutil.rmtree(self._local, ignore_errors=True)
            return
        with contextlib.suppress(DataError):
            url = f"{self.plan.names.folder}/{self.plan.names.work}"
            for info in open_folder(url).list_files():
                self._folder.remove(f"{self.plan.names.work}/{info.name}")

    def close(self) -> None:
        if self._claims is not None:
            os.close(self._claims)
            self._claims = None


def read_manifest_at(folder: DataFolder, name: str) -> PredictManifest | None:
    """None if there is none. DataError if it is damaged."""
    try:
        data = read_file(folder, name, limit_bytes=MAX_MANIFEST_BYTES)
    except (DataError, FileNotFoundError):
        return None
    try:
        manifest = msgspec.json.decode(data, type=PredictManifest)
    except msgspec.MsgspecError as error:
        raise DataError(f"{folder.where(name)} is damaged or no manifest of ronde: {error}") from None
    if manifest.format != MANIFEST_FORMAT:
        raise DataError(f"{folder.where(name)} is no manifest of predictions")
    return manifest


def read_manifest(options: PredictOptions) -> PredictManifest | None:
    """The manifest of a finished prediction; None if it is not finished."""
    names = name_output(options)
    return read_manifest_at(open_folder(names.folder), names.manifest)
