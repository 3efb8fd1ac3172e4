"""The time limits of tests are in an order in which the most useful report of a failure comes first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import limits


def test_whoever_knows_most_reports_first() -> None:
    assert limits.OPERATION_S < limits.RANK_S < limits.PATIENCE_S < limits.TEST_S
    assert limits.SECONDS_S < limits.PATIENCE_S < limits.LONG_S < limits.LONG_TEST_S
    assert limits.BUILD_S < limits.BUILD_TEST_S
    assert limits.TEST_S > 3 * limits.PATIENCE_S + limits.CLOSING_S
    assert limits.LONG_TEST_S > 3 * limits.LONG_S + limits.CLOSING_S
    assert limits.BUILD_TEST_S > 2 * limits.BUILD_S + limits.CLOSING_S


@pytest.mark.parametrize(("load", "expected_s"), [(0.0, 2.0), (3.0, 6.0), (100.0, 8.0)])
def test_a_promise_grows_with_the_load_up_to_a_bound(
    load: float, expected_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    num_cores = len(os.sched_getaffinity(0))
    (tmp_path / "loadavg").write_text(f"{load} 0.0 0.0 {num_cores * load:.0f}/99 1234")
    monkeypatch.setattr(limits, "Path", lambda _: tmp_path / "loadavg")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert limits.promised_s(2.0) == expected_s
