"""A signal ends a wait: Ctrl-C, or a handler of the program's own that raises."""

from __future__ import annotations

import os
import signal

import pytest

from tests.jobs.kit import start_ranks
from tests.limits import promised_s

SOON_S = 1.0


@pytest.mark.parametrize("how", ["blocking", "work", "named"])
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGUSR1, "Alarm")])
def test_what_a_signal_handler_raises_ends_a_wait(how: str, number: signal.Signals, error: str) -> None:
    with start_ranks("interrupts", 2, env={"TEST_HOW": how}) as job:
        job.receive(1, "past the barrier")
        waiting = job.receive(0, "waiting")
        os.kill(job.pids[0], number)
        raised = job.receive(0, "raised")
        assert raised["error"] == error
        assert raised["at"] - waiting["at"] < promised_s(SOON_S)
        job.send([1])
        job.receive_all([0, 1], "over")
        assert job.wait() == [0, 0]
