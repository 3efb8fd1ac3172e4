"""Which signals are requests, and which are only repeats of one."""

from __future__ import annotations

import signal

import pytest

from ronde.launch.driver.driver import SIGNAL_REPEAT_S, SignalRepeatFilter


@pytest.mark.parametrize("number", SIGNAL_REPEAT_S)
def test_the_same_signal_within_moments_is_one_request(number: signal.Signals) -> None:
    repeats, limit_s = SignalRepeatFilter(), SIGNAL_REPEAT_S[number]
    assert repeats.is_new_request(number, 100.0)
    assert not repeats.is_new_request(number, 100.0)
    assert not repeats.is_new_request(number, 100.0 + 0.6 * limit_s)
    assert repeats.is_new_request(number, 100.0 + 1.2 * limit_s), "who goes on asking is heard"
    assert not repeats.is_new_request(number, 100.0 + 1.8 * limit_s)


def test_another_signal_is_another_request() -> None:
    repeats = SignalRepeatFilter()
    assert repeats.is_new_request(signal.SIGTERM, 100.0) and repeats.is_new_request(signal.SIGINT, 100.0)


def test_other_signals_always_count() -> None:
    repeats = SignalRepeatFilter()
    assert repeats.is_new_request(signal.SIGWINCH, 100.0) and repeats.is_new_request(signal.SIGWINCH, 100.0)
