"""Every behaviour, on every kind of ranks. `-k named` runs one chapter, `-k native-3` one kind.

threads     ranks in this process, the reference backend
native      processes that share memory
tcp         processes that think each is on a host of its own
two-hosts   processes that think they are on two hosts
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.cases import Case, all_cases
from tests.conformance.ranks import run_threads
from tests.conformance.runner import ProcessRanks

HOSTS = {"native": "one", "tcp": "apart", "two-hosts": "two"}
LEAST = {"threads": 1, "native": 2, "tcp": 2, "two-hosts": 3}
shared = pytest.mark.leaves(reason="the processes serve all tests of the session, which ends them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per behaviour, kind and number of ranks."""
    if "case" not in metafunc.fixturenames:
        return
    # Sorted by kind and number, so that processes are started once for all tests that need so many.
    wanted = sorted(
        (index, kind, size, name)
        for index, kind in enumerate(("threads", *HOSTS))
        for name, case in all_cases().items()
        for size in case.sizes
        if size >= LEAST[kind]
    )
    made = [
        pytest.param(kind, size, all_cases()[name], id=f"{kind}-{size}-{name}", marks=() if index == 0 else shared)
        for index, kind, size, name in wanted
    ]
    metafunc.parametrize(("kind", "size", "case"), made)


@pytest.fixture(scope="session")
def running() -> Iterator[dict[tuple[str, int], ProcessRanks]]:
    """The processes that were started for a test and serve the next ones, too; of one kind and number at a time."""
    running: dict[tuple[str, int], ProcessRanks] = {}
    yield running
    for ranks in running.values():
        ranks.close()


def test_behaviour(kind: str, size: int, case: Case, running: dict[tuple[str, int], ProcessRanks]) -> None:
    if kind == "threads":
        run_threads(size, case.body)
        return
    if (kind, size) not in running:
        for ranks in running.values():
            ranks.close()
        running.clear()
        running[kind, size] = ProcessRanks(size, hosts=HOSTS[kind])
    running[kind, size].run(case.name)


def test_allreduce_needs_no_extension() -> None:
    ranks = ProcessRanks(2, extension="missing")
    try:
        for name, case in all_cases().items():
            if name.startswith("allreduce.") and 2 in case.sizes:
                ranks.run(name)
    finally:
        ranks.close()


def test_processes_leave_nothing_behind() -> None:
    ranks = ProcessRanks(2)
    try:
        ranks.run("allreduce.shapes_of_all_kinds_come_back")
    finally:
        ranks.close()
