"""A job from the start of its ranks to their end, with agents that only remember what they are told."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping

import pytest

from ronde.launch.course import PIPE_CODE, UNWRITABLE_CODE, Course
from ronde.launch.ending import On
from ronde.launch.job import Host, Job
from ronde.launch.loop import Loop
from ronde.launch.messages import Exited, Failed, FromDriver, Load, Output, Result, Signal, Started
from ronde.launch.output.screen import Gone
from ronde.launch.placement import place
from ronde.launch.ssh import Trouble
from ronde.launch.status import RankFacts
from ronde.launch.verdict import LOST_CODE, NOT_STARTED_CODE, End, Stop
from tests.unit.launch.screens import Memory

CTRL_C = Stop(130, "interrupted by Ctrl-C")


class Stage:
    """A course of four ranks on two hosts, and everything around it."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.sent: list[tuple[int, FromDriver]] = []
        self.lost: list[tuple[int, str]] = []
        self.pauses: list[bool] = []
        self.screen = Memory()
        job = Job(command=("true",), num_ranks=4, hosts=(Host("a", 2), Host("b", 2)), grace_s=0.0, terminate_s=0.0)
        self.course = Course(
            loop,
            job,
            place(job.hosts, 4),
            agents=self,
            screen=self.screen,
            lost=lambda rank, why: self.lost.append((rank, why)),
        )

    def send(self, orders: Mapping[int, FromDriver]) -> None:
        self.sent += orders.items()

    def pause(self, on: bool) -> None:
        self.pauses.append(on)

    def exit(self, *ranks: int, code: int = 0) -> None:
        for rank in ranks:
            self.course.hear(rank // 2, Exited(rank, code))

    def signals(self) -> list[tuple[int, Signal]]:
        return [(index, message) for index, message in self.sent if isinstance(message, Signal)]

    def turn_until_sent(self, number: int) -> None:
        self.loop.run(lambda: any(message.number == number for _, message in self.signals()))


@pytest.fixture
def stage() -> Iterator[Stage]:
    loop = Loop()
    yield Stage(loop)
    loop.close()


def test_it_is_over_when_all_ranks_have_ended(stage: Stage) -> None:
    overs = []
    for rank in (0, 1, 3, 2):
        stage.exit(rank)
        overs.append(stage.course.over)
    assert overs == [False, False, False, True]
    assert [end.rank for end in stage.course.ends] == [0, 1, 3, 2]
    assert stage.screen.ends == [0, 1, 3, 2] and not stage.sent


def test_the_coordinator_hears_how_each_rank_has_ended(stage: Stage) -> None:
    stage.exit(1)
    stage.exit(2, code=-9)
    assert stage.lost == [(1, "exited with code 0"), (2, "killed by signal 9 (SIGKILL)")]


def test_after_a_failure_those_that_stay_are_told_to_end_and_then_killed(stage: Stage) -> None:
    stage.exit(1, code=1)
    assert not stage.sent
    stage.turn_until_sent(signal.SIGTERM)
    assert stage.signals() == [(0, Signal((0,), signal.SIGTERM)), (1, Signal((2, 3), signal.SIGTERM))]
    stage.exit(2, code=-15)
    stage.turn_until_sent(signal.SIGKILL)
    assert stage.signals()[2:] == [(0, Signal((0,), signal.SIGKILL)), (1, Signal((3,), signal.SIGKILL))]
    assert [end.ordered for end in stage.course.ends] == [False, True]
    assert stage.screen.notes == [
        "ending ranks 0, 2, 3, still running 0 s after the first failure",
        "killing ranks 0, 3",
    ]


def test_a_rank_that_ends_well_ends_nobody_else(stage: Stage) -> None:
    stage.exit(0)
    stage.loop.at(0.0, lambda: None)
    stage.loop.run(lambda: stage.screen.num_ticks > 0)
    assert not stage.sent


def test_the_ranks_of_a_lost_host_are_lost(stage: Stage) -> None:
    stage.exit(3)
    stage.course.lose(1, Trouble("closed", "advice", "Connection to b closed by remote host."))
    (_, lost) = stage.course.ends
    assert (lost.rank, lost.host, lost.code) == (2, "b", LOST_CODE)
    assert lost.how == "ended when the connection to it was lost (Connection to b closed by remote host.)"
    stage.turn_until_sent(signal.SIGTERM)
    assert stage.signals() == [(0, Signal((0, 1), signal.SIGTERM))]


def test_a_rank_that_cannot_be_started_has_failed(stage: Stage) -> None:
    stage.course.hear(0, Failed(0, "there is no command 'trian'"))
    stage.course.hear(0, Failed(1, "'data' is no program", 126))
    assert stage.course.ends == [
        End(0, "a", NOT_STARTED_CODE, "could not be started: there is no command 'trian'"),
        End(1, "a", 126, "could not be started: 'data' is no program"),
    ]


def test_other_troubles_of_a_host_are_shown(stage: Stage) -> None:
    stage.course.hear(1, Failed(-1, "its disk is full"))
    assert stage.screen.notes == ["host b: its disk is full"] and not stage.course.ends


def test_ctrl_c_interrupts_and_a_second_one_kills(stage: Stage) -> None:
    stage.course.end(CTRL_C, On.CTRL_C)
    stage.course.end(Stop(143, "ended by SIGTERM"), On.CTRL_C)
    assert [message.number for _, message in stage.signals()] == [signal.SIGINT] * 2 + [signal.SIGKILL] * 2
    assert stage.course.stop == CTRL_C
    stage.exit(0, 1, 2, 3, code=-9)
    assert stage.course.over and all(end.ordered for end in stage.course.ends)


def test_output_is_shown_at_the_end_of_the_turn_and_again_when_the_screen_wants(stage: Stage) -> None:
    for data in (b"a", b"b"):
        stage.course.hear(0, Output(0, "out", data))
    assert stage.screen.num_ticks == 0
    stage.screen.due_s = 0.0  # long ago: at once
    stage.loop.run(lambda: stage.screen.num_ticks == 2)
    assert stage.screen.printed == {0: b"ab"}


@pytest.mark.parametrize(
    ("gone", "stop", "notes"),
    [
        (Gone("Broken pipe", unread=True), Stop(PIPE_CODE, ""), []),
        (Gone("No space left"), Stop(UNWRITABLE_CODE, "No space left"), ["ending ranks 0-3", "killing ranks 0-3"]),
    ],
)
def test_output_that_cannot_be_written_ends_the_job_without_a_word_if_its_reader_has_left(
    stage: Stage, gone: Gone, stop: Stop, notes: list[str]
) -> None:
    stage.screen.why_gone = gone
    stage.course.hear(0, Output(0, "out", b"y\n"))
    stage.turn_until_sent(signal.SIGKILL)
    assert (stage.course.stop, stage.screen.notes) == (stop, notes)


def test_ranks_wait_while_the_reader_of_the_output_is_behind(stage: Stage) -> None:
    stage.screen.is_full = True
    stage.screen.due_s = 0.0
    stage.course.hear(0, Output(0, "out", b"y\n"))
    stage.loop.run(lambda: stage.screen.num_ticks == 2)
    assert stage.pauses == [True]
    stage.screen.is_full = False
    stage.course.hear(0, Output(0, "out", b"y\n"))
    stage.loop.run(lambda: stage.screen.num_ticks == 3)
    assert stage.pauses == [True, False]


def test_results_are_kept(stage: Stage) -> None:
    stage.course.hear(0, Result(1, b"pickled"))
    assert stage.course.results == {1: b"pickled"}


def test_what_is_known_of_each_rank_is_there_for_others(stage: Stage) -> None:
    stage.course.hear(1, Started(3, 4711))
    stage.course.hear(1, Load(((2, 0.5, 1000), (3, 0.25, 2000)), ((0.1, 10), (0.9, 90))))
    stage.exit(2, code=1)
    assert stage.course.facts == [
        RankFacts(host="a", local_rank=0),
        RankFacts(host="a", local_rank=1),
        RankFacts(host="b", local_rank=0, cpu=0.5, memory_bytes=1000, gpu=0.1, gpu_bytes=10, exit_code=1),
        RankFacts(host="b", local_rank=1, pid=4711, cpu=0.25, memory_bytes=2000, gpu=0.9, gpu_bytes=90),
    ]
