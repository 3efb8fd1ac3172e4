"""The coordinator over real sockets: joining, messages, leaving, deaths, and its end."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from ronde.comm.joining import find_coordinator
from ronde.coordinator.round_planning import ElasticLimits, Membership, PlanAction
from ronde.coordinator.rounds import Round
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import StartFailed
from ronde.net.addresses import host_identity
from ronde.net.connect import connect_authenticated, send_and_hang_up
from ronde.net.control_connection import make_frame
from ronde.net.handshake import ConnectionRequest
from ronde.net.keys import JobKey, new_job_key
from ronde.net.messages import (
    LIVENESS,
    VERSION,
    Admission,
    AdmissionStatus,
    AnnounceOperations,
    ChangeGroups,
    CoordinatorMessage,
    EndRound,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    OperationRequest,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RoundStarted,
    RunOperations,
    StackReply,
    WaitingTooLong,
    WorkerMessage,
    decode_admission,
    encode,
)
from ronde.observe.stacks import pid_namespace
from ronde.settings import Settings
from ronde.types import Deadline, Member
from tests.limits import promised_s
from tests.local_job import collect_stacks
from tests.unit.coordinator.requests import announce
from tests.unit.net.polled import PolledClient

KEY = JobKey(new_job_key())
PATIENCE_S = 20.0

T = TypeVar("T", bound=CoordinatorMessage)


class Rank:
    """A rank whose messages the test sends itself. What it receives is kept until the test asks for it."""

    def __init__(self, coordinator: CoordinatorServer, rank: int, *, worker: str = "") -> None:
        self.rank = rank
        self.worker = worker or secrets.token_hex(8)
        self.line, control, name = find_coordinator(
            coordinator.address, KEY, rank, worker=self.worker, deadline=Deadline(PATIENCE_S), heartbeat_s=10.0
        )
        self.control = PolledClient(control, KEY, name)
        self._received: list[CoordinatorMessage] = []

    def send(self, message: WorkerMessage) -> None:
        self.control.send(message)

    def join(self, size: int, *, pid: int = 0) -> None:
        """Ask to be in the round, as this process or another."""
        pid, namespace = pid or os.getpid(), pid_namespace()
        member = Member(self.rank, host_identity(), pid, "", pid_namespace=namespace, worker=self.worker)
        self.send(JoinRound(VERSION, size, member))

    def receive(self, kind: type[T]) -> T:
        """The next message of this kind; those of other kinds stay."""
        deadline = Deadline(PATIENCE_S)
        while not deadline.expired:
            for message in self._received:
                if isinstance(message, kind):
                    self._received.remove(message)
                    return message
            self._received += self.control.poll(deadline.remaining_s)
        raise AssertionError(f"rank {self.rank} did not receive {kind.__name__}, but {self._received}")

    def has_received(self, kind: type[CoordinatorMessage]) -> bool:
        """Whether such a message was sent to it before now: the reply to a heartbeat comes after all earlier ones."""
        self.send(RankHeartbeat(0))
        self.receive(RankHeartbeatReply)
        return any(isinstance(message, kind) for message in self._received)

    def die(self) -> None:
        """Close the connections without LeaveRound, as the kernel does for a killed process."""
        self.control.close(0)
        self.line.close()

    def leave(self) -> None:
        self.send(LeaveRound(LeaveReason.SHUTDOWN))
        self.receive(LeaveConfirmed)
        self.die()


class Job:
    """A coordinator and its ranks; all are closed at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.coordinator: CoordinatorServer

    def start(self, size: int, *, rounds: int | None = 1, **settings: float | str) -> None:
        made = Settings.load({"shutdown_s": 0.2, **settings}, environ={})
        self._serve(CoordinatorServer("127.0.0.1", 0, size, KEY, settings=made, rounds=rounds))

    def start_elastic(self, limits: ElasticLimits, on_membership: Callable[[Membership], None] | None = None) -> None:
        size, settings = limits.start_ranks, Settings()
        self._serve(
            CoordinatorServer(
                "127.0.0.1", 0, size, KEY, settings=settings, rounds=None, limits=limits, on_membership=on_membership
            )
        )

    def _serve(self, coordinator: CoordinatorServer) -> None:
        self.coordinator = coordinator
        self._stack.callback(self.coordinator.close)
        self.coordinator.start()

    def connect(self, rank: int, *, worker: str = "") -> Rank:
        made = Rank(self.coordinator, rank, worker=worker)
        self._stack.callback(made.die)
        return made

    def join(self, size: int) -> list[Rank]:
        """A round that has begun."""
        ranks = [self.connect(rank) for rank in range(size)]
        for rank in ranks:
            rank.join(size)
        for rank in ranks:
            rank.receive(RoundStarted)
        return ranks

    def gather(self, size: int, *, rounds: int | None = 1, **settings: float | str) -> list[Rank]:
        self.start(size, rounds=rounds, **settings)
        return self.join(size)


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)


# --- joining and messages --------------------------------------------------------------------------------------------


def test_a_rank_may_connect_before_the_coordinator_serves() -> None:
    with ExitStack() as stack:
        coordinator = CoordinatorServer("127.0.0.1", 0, 1, KEY, settings=Settings())
        stack.callback(coordinator.close)
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(Rank, coordinator, 0)
            coordinator.start()
            rank = connecting.result(PATIENCE_S)
        stack.callback(rank.die)
        rank.join(1)
        rank.receive(RoundStarted)


def test_a_coordinator_that_was_never_started_closes() -> None:
    coordinator = CoordinatorServer("127.0.0.1", 0, 2, KEY, settings=Settings())
    coordinator.close()
    coordinator.close()


def test_a_process_that_replaces_one_that_died_while_it_joined_is_no_second_process(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.start(2, rounds=None)
    job.connect(1).die()
    ranks = [job.connect(0), job.connect(1)]  # rank 1 has to retry until the coordinator has done with the former one
    for rank in ranks:
        rank.join(2)
    started = [rank.receive(RoundStarted) for rank in ranks]
    assert started[0] == started[1]
    assert [member.worker for member in started[0].members] == [rank.worker for rank in ranks]
    assert "a second process" not in caplog.text


def test_what_makes_no_sense_is_dropped_and_the_job_goes_on(job: Job) -> None:
    ranks = job.gather(2)
    ranks[0].control._socket.send(b"garbage")
    ranks[0].line.sendall(b"nobody writes here")
    ranks[0].send(AnnounceOperations(known_ids=(123456,)))
    ranks[0].send(WaitingTooLong("x", 99, -5, (-3, 77)))
    ranks[0].send(StackReply(4711, "", ""))
    ranks[0].send(ChangeGroups((5, 3)))
    ranks[0].send(AnnounceOperations((OperationRequest(-7, "x", 99, 99, ((-1,),)),)))
    ranks[0].join(2)
    for rank in ranks:
        rank.send(announce("w"))
    assert [rank.receive(RunOperations).operations[0].name for rank in ranks] == ["w", "w"]


def test_a_timeline_that_cannot_be_written_fails_at_the_start(tmp_path: Path) -> None:
    settings = Settings(timeline=str(tmp_path / "no" / "trace.json"))
    with pytest.raises(ValueError, match="cannot be written"):
        CoordinatorServer("127.0.0.1", 0, 1, KEY, settings=settings)


def test_an_address_that_is_taken_fails_at_the_start(job: Job) -> None:
    job.start(1)
    port = int(job.coordinator.address.rpartition(":")[2])
    with pytest.raises(StartFailed, match="cannot listen"):
        CoordinatorServer("127.0.0.1", port, 1, KEY, settings=Settings())


def test_an_elastic_job_goes_on_without_a_rank_and_tells_its_launcher(job: Job) -> None:
    told: list[Membership] = []
    job.start_elastic(ElasticLimits(start_ranks=2), told.append)
    job.coordinator.set_host_name(4, "a")
    job.coordinator.set_num_starting(0)
    first, second = job.connect(3), job.connect(4)
    for rank in (first, second):
        rank.join(2)
    assert [member.worker for member in first.receive(RoundStarted).members] == [first.worker, second.worker]
    first.die()
    job.coordinator.rank_exited(3, "killed by SIGKILL")
    assert second.receive(RankLost) == RankLost(0, "killed by SIGKILL")
    second.send(LeaveRound(LeaveReason.REJOINING))
    second.receive(LeaveConfirmed)
    again = job.connect(4, worker=second.worker)
    again.join(2)
    assert [(member.rank, member.worker) for member in again.receive(RoundStarted).members] == [(0, second.worker)]
    assert not again.has_received(RankLost)
    assert told[0].plan.action is PlanAction.WAIT and told[0].members == ()
    assert told[-1].members == (4,) and (told[-1].num_rounds, told[-1].num_resets) == (2, 1)
    assert [rank.worker for rank in job.coordinator.activity().ranks] == [second.worker]
    with pytest.raises(StartFailed, match="worker 3 is no longer in the job"):
        job.connect(3, worker=first.worker)
    again.send(LeaveRound(LeaveReason.FINISHED))
    again.receive(LeaveConfirmed)
    with pytest.raises(StartFailed, match="the job is finished"):
        job.connect(5)
    assert told[-1].is_finished


def test_a_newcomer_of_an_elastic_job_is_told_that_it_is_a_candidate(job: Job) -> None:
    job.start_elastic(ElasticLimits(start_ranks=1))
    job.join(1)
    request = ConnectionRequest(LIVENESS, 1, "x", "newcomer")
    connection, reply = connect_authenticated(job.coordinator.address, KEY, request, Deadline(PATIENCE_S))
    with connection:
        assert decode_admission(reply) == Admission(AdmissionStatus.CANDIDATE, rank=1, size=2)
        assert connection.recv(1) == b"", "nobody watches it"


# --- leaving, dying and the end --------------------------------------------------------------------------------------


def test_a_death_is_told_to_all_at_once(job: Job) -> None:
    ranks = job.gather(3)
    ranks[1].die()
    began = time.monotonic()
    assert ranks[0].receive(RankLost) == ranks[2].receive(RankLost) == RankLost(1, "its process is gone")
    assert time.monotonic() - began < promised_s(1.0)


def test_the_last_message_of_a_rank_that_lost_control_messages_is_told_to_all(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    send_and_hang_up(ranks[1].line.fileno(), encode(LeaveRound(LeaveReason.MESSAGES_LOST, "x got lost")))
    assert ranks[0].receive(RankLost) == RankLost(1, "x got lost")


def test_a_control_message_that_nobody_can_read_counts_as_lost(job: Job) -> None:
    ranks = job.gather(2)
    ranks[1].control._socket.send(make_frame(1, 0, RankHeartbeat(0))[:-1])
    ranks[1].control._num_sent += 1
    ranks[1].send(RankHeartbeat(1))
    lost = "its control connection to the coordinator broke, and 1 message to it got lost"
    assert ranks[0].receive(RankLost) == RankLost(1, lost)
    assert lost in ranks[1].receive(EndRound).reason


def test_a_rank_whose_process_is_gone_is_lost_though_its_connection_stays_open(job: Job) -> None:
    """As when a child of the process has inherited the connection."""
    process = subprocess.Popen(["sleep", "1000"])
    job.start(2, stall_s=0.1)
    first, second = job.connect(0), job.connect(1)
    first.join(2)
    second.join(2, pid=process.pid)
    first.receive(RoundStarted)
    first.send(announce("w"))
    process.kill()
    process.wait()
    assert first.receive(RankLost) == RankLost(1, "its process is gone")


def test_closing_waits_for_those_who_have_not_left(job: Job) -> None:
    first, second = job.gather(2, shutdown_s=PATIENCE_S)
    first.leave()
    closer = threading.Thread(target=job.coordinator.close)
    closer.start()
    assert not second.has_received(EndRound)
    second.leave()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


def test_who_does_not_leave_in_time_hears_that_it_is_over(job: Job) -> None:
    first, second = job.gather(2)
    first.leave()
    job.coordinator.close()
    assert "closed by its host" in second.receive(EndRound).reason


def test_who_comes_early_where_rank_0_hosts_calls_until_the_next_coordinator_is_there(job: Job) -> None:
    first, second = job.gather(2, shutdown_s=PATIENCE_S)
    second.leave()
    with pytest.raises(StartFailed, match=r"rank 1 was not let in within 2 s: the round before is not over"):
        find_coordinator(job.coordinator.address, KEY, 1, deadline=Deadline(2.0), heartbeat_s=10.0)
    first.leave()


def test_a_coordinator_that_breaks_ends_the_round_for_everybody(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = job.gather(2)

    def broken(*_: object) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Round, "handle", broken)
    with caplog.at_level(logging.CRITICAL, "ronde.coordinator"):
        ranks[0].send(announce("w"))
        assert [rank.receive(EndRound).reason for rank in ranks] == [
            "the coordinator failed: RuntimeError('a mistake of ours')"
        ] * 2
    assert ranks[1].line.recv(1) == b""


def test_the_end_of_a_job_can_still_be_looked_at(job: Job) -> None:
    for rank in job.gather(2):
        rank.leave()
    assert job.coordinator.wait(PATIENCE_S)
    job.coordinator.close()
    assert [rank.state for rank in job.coordinator.activity().ranks] == ["left", "left"]
    assert [stack.why for stack in collect_stacks(job.coordinator, Deadline(5.0))] == [
        "has left the round by shutdown()"
    ] * 2
