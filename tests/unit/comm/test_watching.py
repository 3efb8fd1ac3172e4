"""What a coordinator tells about its job while it runs. Ranks are worked by hand, over real sockets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ronde.coordinator.server import CoordinatorServer, DeferredCalls
from ronde.net.messages import (
    ActivityReport,
    ArrivalSamples,
    LeaveRound,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    StackReply,
    StackRequest,
)
from ronde.observe.activity import ActivitySample, CurrentOperation, JobActivity
from ronde.observe.stacks import RankStack
from ronde.observe.stragglers import ArrivalSample
from ronde.types import Deadline
from tests.unit.comm.scripted_ranks import PATIENCE_S, Job, Rank, allreduce

S = 1_000_000_000
MS = 1_000_000


def sync(rank: Rank) -> None:
    """After this, everything that the rank has said was heard."""
    rank.say(RankHeartbeat(0))
    rank.hear(RankHeartbeatReply)


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


def test_the_first_that_is_lost_is_remembered_with_its_reason(job: Job) -> None:
    ranks = job.gather(3, rounds=None)
    assert job.coordinator.first_lost() is None
    ranks[2].say(LeaveRound(orderly=False, reason="ValueError: boom"))
    ranks[0].hear(RankLost)
    ranks[0].say(LeaveRound(orderly=False, reason="PeerLost: rank 0 lost rank 2"))
    ranks[1].hear(RankLost)
    assert first_lost(job) == (2, "ValueError: boom")
    ranks[1].leave()
    until(job, ["lost", "left", "lost"])
    assert first_lost(job) == (2, "ValueError: boom")


def test_leaving_in_good_order_is_no_loss(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    ranks[0].leave()
    assert ranks[1].hear(RankLost).rank == 0
    assert job.coordinator.first_lost() is None


def test_a_later_round_that_loses_one_counts_and_one_that_loses_none_does_not(job: Job) -> None:
    job.start(2, rounds=None)
    for lost in (1, None, 0):
        ranks = job.join(2)
        if lost is not None:
            ranks[lost].say(LeaveRound(orderly=False, reason=f"rank {lost} broke"))
            ranks[1 - lost].hear(RankLost)
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
    first = job.come(0)
    first.join(3)
    sync(first)
    vitals = job.coordinator.activity()
    assert vitals.ranks[0].why == "is in init(), which waits for ranks 1, 2"
    assert vitals.ranks[1].why == "has not called ronde.init() yet"
    assert (vitals.ranks[0].pid, vitals.ranks[1].pid, vitals.round) == (os.getpid(), 0, -1)
    others = [job.come(rank) for rank in (1, 2)]
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
            rank.say(
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
        rank.say(allreduce("w"))
        rank.say(
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
    assert [stack.why for stack in job.coordinator.collect_stacks(Deadline(5.0))] == [
        "has left the round by shutdown()"
    ] * 2


# --- stacks -----------------------------------------------------------------------------------------------------------


def asking(coordinator: CoordinatorServer, deadline: Deadline) -> Callable[[], tuple[RankStack, ...]]:
    """Asks in a thread; the result is what was answered."""
    pool = ThreadPoolExecutor(1)
    answer = pool.submit(coordinator.collect_stacks, deadline)

    def result() -> tuple[RankStack, ...]:
        try:
            return answer.result(PATIENCE_S)
        finally:
            pool.shutdown()

    return result


def test_every_rank_says_where_it_is(job: Job) -> None:
    ranks = job.gather(2)
    result = asking(job.coordinator, Deadline(PATIENCE_S))
    for rank in ranks:
        ticket = rank.hear(StackRequest).query_id
        rank.say(StackReply(ticket, f"train.py:{rank.rank}", "main thread: …"))
    assert [(stack.line, stack.stack, stack.why) for stack in result()] == [
        ("train.py:0", "main thread: …", ""),
        ("train.py:1", "main thread: …", ""),
    ]


def test_for_a_rank_that_does_not_answer_there_are_words(job: Job) -> None:
    ranks = job.gather(3)
    ranks[2].die()
    ranks[0].hear(RankLost)
    result = asking(job.coordinator, Deadline(0.3))
    ticket = ranks[0].hear(StackRequest).query_id
    ranks[0].say(StackReply(ticket - 1, "an answer to another question", ""))
    ranks[0].say(StackReply(ticket, "train.py:7", ""))
    first, second, third = result()
    assert (first.line, first.why) == ("train.py:7", "")
    assert second.why.startswith("does not answer; its process is ")
    assert third.why == "is lost: its process is gone"


def test_before_init_there_is_nothing_to_ask(job: Job) -> None:
    job.start(2)
    rank = job.come(0)
    rank.join(2)
    sync(rank)
    assert [stack.why for stack in job.coordinator.collect_stacks(Deadline(PATIENCE_S))] == [
        "is in init(), which waits for rank 1",
        "has not called ronde.init() yet",
    ]


def test_who_asks_does_not_wait_for_a_coordinator_that_ends(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    result = asking(job.coordinator, Deadline(PATIENCE_S))
    ranks[0].hear(StackRequest)
    deadline = Deadline(PATIENCE_S / 2)
    job.coordinator.close()
    assert [bool(stack.why) for stack in result()] == [True, True]
    assert not deadline.expired


# --- errands ----------------------------------------------------------------------------------------------------------


def test_an_error_in_an_answer_is_raised_where_it_was_asked_for() -> None:
    asked = threading.Event()
    errands = DeferredCalls(asked.set)

    def serve() -> None:
        asked.wait(PATIENCE_S)
        errands.run_pending(5)

    server = threading.Thread(target=serve)
    server.start()
    with pytest.raises(ZeroDivisionError):
        errands.call(lambda now_ns: now_ns // 0, lambda: True)
    server.join()


def test_where_no_thread_runs_the_answer_is_found_at_once() -> None:
    assert DeferredCalls(lambda: None).call(lambda now_ns: now_ns > 0, lambda: False) is True
