"""The journal of a study: Optuna's file of JSON lines, with the driver of the search as its only writer.

A driver that was killed inside a write leaves a torn last line, after which Optuna could not read the file any more, or
a part of what a trial has reported without its end, which would stay there when the trial is run again, and a lock that
Optuna would wait 30 seconds for. open_journal() cuts these lines and removes the lock. It may do so because it holds an
exclusive flock on the journal, which the kernel releases when its owner dies: nobody else writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from ronde.data.files import wait_for_lock
from ronde.errors import RondeError
from ronde.types import Deadline

LOCK_WAIT_S = 10.0
"""How long a driver that is just ending may hold the journal."""
OPTUNA_LOCK_SUFFIX = ".lock"
SET_INTERMEDIATE_VALUE = 7
SET_TRIAL_USER_ATTRIBUTE = 8
"""Optuna's codes of the records that stand before the end of a trial, in one write with it."""


class StudyJournal(JournalFileBackend):
    """The journal, open for writing. Inside of batch() records are kept and written together, with one fsync."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        super().__init__(str(path))
        self._lock_fd = lock_fd
        self._num_written = sum(1 for _ in super().read_logs(0))
        self._batch: list[dict[str, Any]] | None = None

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Called by Optuna."""
        if self._batch is not None:
            self._batch += logs
            return
        try:
            super().append_logs(logs)
        except OSError as error:  # such as a full disk
            raise RondeError(
                f"cannot write {self._file_path}: {error.strerror}; the search has ended, and the same command goes on "
                "when it can be written again"
            ) from error
        self._num_written += len(logs)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:  # type: ignore[override]  # wider than it needs
        """Called by Optuna."""
        if log_number_from < self._num_written:
            yield from super().read_logs(log_number_from)
        yield from (self._batch or [])[max(0, log_number_from - self._num_written) :]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """After an exception nothing is written, and the journal is not to be used any more."""
        self._batch = []
        yield
        batch, self._batch = self._batch, None
        if batch:
            self.append_logs(batch)

    def close(self) -> None:
        """Let another driver write. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def open_journal(path: Path) -> StudyJournal:
    """Open a journal for writing, or make it; repair what a killed driver has left. RondeError when another driver has
    it open, ValueError when it is damaged in the middle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _open_locked(path)
    try:
        size = repair_end(path)
        os.truncate(fd, size)
        for stale in path.parent.glob(f"{path.name}{OPTUNA_LOCK_SUFFIX}*"):
            stale.unlink(missing_ok=True)
        return StudyJournal(path, fd)
    except BaseException:
        os.close(fd)
        raise


@contextmanager
def lock_journal(path: Path) -> Iterator[None]:
    """Within this context no driver has this journal open. RondeError when one has."""
    fd = _open_locked(path)
    try:
        yield
    finally:
        os.close(fd)


def _open_locked(path: Path) -> int:
    """Open the file, make it if need be, and take its lock. What is locked is the file of this name, also when another
    driver has just removed the one that was opened."""
    deadline = Deadline(LOCK_WAIT_S)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not wait_for_lock(fd, deadline.remaining_s):
                raise RondeError(
                    f"another search is running in {path.parent}; wait for its end, or choose another folder"
                )
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def repair_end(path: Path) -> int:
    """Return how many bytes of a journal are whole writes. ValueError names a line that is damaged and not the last."""
    size = num_whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parse_record(line)
            if record is None:
                if file.read(1):
                    raise ValueError(
                        f"{path}, line {number} is damaged, and others follow it; restore the file, or choose another "
                        "folder"
                    )
                break
            size += len(line)
            if record.get("op_code") not in (SET_INTERMEDIATE_VALUE, SET_TRIAL_USER_ATTRIBUTE):
                num_whole = size
    return num_whole


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
