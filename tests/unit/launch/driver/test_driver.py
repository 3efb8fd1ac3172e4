"""Ranks from their start to their end: with agents that only record, and as whole jobs of this machine. What a user
sees of a job is in tests/jobs."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from ronde.exit_codes import LOST_CODE, NOT_STARTED_CODE
from ronde.launch.driver.driver import Driver, log_to_output, run_job
from ronde.launch.driver.failure_report import JobResult, StopRequest
from ronde.launch.driver.monitor import RankStatus
from ronde.launch.driver.ssh import HostError
from ronde.launch.driver.supervisor import (
    SIGPIPE_EXIT_CODE,
    WRITE_ERROR_EXIT_CODE,
    RankLocation,
    RankSupervisor,
)
from ronde.launch.job import Job
from ronde.launch.output.printer import Printer
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
    StdStream,
    UsageReport,
)
from ronde.net.event_loop import EventLoop

CTRL_C = StopRequest(130, "interrupted by Ctrl-C")


class RecordingSink(Printer):
    """A Printer that keeps everything; `on_output` is called with every output."""

    def __init__(self, on_output: Callable[[int], None] = lambda rank: None) -> None:
        self.printed: dict[int, bytes] = {}
        self.exited_ranks: list[int] = []
        self.messages: list[str] = []
        self.num_refreshes = 0
        self.due_s: float | None = None
        self.closed_with: OutputClosed | None = None
        self.backlogged = False
        self._on_output = on_output

    def write(self, rank: int, stream: StdStream, data: bytes) -> None:
        self.printed[rank] = self.printed.get(rank, b"") + data
        self._on_output(rank)

    def rank_started(self, rank: int) -> None: ...

    def rank_exited(self, rank: int) -> None:
        self.exited_ranks.append(rank)

    def print_message(self, text: str) -> None:
        self.messages.append(text)

    def refresh(self, now_s: float) -> float | None:
        self.num_refreshes += 1
        due_s, self.due_s = self.due_s, None
        return due_s

    def tail(self, rank: int, exit_code: int) -> str:
        return self.printed.get(rank, b"").decode()

    def closed(self) -> OutputClosed | None:
        return self.closed_with

    def is_backlogged(self) -> bool:
        return self.backlogged

    def close(self, *, timeout_s: float | None = None) -> None: ...


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
            host_name=lambda index: "ab"[index],
        )
        self.supervisor.start_ranks(
            [RankLocation(each.rank, each.host_index, each.host.name, each.local_rank) for each in job.placements], {}
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
    third = {"local_rank": 0, "cpu": 0.5, "memory_bytes": 1000, "gpu": 0.1, "gpu_bytes": 10, "exit_code": 1}
    fourth = {"local_rank": 1, "pid": 4711, "cpu": 0.25, "memory_bytes": 2000, "gpu": 0.9, "gpu_bytes": 90}
    assert [*scene.supervisor.rank_statuses.values()] == [
        RankStatus(rank=0, state="starting", host="a"),
        RankStatus(rank=1, state="starting", host="a", local_rank=1),
        msgspec.convert({"rank": 2, "state": "starting", "host": "b", **third}, RankStatus),
        msgspec.convert({"rank": 3, "state": "starting", "host": "b", **fourth}, RankStatus),
    ]


# --- log lines ----------------------------------------------------------------------------------------------------

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


def test_warnings_of_any_thread_are_noted_in_the_loop_and_the_last_ones_at_the_end() -> None:
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
        logger.error("too late for the loop")
    assert printed == [(text, threading.main_thread()) for text in ("rank 3 is lost", "too late for the loop")]
    assert not logging.getLogger("ronde").handlers


def test_a_program_with_handlers_of_its_own_keeps_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with closing(EventLoop()) as loop, log_to_output(loop, pytest.fail):
        logger.warning("for the program")
    assert caplog.messages == ["for the program"]


# --- whole jobs ---------------------------------------------------------------------------------------------------

STAY = "while :; do sleep 0.05; done"


def job(script: str, num_ranks: int = 2) -> Job:
    """Ranks that run a shell script."""
    return Job(command=("/bin/sh", "-c", script), num_ranks=num_ranks)


def run(script: str, num_ranks: int = 2) -> tuple[JobResult, RecordingSink]:
    sink = RecordingSink()
    return Driver(job(script, num_ranks), sink).run(), sink


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_twice_at_once_leaves_ranks_the_time_to_save(number: signal.Signals) -> None:
    # The second one comes when the first was heard: the rank sends it when it is told to end.
    again = f"kill -{number.value} $PPID"
    save = f"{again}; echo saving; sleep 0.5; echo saved; exit 7"
    before = signal.getsignal(number)
    result, sink = run(f"trap '{save}' TERM; {again}; {STAY}", 1)
    assert signal.getsignal(number) == before
    assert (result.exit_code, result.exit_codes) == (128 + number, {0: 7})
    said = sink.printed[0].splitlines()  # the shell may also tell that its `sleep` was ended
    assert (b"saving" in said, said[-1], len(sink.messages)) == (True, b"saved", 1), (said, sink.messages)


def test_stop_from_another_thread_ends_everything() -> None:
    threads: list[threading.Thread] = []

    def stop(rank: int) -> None:
        threads.append(threading.Thread(target=driver.stop, args=["the notebook's cell was stopped"]))
        threads[-1].start()

    driver = Driver(job(f"echo here; {STAY}", 1), RecordingSink(stop))
    result = driver.run()
    for thread in threads:
        thread.join()
    assert (result.exit_code, result.summary) == (143, "the notebook's cell was stopped")


def test_a_job_that_is_stopped_before_it_runs_starts_nothing() -> None:
    driver = Driver(job("true"), RecordingSink())
    driver.stop("changed my mind")
    why = "changed my mind"
    assert driver.run() == JobResult(143, f"{why}, before any rank was started", stop_request=StopRequest(143, why))


def test_a_rank_that_never_joins_is_named_as_the_one_that_left_too_early() -> None:
    script = "import os, ronde; os.environ['RANK'] == '1' or ronde.init()"
    result = Driver(Job(command=(sys.executable, "-c", script), num_ranks=2), RecordingSink()).run()
    assert (result.exit_code, result.first_failed_rank) == (1, 0)
    left, then = result.summary.splitlines()
    assert left == "rank 1 on host localhost left too early: exited with code 0"
    assert then.startswith("rank 0 then exited with code 1: StartFailed: rank 1 ended before the round began (exited")


class NobodyReads(RecordingSink):
    """A sink whose reader takes nothing."""

    def is_backlogged(self) -> bool:
        return bool(self.printed)


FLOOD_OR_FAIL = 'if [ "$RANK" = 0 ]; then exec yes; fi; read line < {fifo}; exit 3'


@pytest.mark.parametrize("host", ["localhost", "other"])
def test_a_death_is_known_at_once_though_nobody_reads_the_output(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, ssh = tmp_path / "fifo", tmp_path / "ssh"
    os.mkfifo(fifo)
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; exec sh -c "$3"')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    full = threading.Event()
    sink = NobodyReads(lambda rank: full.set())

    def fail_when_output_waits() -> None:
        full.wait()
        time.sleep(0.3)  # the pipes on the way fill up
        fifo.write_text("now\n")

    thread = threading.Thread(target=fail_when_output_waits)
    thread.start()
    script = FLOOD_OR_FAIL.format(fifo=fifo)
    result = Driver(
        Job(command=("/bin/sh", "-c", script), num_ranks=2, hosts=(Host(host, 2),), grace_s=0.0), sink
    ).run()
    thread.join()
    assert (result.exit_code, result.first_failed_rank) == (3, 1)
    assert result.exit_codes == {0: -signal.SIGTERM, 1: 3}


# --- restarts -------------------------------------------------------------------------------------------------------


def test_a_job_that_fails_is_started_again_and_says_so(tmp_path: Path) -> None:
    script = f"mkdir {tmp_path}/$RANK 2>/dev/null && exit 3; test -d {tmp_path}/$RANK"
    sink = RecordingSink()
    result = run_job(Job(command=("/bin/sh", "-c", script), num_ranks=1, restarts=2), sink)
    assert (result.exit_code, result.summary) == (0, "")
    (message,) = sink.messages
    first, last = message.splitlines()
    assert first == "rank 0 on host localhost failed first: exited with code 3"
    assert last == "starting the job again (restart 1 of 2)"


@pytest.mark.parametrize(
    ("script", "num_restarts", "code"), [("exit 3", 2, 3), ("kill -TERM $PPID; sleep 100", 0, 143)]
)
def test_a_job_is_not_started_again_for_ever_or_when_somebody_has_ended_it(
    script: str, num_restarts: int, code: int
) -> None:
    sink = RecordingSink()
    result = run_job(Job(command=("/bin/sh", "-c", script), num_ranks=1, restarts=2), sink)
    assert result.exit_code == code
    assert sum("starting the job again" in message for message in sink.messages) == num_restarts


def test_a_job_that_cannot_be_started_is_not_started_again() -> None:
    sink = RecordingSink()
    result = run_job(Job(command=("true",), num_ranks=1, cwd="/nowhere", restarts=2), sink)
    assert (result.exit_code, sink.messages) == (1, [])
