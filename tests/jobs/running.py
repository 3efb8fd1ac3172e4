"""Jobs for tests as their users start them: the installed command `ronde run`, a process of its own.

Everything a job starts has a mark of the test in its environment. By it, it is found again: when a job is over, nothing
that has its mark may still run.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from ronde.launch.tty import set_window_size
from ronde.types import Deadline
from tests.limits import PATIENCE_S, SECONDS_S

ROOT = Path(__file__).resolve().parents[2]
RONDE = str(Path(sys.executable).with_name("ronde"))
MARK = "TEST_MARK"


class Done(NamedTuple):
    """How a command has ended. Bytes that are no text are in the texts as surrogates."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> list[str]:
        """What `ronde run` itself says at the end: the last lines without a number in front."""
        lines = self.err.splitlines()
        while lines and any(line.startswith("[") for line in lines):
            lines.pop(0)
        return lines


class Running:
    """A job under way; a context. At its end the driver is dead, and nothing that it has started is left."""

    def __init__(self, *words: str, env: Mapping[str, str] | None = None, merged: bool = False) -> None:
        """`words` follow `ronde run`; `env` is added to the environment; merged: `2>&1`."""
        self._mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._seen: list[psutil.Process] = []
        self.driver = subprocess.Popen(
            [RONDE, "run", *words],
            cwd=ROOT,
            env={**os.environ, **(env or {}), name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.nothing_left()
        finally:
            end(self.driver)

    def out(self, count: int = 1) -> list[str]:
        """The next lines on standard output; the test's own time limit ends the wait."""
        assert self.driver.stdout is not None
        lines = [self.driver.stdout.readline().decode() for _ in range(count)]
        assert all(lines), self.result()
        self._seen = self.processes()
        return sorted(line.rstrip("\n") for line in lines)

    def err_until(self, text: str) -> str:
        """Lines on standard error, up to the first that holds the text."""
        assert self.driver.stderr is not None
        said = ""
        while text not in said:
            line = self.driver.stderr.readline().decode()
            assert line, f"waited for {text!r}, saw {said!r}"
            said += line
        return said

    def processes(self) -> list[psutil.Process]:
        """All that runs for the job, but for the driver."""
        return psutil.Process(self.driver.pid).children(recursive=True)

    def signal(self, number: int) -> None:
        """To the driver alone."""
        self.driver.send_signal(number)

    def result(self, limit_s: float = PATIENCE_S) -> Done:
        """How it has ended, when it has."""
        out, err = self.driver.communicate(timeout=limit_s)
        text = out.decode(errors="surrogateescape"), err.decode(errors="surrogateescape")
        return Done(self.driver.returncode, *text)

    def nothing_left(self) -> None:
        """Wait until nothing of the job runs any more."""
        _, left = psutil.wait_procs(self._seen, timeout=SECONDS_S)
        deadline = Deadline(SECONDS_S)
        while (found := [*map(words, left), *marked(self._mark)]) and not deadline.expired:
            left = [process for process in left if process.is_running()]
            time.sleep(0.01)
        assert not found, "\n".join(found)


class Terminal:
    """A terminal for a command, and somebody who types; a context."""

    def __init__(self, command: list[str], rows: int = 24, columns: int = 80) -> None:
        self._fd, self._theirs = os.openpty()
        set_window_size(self._theirs, rows, columns)
        self.before = termios.tcgetattr(self._theirs)
        theirs = self._theirs
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        self.shown = ""
        self._typed = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
        os.close(self._fd)
        os.close(self._theirs)

    def read_until(self, text: str) -> str:
        """Wait until this is shown; what was shown since somebody last typed."""
        deadline = Deadline(PATIENCE_S)
        while text not in self.shown[self._typed :]:
            ready, _, _ = select.select([self._fd], [], [], deadline.remaining_s)
            assert ready, f"waited for {text!r}, saw {self.shown!r}"
            self.shown += os.read(self._fd, 1 << 16).decode()
        return self.shown[self._typed :]

    def type(self, text: str) -> None:
        """As a person would."""
        self._typed = len(self.shown)
        os.write(self._fd, text.encode())

    def modes(self) -> list[object]:
        """How it is set now."""
        return termios.tcgetattr(self._theirs)

    def result(self) -> int:
        """The exit code; all that was shown is in `shown`."""
        deadline = Deadline(PATIENCE_S)
        while (code := self.process.poll()) is None or select.select([self._fd], [], [], 0)[0]:
            assert not deadline.expired, f"it does not end; saw {self.shown!r}"
            if select.select([self._fd], [], [], 0.01)[0]:
                self.shown += os.read(self._fd, 1 << 16).decode()
        return code


def run(*words: str, env: Mapping[str, str] | None = None, limit_s: float = PATIENCE_S) -> Done:
    """`ronde run` to its end; it leaves nothing behind."""
    with Running(*words, env=env) as job:
        return job.result(limit_s)


def ask(*words: str, env: Mapping[str, str] | None = None) -> Done:
    """Another command of ronde to its end."""
    done = subprocess.run(
        [RONDE, *words], env={**os.environ, **(env or {})}, capture_output=True, timeout=PATIENCE_S, check=False
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def script(name: str, *words: str) -> list[str]:
    """The command of a rank that runs this script of tests/jobs/scripts."""
    return [sys.executable, "-m", f"tests.jobs.scripts.{name}", *words]


def marked(mark: str) -> list[str]:
    """All processes with this in their environment, in words. (Dead ones have none.)"""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(f"process {path.parent.name}: {(path.parent / 'cmdline').read_bytes()!r}")
        except OSError:  # it ended while we looked, or is somebody else's
            continue
    return found


def words(process: psutil.Process) -> str:
    try:
        return f"process {process.pid}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {process.pid}"


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """However the test went."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
