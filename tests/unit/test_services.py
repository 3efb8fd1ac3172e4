"""The table at the end of a test run tells what was not tested on this machine."""

from __future__ import annotations

from tests.services import ServiceResult, table

NO_ROOT = "needs root"


def test_a_service_has_run_when_one_of_its_tests_has() -> None:
    results = [ServiceResult("MPICH", "passed", "")] * 3 + [ServiceResult("MPICH", "skipped", "too new")]
    assert table(results) == ["MPICH  ran      3 tests; 1 skipped: too new"]


def test_a_service_that_was_never_used_says_why() -> None:
    results = [ServiceResult("ssh", "skipped", NO_ROOT)] * 2 + [ServiceResult("a wheel", "failed", "")]
    assert table(results) == [
        "a wheel  ran      1 tests, 1 failed",
        "ssh      SKIPPED  2 skipped: needs root",
    ]


def test_without_services_there_is_no_table() -> None:
    assert table([]) == []
