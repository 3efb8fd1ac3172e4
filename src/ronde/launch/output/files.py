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
from ronde.launch.messages import Stream

__all__ = ["RankFiles"]

Key: TypeAlias = tuple[int, Stream]

_STREAMS: tuple[Stream, ...] = ("out", "err")
_MAX_OPEN = 128
"""More files than this are opened again when they are needed: descriptors are for the ranks."""
_MAX_NAMED = 8
_OWN = re.compile(r"rank-\d+\.(out|err)")


class RankFiles:
    """`rank-0.out`, `rank-0.err` … in a folder, or `rank.0/stdout` … if they are to be `nested`; empty at first. Calls
    `tell` with words when one cannot be written: once for each kind of error.

    Files of an earlier run with more ranks are removed: the folder shows one run, not parts of two. (Not the nested
    ones: Horovod leaves them.)"""

    def __init__(self, folder: str, *, num_ranks: int, tell: Callable[[str], None], nested: bool = False) -> None:
        self._folder = Path(folder)
        self._nested = nested
        self._digits = len(str(num_ranks - 1))
        self._tell = tell
        self._told: set[int | None] = set()
        self._open: OrderedDict[Key, FileIO] = OrderedDict()
        self._incomplete: dict[Key, None] = {}
        try:
            for rank in range(num_ranks):
                self.path(rank, "out").parent.mkdir(parents=True, exist_ok=True)
                for stream in _STREAMS:
                    self.path(rank, stream).write_bytes(b"")
        except OSError as error:
            raise StartFailed(f"cannot make the output file {error.filename}: {error.strerror}") from error
        if not nested:
            self._remove_others(num_ranks)

    def path(self, rank: int, stream: Stream) -> Path:
        """The file of a rank; names sort by rank."""
        number = f"{rank:0{self._digits}}"
        name = f"rank.{number}/std{stream}" if self._nested else f"rank-{number}.{stream}"
        return self._folder / name

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Append; it can be read at once."""
        key = (rank, stream)
        if key in self._incomplete:
            return
        try:
            file = self._file(key)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            self._fail(key, error)

    def close(self) -> None:
        """Close all, and say which are incomplete. Idempotent."""
        while self._open:
            self._close(*self._open.popitem())
        if self._incomplete:
            paths = [str(self.path(*key)) for key in self._incomplete]
            more = f" and {len(paths) - _MAX_NAMED} more" if len(paths) > _MAX_NAMED else ""
            self._tell(f"incomplete output files: {', '.join(paths[:_MAX_NAMED])}{more}")
            self._incomplete = {}

    def _remove_others(self, num_ranks: int) -> None:
        own = {self.path(rank, stream) for rank in range(num_ranks) for stream in _STREAMS}
        try:
            for path in sorted(self._folder.iterdir()):
                if _OWN.fullmatch(path.name) and path not in own and not path.is_dir():
                    path.unlink()
        except OSError as error:
            self._tell(f"files of an earlier run may be left in {self._folder}: {error.strerror}")

    def _file(self, key: Key) -> FileIO:
        file = self._open.get(key)
        if file is None:
            if len(self._open) >= _MAX_OPEN:
                self._close(*self._open.popitem(last=False))
            file = self._open[key] = self.path(*key).open("ab", buffering=0)
        self._open.move_to_end(key)
        return file

    def _close(self, key: Key, file: FileIO) -> None:
        try:
            file.close()
        except OSError as error:  # some file systems tell only now that they are full
            self._fail(key, error)

    def _fail(self, key: Key, error: OSError) -> None:
        if key in self._incomplete:
            return
        self._incomplete[key] = None
        if (file := self._open.pop(key, None)) is not None:
            self._close(key, file)
        if error.errno not in self._told:
            self._told.add(error.errno)
            why = error.strerror or str(error)
            self._tell(f"cannot write {self.path(*key)}: {why}; the job goes on, the file stays incomplete")
