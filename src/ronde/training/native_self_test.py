"""Whether a native library of ronde works with the installed framework. The failure would be a crash, so that is found
out by a process of its own, which runs a module with a function main() that raises, crashes or says "passed".

It is done once per user, build of the framework and library. One rank per host does it while the others wait for a file
lock; the result is kept in the user's cache. Ranks need not agree on it: what runs through Python instead does the same
on the wire.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ronde.settings import cache_dir
from ronde.types import Deadline

SELF_TEST_S = 120.0
LOCK_CHECK_S = 0.05
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""How a self-test ends whose library does not work. Another signal comes from outside, as when memory is short."""

logger = logging.getLogger("ronde.training")


class SelfTestResult(msgspec.Struct, frozen=True):
    problem: str
    """Why the library does not work; empty if it does."""
    is_lasting: bool = True
    """Whether another self-test would say the same, as far as one can know."""


def find_problem_by_test(module: str, library: Path, build: Sequence[object]) -> str:
    """What the self-test `module` says about a library, from the cache or by running it now; empty if all is well.
    `build` is what tells one build of the framework from another."""
    digest = hashlib.sha256(library.read_bytes())
    digest.update(repr((*build, sys.executable)).encode())
    try:
        folder = cache_dir() / module.split(".")[1]
        folder.mkdir(parents=True, exist_ok=True)
        result_file = folder / f"{digest.hexdigest()[:24]}.json"
        with _locked(result_file.with_suffix(".lock")):
            found = _read_result(result_file)
            if found is None:
                found = run_self_test(module)
                _write_result(result_file, found)
    except OSError as error:  # no cache: each rank tests for itself
        logger.info("the result of the self-test cannot be kept: %s", error)
        found = run_self_test(module)
    return found.problem


def run_self_test(module: str) -> SelfTestResult:
    """Let the function main() of a module run in another process."""
    code = f"import sys; sys.path[:] = sys.argv[1:]; import {module} as test; test.main()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *sys.path], capture_output=True, text=True, timeout=SELF_TEST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return SelfTestResult(f"the self-test did not run: {error}", is_lasting=False)
    if done.returncode == 0 and done.stdout.endswith("passed\n"):
        return SelfTestResult("")
    last = (done.stderr.strip() or "no output").splitlines()[-1]
    is_lasting = done.returncode >= 0 or -done.returncode in CRASHES
    return SelfTestResult(f"the self-test {module} ended with status {done.returncode}: {last}", is_lasting)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, while the ranks of this host wait for each other. Past the deadline, go on without."""
    deadline = Deadline(SELF_TEST_S + 10.0)
    with path.open("w") as file:
        while not deadline.expired:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_CHECK_S)
        yield  # closing the file releases the lock


def _read_result(path: Path) -> SelfTestResult | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SelfTestResult)
    except (OSError, msgspec.DecodeError):
        return None


def _write_result(path: Path, result: SelfTestResult) -> None:
    if not result.is_lasting:
        return
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
        file.write(msgspec.json.encode(result))
    Path(file.name).replace(path)
