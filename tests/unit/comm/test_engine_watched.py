"""The engine of a job that is watched: vitals, whom a wait was for, and timelines that begin and end on request."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ronde.errors import OperationTimeout, RoundEnded
from ronde.net.messages import (
    ActivityReport,
    AgreedOperation,
    AnnounceOperations,
    EndRound,
    LeaveRound,
    RankHeartbeat,
    RunOperations,
    SetTracing,
    TimelineReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
)
from ronde.types import Deadline
from tests.unit.comm.scripted_control import Stage


def test_without_a_launcher_nobody_is_told_how_it_is(stage: Stage) -> None:
    stage.control.expect(RankHeartbeat)
    assert not any(isinstance(message, ActivityReport) for message in stage.control.said)


def test_a_launcher_is_told_how_it_is_at_the_start_and_before_leaving() -> None:
    stage = Stage(watched=True)
    try:
        assert stage.control.expect(ActivityReport).activity.steps == 0
        stage.recorder.mark_step()
        stage.engine.leave(LeaveRound(orderly=False), Deadline(10))
        deadline = Deadline(10)
        while stage.control.expect(ActivityReport).activity.steps != 1:
            assert not deadline.expired
    finally:
        stage.engine.stop()


def test_who_waits_for_a_named_operation_knows_whom_it_waited_for(stage: Stage) -> None:
    work = stage.announce("w")
    stage.control.expect(AnnounceOperations)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    while stage.engine.waits.blocked_operation() is None:
        pass
    doing = stage.engine.waits.blocked_operation()
    assert doing is not None and (doing.op, doing.named_operation) == ("allreduce 'w' of group 0", (0, "w"))
    # Rank 2 came last, rank 1 an hour before it; so did this rank, says the coordinator.
    stage.control.tell(RunOperations(0, (AgreedOperation(1, "w"),), stragglers=((2, 0), (0, 1), (1, 3600 * 10**9))))
    work._wait_for_start(Deadline(10))
    stage.finish(work)
    waiter.join()
    reading = stage.recorder.sample_activity(0, None)
    blamed = dict(reading.waited_for)
    assert blamed[2] > 0 == blamed[1] and 0 not in blamed
    assert reading.waiting_ns >= blamed[2]
    assert stage.engine.waits.blocked_operation() is None


def is_tracing(stage: Stage) -> bool:
    return stage.recorder.tracing


def test_a_timeline_begins_and_ends_when_the_coordinator_says_so(stage: Stage) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(stage.engine.request_timeline, TimelineRequest("/tmp/t.json"), Deadline(10))
        stage.control.expect(TimelineRequest)
        stage.control.tell(SetTracing(True), TimelineReply())
        assert asked.result(10) == ""
    assert is_tracing(stage)
    stage.recorder.record_operation("allreduce", "w", 0, 4, 1, 2, 3)
    stage.control.expect(TraceBatch, lambda batch: any(b"allreduce w" in event for event in batch.events))
    stage.recorder.record_operation("allreduce", "last", 0, 4, 1, 2, 3)
    stage.control.tell(SetTracing(False))
    stage.control.expect(TraceFlushed)
    assert not is_tracing(stage)
    stage.control.expect(TraceBatch, lambda batch: any(b"allreduce last" in event for event in batch.events))


def test_a_timeline_that_cannot_be_is_refused_and_nobody_waits_for_ever(stage: Stage) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(stage.engine.request_timeline, TimelineRequest("/no/t.json"), Deadline(10))
        stage.control.expect(TimelineRequest)
        stage.control.tell(TimelineReply("cannot be written"))
        assert asked.result(10) == "cannot be written"
    with pytest.raises(OperationTimeout, match="not begun in time"):
        stage.engine.request_timeline(TimelineRequest("/tmp/t.json"), Deadline(0.01))
    stage.control.tell(EndRound("enough"))
    with pytest.raises(RoundEnded, match="enough"):
        stage.engine.request_timeline(TimelineRequest(""), Deadline(10))
