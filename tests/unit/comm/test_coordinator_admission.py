"""A rank is welcomed a moment before the coordinator watches its connection: what happens in that moment.

The delay is injected where the caller is taken in (Coordinator._arrive), and lasts until the test says so.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ronde.comm import joining
from ronde.coordinator.server import CoordinatorServer, LivenessConnection
from ronde.net.connect import connect_authenticated
from ronde.net.keys import new_job_key
from ronde.net.listener import ConnectionRequest
from ronde.net.messages import JoinRefused, RankLost, RoundStarted
from ronde.types import Deadline
from tests.jobs.kit import hosted_by_rank_0
from tests.unit.comm.scripted_ranks import KEY, PATIENCE_S, Job

SLOW_RANK = 1


@pytest.fixture
def taken_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The slow rank's connection is handed to the coordinator when this is set."""
    may_arrive = threading.Event()
    arrive = CoordinatorServer._on_connection

    def arrive_late(coordinator: CoordinatorServer, caller: ConnectionRequest, line: LivenessConnection) -> bool:
        if caller.rank == SLOW_RANK:
            may_arrive.wait(PATIENCE_S)
        return arrive(coordinator, caller, line)

    monkeypatch.setattr(CoordinatorServer, "_on_connection", arrive_late)
    yield may_arrive
    may_arrive.set()


def test_a_rank_that_joins_before_it_is_taken_in_is_waited_for_and_then_watched(
    job: Job, taken_in: threading.Event
) -> None:
    job.start(2)
    first, slow = job.come(0), job.come(SLOW_RANK)
    first.join(2)
    slow.join(2)
    assert not slow.has_heard(RoundStarted)  # its Join has come
    assert not slow.has_heard(RoundStarted), "the round began although nobody watches this rank"
    taken_in.set()
    assert first.hear(RoundStarted) == slow.hear(RoundStarted)
    slow.die()
    assert first.hear(RankLost) == RankLost(SLOW_RANK, "its process is gone")


def test_a_rank_that_dies_before_it_is_taken_in_is_in_no_round(job: Job, taken_in: threading.Event) -> None:
    job.start(2)
    first, slow = job.come(0), job.come(SLOW_RANK)
    first.join(2)
    slow.join(2)
    assert not slow.has_heard(RoundStarted)
    slow.die()
    taken_in.set()
    assert first.hear(JoinRefused).reason == "rank 1 ended before the round began (its process is gone)"


def test_a_retry_of_one_process_takes_the_seat_of_its_former_connection(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = job.start(2)
    first = job.come(0)
    caller = joining.make_liveness_request(1, 0)
    monkeypatch.setattr(joining, "make_liveness_request", lambda rank, round: caller)
    former, _ = connect_authenticated(coordinator.address, KEY, caller, Deadline(PATIENCE_S))
    again = job.come(1)  # the coordinator has not seen the former connection end
    former.close()
    first.join(2)
    again.join(2)
    assert first.hear(RoundStarted) == again.hear(RoundStarted)
    assert not first.has_heard(RankLost), "the end of the former connection was taken for the end of the process"
    again.die()
    assert first.hear(RankLost).rank == 1


RANK = """
import signal, sys, threading, time
import numpy, ronde
from ronde.coordinator.server import CoordinatorServer

heard = threading.Event()
arrive, hear_join = CoordinatorServer._on_connection, CoordinatorServer._on_join

def arrive_late(coordinator, caller, line):
    if caller.rank == 1:
        heard.wait(50)
        time.sleep(0.05)  # the round would begin now
    return arrive(coordinator, caller, line)

def note_join(coordinator, rank, *how):
    hear_join(coordinator, rank, *how)
    if rank == 1:
        heard.set()

CoordinatorServer._on_connection, CoordinatorServer._on_join = arrive_late, note_join
ronde.init()
total = ronde.allreduce(numpy.ones(1), name="all are here")
print(float(total[0]), flush=True)
if ronde.rank() == 1:
    signal.pause()
try:
    ronde.allreduce(numpy.ones(1), name="one is missing")
except ronde.PeerLost as error:
    print(error, flush=True)
"""


def test_nobody_is_lost_at_the_start_and_a_later_death_is_noticed() -> None:
    """With rank 0 as host, as under mpirun. The operation itself may take an hour: only the death ends the wait."""
    place = {**hosted_by_rank_0(), "size": 2, "key": new_job_key(), "operation_s": 3600, "stall_s": 0}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={f"RONDE_{name.upper()}": str(value) for name, value in {**place, "rank": rank}.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "2.0\n"
        ranks[1].send_signal(signal.SIGKILL)
        said, _ = ranks[0].communicate(timeout=PATIENCE_S)
        assert "rank 0 lost rank 1" in said and "its process is gone" in said
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
