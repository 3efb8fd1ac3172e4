"""One file per rank and stream with what the rank printed, byte for byte. Used by the Printer for `--output`.

A file that cannot be written is left as it is, a true beginning of what was printed: the job goes on.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from ronde.errors import StartFailed
from ronde.launch.protocol import StdStream

__all__ = ["RankOutputFiles"]

_RankStream: TypeAlias = tuple[int, StdStream]

_STREAMS: tuple[StdStream, ...] = ("out", "err")
_MAX_OPEN_FILES = 128
"""More files than this are opened again when they are needed: descriptors are for the ranks."""
_MAX_PATHS_SHOWN = 8
_FILE_NAME = re.compile(r"rank-\d+\.(out|err)")


class RankOutputFiles:
    """`rank-0.out`, `rank-0.err` … in a folder, or `rank.0/stdout` … if they are to be `nested`; empty at first. Calls
    `tell` with words when one cannot be written: once for each kind of error.

    Files of an earlier run with more ranks are removed: the folder shows one run, not parts of two. (Not the nested
    ones: Horovod leaves them.)"""

    def __init__(
        self, directory: str, *, num_ranks: int, print_message: Callable[[str], None], horovod_layout: bool = False
    ) -> None:
        self._directory = Path(directory)
        self._horovod_layout = horovod_layout
        self._digits = len(str(num_ranks - 1))
        self._print_message = print_message
        self._reported_errnos: set[int | None] = set()
        self._open_files: OrderedDict[_RankStream, FileIO] = OrderedDict()
        self._incomplete: dict[_RankStream, None] = {}
        try:
            for rank in range(num_ranks):
                self.path(rank, "out").parent.mkdir(parents=True, exist_ok=True)
                for stream in _STREAMS:
                    self.path(rank, stream).write_bytes(b"")
        except OSError as error:
            raise StartFailed(f"cannot make the output file {error.filename}: {error.strerror}") from error
        if not horovod_layout:
            self._remove_stale_files(num_ranks)

    def path(self, rank: int, stream: StdStream) -> Path:
        """The file of a rank; names sort by rank."""
        number = f"{rank:0{self._digits}}"
        name = f"rank.{number}/std{stream}" if self._horovod_layout else f"rank-{number}.{stream}"
        return self._directory / name

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        """Append; it can be read at once."""
        key = (rank, stream)
        if key in self._incomplete:
            return
        try:
            file = self._open_file(key)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            self._mark_incomplete(key, error)

    def close(self) -> None:
        """Close all, and say which are incomplete. Idempotent."""
        while self._open_files:
            self._close_file(*self._open_files.popitem())
        if self._incomplete:
            paths = [str(self.path(*key)) for key in self._incomplete]
            more = f" and {len(paths) - _MAX_PATHS_SHOWN} more" if len(paths) > _MAX_PATHS_SHOWN else ""
            self._print_message(f"incomplete output files: {', '.join(paths[:_MAX_PATHS_SHOWN])}{more}")
            self._incomplete = {}

    def _remove_stale_files(self, num_ranks: int) -> None:
        own = {self.path(rank, stream) for rank in range(num_ranks) for stream in _STREAMS}
        try:
            for path in sorted(self._directory.iterdir()):
                if _FILE_NAME.fullmatch(path.name) and path not in own and not path.is_dir():
                    path.unlink()
        except OSError as error:
            self._print_message(f"files of an earlier run may be left in {self._directory}: {error.strerror}")

    def _open_file(self, key: _RankStream) -> FileIO:
        file = self._open_files.get(key)
        if file is None:
            if len(self._open_files) >= _MAX_OPEN_FILES:
                self._close_file(*self._open_files.popitem(last=False))
            file = self._open_files[key] = self.path(*key).open("ab", buffering=0)
        self._open_files.move_to_end(key)
        return file

    def _close_file(self, key: _RankStream, file: FileIO) -> None:
        try:
            file.close()
        except OSError as error:  # some file systems tell only now that they are full
            self._mark_incomplete(key, error)

    def _mark_incomplete(self, key: _RankStream, error: OSError) -> None:
        if key in self._incomplete:
            return
        self._incomplete[key] = None
        if (file := self._open_files.pop(key, None)) is not None:
            self._close_file(key, file)
        if error.errno not in self._reported_errnos:
            self._reported_errnos.add(error.errno)
            why = error.strerror or str(error)
            self._print_message(f"cannot write {self.path(*key)}: {why}; the job goes on, the file stays incomplete")
