"""The server processes of a job, with agents and a coordinator that only record. Whole jobs are in
tests/jobs/test_server_processes.py."""

from __future__ import annotations

import signal
from contextlib import closing

from ronde.launch.driver.server_pool import ServerPool
from ronde.launch.driver.supervisor import RankLocation, RankSupervisor
from ronde.launch.job import Job
from ronde.launch.protocol import DriverMessage, RankExit, RankOrder, SignalRanks, StartRanks
from ronde.launch.server_processes import process_names
from ronde.net.event_loop import EventLoop
from ronde.settings import FIRST_SERVER
from tests.unit.launch.driver.test_driver import RecordingSink


class RecordingCoordinator:
    def __init__(self) -> None:
        self.exits: dict[int, str] = {}

    def rank_exited(self, rank: int, how: str) -> None:
        self.exits[rank] = how

    def set_host_name(self, number: int, name: str) -> None: ...


class ServerScene:
    """A job of one rank and two servers, whose cooldown is none."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.now_s = 100.0
        self.sent: list[DriverMessage] = []
        self.sink = RecordingSink()
        self.coordinator = RecordingCoordinator()
        job = Job(command=("true",), num_ranks=1, servers=2, cooldown_s=(0.0, 0.0))
        self.supervisor = RankSupervisor(
            loop,
            job,
            send=lambda messages: self.sent.extend(messages.values()),
            output_sink=self.sink,
            on_rank_exit=lambda number, how: None,
            host_name=lambda index: "here",
            names=process_names(job),
        )
        self.pool = ServerPool(
            loop,
            job,
            self.supervisor,
            self.coordinator,
            ranks=self.supervisor.policy,
            choose_host=lambda place: 0,
            host_name=lambda index: "here",
            make_order=lambda number, host_index: RankOrder(number, (), {}, "/"),
            clock=lambda: self.now_s,
        )
        self.supervisor.policy = self.pool
        self.supervisor.start_ranks([RankLocation(0, 0, "here", 0)], {})
        self.pool.start()

    def exit(self, number: int, code: int) -> None:
        self.supervisor.handle_message(0, RankExit(number, code))
        done: list[bool] = []

        def end() -> None:
            self.loop.call_later(0.0, lambda: done.append(True))

        self.loop.call_later(0.0, end)
        self.loop.run_until(lambda: bool(done))

    def is_over(self) -> bool:
        return self.supervisor.finished

    @property
    def started(self) -> list[int]:
        return [order.rank for each in self.sent if isinstance(each, StartRanks) for order in each.orders]

    def close(self) -> None:
        self.pool.close()
        self.supervisor.close()


def test_a_lost_server_is_replaced_under_another_number_and_the_job_goes_on() -> None:
    with closing(EventLoop()) as loop, closing(ServerScene(loop)) as scene:
        assert scene.started == [FIRST_SERVER, FIRST_SERVER + 1]
        scene.exit(FIRST_SERVER, -9)
        assert scene.started[2:] == [FIRST_SERVER + 2]
        assert not scene.supervisor.is_ending
        assert scene.coordinator.exits == {FIRST_SERVER: "killed by signal 9 (SIGKILL)"}
        assert any("server 0 on host here killed by signal 9" in text for text in scene.sink.messages)


def test_servers_end_behind_the_last_rank() -> None:
    with closing(EventLoop()) as loop, closing(ServerScene(loop)) as scene:
        scene.exit(0, 0)
        assert SignalRanks((FIRST_SERVER, FIRST_SERVER + 1), signal.SIGTERM) in scene.sent
        assert not scene.is_over()
        for number in (FIRST_SERVER, FIRST_SERVER + 1):
            scene.exit(number, 0)
        assert scene.is_over() and len(scene.started) == 2


def test_servers_that_end_as_soon_as_they_are_started_end_the_job() -> None:
    with closing(EventLoop()) as loop, closing(ServerScene(loop)) as scene:
        for number in range(3):
            scene.exit(FIRST_SERVER + number, 1)
        assert scene.supervisor.is_ending and [each.name for each in scene.pool.failed_exits] == ["server 2"]


def test_a_server_that_was_of_use_may_end_as_often_as_it_likes() -> None:
    with closing(EventLoop()) as loop, closing(ServerScene(loop)) as scene:
        for number in range(5):
            scene.now_s += 60.0
            scene.exit(FIRST_SERVER + number, 1)
        assert not scene.supervisor.is_ending and len(scene.started) == 7
