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
from tests.conformance.ranks import Ranks, ThreadRanks
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
def crews() -> Iterator[dict[tuple[str, int], ProcessRanks]]:
    """Processes that were started for a test and serve the next ones, too; one kind at a time."""
    started: dict[tuple[str, int], ProcessRanks] = {}
    yield started
    for crew in started.values():
        crew.close()


def test_behaviour(kind: str, size: int, case: Case, crews: dict[tuple[str, int], ProcessRanks]) -> None:
    ranks: Ranks = ThreadRanks(size)
    if kind != "threads":
        if (kind, size) not in crews:
            for crew in crews.values():
                crew.close()
            crews.clear()
            crews[kind, size] = ProcessRanks(size, hosts=HOSTS[kind])
        ranks = crews[kind, size]
    ranks.run(case)


def test_processes_leave_nothing_behind() -> None:
    crew = ProcessRanks(2)
    try:
        crew.run(all_cases()["allreduce.shapes_of_all_kinds_come_back"])
    finally:
        crew.close()
