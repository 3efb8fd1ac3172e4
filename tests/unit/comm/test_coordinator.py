"""The coordinator over real sockets: how ranks come together, what it says to them, what it watches."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path
from socket import gethostname, socket
from typing import cast

import msgspec
import pytest

from ronde.coordinator.server import CoordinatorServer
from ronde.errors import StartFailed
from ronde.net.messages import (
    AnnounceOperations,
    ChangeGroups,
    GroupsChanged,
    JoinRefused,
    OperationRejected,
    OperationRequest,
    RankHeartbeat,
    RankHeartbeatReply,
    RoundStarted,
    RunOperations,
    StackReply,
    StackRequest,
    StallReport,
    TraceBatch,
    WaitingTooLong,
)
from ronde.settings import Settings
from tests.unit.comm.scripted_ranks import KEY, PATIENCE_S, Job, Rank, allreduce

# --- coming together -------------------------------------------------------------------------------------------------


def test_all_ranks_are_welcomed_with_all_members(job: Job) -> None:
    job.start(2)
    first, second = job.come(0), job.come(1)
    second.join(2)
    first.join(2)
    welcome = first.hear(RoundStarted)
    assert welcome == second.hear(RoundStarted)
    assert (welcome.round, [member.rank for member in welcome.members]) == (0, [0, 1])


def test_a_rank_may_come_before_the_coordinator_serves() -> None:
    with ExitStack() as stack:
        coordinator = CoordinatorServer("127.0.0.1", 0, 1, KEY, settings=Settings())
        stack.callback(coordinator.close)
        rank = Rank(coordinator, 0)
        stack.callback(rank.die)
        rank.join(1)
        coordinator.start()
        rank.hear(RoundStarted)


def test_a_coordinator_that_was_never_started_closes() -> None:
    coordinator = CoordinatorServer("127.0.0.1", 0, 2, KEY, settings=Settings())
    coordinator.close()
    coordinator.close()


def test_who_does_not_come_in_time_is_named_to_those_who_did(job: Job) -> None:
    job.start(3, start_s=0.2)
    rank = job.come(1)
    rank.join(3)
    assert rank.hear(JoinRefused).reason.startswith("ranks 0, 2 of 3 did not join within ")


def test_ranks_that_disagree_are_all_refused_also_late_ones(job: Job) -> None:
    job.start(3)
    ranks = [job.come(rank) for rank in range(3)]
    ranks[0].join(3)
    assert not ranks[0].has_heard(JoinRefused)  # its Join has come
    ranks[1].join(4)
    why = "ranks disagree on the number of ranks: rank 0 gave 3; rank 1 gave 4"
    assert ranks[0].hear(JoinRefused).reason == ranks[1].hear(JoinRefused).reason == why
    ranks[2].join(3)
    assert ranks[2].hear(JoinRefused).reason == why


def test_a_second_process_with_the_same_rank_is_sent_away_and_the_round_refused(job: Job) -> None:
    job.start(2)
    rank = job.come(0)
    with pytest.raises(StartFailed, match="another process already is rank 0"):
        job.come(0)
    rank.join(2)
    assert rank.hear(JoinRefused).reason.startswith("two processes say that they are rank 0")


def test_a_second_process_does_not_disturb_a_round_that_is_on(job: Job) -> None:
    ranks = job.gather(2)
    with pytest.raises(StartFailed, match="another process already is rank 1"):
        job.come(1)
    for rank in ranks:
        rank.say(allreduce("w"))
    assert [rank.hear(RunOperations).operations[0].name for rank in ranks] == ["w", "w"]


def test_a_rank_outside_of_the_job_is_sent_away(job: Job) -> None:
    job.start(2)
    with pytest.raises(StartFailed, match="no rank 2 among the 2 of this job"):
        job.come(2)


def test_a_rank_that_dies_before_the_round_begins_ends_the_wait_of_the_others(job: Job) -> None:
    job.start(3)
    ranks = [job.come(rank) for rank in (0, 1)]
    for rank in ranks:
        rank.join(3)
    ranks[1].has_heard(RoundStarted)  # its Join has come
    ranks[1].die()
    assert ranks[0].hear(JoinRefused).reason == "rank 1 ended before the round began (its process is gone)"


def test_a_launcher_that_saw_a_rank_die_ends_the_wait_of_the_others(job: Job) -> None:
    coordinator = job.start(2, rounds=None)
    rank = job.come(0)
    rank.join(2)
    coordinator.rank_exited(1, "exited with code 3")
    assert rank.hear(JoinRefused).reason == "rank 1 ended before the round began (exited with code 3)"


# --- named operations and groups -------------------------------------------------------------------------------------


def test_a_named_operation_runs_on_all_when_all_have_announced_it(job: Job) -> None:
    first, second = job.gather(2)
    first.say(allreduce("w"))
    assert not first.has_heard(RunOperations)
    second.say(allreduce("w"))
    assert first.hear(RunOperations) == second.hear(RunOperations)


def test_ranks_that_disagree_hear_the_same_words(job: Job) -> None:
    first, second = job.gather(2)
    first.say(allreduce("w", (3, 4)))
    second.say(allreduce("w", (3, 5)))
    failed = first.hear(OperationRejected)
    assert failed == second.hear(OperationRejected)
    assert failed.reason == "allreduce 'w': ranks disagree on shape: rank 0 gave (3, 4); rank 1 gave (3, 5)"


def test_groups_of_the_beginning_and_later_ones_work(job: Job) -> None:
    ranks = job.gather(2, groups=((0, 1),))
    for rank in ranks:
        rank.say(allreduce("w", group=1))
        rank.say(ChangeGroups((1,)))
    assert [rank.hear(RunOperations).group for rank in ranks] == [1, 1]
    assert [rank.hear(GroupsChanged) for rank in ranks] == [GroupsChanged((1,), 2)] * 2
    ranks[1].say(allreduce("alone", group=2))
    assert ranks[1].hear(RunOperations).group == 2
    for rank in ranks:
        rank.say(ChangeGroups((1,), 2))
    assert ranks[0].hear(GroupsChanged).removed
    ranks[1].say(allreduce("late", group=2))
    assert "group 2 does not exist" in ranks[1].hear(OperationRejected).reason


def test_a_heartbeat_is_answered_with_the_clock(job: Job) -> None:
    job.start(1)
    rank = job.come(0)
    before_ns = time.monotonic_ns()
    rank.say(RankHeartbeat(42))
    answer = rank.hear(RankHeartbeatReply)
    assert answer.sent_ns == 42
    assert before_ns <= answer.coordinator_ns <= time.monotonic_ns()


def test_what_makes_no_sense_is_dropped_and_the_job_goes_on(job: Job) -> None:
    ranks = job.gather(2)
    ranks[0].control._socket.send(b"garbage")
    cast(socket, ranks[0].line).sendall(b"nobody writes here")
    ranks[0].say(AnnounceOperations(known_ids=(123456,)))
    ranks[0].say(WaitingTooLong("x", 99, -5, (-3, 77)))
    ranks[0].say(StackReply(4711, "", ""))
    ranks[0].say(ChangeGroups((5, 3)))
    ranks[0].say(AnnounceOperations((OperationRequest(-7, "x", 99, 99, ((-1,),)),)))
    ranks[0].join(2)
    for rank in ranks:
        rank.say(allreduce("w"))
    assert [rank.hear(RunOperations).operations[0].name for rank in ranks] == ["w", "w"]


# --- watching --------------------------------------------------------------------------------------------------------


def test_a_stall_is_reported_once_with_where_the_missing_rank_is(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    first, second = job.gather(2, stall_s=0.1)
    with caplog.at_level(logging.WARNING, "ronde.stall"):
        first.say(allreduce("w"))
        query = second.hear(StackRequest)
        second.say(StackReply(query.query_id, "train.py:42 in step: sleep(1000)", "…"))
        stalled = first.hear(StallReport)
        assert second.hear(StallReport) == stalled
    assert stalled.missing == (1,)
    assert "allreduce 'w'" in stalled.op
    assert "train.py:42 in step: sleep(1000)" in stalled.report
    assert caplog.messages == [stalled.report]
    second.say(allreduce("w"))
    first.hear(RunOperations)
    assert not first.has_heard(StallReport)


@pytest.mark.parametrize("names", [(), ("a", "b")], ids=["nobody told", "told by a launcher"])
def test_a_rank_that_does_not_answer_is_reported_too_with_its_hosts_name(job: Job, names: tuple[str, ...]) -> None:
    first, _ = job.gather(2, stall_s=0.05, host_names=names)
    first.say(allreduce("w"))
    host = names[1] if names else gethostname()
    assert f"rank 1 on host {host}, pid {os.getpid()}, does not answer" in first.hear(StallReport).report


def test_a_wait_in_an_operation_without_a_name_is_reported_for_all_who_wait(job: Job) -> None:
    ranks = job.gather(3, stall_s=0.1)
    now_ns = time.monotonic_ns()
    for rank in ranks[:2]:
        rank.say(WaitingTooLong("barrier", 0, now_ns, (2,)))
    query = ranks[2].hear(StackRequest)
    ranks[2].say(StackReply(query.query_id, "eval.py:7 in main: run()", ""))
    stalled = ranks[0].hear(StallReport)
    assert (stalled.op, stalled.missing) == ("barrier", (2,))
    assert "eval.py:7" in stalled.report


def test_the_timeline_collects_what_all_ranks_recorded(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks = job.gather(2, timeline=str(path))
    for rank in ranks:
        event = {"name": f"of {rank.rank}", "ph": "X", "ts": 1, "dur": 1, "pid": rank.rank, "tid": 0}
        rank.say(TraceBatch((msgspec.json.encode(event),)))
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
