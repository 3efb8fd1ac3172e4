"""One file per rank and stream with what the rank printed, byte for byte: `ronde run --output`.

After a write fails, the file is left as it is, a true beginning of what was printed, and the job goes on.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import TypeAlias

from ronde.errors import StartFailed
from ronde.launch.protocol import StdStream

RankStream: TypeAlias = tuple[int, StdStream]
"""One stream of one rank."""

_STREAMS: tuple[StdStream, ...] = ("out", "err")
_MAX_OPEN_FILES = 128
"""Files beyond this number are opened again when they are needed: the driver needs its descriptors for ranks."""
_MAX_PATHS_SHOWN = 8
_FILE_NAME = re.compile(r"(rank-\d+|scheduler|server-\d+)\.(out|err)")


class RankOutputFiles:
    """Creates empty files `rank-0.out`, `rank-0.err` … in a directory, or `rank.0/stdout` … in the layout of Horovod.
    `names` are those of processes that are no ranks, by number: `scheduler.out`. When a file cannot be written,
    print_message is called: once for each kind of error.

    Files of an earlier run with more ranks are removed, so that the directory shows one run and not parts of two.
    (Horovod leaves its own, so those are left.)"""

    def __init__(
        self,
        directory: str,
        *,
        num_ranks: int,
        print_message: Callable[[str], None],
        horovod_layout: bool = False,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._horovod_layout = horovod_layout
        self._digits = len(str(num_ranks - 1))
        self._names: Mapping[int, str] = {} if names is None else names
        self._print_message = print_message
        self._reported_errnos: set[int | None] = set()
        self._open_files: OrderedDict[RankStream, FileIO] = OrderedDict()
        self._incomplete: dict[RankStream, None] = {}
        try:
            for rank in range(num_ranks):
                self.path(rank, "out").parent.mkdir(parents=True, exist_ok=True)
                for stream in _STREAMS:
                    self.path(rank, stream).write_bytes(b"")
        except OSError as error:
            raise StartFailed(f"cannot make the output file {error.filename}: {error.strerror}") from error
        if not horovod_layout:
            self._remove_stale_files(num_ranks)

    def rank_started(self, rank: int) -> None:
        """Create the files of a rank that was not there at the beginning; those that exist are continued."""
        for stream in _STREAMS:
            path = self.path(rank, stream)
            try:
                path.parent.mkdir(exist_ok=True)
                path.touch()
            except OSError as error:
                self._mark_incomplete((rank, stream), error)

    def path(self, rank: int, stream: StdStream) -> Path:
        """Return the file of a stream. Names sort by rank."""
        if rank in self._names:
            name = self._names[rank].removeprefix("the ").replace(" ", "-")
            return self._directory / f"{name}.{stream}"
        number = f"{rank:0{self._digits}}"
        name = f"rank.{number}/std{stream}" if self._horovod_layout else f"rank-{number}.{stream}"
        return self._directory / name

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        key = (rank, stream)
        if key in self._incomplete:
            return
        try:
            file = self._open_files.get(key)
            if file is None:
                if len(self._open_files) >= _MAX_OPEN_FILES:
                    self._close_file(*self._open_files.popitem(last=False))
                file = self._open_files[key] = self.path(*key).open("ab", buffering=0)
            self._open_files.move_to_end(key)
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except OSError as error:
            self._mark_incomplete(key, error)

    def close(self) -> None:
        """Close all files, and print which are incomplete. Idempotent."""
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

    def _close_file(self, key: RankStream, file: FileIO) -> None:
        try:
            file.close()
        except OSError as error:  # some file systems report only now that they are full
            self._mark_incomplete(key, error)

    def _mark_incomplete(self, key: RankStream, error: OSError) -> None:
        if key in self._incomplete:
            return
        self._incomplete[key] = None
        if (file := self._open_files.pop(key, None)) is not None:
            self._close_file(key, file)
        if error.errno not in self._reported_errnos:
            self._reported_errnos.add(error.errno)
            reason = error.strerror or str(error)
            self._print_message(f"cannot write {self.path(*key)}: {reason}; the job goes on, the file stays incomplete")
