"""How a job is brought to its end."""

from __future__ import annotations

import signal

import pytest

from ronde.launch.ending import HURRY_S, INTERRUPT_S, KILL_S, NEXT, Ending, On, Stage, Step


def ending() -> Ending:
    return Ending(grace_s=10.0, terminate_s=5.0)


def test_after_a_failure_the_others_get_grace_then_sigterm_then_sigkill() -> None:
    job = ending()
    assert job.on(On.FAILED) == Step(Stage.GRACE, None, 10.0)
    assert job.on(On.FAILED) is None
    assert job.on(On.TIME) == Step(Stage.TERMINATE, signal.SIGTERM, 5.0)
    assert job.on(On.TIME) == Step(Stage.KILL, signal.SIGKILL, KILL_S)
    assert job.on(On.TIME) == Step(Stage.GIVEN_UP, None, None)


def test_ctrl_c_interrupts_and_does_not_wait_long() -> None:
    job = ending()
    assert job.on(On.CTRL_C) == Step(Stage.INTERRUPT, signal.SIGINT, INTERRUPT_S)
    assert job.on(On.TIME) == Step(Stage.TERMINATE, signal.SIGTERM, HURRY_S)
    assert job.on(On.TIME) == Step(Stage.KILL, signal.SIGKILL, KILL_S)


@pytest.mark.parametrize("first", [On.CTRL_C, On.STOP])
@pytest.mark.parametrize("second", [On.CTRL_C, On.STOP])
def test_who_asks_twice_gets_it_at_once(first: On, second: On) -> None:
    job = ending()
    job.on(first)
    assert job.on(second) == Step(Stage.KILL, signal.SIGKILL, KILL_S)


def test_nobody_is_given_more_time_by_asking_again() -> None:
    job = ending()
    for event in (On.STOP, On.STOP):
        job.on(event)
    assert all(job.on(event) is None for event in (On.FAILED, On.CTRL_C, On.STOP))


def test_every_stage_but_the_first_and_last_ends_with_time() -> None:
    assert {stage for stage, on in NEXT if on is On.TIME} == {*Stage} - {Stage.RUNNING, Stage.GIVEN_UP}
