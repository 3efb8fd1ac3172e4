"""Run a command beside busy processes, as on a machine with other work to do: `busy.py [-n 2] [--log FILE] COMMAND …`.

Returns the command's exit code. The busy processes end with this one, however it ends. With --log a line is added to a
file: date, commit, outcome, duration, and the tests that failed, which are taken from the output of pytest.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PR_SET_PDEATHSIG = 1
FAILED = re.compile(rb"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)
"""In the summary of pytest. Names of tests may have spaces."""
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def burn(parent: int) -> None:
    """Use one core until the parent has ended. Never returns."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the kernel ends this process with its parent
    while os.getppid() == parent:  # it may have ended before that was asked for
        for _ in range(1_000_000):
            pass
    os._exit(0)


@contextmanager
def busy(number: int) -> Iterator[list[int]]:
    """Start so many busy processes; they end with the context. Yields their process ids."""
    parent, pids = os.getpid(), list[int]()
    try:
        for _ in range(number):
            pid = os.fork()
            if pid == 0:
                burn(parent)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(command: Sequence[str]) -> tuple[int, bytes]:
    """The command's exit code as a shell has it, and its output, which is also passed on. Signals that end this process
    are passed on, too, and the command decides what they mean."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for number in ENDINGS:
        signal.signal(number, lambda got, _: process.send_signal(got))
    assert process.stdout is not None
    output = b""
    while data := os.read(process.stdout.fileno(), 1 << 16):
        output += data
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    process.stdout.close()
    code = process.wait()
    return (128 - code if code < 0 else code), output


def commit() -> str:
    """What is checked out here, with a + when files have been changed."""
    words = ("git", "describe", "--always", "--dirty=+", "--exclude=*")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def entry(at: datetime.datetime, commit: str, code: int, seconds: float, output: bytes) -> str:
    """The line for the log."""
    failed = [name.decode(errors="replace") for name in dict.fromkeys(FAILED.findall(output))]
    outcome = "passed" if code == 0 else f"code {code}"
    words = [f"{at:%Y-%m-%d %H:%M:%S}", commit, outcome, f"{seconds / 60:.1f} min", f"{len(failed)} failed", *failed]
    return "  ".join(words) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run the command of the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, metavar="NUMBER", help="how many busy processes (default: 2)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="add a line with the outcome to this file")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    wanted = parser.parse_args(arguments)
    if not wanted.command:
        parser.error("there is no command to run")
    at, began, checked_out = datetime.datetime.now(), time.monotonic(), commit()
    with busy(wanted.n):
        code, output = run(wanted.command)
    if wanted.log is not None:
        wanted.log.parent.mkdir(parents=True, exist_ok=True)
        with wanted.log.open("a") as log:
            log.write(entry(at, checked_out, code, time.monotonic() - began, output))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
