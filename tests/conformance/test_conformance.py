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
shared = pytest.mark.leaves(reason="the processes serve all tests of the session, which ends them")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per behaviour, kind and number of ranks."""
    if "case" not in metafunc.fixturenames:
        return
    made = [
        pytest.param(kind, size, case, id=f"{kind}-{size}-{case.name}", marks=() if kind == "threads" else shared)
        for kind in ("threads", *HOSTS)
        for case in all_cases().values()
        for size in case.sizes
        if kind == "threads" or size > {"two-hosts": 2}.get(kind, 1)
    ]
    made.sort(key=lambda param: param.values[:2] if isinstance(param.values[0], str) else ())
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
