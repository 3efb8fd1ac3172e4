"""The processes of one measured implementation: started, watched, and surely ended. Used by peers.py and ours.py."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

import psutil

from ronde.types import Deadline

__all__ = ["Outputs", "Processes", "Started"]

TAIL_LINES = 20
TAIL_BYTES = 16384
TERMINATE_S = 3.0
"""mpiexec gets this long to end its ranks itself."""


class Started(Protocol):
    """Processes under way, whoever started them."""

    def ended(self) -> str:
        """Which one has ended too early and how, in words; empty when all run."""

    def tail(self) -> str:
        """The last lines that they wrote."""

    def wait(self, deadline: Deadline) -> None:
        """Until all have ended by themselves, or the deadline."""

    def close(self) -> None:
        """End those still running, and everything they started."""


class Outputs:
    """Files that take what processes write; they have no name, so nothing is left of them."""

    def __init__(self, num: int) -> None:
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(num)]

    def tail(self) -> str:
        """The last lines of each, those with nothing left out."""
        texts = []
        for index, file in enumerate(self.files):
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
            if lines:
                texts.append("\n".join((f"output of process {index}:", *lines[-TAIL_LINES:])))
        return "\n".join(texts)

    def close(self) -> None:
        """Forget what was written."""
        for file in self.files:
            file.close()


class Processes:
    """Commands run side by side, each in a session of its own: Ctrl-C reaches us alone, and we end them in order."""

    def __init__(self, commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None) -> None:
        self._outputs = Outputs(len(commands))
        self._running: list[subprocess.Popen[bytes]] = []
        try:
            for command, output in zip(commands, self._outputs.files, strict=True):
                self._running.append(
                    subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        except BaseException:
            self.close()
            raise

    def ended(self) -> str:
        """Which one has ended and how; empty when all run."""
        for index, process in enumerate(self._running):
            code = process.poll()
            if code is not None:
                which = f"process {index}" if len(self._running) > 1 else "the process"
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                return f"{which} ended {how}"
        return ""

    def tail(self) -> str:
        """The last lines that they wrote."""
        return self._outputs.tail()

    def wait(self, deadline: Deadline) -> None:
        """Until all have ended, or the deadline."""
        for process in self._running:
            try:
                process.wait(deadline.left_s)
            except subprocess.TimeoutExpired:
                return

    def close(self) -> None:
        """First ask (mpiexec then ends its ranks), then kill them and all their descendants."""
        family = [child for process in self._running for child in _descendants(process)]
        for process in self._running:
            process.terminate()  # does nothing when it has ended
        self.wait(Deadline(TERMINATE_S))
        for process in self._running:
            process.kill()
            process.wait()
        for child in family:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(family, timeout=TERMINATE_S)
        self._outputs.close()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    except psutil.NoSuchProcess:
        return []
