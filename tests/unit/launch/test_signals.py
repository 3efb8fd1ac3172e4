"""Which signals are requests, and which are only repeats of one."""

from __future__ import annotations

import signal

import pytest

from ronde.launch.signals import REPEAT_S, RepeatFilter


@pytest.mark.parametrize("number", REPEAT_S)
def test_the_same_signal_within_moments_is_one_request(number: signal.Signals) -> None:
    repeats, limit_s = RepeatFilter(), REPEAT_S[number]
    assert repeats.counts(number, 100.0)
    assert not repeats.counts(number, 100.0)
    assert not repeats.counts(number, 100.0 + 0.6 * limit_s)
    assert repeats.counts(number, 100.0 + 1.2 * limit_s), "who goes on asking is heard"
    assert not repeats.counts(number, 100.0 + 1.8 * limit_s)


def test_another_signal_is_another_request() -> None:
    repeats = RepeatFilter()
    assert repeats.counts(signal.SIGTERM, 100.0) and repeats.counts(signal.SIGINT, 100.0)


def test_other_signals_always_count() -> None:
    repeats = RepeatFilter()
    assert repeats.counts(signal.SIGWINCH, 100.0) and repeats.counts(signal.SIGWINCH, 100.0)
