"""What the ranks of trials print, in a file for each trial. The sink of the drivers of a search."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.launch.output.tail import OutputTail
from ronde.launch.output.terminal import OutputClosed
from ronde.launch.protocol import StdStream

OUTPUT_FOLDER = "output"
MAX_REST_BYTES = 64 * 1024
"""An unfinished line is kept up to this length."""

logger = logging.getLogger("ronde.search")


class TrialOutput:
    """The output of one group of workers. The driver of the group writes, in its thread; that of the search switches
    files."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        num_ranks: int,
        on_data: Callable[[int, StdStream, bytes], None] | None = None,
    ) -> None:
        """Until the first trial, output goes to the file `name`. `on_data` gets everything, too."""
        self._folder = folder / OUTPUT_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._idle_name = name
        self._name = name
        self._num_ranks = num_ranks
        self._on_data = on_data
        self._file: Any = None  # a raw file, so nothing is left to be written when it is closed
        self._rests: dict[tuple[int, StdStream], bytes] = {}
        """Unfinished lines."""
        self._tails: dict[int, OutputTail] = {}
        self._has_warned = False
        self._lock = threading.Lock()

    def begin_trial(self, number: int) -> None:
        """What comes from now on belongs to this trial."""
        self._switch(trial_file_name(number))

    def end_trial(self) -> None:
        self._switch(self._idle_name)

    def rank_started(self, rank: int) -> None:
        self._tails[rank] = OutputTail()

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        self._tails[rank].add(stream, data)
        if self._on_data is not None:
            self._on_data(rank, stream, data)
        with self._lock:
            if self._num_ranks == 1:
                self._write(data)
            else:
                *lines, rest = (self._rests.pop((rank, stream), b"") + data).split(b"\n")
                if len(rest) > MAX_REST_BYTES:  # a line that does not end is cut
                    lines, rest = [*lines, rest], b""
                self._write(b"".join(b"[%d] %s\n" % (rank, line) for line in lines))
                if rest:
                    self._rests[rank, stream] = rest

    def rank_exited(self, rank: int) -> None:
        with self._lock:
            self._write_rests()

    def print_message(self, text: str) -> None:
        with self._lock:
            self._write(f"[ronde] {text}\n".encode(errors="replace"))

    def tail(self, rank: int, exit_code: int) -> str:
        return self._tails[rank].text(exit_code) if rank in self._tails else ""

    def refresh(self, now_s: float) -> float | None:
        return None

    def is_backlogged(self) -> bool:
        return False

    def closed(self) -> OutputClosed | None:
        return None

    def close(self, *, timeout_s: float | None = None) -> None:
        self._switch(self._idle_name)

    def _switch(self, name: str) -> None:
        with self._lock:
            self._write_rests()
            if self._file is not None:
                self._file.close()
                self._file = None
            self._name = name

    def _write_rests(self) -> None:
        for (rank, _), rest in self._rests.items():
            self._write(b"[%d] %s\n" % (rank, rest))
        self._rests.clear()

    def _write(self, data: bytes) -> None:
        if not data:
            return
        try:
            if self._file is None:
                self._file = (self._folder / self._name).open("ab", buffering=0)
            self._file.write(data)
        except OSError as error:  # such as a full disk: the trial goes on without
            if not self._has_warned:
                self._has_warned = True
                logger.warning("cannot write %s, so output of trials is lost: %s", self._folder, error.strerror)


def trial_file_name(number: int) -> str:
    return f"trial-{number:04}.txt"
