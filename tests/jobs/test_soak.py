"""Short versions of `make soak`: an elastic job under random faults counts every sample once and ends with the loss of
an undisturbed run. How fast it is is not tested here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.soak import LOSS_TOLERANCE, run_chaos, run_goodput

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
SECONDS_S = 100.0


def test_chaos_loses_no_sample_and_changes_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_chaos(tmp_path, SECONDS_S, seed=1, say=print)
    assert result.exact
    assert sum(result.faults.values()) >= 3, capsys.readouterr().out
    assert result.loss == pytest.approx(result.undisturbed_loss, rel=LOSS_TOLERANCE)


def test_killed_workers_come_back_and_no_sample_is_lost(tmp_path: Path) -> None:
    result = run_goodput(tmp_path, SECONDS_S / 2, seed=1, kills=3, say=print)
    assert result.exact
    assert result.faults["kill"] >= 1
