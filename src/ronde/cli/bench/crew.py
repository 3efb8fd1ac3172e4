"""The ranks of one measured implementation, and how they are told what to do. Used by measure.py.

Each rank has two named pipes in a directory only we can enter: `to-RANK` for commands and `from-RANK` for answers, one
JSON object per line. Pipes work the same however the ranks were started (by us, by mpiexec, in another network
namespace), and both sides see at once when the other is gone: rank.py reads the end of its pipe, we get a hang-up.
"""

from __future__ import annotations

import json
import os
import selectors
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ronde.cli.bench.processes import Started
from ronde.errors import RondeError
from ronde.types import Deadline

__all__ = ["RANK_PROGRAM", "Crew", "CrewFailed"]

RANK_PROGRAM = str(Path(__file__).with_name("rank.py"))
LEAVE_S = 10.0
READ_BYTES = 1 << 16
LOOK_S = 0.5
"""How often to look whether a process ended before its rank opened its pipes."""


class CrewFailed(RondeError):
    """The ranks of one implementation could not start, crashed, or did not answer in time."""


class _Pipes:
    """Our ends of the two pipes of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self._unread = b""
        to, answers = directory / f"to-{rank}", directory / f"from-{rank}"
        os.mkfifo(to, 0o600)
        os.mkfifo(answers, 0o600)
        # Opened for both directions it does not wait for the rank to come; the rank still reads the end when we go.
        self._to = os.open(to, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.answers = os.open(answers, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except BaseException:
            os.close(self._to)
            raise

    def write(self, line: bytes) -> None:
        """Send one command. It fits into the pipe, so this does not block."""
        os.write(self._to, line)

    def read(self) -> bytes | None:
        """The next whole line, nothing when it has not come yet; EOFError when the rank is gone."""
        try:
            got = os.read(self.answers, READ_BYTES)
        except BlockingIOError:
            return None
        if not got:
            raise EOFError
        line, newline, rest = (self._unread + got).partition(b"\n")
        if not newline:
            self._unread = line
            return None
        assert not rest, "a rank answers once per command"
        self._unread = b""
        return line

    def close(self) -> None:
        """Close both."""
        os.close(self._to)
        os.close(self.answers)


class Crew:
    """All ranks of one implementation. `start` gets the directory of the pipes and starts the processes."""

    def __init__(self, name: str, size: int, start: Callable[[Path], Started], deadline: Deadline) -> None:
        self.name = name
        self.size = size
        self._pipes: list[_Pipes] = []
        self._selector = selectors.DefaultSelector()
        self._started: Started | None = None
        self._healthy = False
        self._directory = tempfile.TemporaryDirectory(prefix="ronde-bench-")
        try:
            directory = Path(self._directory.name)
            for rank in range(size):
                self._pipes.append(_Pipes(directory, rank))
            self._started = start(directory)
            # Before a rank opens its pipe there is nothing to read and no hang-up: look at the processes meanwhile.
            for hello in self._answers("starting", deadline):
                if hello["size"] != size:
                    raise CrewFailed(f"{name} started {hello['size']} ranks instead of {size}")
        except BaseException:
            self.close()
            raise

    def ask(self, doing: str, deadline: Deadline, **command: Any) -> list[dict[str, Any]]:  # JSON
        """Give all ranks one command and wait for all answers, in the order of the ranks."""
        line = json.dumps(command).encode() + b"\n"
        for pipes in self._pipes:
            pipes.write(line)
        return self._answers(doing, deadline)

    def _answers(self, doing: str, deadline: Deadline) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        self._healthy = False
        for pipes in self._pipes:
            self._selector.register(pipes.answers, selectors.EVENT_READ, pipes)
        try:
            while len(answers) < self.size:
                for key, _ in self._selector.select(min(LOOK_S, deadline.left_s)):
                    line = self._read(key.data, doing)
                    if line is not None:
                        answers[key.data.rank] = self._checked(key.data.rank, json.loads(line), doing)
                        self._selector.unregister(key.fd)
                self._check_alive(doing)
                if deadline.passed:
                    silent = sorted(set(range(self.size)) - set(answers))
                    raise self._failure(f"{doing} took over {deadline.seconds:.0f} s; no answer from ranks {silent}")
        finally:
            for fd in list(self._selector.get_map()):
                self._selector.unregister(fd)
        self._healthy = True
        return [answers[rank] for rank in range(self.size)]

    def _read(self, pipes: _Pipes, doing: str) -> bytes | None:
        try:
            return pipes.read()
        except EOFError:
            raise self._failure(f"rank {pipes.rank} ended while {doing}") from None

    def _checked(self, rank: int, answer: dict[str, Any], doing: str) -> dict[str, Any]:
        if "error" in answer:
            raise self._failure(f"rank {rank} failed while {doing}:\n{answer['error'].strip()}")
        return answer

    def _check_alive(self, doing: str) -> None:
        assert self._started is not None
        how = self._started.ended()
        if how:
            raise self._failure(f"{how} while {doing}")

    def _failure(self, words: str) -> CrewFailed:
        assert self._started is not None
        # A rank's pipe closes a moment before its process has ended and written its last line.
        self._started.wait(Deadline(LOOK_S))
        ended = self._started.ended()
        how = f" ({ended})" if ended and ended not in words else ""
        return CrewFailed("\n".join(filter(None, (f"{self.name}: {words}{how}", self._started.tail()))))

    def close(self) -> None:
        """Tell the ranks to leave when all of them listen, and end what is left."""
        try:
            if self._healthy and self._started is not None:
                for pipes in self._pipes:
                    pipes.write(b'{"do": "quit"}\n')
                self._started.wait(Deadline(LEAVE_S))
        finally:
            # The end of their pipes lets ranks leave that no signal of ours would reach.
            while self._pipes:
                self._pipes.pop().close()
            if self._started is not None:
                self._started.close()
                self._started = None
            self._selector.close()
            self._directory.cleanup()
