"""How a job is brought to its end."""

from __future__ import annotations

import signal

import pytest

from ronde.launch.driver.termination import TRANSITIONS, Termination, TerminationEvent, TerminationStage
from ronde.launch.timeouts import INTERRUPT_TIMEOUT_S, INTERRUPTED_TERMINATE_TIMEOUT_S, KILL_TIMEOUT_S

FAILED, INTERRUPTED = TerminationEvent.RANK_FAILED, TerminationEvent.INTERRUPTED
STOPPED, TIMED_OUT = TerminationEvent.STOP_REQUESTED, TerminationEvent.TIMED_OUT
GRACE = (TerminationStage.GRACE, None, 10.0)
INTERRUPT = (TerminationStage.INTERRUPT, signal.SIGINT, INTERRUPT_TIMEOUT_S)
TERMINATE = (TerminationStage.TERMINATE, signal.SIGTERM, 5.0)
TERMINATE_SOON = (TerminationStage.TERMINATE, signal.SIGTERM, INTERRUPTED_TERMINATE_TIMEOUT_S)
KILL = (TerminationStage.KILL, signal.SIGKILL, KILL_TIMEOUT_S)
ABANDON = (TerminationStage.ABANDONED, None, None)


@pytest.mark.parametrize(
    ("events", "steps"),
    [
        ((FAILED, FAILED, TIMED_OUT, TIMED_OUT, TIMED_OUT), [GRACE, None, TERMINATE, KILL, ABANDON]),
        ((FAILED, STOPPED, TIMED_OUT), [GRACE, TERMINATE, KILL]),
        ((INTERRUPTED, TIMED_OUT, TIMED_OUT), [INTERRUPT, TERMINATE_SOON, KILL]),
        ((INTERRUPTED, INTERRUPTED), [INTERRUPT, KILL]),
        ((INTERRUPTED, STOPPED), [INTERRUPT, KILL]),
        ((STOPPED, INTERRUPTED), [TERMINATE, KILL]),
        ((STOPPED, STOPPED, FAILED, INTERRUPTED, STOPPED), [TERMINATE, KILL, None, None, None]),
    ],
)
def test_a_job_ends_step_by_step_and_who_asks_twice_gets_it_at_once(
    events: tuple[TerminationEvent, ...], steps: list[object]
) -> None:
    termination = Termination(grace_s=10.0, terminate_s=5.0)
    assert [termination.handle_event(event) for event in events] == steps


def test_every_stage_but_the_first_and_last_ends_with_time() -> None:
    ending = {stage for stage, event in TRANSITIONS if event is TIMED_OUT}
    assert ending == {*TerminationStage} - {TerminationStage.RUNNING, TerminationStage.ABANDONED}
