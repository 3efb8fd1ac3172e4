"""How a job is brought to its end."""

from __future__ import annotations

import signal

import pytest

from ronde.launch.driver.termination import (
    TRANSITIONS,
    Termination,
    TerminationEvent,
    TerminationStage,
    TerminationStep,
)
from ronde.launch.timeouts import INTERRUPT_TIMEOUT_S, INTERRUPTED_TERMINATE_TIMEOUT_S, KILL_TIMEOUT_S


def ending() -> Termination:
    return Termination(grace_s=10.0, terminate_s=5.0)


def test_after_a_failure_the_others_get_grace_then_sigterm_then_sigkill() -> None:
    job = ending()
    assert job.handle_event(TerminationEvent.RANK_FAILED) == TerminationStep(TerminationStage.GRACE, None, 10.0)
    assert job.handle_event(TerminationEvent.RANK_FAILED) is None
    assert job.handle_event(TerminationEvent.TIMED_OUT) == TerminationStep(
        TerminationStage.TERMINATE, signal.SIGTERM, 5.0
    )
    assert job.handle_event(TerminationEvent.TIMED_OUT) == TerminationStep(
        TerminationStage.KILL, signal.SIGKILL, KILL_TIMEOUT_S
    )
    assert job.handle_event(TerminationEvent.TIMED_OUT) == TerminationStep(TerminationStage.ABANDONED, None, None)


def test_ctrl_c_interrupts_and_does_not_wait_long() -> None:
    job = ending()
    assert job.handle_event(TerminationEvent.INTERRUPTED) == TerminationStep(
        TerminationStage.INTERRUPT, signal.SIGINT, INTERRUPT_TIMEOUT_S
    )
    assert job.handle_event(TerminationEvent.TIMED_OUT) == TerminationStep(
        TerminationStage.TERMINATE, signal.SIGTERM, INTERRUPTED_TERMINATE_TIMEOUT_S
    )
    assert job.handle_event(TerminationEvent.TIMED_OUT) == TerminationStep(
        TerminationStage.KILL, signal.SIGKILL, KILL_TIMEOUT_S
    )


@pytest.mark.parametrize("first", [TerminationEvent.INTERRUPTED, TerminationEvent.STOP_REQUESTED])
@pytest.mark.parametrize("second", [TerminationEvent.INTERRUPTED, TerminationEvent.STOP_REQUESTED])
def test_who_asks_twice_gets_it_at_once(first: TerminationEvent, second: TerminationEvent) -> None:
    job = ending()
    job.handle_event(first)
    assert job.handle_event(second) == TerminationStep(TerminationStage.KILL, signal.SIGKILL, KILL_TIMEOUT_S)


def test_nobody_is_given_more_time_by_asking_again() -> None:
    job = ending()
    for event in (TerminationEvent.STOP_REQUESTED, TerminationEvent.STOP_REQUESTED):
        job.handle_event(event)
    assert all(
        job.handle_event(event) is None
        for event in (TerminationEvent.RANK_FAILED, TerminationEvent.INTERRUPTED, TerminationEvent.STOP_REQUESTED)
    )


def test_every_stage_but_the_first_and_last_ends_with_time() -> None:
    assert {stage for stage, on in TRANSITIONS if on is TerminationEvent.TIMED_OUT} == {*TerminationStage} - {
        TerminationStage.RUNNING,
        TerminationStage.ABANDONED,
    }
