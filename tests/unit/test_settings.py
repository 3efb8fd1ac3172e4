"""Settings: what is wrong is told at the start, by its name."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest

from ronde.launch.agent.orphans import COOKIE_VARIABLE
from ronde.launch.agent.rank import CALL_FD_VARIABLE, RESULT_FD_VARIABLE
from ronde.settings import PREFIX, Settings

SECONDS = [field.name for field in dataclasses.fields(Settings) if field.name.endswith("_s")]


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e300", "-1", "2e6"])
def test_a_time_that_no_clock_can_count_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* seconds, got {re.escape(str(float(text)))}"):
        Settings.load({}, {PREFIX + name.upper(): text})


@pytest.mark.parametrize("name", SECONDS)
def test_only_the_stall_watch_can_be_turned_off(name: str) -> None:
    if name == "stall_s":
        assert Settings(stall_s=0).stall_s == 0
    else:
        with pytest.raises(ValueError, match=f"{name} must be above 0"):
            Settings.load({name: 0}, {})


def test_an_unknown_variable_is_told_once_with_what_it_may_mean(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"RONDE_STAL_S": "5", "RONDE_XYZZY": "1", "RONDE_STALL_S": "7", "OTHER": "1"}
    with caplog.at_level(logging.WARNING, "ronde.settings"):
        for _ in range(2):
            assert Settings.load({}, environ).stall_s == 7
    assert caplog.messages == [
        "RONDE_STAL_S is no setting of ronde and does nothing; did you mean RONDE_STALL_S?",
        "RONDE_XYZZY is no setting of ronde and does nothing",
    ]


@pytest.mark.parametrize(
    "environ",
    [
        dict.fromkeys((CALL_FD_VARIABLE, RESULT_FD_VARIABLE, COOKIE_VARIABLE, "RONDE_TEST_SMALL"), "7"),
        {"RONDE_COORDINATOR_HOSTED": "1", "RONDE_OPERATIONS_S": "its launcher has told"},
    ],
    ids=["not settings", "in a rank"],
)
def test_what_is_no_mistake_or_was_told_before_is_not_told(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    Settings.load({}, environ)
    assert not caplog.messages
