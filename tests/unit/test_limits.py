"""The time limits of tests are in an order in which the most useful report of a failure comes first."""

from __future__ import annotations

from tests import limits


def test_whoever_knows_most_reports_first() -> None:
    assert limits.OPERATION_S < limits.RANK_S < limits.PATIENCE_S < limits.TEST_S
    assert limits.SECONDS_S < limits.PATIENCE_S < limits.LONG_S < limits.LONG_TEST_S
    assert limits.BUILD_S < limits.BUILD_TEST_S


def test_a_test_has_time_for_several_waits() -> None:
    assert limits.TEST_S > 3 * limits.PATIENCE_S + limits.CLOSING_S
    assert limits.LONG_TEST_S > 3 * limits.LONG_S + limits.CLOSING_S
    assert limits.BUILD_TEST_S > 2 * limits.BUILD_S + limits.CLOSING_S


def test_a_promise_is_never_shorter_than_on_a_quiet_machine() -> None:
    assert limits.promised_s(2.0) >= 2.0
