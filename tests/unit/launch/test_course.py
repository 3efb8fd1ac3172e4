"""A job from the start of its ranks to their end, with agents that only remember what they are told."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping

import pytest

from ronde.launch.driver.driver import SIGPIPE_EXIT_CODE, WRITE_ERROR_EXIT_CODE, RankSupervisor
from ronde.launch.driver.failure_report import RankExit, StopRequest
from ronde.launch.driver.monitor import RankProcessInfo
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.termination import TerminationEvent
from ronde.launch.job import Job
from ronde.launch.output.terminal import OutputClosed
from ronde.launch.placement import Host, place_ranks
from ronde.launch.protocol import (
    DriverMessage,
    FunctionResult,
    RankExited,
    RankOutput,
    RankStarted,
    RankStartFailed,
    SignalRanks,
    UsageReport,
)
from ronde.net.event_loop import EventLoop
from ronde.text import LOST_CODE, NOT_STARTED_CODE
from tests.unit.launch.screens import RecordingSink

CTRL_C = StopRequest(130, "interrupted by Ctrl-C")


class Stage:
    """A course of four ranks on two hosts, and everything around it."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.sent: list[tuple[int, DriverMessage]] = []
        self.lost: list[tuple[int, str]] = []
        self.pauses: list[bool] = []
        self.screen = RecordingSink()
        job = Job(command=("true",), num_ranks=4, hosts=(Host("a", 2), Host("b", 2)), grace_s=0.0, terminate_s=0.0)
        self.course = RankSupervisor(
            loop,
            job,
            place_ranks(job.hosts, 4),
            agents=self,
            output_sink=self.screen,
            on_rank_exit=lambda rank, why: self.lost.append((rank, why)),
        )

    def send(self, messages: Mapping[int, DriverMessage]) -> None:
        self.sent += messages.items()

    def set_reading_paused(self, paused: bool) -> None:
        self.pauses.append(paused)

    def exit(self, *ranks: int, code: int = 0) -> None:
        for rank in ranks:
            self.course.handle_message(rank // 2, RankExited(rank, code))

    def signals(self) -> list[tuple[int, SignalRanks]]:
        return [(index, message) for index, message in self.sent if isinstance(message, SignalRanks)]

    def turn_until_sent(self, number: int) -> None:
        self.loop.run_until(lambda: any(message.number == number for _, message in self.signals()))


@pytest.fixture
def stage() -> Iterator[Stage]:
    loop = EventLoop()
    yield Stage(loop)
    loop.close()


def test_it_is_over_when_all_ranks_have_ended(stage: Stage) -> None:
    overs = []
    for rank in (0, 1, 3, 2):
        stage.exit(rank)
        overs.append(stage.course.finished)
    assert overs == [False, False, False, True]
    assert [end.rank for end in stage.course.exits] == [0, 1, 3, 2]
    assert stage.screen.exited_ranks == [0, 1, 3, 2] and not stage.sent


def test_the_coordinator_hears_how_each_rank_has_ended(stage: Stage) -> None:
    stage.exit(1)
    stage.exit(2, code=-9)
    assert stage.lost == [(1, "exited with code 0"), (2, "killed by signal 9 (SIGKILL)")]


def test_after_a_failure_those_that_stay_are_told_to_end_and_then_killed(stage: Stage) -> None:
    stage.exit(1, code=1)
    assert not stage.sent
    stage.turn_until_sent(signal.SIGTERM)
    assert stage.signals() == [(0, SignalRanks((0,), signal.SIGTERM)), (1, SignalRanks((2, 3), signal.SIGTERM))]
    stage.exit(2, code=-15)
    stage.turn_until_sent(signal.SIGKILL)
    assert stage.signals()[2:] == [(0, SignalRanks((0,), signal.SIGKILL)), (1, SignalRanks((3,), signal.SIGKILL))]
    assert [end.requested for end in stage.course.exits] == [False, True]
    assert stage.screen.messages == [
        "ending ranks 0, 2, 3, still running 0 s after the first failure",
        "killing ranks 0, 3",
    ]


def test_a_rank_that_ends_well_ends_nobody_else(stage: Stage) -> None:
    stage.exit(0)
    stage.loop.call_later(0.0, lambda: None)
    stage.loop.run_until(lambda: stage.screen.num_refreshes > 0)
    assert not stage.sent


def test_the_ranks_of_a_lost_host_are_lost(stage: Stage) -> None:
    stage.exit(3)
    stage.course.handle_agent_lost(1, HostError("closed", "advice", "Connection to b closed by remote host."))
    (_, lost) = stage.course.exits
    assert (lost.rank, lost.host, lost.exit_code) == (2, "b", LOST_CODE)
    assert lost.reason == "ended when the connection to it was lost (Connection to b closed by remote host.)"
    stage.turn_until_sent(signal.SIGTERM)
    assert stage.signals() == [(0, SignalRanks((0, 1), signal.SIGTERM))]


def test_a_rank_that_cannot_be_started_has_failed(stage: Stage) -> None:
    stage.course.handle_message(0, RankStartFailed(0, "there is no command 'trian'"))
    stage.course.handle_message(0, RankStartFailed(1, "'data' is no program", 126))
    assert stage.course.exits == [
        RankExit(0, "a", NOT_STARTED_CODE, "could not be started: there is no command 'trian'"),
        RankExit(1, "a", 126, "could not be started: 'data' is no program"),
    ]


def test_other_troubles_of_a_host_are_shown(stage: Stage) -> None:
    stage.course.handle_message(1, RankStartFailed(-1, "its disk is full"))
    assert stage.screen.messages == ["host b: its disk is full"] and not stage.course.exits


def test_ctrl_c_interrupts_and_a_second_one_kills(stage: Stage) -> None:
    stage.course.request_stop(CTRL_C, TerminationEvent.INTERRUPTED)
    stage.course.request_stop(StopRequest(143, "ended by SIGTERM"), TerminationEvent.INTERRUPTED)
    assert [message.number for _, message in stage.signals()] == [signal.SIGINT] * 2 + [signal.SIGKILL] * 2
    assert stage.course.stop_request == CTRL_C
    stage.exit(0, 1, 2, 3, code=-9)
    assert stage.course.finished and all(end.requested for end in stage.course.exits)


def test_output_is_shown_at_the_end_of_the_turn_and_again_when_the_screen_wants(stage: Stage) -> None:
    for data in (b"a", b"b"):
        stage.course.handle_message(0, RankOutput(0, "out", data))
    assert stage.screen.num_refreshes == 0
    stage.screen.due_s = 0.0  # long ago: at once
    stage.loop.run_until(lambda: stage.screen.num_refreshes == 2)
    assert stage.screen.printed == {0: b"ab"}


@pytest.mark.parametrize(
    ("gone", "stop", "notes"),
    [
        (OutputClosed("Broken pipe", broken_pipe=True), StopRequest(SIGPIPE_EXIT_CODE, ""), []),
        (
            OutputClosed("No space left"),
            StopRequest(WRITE_ERROR_EXIT_CODE, "No space left"),
            ["ending ranks 0-3", "killing ranks 0-3"],
        ),
    ],
)
def test_output_that_cannot_be_written_ends_the_job_without_a_word_if_its_reader_has_left(
    stage: Stage, gone: OutputClosed, stop: StopRequest, notes: list[str]
) -> None:
    stage.screen.closed_with = gone
    stage.course.handle_message(0, RankOutput(0, "out", b"y\n"))
    stage.turn_until_sent(signal.SIGKILL)
    assert (stage.course.stop_request, stage.screen.messages) == (stop, notes)


def test_ranks_wait_while_the_reader_of_the_output_is_behind(stage: Stage) -> None:
    stage.screen.backlogged = True
    stage.screen.due_s = 0.0
    stage.course.handle_message(0, RankOutput(0, "out", b"y\n"))
    stage.loop.run_until(lambda: stage.screen.num_refreshes == 2)
    assert stage.pauses == [True]
    stage.screen.backlogged = False
    stage.course.handle_message(0, RankOutput(0, "out", b"y\n"))
    stage.loop.run_until(lambda: stage.screen.num_refreshes == 3)
    assert stage.pauses == [True, False]


def test_results_are_kept(stage: Stage) -> None:
    stage.course.handle_message(0, FunctionResult(1, b"pickled"))
    assert stage.course.return_values == {1: b"pickled"}


def test_what_is_known_of_each_rank_is_there_for_others(stage: Stage) -> None:
    stage.course.handle_message(1, RankStarted(3, 4711))
    stage.course.handle_message(1, UsageReport(((2, 0.5, 1000), (3, 0.25, 2000)), ((0.1, 10), (0.9, 90))))
    stage.exit(2, code=1)
    assert stage.course.process_infos == [
        RankProcessInfo(host="a", local_rank=0),
        RankProcessInfo(host="a", local_rank=1),
        RankProcessInfo(host="b", local_rank=0, cpu=0.5, memory_bytes=1000, gpu=0.1, gpu_bytes=10, exit_code=1),
        RankProcessInfo(host="b", local_rank=1, pid=4711, cpu=0.25, memory_bytes=2000, gpu=0.9, gpu_bytes=90),
    ]
