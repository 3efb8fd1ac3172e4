"""A job from the start of its ranks to their end, with agents that only record; and what reaches the driver besides."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from ronde.launch.driver.driver import (
    SIGNAL_REPEAT_S,
    SIGPIPE_EXIT_CODE,
    WRITE_ERROR_EXIT_CODE,
    RankSupervisor,
    SignalRepeatFilter,
    log_to_output,
)
from ronde.launch.driver.failure_report import StopRequest
from ronde.launch.driver.monitor import RankProcessInfo
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.termination import TerminationEvent
from ronde.launch.job import Job
from ronde.launch.output.terminal import OutputClosed
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentError,
    DriverMessage,
    ExitReason,
    PauseOutput,
    RankExit,
    RankOutput,
    RankStarted,
    SignalRanks,
    UsageReport,
)
from ronde.net.event_loop import EventLoop
from ronde.text import LOST_CODE, NOT_STARTED_CODE
from tests.unit.launch.recording_sink import RecordingSink

CTRL_C = StopRequest(130, "interrupted by Ctrl-C")


class Scene:
    """A supervisor of four ranks on two hosts, whose agents only record what they are sent."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.sent: list[tuple[int, DriverMessage]] = []
        self.lost: list[tuple[int, str]] = []
        self.sink = RecordingSink()
        job = Job(command=("true",), num_ranks=4, hosts=(Host("a", 2), Host("b", 2)), grace_s=0.0, terminate_s=0.0)
        self.supervisor = RankSupervisor(
            loop,
            job,
            send=lambda messages: self.sent.extend(messages.items()),
            output_sink=self.sink,
            on_rank_exit=lambda rank, why: self.lost.append((rank, why)),
        )

    def exit(self, *ranks: int, code: int = 0) -> None:
        for rank in ranks:
            self.supervisor.handle_message(rank // 2, RankExit(rank, code))

    def signals(self) -> list[tuple[int, SignalRanks]]:
        return [(index, message) for index, message in self.sent if isinstance(message, SignalRanks)]

    def turn_until_sent(self, number: int) -> None:
        self.loop.run_until(lambda: any(message.number == number for _, message in self.signals()))


@pytest.fixture
def scene() -> Iterator[Scene]:
    loop = EventLoop()
    yield Scene(loop)
    loop.close()


def test_it_is_over_when_all_ranks_have_ended(scene: Scene) -> None:
    overs = []
    for rank in (0, 1, 3, 2):
        scene.exit(rank)
        overs.append(scene.supervisor.finished)
    assert overs == [False, False, False, True]
    assert [end.rank for end in scene.supervisor.exits] == [0, 1, 3, 2]
    assert scene.sink.exited_ranks == [0, 1, 3, 2] and not scene.sent


def test_the_coordinator_hears_how_each_rank_has_ended(scene: Scene) -> None:
    scene.exit(1)
    scene.exit(2, code=-9)
    assert scene.lost == [(1, "exited with code 0"), (2, "killed by signal 9 (SIGKILL)")]


def test_after_a_failure_those_that_stay_are_told_to_end_and_then_killed(scene: Scene) -> None:
    scene.exit(1, code=1)
    assert not scene.sent
    scene.turn_until_sent(signal.SIGTERM)
    assert scene.signals() == [(0, SignalRanks((0,), signal.SIGTERM)), (1, SignalRanks((2, 3), signal.SIGTERM))]
    scene.exit(2, code=-15)
    scene.turn_until_sent(signal.SIGKILL)
    assert scene.signals()[2:] == [(0, SignalRanks((0,), signal.SIGKILL)), (1, SignalRanks((3,), signal.SIGKILL))]
    assert [end.requested for end in scene.supervisor.exits] == [False, True]
    assert scene.sink.messages == [
        "ending ranks 0, 2, 3, still running 0 s after the first failure",
        "killing ranks 0, 3",
    ]


def test_the_ranks_of_a_lost_host_are_lost(scene: Scene) -> None:
    scene.exit(3)
    scene.supervisor.handle_agent_lost(1, HostError("advice", "Connection to b closed by remote host."))
    (_, lost) = scene.supervisor.exits
    assert lost == RankExit(2, LOST_CODE, ExitReason.HOST_LOST, "Connection to b closed by remote host.", "b")
    scene.turn_until_sent(signal.SIGTERM)
    assert scene.signals() == [(0, SignalRanks((0, 1), signal.SIGTERM))]


def test_a_rank_that_cannot_be_started_has_failed(scene: Scene) -> None:
    failed = RankExit(0, NOT_STARTED_CODE, ExitReason.NOT_STARTED, "there is no command 'trian'")
    scene.supervisor.handle_message(0, failed)
    assert scene.supervisor.exits == [msgspec.structs.replace(failed, host="a")]
    assert scene.lost == [(0, "could not be started: there is no command 'trian'")]


def test_other_errors_of_a_host_are_shown(scene: Scene) -> None:
    scene.supervisor.handle_message(1, AgentError("its disk is full"))
    assert scene.sink.messages == ["host b: its disk is full"] and not scene.supervisor.exits


def test_ctrl_c_interrupts_and_a_second_one_kills(scene: Scene) -> None:
    scene.supervisor.request_stop(CTRL_C, TerminationEvent.INTERRUPTED)
    scene.supervisor.request_stop(StopRequest(143, "ended by SIGTERM"), TerminationEvent.INTERRUPTED)
    assert [message.number for _, message in scene.signals()] == [signal.SIGINT] * 2 + [signal.SIGKILL] * 2
    assert scene.supervisor.stop_request == CTRL_C
    scene.exit(0, 1, 2, 3, code=-9)
    assert scene.supervisor.finished and all(end.requested for end in scene.supervisor.exits)


def test_output_is_shown_at_the_end_of_the_turn_and_again_when_the_screen_wants(scene: Scene) -> None:
    for data in (b"a", b"b"):
        scene.supervisor.handle_message(0, RankOutput(0, "out", data))
    assert scene.sink.num_refreshes == 0
    scene.sink.due_s = 0.0  # long ago: at once
    scene.loop.run_until(lambda: scene.sink.num_refreshes == 2)
    assert scene.sink.printed == {0: b"ab"}


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
    scene: Scene, gone: OutputClosed, stop: StopRequest, notes: list[str]
) -> None:
    scene.sink.closed_with = gone
    scene.supervisor.handle_message(0, RankOutput(0, "out", b"y\n"))
    scene.turn_until_sent(signal.SIGKILL)
    assert (scene.supervisor.stop_request, scene.sink.messages) == (stop, notes)


def pauses(scene: Scene) -> list[tuple[int, bool]]:
    return [(index, message.paused) for index, message in scene.sent if isinstance(message, PauseOutput)]


def test_ranks_wait_while_the_reader_of_the_output_is_behind_and_nothing_is_lost(scene: Scene) -> None:
    scene.sink.backlogged = True
    scene.supervisor.handle_message(0, RankOutput(0, "out", b"a"))
    scene.loop.run_until(lambda: scene.sink.num_refreshes == 1)
    assert pauses(scene) == [(0, True), (1, True)]
    scene.supervisor.handle_message(0, RankOutput(0, "out", b"b"))  # it was on its way
    assert scene.sink.printed == {0: b"a"}
    scene.sink.backlogged = False
    scene.supervisor.print_message("go on")  # as the time at which the sink wants to be called again does
    scene.loop.run_until(lambda: len(pauses(scene)) == 4)
    assert pauses(scene)[2:] == [(0, False), (1, False)]
    assert scene.sink.printed == {0: b"ab"}


def test_an_exit_is_known_at_once_though_nobody_reads_the_output(scene: Scene) -> None:
    scene.sink.backlogged = True
    scene.supervisor.handle_message(0, RankOutput(0, "out", b"a"))
    scene.loop.run_until(lambda: bool(pauses(scene)))
    scene.supervisor.handle_message(0, RankOutput(1, "out", b"last words"))
    scene.exit(1, code=3)
    assert scene.lost == [(1, "exited with code 3")]
    scene.turn_until_sent(signal.SIGTERM)
    assert scene.sink.exited_ranks == [], "the sink gets its output first"
    scene.exit(0, 2, 3, code=-15)
    assert scene.supervisor.finished
    scene.supervisor.finish_output()
    assert (scene.sink.printed[1], scene.sink.exited_ranks[0]) == (b"last words", 1)


def test_what_is_known_of_each_rank_is_there_for_others(scene: Scene) -> None:
    scene.supervisor.handle_message(1, RankStarted(3, 4711))
    scene.supervisor.handle_message(1, UsageReport(((2, 0.5, 1000), (3, 0.25, 2000)), ((0.1, 10), (0.9, 90))))
    scene.exit(2, code=1)
    assert scene.supervisor.process_infos == [
        RankProcessInfo(host="a", local_rank=0),
        RankProcessInfo(host="a", local_rank=1),
        RankProcessInfo(host="b", local_rank=0, cpu=0.5, memory_bytes=1000, gpu=0.1, gpu_bytes=10, exit_code=1),
        RankProcessInfo(host="b", local_rank=1, pid=4711, cpu=0.25, memory_bytes=2000, gpu=0.9, gpu_bytes=90),
    ]


# --- signals and log lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNAL_REPEAT_S)
def test_the_same_signal_within_moments_is_one_request(number: signal.Signals) -> None:
    repeats, limit_s = SignalRepeatFilter(), SIGNAL_REPEAT_S[number]
    assert repeats.is_new_request(number, 100.0)
    assert not repeats.is_new_request(number, 100.0)
    assert not repeats.is_new_request(number, 100.0 + 0.6 * limit_s)
    assert repeats.is_new_request(number, 100.0 + 1.2 * limit_s), "who goes on asking is heard"
    assert not repeats.is_new_request(number, 100.0 + 1.8 * limit_s)


logger = logging.getLogger("ronde.launch")


@contextmanager
def unhandled() -> Iterator[None]:
    """As in a process that has not set up its log: pytest has handlers of its own."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_warnings_of_any_thread_are_noted_in_the_loop() -> None:
    printed: list[tuple[str, threading.Thread]] = []

    def print_message(text: str) -> None:
        printed.append((text, threading.current_thread()))

    with unhandled(), closing(EventLoop()) as loop, log_to_output(loop, print_message):
        thread = threading.Thread(target=lambda: logger.warning("rank %d is lost", 3))
        thread.start()
        thread.join()
        logger.info("nobody needs this")
        assert not printed
        loop.run_until(lambda: bool(printed))
    assert printed == [("rank 3 is lost", threading.main_thread())]
    assert not logging.getLogger("ronde").handlers


def test_the_last_ones_are_noted_at_the_end() -> None:
    printed: list[str] = []
    with unhandled(), closing(EventLoop()) as loop, log_to_output(loop, printed.append):
        logger.error("too late for the loop")
    assert printed == ["too late for the loop"]


def test_a_program_with_handlers_of_its_own_keeps_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with closing(EventLoop()) as loop, log_to_output(loop, pytest.fail):
        logger.warning("for the program")
    assert caplog.messages == ["for the program"]
