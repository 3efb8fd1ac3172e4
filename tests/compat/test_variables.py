"""What HOROVOD_* variables mean."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from horovod.common.variables import (
    LOGGERS,
    OPERATION_TIMEOUT_S,
    is_true,
    set_log_level,
    settings_from,
    timeline_from,
    warn_without_effect,
)
from ronde.settings import Settings


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "1048576"}, {"fusion_bytes": 1048576}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_bytes": 0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "10"}, {"stall_s": 10.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "10"}, {"stall_s": 0.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, {"operation_s": 90.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, {}),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}, {"start_s": 120.0}),
        ({"HOROVOD_CPU_OPERATIONS": "MPI"}, {"backend": "mpi"}),
        ({"HOROVOD_CPU_OPERATIONS": "gloo"}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": ""}, {}),
    ],
)
def test_variables_become_settings(variables: dict[str, str], expected: dict[str, object]) -> None:
    found = settings_from(variables)
    assert found == {"operation_s": OPERATION_TIMEOUT_S, "stall_s": 60.0, **expected}
    Settings(**found)


def test_rondes_own_variables_count_more_than_horovods_defaults_and_less_than_what_was_asked_for() -> None:
    own = {"RONDE_STALL_S": "7", "RONDE_OPERATION_S": "8"}
    assert settings_from(own) == {}
    assert settings_from({**own, "HOROVOD_STALL_CHECK_TIME_SECONDS": "9"}) == {"stall_s": 9.0}


@pytest.mark.parametrize(
    ("name", "text"),
    [("HOROVOD_FUSION_THRESHOLD", "lots"), ("HOROVOD_CPU_OPERATIONS", "nccl"), ("HOROVOD_GLOO_TIMEOUT_SECONDS", "x")],
)
def test_nonsense_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{text}' cannot be read"):
        settings_from({name: text})


def test_a_switch_is_a_number_above_zero_or_a_word_for_yes() -> None:
    assert [is_true(text) for text in ("1", "2", "true", "YES")] == [True] * 4
    assert [is_true(text) for text in (None, "", "0", "-1", "no", "maybe")] == [False] * 6


def test_a_timeline_is_a_file_or_comes_later() -> None:
    assert timeline_from({"HOROVOD_TIMELINE": "/tmp/t.json"}) == "/tmp/t.json"
    assert timeline_from({"HOROVOD_TIMELINE": "dynamic"}) is None
    assert timeline_from({"HOROVOD_TIMELINE": ""}) is timeline_from({}) is None


def test_what_has_no_effect_is_told_in_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_CACHE_CAPACITY": "0",  # a number as any other
        "HOROVOD_AUTOTUNE": "0",  # off
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_MPI": "0",
        "HOROVOD_NCCL_HOME": "/usr",
        "HOROVOD_WHAT": "1",
        "HOROVOD_RANK": "0",
        "HOROVOD_TIMELINE": "x",
        "HOROVOD_FUSION_THRESHOLD": "1",
        "PATH": "x",
    }
    with caplog.at_level(logging.WARNING, logger="horovod"):
        warn_without_effect(environ, logging.getLogger("horovod"))
    assert [record.getMessage() for record in caplog.records] == [
        "HOROVOD_CACHE_CAPACITY has no effect here: repeated operations are always announced by a short number",
        "HOROVOD_CYCLE_TIME has no effect here: there is no cycle: operations start when every process is ready",
        "HOROVOD_NCCL_HOME has no effect here: nothing is compiled",
        "HOROVOD_WHAT is not known here, and has no effect",
        "HOROVOD_WITH_PYTORCH has no effect here: nothing is compiled",
    ]


@pytest.fixture
def fresh_loggers() -> Iterator[None]:
    yield
    for logger in map(logging.getLogger, LOGGERS):
        logger.setLevel(logging.NOTSET)
        logger.handlers.clear()
        logger.propagate = True


@pytest.mark.usefixtures("fresh_loggers")
def test_the_level_of_the_log_can_be_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    set_log_level("error")
    assert not logging.getLogger("ronde.comm").isEnabledFor(logging.WARNING)
    set_log_level("DEBUG", hide_time=True)
    logging.getLogger("ronde.comm").debug("here")
    assert capsys.readouterr().err == "DEBUG ronde.comm: here\n"
    with pytest.raises(ValueError, match="must be one of TRACE"):
        set_log_level("loud")
