"""Settings: a wrong value raises an error at start that names the setting, and the declaration needs no source file."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from ronde.launch.agent.orphans import COOKIE_VARIABLE
from ronde.launch.agent.rank import CALL_FD_VARIABLE, RESULT_FD_VARIABLE
from ronde.settings import PREFIX, Settings

SECONDS = [name for name in Settings.__struct_fields__ if name.endswith("_s")]


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e300", "-1", "2e6"])
def test_a_time_that_no_clock_can_count_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* seconds, got {re.escape(str(float(text)))}"):
        Settings.load({}, {PREFIX + name.upper(): text})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"rank": 2, "size": 2}, "rank must be from 0 to size - 1 = 1, got 2"),
        ({"backend": "gloo"}, "backend must be native or mpi, got 'gloo'"),
        ({"algorithm": "tree"}, "algorithm must be empty, direct, doubling, halving, ring or two_level, got 'tree'"),
        ({"chunk_bytes": 1}, "chunk_bytes must be at least 4096, got 1"),
        ({"slot_bytes": 4096}, "slot_bytes must be at least chunk_bytes (262144), got 4096"),
        ({"slot_bytes": 2 << 30}, "slot_bytes must be at most 1073741824, got 2147483648"),
        ({"slot_bytes": 1_000_001}, "slot_bytes must be a multiple of 64, got 1000001"),
        ({"chunk_bytes": 5000}, "chunk_bytes must be a multiple of 64, got 5000"),
        ({"key": "abc"}, "key must be 64 hexadecimal digits"),
        ({"start_s": 0}, "start_s must be above 0 and at most 1000000 seconds, got 0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings.load(given, {})
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings().replace(**given)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("RONDE_SIZE", "two", "RONDE_SIZE must be a whole number, got 'two'"),
        ("RONDE_STALL_S", "soon", "RONDE_STALL_S must be a number, got 'soon'"),
        ("RONDE_COORDINATOR_HOSTED", "maybe", "RONDE_COORDINATOR_HOSTED must be 1 or 0, got 'maybe'"),
    ],
)
def test_a_text_of_another_type_is_refused_with_its_variable(variable: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.load({}, {variable: text})
    assert Settings.load({}, {"RONDE_COORDINATOR_HOSTED": "Yes", "RONDE_STALL_S": "0"}).stall_s == 0


def test_the_environment_wins_over_a_file_and_an_argument_over_both() -> None:
    environ = {"RONDE_STALL_S": "2", "RONDE_START_S": "2"}
    settings = Settings.load({"stall_s": 3.0}, environ, {"stall_s": 1.0, "start_s": 1.0, "shutdown_s": 1.0})
    assert (settings.stall_s, settings.start_s, settings.shutdown_s) == (3.0, 2.0, 1.0)
    assert Settings.given_names({"size": 2}, environ) == {"size", "stall_s", "start_s"}


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown setting stalls"):
        Settings.load({"stalls": 1}, {})


def test_the_key_is_not_shown() -> None:
    settings = Settings(key="ab" * 32)
    assert "abab" not in repr(settings)
    assert "key" not in dict(settings.__rich_repr__())


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
