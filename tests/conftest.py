"""What all tests share: after a test, no thread, process, file descriptor or shared memory of its making is left; time
limits; and a table of what was tested on this machine (tests/services.py).

A test that has to leave something says so: `@pytest.mark.leaves(reason="…")`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.limits import CLOSING_S, TEST_S
from tests.services import ServiceResult, table

# A single example may take any time on a busy machine; pytest limits the whole test.
hypothesis.settings.register_profile("ronde", deadline=None)
hypothesis.settings.load_profile("ronde")

# Programs of the tests are small: XLA takes longer to optimize them than it saves. Jobs inherit this.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

UNIT_TESTS = Path(__file__).parent / "unit"

NATIVE_THREADS = ("ronde", "ZMQbg")
"""Names of native threads that somebody has to close. The pools of BLAS and PyTorch stay by design."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes have more time than pyproject.toml says, unless they say themselves how much. Reports
    tell which services a test needs."""
    for item in items:
        if UNIT_TESTS not in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))
        for marker in item.iter_markers("service"):
            item.user_properties.append(("service", marker.args[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs something that is not there."""
    for marker in item.iter_markers("service"):
        if marker.kwargs["missing"]:
            pytest.skip(marker.kwargs["missing"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What of this machine the tests have used, and what they could not use."""
    outcomes = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}
    results = []
    for key, outcome in outcomes.items():
        for report in terminalreporter.stats.get(key, []):
            if not isinstance(report, pytest.TestReport):  # of a module that could not be imported
                continue
            why = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
            names = [str(name) for kind, name in report.user_properties if kind == "service"]
            # Otherwise a reason would be missing in the table.
            names = names or (["no service"] if outcome == "skipped" else [])
            results += [ServiceResult(name, outcome, why) for name in names]
    if rows := table(results):
        terminalreporter.section("services")
        for row in rows:
            terminalreporter.write_line(row)


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, one under nohup the end of its terminal, and so does all that they
    start: tests of both start processes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def held() -> dict[str, str]:
    """What this process holds right now: by what is compared, how it is called in a message."""
    return dict((*_python_threads(), *_native_threads(), *_children(), *_files(), *_shared_memory()))


def left_since(before: dict[str, str]) -> list[str]:
    return sorted(words for thing, words in held().items() if thing not in before)


def _python_threads() -> Iterator[tuple[str, str]]:
    for thread in threading.enumerate():
        yield f"thread {thread.ident}", f"thread {thread.name!r}"


def _native_threads() -> Iterator[tuple[str, str]]:
    known = {thread.native_id for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # it ended while we looked
            continue
        if int(task.name) not in known and name.startswith(NATIVE_THREADS):
            yield f"native thread {task.name}", f"native thread {name!r}"


def _children() -> Iterator[tuple[str, str]]:
    try:  # spares a look at every process of the machine
        if not any((task / "children").read_text() for task in Path("/proc/self/task").iterdir()):
            return
    except OSError:  # a thread ended while we looked, or the kernel does not tell
        pass
    for child in psutil.Process().children(recursive=True):
        try:
            words = f"process {child.pid} ({child.status()}): {' '.join(child.cmdline()) or child.name()}"
        except psutil.Error:  # it ended while we looked
            words = f"process {child.pid}"
        yield f"process {child.pid}", words


def _files() -> Iterator[tuple[str, str]]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        yield f"file {link.name} {target}", f"file descriptor {link.name}: {target}"


def _shared_memory() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if "/memfd:ronde" in path:
            yield f"map {addresses}", f"mapped shared memory {path}"


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that left something behind. Set up before, and torn down after, the test's own fixtures."""
    marker = request.node.get_closest_marker("leaves")
    if marker is not None:
        if not marker.kwargs.get("reason"):
            pytest.fail('say why: @pytest.mark.leaves(reason="…")')
        yield
        return
    before = held()
    yield
    deadline = time.monotonic() + CLOSING_S
    while (left := left_since(before)) and time.monotonic() < deadline:
        gc.collect()  # a traceback kept by pytest.raises may hold what the test's variables own
        time.sleep(0.01)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left))
