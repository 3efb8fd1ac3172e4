"""The coordinator over real sockets: joining, messages, leaving, deaths, and what it answers about its job."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname

import msgspec
import pytest

from ronde.comm.joining import connect_to_coordinator
from ronde.coordinator.rounds import Round
from ronde.coordinator.server import CoordinatorServer
from ronde.errors import StartFailed
from ronde.net.messages import (
    ActivityReport,
    AnnounceOperations,
    ArrivalSamples,
    ChangeGroups,
    EndRound,
    GroupsChanged,
    JoinRefused,
    LeaveReason,
    LeaveRound,
    OperationRejected,
    OperationRequest,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RoundStarted,
    RunOperations,
    StackReply,
    StackRequest,
    StallReport,
    TraceBatch,
    WaitingTooLong,
)
from ronde.observe.activity import ActivitySample, CurrentOperation, JobActivity
from ronde.observe.stacks import RankStack
from ronde.observe.stragglers import ArrivalSample
from ronde.settings import Settings
from ronde.types import Deadline
from tests.local_job import collect_stacks
from tests.unit.coordinator.scripted_ranks import KEY, PATIENCE_S, Job, Rank, allreduce

# --- coming together -------------------------------------------------------------------------------------------------


def test_all_ranks_are_welcomed_with_all_members(job: Job) -> None:
    job.start(2)
    first, second = job.connect(0), job.connect(1)
    second.join(2)
    first.join(2)
    welcome = first.receive(RoundStarted)
    assert welcome == second.receive(RoundStarted)
    assert (welcome.round, [member.rank for member in welcome.members]) == (0, [0, 1])


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


def test_who_does_not_come_in_time_is_named_to_those_who_did(job: Job) -> None:
    job.start(3, start_s=0.2)
    rank = job.connect(1)
    rank.join(3)
    assert rank.receive(JoinRefused).reason.startswith("ranks 0, 2 of 3 did not join within ")


def test_a_second_process_with_the_same_rank_is_sent_away_and_the_round_refused(job: Job) -> None:
    job.start(2)
    rank = job.connect(0)
    with pytest.raises(StartFailed, match="another process already is rank 0"):
        job.connect(0)
    rank.join(2)
    assert rank.receive(JoinRefused).reason.startswith("two processes say that they are rank 0")


def test_a_second_process_does_not_disturb_a_round_that_is_on(job: Job) -> None:
    ranks = job.gather(2)
    with pytest.raises(StartFailed, match="another process already is rank 1"):
        job.connect(1)
    for rank in ranks:
        rank.send(allreduce("w"))
    assert [rank.receive(RunOperations).operations[0].name for rank in ranks] == ["w", "w"]


def test_a_process_that_replaces_one_that_died_while_it_joined_is_no_second_process(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.start(2, rounds=None)
    job.connect(1).die()
    ranks = [job.connect(0), job.connect(1)]  # rank 1 has to retry until the coordinator has done with the former one
    for rank in ranks:
        rank.join(2)
    assert [rank.receive(RoundStarted).round for rank in ranks] == [0, 0]
    assert "a second process" not in caplog.text


# --- named operations and groups -------------------------------------------------------------------------------------


def test_a_named_operation_runs_on_all_when_all_have_announced_it(job: Job) -> None:
    first, second = job.gather(2)
    first.send(allreduce("w"))
    assert not first.has_received(RunOperations)
    second.send(allreduce("w"))
    assert first.receive(RunOperations) == second.receive(RunOperations)


def test_groups_of_the_beginning_and_later_ones_work(job: Job) -> None:
    ranks = job.gather(2, groups=((0, 1),))
    for rank in ranks:
        rank.send(allreduce("w", group=1))
        rank.send(ChangeGroups((1,)))
    assert [rank.receive(RunOperations).group for rank in ranks] == [1, 1]
    assert [rank.receive(GroupsChanged) for rank in ranks] == [GroupsChanged((1,), 2)] * 2
    ranks[1].send(allreduce("alone", group=2))
    assert ranks[1].receive(RunOperations).group == 2
    for rank in ranks:
        rank.send(ChangeGroups((1,), 2))
    assert ranks[0].receive(GroupsChanged).removed
    ranks[1].send(allreduce("late", group=2))
    assert "group 2 does not exist" in ranks[1].receive(OperationRejected).reason


def test_a_heartbeat_is_answered_with_the_clock(job: Job) -> None:
    job.start(1)
    rank = job.connect(0)
    before_ns = time.monotonic_ns()
    rank.send(RankHeartbeat(42))
    answer = rank.receive(RankHeartbeatReply)
    assert answer.sent_ns == 42
    assert before_ns <= answer.coordinator_ns <= time.monotonic_ns()


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
        rank.send(allreduce("w"))
    assert [rank.receive(RunOperations).operations[0].name for rank in ranks] == ["w", "w"]


# --- watching --------------------------------------------------------------------------------------------------------


def test_a_stall_is_reported_once_with_where_the_missing_rank_is(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    first, second = job.gather(2, stall_s=0.1)
    with caplog.at_level(logging.WARNING, "ronde.stall"):
        first.send(allreduce("w"))
        query = second.receive(StackRequest)
        second.send(StackReply(query.query_id, "train.py:42 in step: sleep(1000)", "…"))
        stalled = first.receive(StallReport)
        assert second.receive(StallReport) == stalled
    assert stalled.missing == (1,)
    assert "allreduce 'w'" in stalled.op
    assert "train.py:42 in step: sleep(1000)" in stalled.report
    assert caplog.messages == [stalled.report]
    second.send(allreduce("w"))
    first.receive(RunOperations)
    assert not first.has_received(StallReport)


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["nobody told", "told by a launcher"])
def test_a_rank_that_does_not_answer_is_reported_too_with_its_hosts_name(job: Job, names: tuple[str, ...]) -> None:
    first, _ = job.gather(2, stall_s=0.05, host_names=names)
    first.send(allreduce("w"))
    host = names[1] if names else gethostname()
    assert f"rank 1 on host {host}, pid {os.getpid()}, does not answer" in first.receive(StallReport).report


def test_the_timeline_collects_what_all_ranks_recorded(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks = job.gather(2, timeline=str(path))
    for rank in ranks:
        event = {"name": f"of {rank.rank}", "ph": "X", "ts": 1, "dur": 1, "pid": rank.rank, "tid": 0}
        rank.send(TraceBatch((msgspec.json.encode(event),)))
        rank.leave()
    assert job.coordinator.wait(PATIENCE_S)
    trace = msgspec.json.decode(path.read_bytes())
    assert {event["name"] for event in trace["traceEvents"]} == {"of 0", "of 1"}


def test_a_timeline_that_cannot_be_written_fails_at_the_start(tmp_path: Path) -> None:
    settings = Settings(timeline=str(tmp_path / "no" / "trace.json"))
    with pytest.raises(ValueError, match="cannot be written"):
        CoordinatorServer("127.0.0.1", 0, 1, KEY, settings=settings)


def test_an_address_that_is_taken_fails_at_the_start(job: Job) -> None:
    job.start(1)
    port = int(job.coordinator.address.rpartition(":")[2])
    with pytest.raises(StartFailed, match="cannot listen"):
        CoordinatorServer("127.0.0.1", port, 1, KEY, settings=Settings())


# --- leaving and dying -----------------------------------------------------------------------------------------------


def test_a_death_is_told_to_all_at_once(job: Job) -> None:
    ranks = job.gather(3)
    ranks[1].die()
    began = time.monotonic()
    assert ranks[0].receive(RankLost) == ranks[2].receive(RankLost) == RankLost(1, "its process is gone")
    assert time.monotonic() - began < 1.0


def test_a_rank_whose_process_is_gone_is_lost_though_its_connection_stays_open(job: Job) -> None:
    """As when a child of the process has inherited the connection."""
    process = subprocess.Popen(["sleep", "1000"])
    job.start(2, stall_s=0.1)
    first, second = job.connect(0), job.connect(1)
    first.join(2)
    second.join(2, pid=process.pid)
    first.receive(RoundStarted)
    first.send(allreduce("w"))
    process.kill()
    process.wait()
    assert first.receive(RankLost) == RankLost(1, "its process is gone")


def test_the_words_of_the_launcher_are_told(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    job.coordinator.rank_exited(1, "killed by signal 9")
    ranks[1].die()
    assert ranks[0].receive(RankLost) == RankLost(1, "killed by signal 9")


def test_a_rank_whose_script_just_ends_is_missed_but_not_shown_as_lost(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    ranks[1].send(LeaveRound(LeaveReason.SCRIPT_ENDED, detail="exited without shutdown"))
    assert ranks[0].receive(RankLost) == RankLost(1, "exited without shutdown")
    shown = job.coordinator.activity().ranks[1]
    assert (shown.state, shown.why) == ("left", "has come to the end of its script")
    lost = job.coordinator.first_lost()
    assert lost is not None and (lost[0], lost[1].reason) == (1, LeaveReason.SCRIPT_ENDED)


def test_when_all_have_left_a_coordinator_of_one_round_ends(job: Job) -> None:
    for rank in job.gather(2):
        rank.leave()
    assert job.coordinator.wait(PATIENCE_S)


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


def test_a_launchers_coordinator_serves_round_after_round(job: Job) -> None:
    job.start(2, rounds=None)
    for _ in range(3):
        for rank in job.join(2):
            rank.leave()


def test_who_comes_early_to_the_next_round_waits_for_the_others_to_leave_this_one(job: Job) -> None:
    first, second = job.gather(2, rounds=None, shutdown_s=PATIENCE_S)
    first.leave()
    early = job.connect(0)
    early.join(2)
    assert not early.has_received(RoundStarted)
    second.leave()
    late = job.connect(1)
    late.join(2)
    assert early.receive(RoundStarted).round == late.receive(RoundStarted).round == 1


def test_who_comes_early_where_rank_0_hosts_calls_until_the_next_coordinator_is_there(job: Job) -> None:
    first, second = job.gather(2, shutdown_s=PATIENCE_S)
    second.leave()
    with pytest.raises(StartFailed, match=r"rank 1 was not let in within 0\.1 s: the round before is not over"):
        connect_to_coordinator(job.coordinator.address, KEY, 1, round=1, deadline=Deadline(0.1), heartbeat_s=10.0)
    first.leave()


def test_a_coordinator_that_breaks_ends_the_round_for_everybody(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = job.gather(2)

    def broken(*_: object) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Round, "handle", broken)
    with caplog.at_level(logging.CRITICAL, "ronde.coordinator"):
        ranks[0].send(allreduce("w"))
        assert [rank.receive(EndRound).reason for rank in ranks] == [
            "the coordinator failed: RuntimeError('a mistake of ours')"
        ] * 2
    assert ranks[1].line.recv(1) == b""


S = 1_000_000_000
MS = 1_000_000


def sync(rank: Rank) -> None:
    """After this, everything that the rank has said was heard."""
    rank.send(RankHeartbeat(0))
    rank.receive(RankHeartbeatReply)


def states(vitals: JobActivity) -> list[str]:
    return [rank.state for rank in vitals.ranks]


def until(job: Job, wanted: list[str]) -> JobActivity:
    deadline = Deadline(PATIENCE_S)
    while True:
        vitals = job.coordinator.activity()
        if states(vitals) == wanted:
            return vitals
        assert not deadline.expired, f"{wanted} expected, but it is {states(vitals)}"


def first_lost(job: Job) -> tuple[int, str] | None:
    lost = job.coordinator.first_lost()
    return None if lost is None else (lost[0], lost[1].description)


# --- who was lost first -----------------------------------------------------------------------------------------------


def test_leaving_in_good_order_is_no_loss(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    ranks[0].leave()
    assert ranks[1].receive(RankLost).rank == 0
    assert job.coordinator.first_lost() is None


def test_a_later_round_that_loses_one_counts_and_one_that_loses_none_does_not(job: Job) -> None:
    job.start(2, rounds=None)
    for lost in (1, None, 0):
        ranks = job.join(2)
        if lost is not None:
            ranks[lost].send(LeaveRound(LeaveReason.FAILED, f"rank {lost} broke"))
            ranks[1 - lost].receive(RankLost)
        for rank in (0, 1):
            if rank != lost:
                ranks[rank].leave()
        expected = 1 if lost is None else lost
        until(job, ["lost" if rank == lost else "left" for rank in (0, 1)])
        assert first_lost(job) == (expected, f"rank {expected} broke")


# --- vitals -----------------------------------------------------------------------------------------------------------


def test_the_life_of_a_rank(job: Job) -> None:
    job.start(3, rounds=None)
    assert states(job.coordinator.activity()) == ["starting"] * 3
    first = job.connect(0)
    first.join(3)
    sync(first)
    vitals = job.coordinator.activity()
    assert vitals.ranks[0].why == "is in init(), which waits for ranks 1, 2"
    assert vitals.ranks[1].why == "has not called ronde.init() yet"
    assert (vitals.ranks[0].pid, vitals.ranks[1].pid, vitals.round) == (os.getpid(), 0, -1)
    others = [job.connect(rank) for rank in (1, 2)]
    for rank in others:
        rank.join(3)
    assert until(job, ["running"] * 3).round == 0
    others[0].leave()
    others[1].die()
    vitals = until(job, ["running", "left", "lost"])
    assert vitals.ranks[2].why == "its process is gone"


def test_what_ranks_tell_is_put_together(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    for second in (1, 2):
        for rank in ranks:
            waits = rank.rank == 0
            note = ArrivalSample(second, 0, 0 if waits else 500 * MS, 500 * MS * waits, 500 * MS * waits)
            reading = ActivitySample(second * S, 10 * second, waiting_ns=500 * MS * waits * second)
            rank.send(
                ActivityReport(
                    reading, (ArrivalSamples("0.ordered", 0, (note,)), ArrivalSamples("9.ordered", 9, (note,)))
                )
            )
            sync(rank)
    first, second_rank = job.coordinator.activity().ranks
    assert (first.steps, first.steps_per_s, first.computing, first.waiting) == (20, 10.0, 0.5, 0.5)
    assert (second_rank.computing, second_rank.waiting) == (1.0, 0.0)
    assert (first.held_up_s, second_rank.held_up_s) == (0.0, 1.0)


def test_a_named_operation_that_waits_shows_for_whom(job: Job) -> None:
    ranks = job.gather(3, rounds=None)
    for rank in ranks[:2]:
        rank.send(allreduce("w"))
        rank.send(
            ActivityReport(
                ActivitySample(
                    4 * S, current_operation=CurrentOperation("allreduce 'w' of group 0", S, named_operation=(0, "w"))
                )
            )
        )
        sync(rank)
    vitals = job.coordinator.activity()
    assert vitals.slowest == 2
    assert [rank.held_up_s for rank in vitals.ranks] == [0.0, 0.0, 6.0]
    assert vitals.ranks[0].doing.endswith(" for rank 2 in allreduce 'w' of group 0")


def test_the_end_of_a_job_can_still_be_looked_at(job: Job) -> None:
    for rank in job.gather(2):
        rank.leave()
    assert job.coordinator.wait(PATIENCE_S)
    job.coordinator.close()
    assert states(job.coordinator.activity()) == ["left", "left"]
    assert [stack.why for stack in collect_stacks(job.coordinator, Deadline(5.0))] == [
        "has left the round by shutdown()"
    ] * 2


# --- stacks -----------------------------------------------------------------------------------------------------------


def asking(coordinator: CoordinatorServer, deadline: Deadline) -> Callable[[], tuple[RankStack, ...]]:
    """Asks in a thread; the result is what was answered."""
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(collect_stacks, coordinator, deadline)

    def result() -> tuple[RankStack, ...]:
        try:
            return answer.result(PATIENCE_S)
        finally:
            pool.shutdown()

    return result


def test_for_a_rank_that_does_not_answer_there_are_words(job: Job) -> None:
    ranks = job.gather(3)
    ranks[2].die()
    ranks[0].receive(RankLost)
    result = asking(job.coordinator, Deadline(0.3))
    query_id = ranks[0].receive(StackRequest).query_id
    ranks[0].send(StackReply(query_id - 1, "an answer to another question", ""))
    ranks[0].send(StackReply(query_id, "train.py:7", ""))
    first, second, third = result()
    assert (first.line, first.why) == ("train.py:7", "")
    assert second.why.startswith("does not answer; its process is ")
    assert third.why == "is lost: its process is gone"


def test_before_init_there_is_nothing_to_ask(job: Job) -> None:
    job.start(2)
    rank = job.connect(0)
    rank.join(2)
    sync(rank)
    assert [stack.why for stack in collect_stacks(job.coordinator, Deadline(PATIENCE_S))] == [
        "is in init(), which waits for rank 1",
        "has not called ronde.init() yet",
    ]


def test_who_asks_does_not_wait_for_a_coordinator_that_ends(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    result = asking(job.coordinator, Deadline(PATIENCE_S))
    ranks[0].receive(StackRequest)
    deadline = Deadline(PATIENCE_S / 2)
    job.coordinator.close()
    assert [bool(stack.why) for stack in result()] == [True, True]
    assert not deadline.expired
