"""What a signal handler may do in the middle of an operation: end it with an exception (as Ctrl-C does), or leave the
round. Everything else that would have to wait for the interrupted operation is refused."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ronde.settings import Settings
from ronde.types import Deadline
from tests.jobs.kit import LocalRanks, start_ranks
from tests.limits import PATIENCE_S, promised_s

SOON_S = 1.0
SHUTDOWN_S = 30.0
SETTINGS = Settings(stall_s=0.0, shutdown_s=SHUTDOWN_S)
"""A shutdown that hangs is told from a slow one."""
WAYS = ["blocking", "repeated", "work", "named", "repeated named", "behind", "message", "request", "bucket", "group"]

ways = pytest.mark.parametrize("how", WAYS)


def interrupt(job: LocalRanks, how: str, action: str, number: signal.Signals = signal.SIGUSR1) -> float:
    """Send a signal to rank 0, which waits for rank 1; when that was."""
    job.send([0, 1], how=how, action=action)
    job.receive(1, "past the barrier")
    waiting = job.receive(0, "waiting")
    os.kill(job.pids[0], number)
    return float(waiting["at"])


@ways
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGUSR1, "Alarm")])
def test_what_a_signal_handler_raises_ends_a_wait(how: str, number: signal.Signals, error: str) -> None:
    with start_ranks("interrupts", 2, settings=SETTINGS) as job:
        at = interrupt(job, how, "raise", number)
        ended = job.receive(0, "ended")
        assert ended["error"].startswith(error)
        assert ended["at"] - at < promised_s(SOON_S)
        job.send([1], come=False)
        stayed = job.receive(1, "stayed")["error"]
        if how == "work":  # only the wait has ended; the operation goes on in the background
            assert stayed == "" and job.receive(0, "went on")["result"] == [2, 2, 2]
        else:
            assert stayed.startswith(("PeerLost: rank 1 lost rank 0", "RoundEnded"))
        job.receive_all([0, 1], "over")
        assert job.wait() == [0, 0]


@ways
def test_an_operation_in_a_signal_handler_is_refused_and_the_interrupted_one_goes_on(how: str) -> None:
    with start_ranks("interrupts", 2, settings=SETTINGS) as job:
        interrupt(job, how, "operate")
        job.receive(0, "operated")  # before that, the operation could end and its handler run after it
        job.send([1], come=True)
        ended = job.receive(0, "ended")
        assert ended["error"] == ""
        came = job.receive(1, "came")
        is_message = how in ("message", "request")
        assert ended["result"] == [2, 2, 2] and came["result"] == ([1, 1, 1] if is_message else [2, 2, 2])
        assert len(ended["inside"]) == 7, ended["inside"]
        for error in ended["inside"]:
            assert "this thread is in the middle of another operation" in error and "signal handler" in error
        job.receive_all([0, 1], "over")
        assert job.wait() == [0, 0]


@ways
@pytest.mark.parametrize("action", ["shut down", "shut down and exit"])
def test_shutdown_in_a_signal_handler_ends_the_operation_and_the_others_learn_why(how: str, action: str) -> None:
    with start_ranks("interrupts", 2, settings=SETTINGS) as job:
        interrupt(job, how, action)
        ended = job.receive(0, "ended")
        assert ended["inside"] == [] and not ended["initialized"]
        assert ended["took_s"] < promised_s(SOON_S)
        if action == "shut down":
            assert ended["error"].startswith("RoundEnded: ") and "shutdown() was called" in ended["error"]
        else:
            assert ended["error"].startswith("SystemExit")
        job.send([1], come=False)
        stayed = job.receive(1, "stayed")["error"]
        assert stayed.startswith("PeerLost: rank 1 lost rank 0") and "it has left the round by shutdown()" in stayed
        job.receive_all([0, 1], "over")
        assert job.wait() == [0, 0]


def test_shutdown_in_a_signal_handler_ends_init_and_the_next_init_is_like_the_first() -> None:
    with start_ranks("interrupts", 2, settings=SETTINGS) as job:
        job.send([0, 1], how="init", action="shut down")
        job.receive(0, "waiting")
        core = job.coordinator._core

        def wait_for_connection(before: object) -> object:
            """The attempt of rank 0 that is connected, other than the one before."""
            deadline = Deadline(PATIENCE_S)
            while 0 not in core._connections or core._connections[0].attempt == before:
                assert not deadline.expired, "rank 0 has not come"
                time.sleep(0.01)
            return core._connections[0].attempt

        attempt = wait_for_connection(None)
        at = time.monotonic()
        os.kill(job.pids[0], signal.SIGUSR1)
        ended = job.receive(0, "ended")
        assert "shutdown() was called while init() was under way" in ended["error"] and not ended["initialized"]
        assert ended["at"] - at < promised_s(SOON_S)
        # Rank 0 first: a rank that joins while another one has given up is refused.
        job.send([0])
        wait_for_connection(attempt)
        job.send([1])
        assert [joined["result"] for joined in job.receive_all([0, 1], "joined").values()] == [[2, 2, 2], [2, 2, 2]]
        job.receive_all([0, 1], "over")
        assert job.wait() == [0, 0]
