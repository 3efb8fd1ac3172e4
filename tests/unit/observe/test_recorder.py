"""The Recorder: recent events, sums, and the trace until it is drained."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ronde.observe.activity import CurrentOperation
from ronde.observe.events import Event, PeerGone
from ronde.observe.recorder import Recorder
from ronde.observe.timeline import NegotiationSlice


def gone(peer: int) -> Event:
    return PeerGone(at_ns=1000 * peer, rank=0, peer=peer)


def drained(recorder: Recorder, limit: int = 1000) -> list[dict[str, Any]]:
    return [json.loads(event) for event in recorder.drain_trace(limit)[0]]


def test_the_most_recent_events_are_kept_in_order() -> None:
    recorder = Recorder(0, capacity=3)
    for peer in range(5):
        recorder.record_event(gone(peer))
    assert recorder.events() == [gone(2), gone(3), gone(4)]
    assert recorder.drain_trace(1000) == ([], 0), "nobody asked for a trace"


def test_the_trace_names_the_process_and_has_operations_and_events_in_order() -> None:
    recorder = Recorder(2)
    recorder.set_tracing(True, label="rank 2 on host a")
    recorder.record_operation("allreduce", "w", 0, 64, 1000, 3000, 3500)
    recorder.record_event(gone(7))
    recorder.set_tracing(False)
    recorder.record_event(gone(8))
    trace = drained(recorder)
    assert trace[0]["args"] == {"name": "rank 2 on host a"}
    assert [event["name"] for event in trace if event["ph"] != "M"] == ["allreduce w", "wait", "move", "PeerGone"]
    assert {event["pid"] for event in trace} == {2}


def test_the_clock_offset_of_the_moment_of_draining_counts() -> None:
    recorder = Recorder(0)
    recorder.set_tracing(True)
    recorder.record_operation("barrier", "", 0, 0, 1000, 3000, 3500)
    recorder.clock_offset_ns = -1_000
    recorder.record_event(gone(5))
    times = [(event["name"], event["ts"]) for event in drained(recorder) if event["ph"] != "M"]
    assert times == [("barrier", 0.0), ("wait", 0.0), ("move", 2.0), ("PeerGone", 4.0)]


def test_draining_in_small_parts_gives_the_same_trace() -> None:
    def filled() -> Recorder:
        recorder = Recorder(0)
        recorder.set_tracing(True)
        for step in range(5):
            recorder.record_operation("barrier", "", 0, 0, 1000 * step, 1000 * step + 10, 1000 * step + 20)
        return recorder

    drained_in_parts = filled()
    parts = []
    while part := drained(drained_in_parts, limit=2):
        assert len(part) <= 2
        parts += part
    assert parts == drained(filled())


def test_what_does_not_fit_in_the_trace_is_counted_once_and_still_summed() -> None:
    recorder = Recorder(0, trace_capacity=10)
    recorder.set_tracing(True)
    for step in range(25):
        recorder.record_operation("barrier", "", 0, 0, step, step, step)
    events, dropped = recorder.drain_trace(1000)
    assert dropped == 15
    assert sum(json.loads(event)["name"] == "barrier" for event in events) == 10
    assert recorder.drain_trace(1000) == ([], 0)
    assert recorder.metrics().total.operations == 25


# --- samples for the coordinator --------------------------------------------------------------------------------------


def test_a_sample_has_the_sums_so_far_without_the_time_in_which_no_caller_was_blocked() -> None:
    recorder = Recorder(0)
    recorder.record_operation("bucket", "", 0, 100, 0, 3_000, 4_000)
    recorder.record_operation("allreduce", "", 0, 100, 5_000, 6_000, 8_000)
    recorder.record_overlap(2_000, 1_000)
    recorder.record_overlap(-500, 0)
    recorder.steps += 1
    sample = recorder.sample_activity(9_000, None)
    assert (sample.at_ns, sample.steps, sample.operations, sample.bytes) == (9_000, 1, 2, 200)
    assert (sample.waiting_ns, sample.moving_ns) == pytest.approx((2_500, 2_000), abs=1)


def test_what_is_under_way_counts_as_far_as_it_has_come() -> None:
    recorder = Recorder(0)
    waits = recorder.sample_activity(10_000, CurrentOperation("barrier", 4_000, (1,)))
    moves = recorder.sample_activity(10_000, CurrentOperation("barrier", 4_000, (), is_waiting=False))
    assert (waits.waiting_ns, waits.moving_ns) == pytest.approx((6_000, 0), abs=1)
    assert (moves.waiting_ns, moves.moving_ns) == pytest.approx((0, 6_000), abs=1)


def test_whom_a_caller_waited_for_adds_up() -> None:
    recorder = Recorder(0)
    recorder.record_waits({1: 10.0, 2: 5.0})
    recorder.record_waits({1: 10.0})
    assert dict(recorder.sample_activity(0, None).waited_for) == {1: 20, 2: 5}


def test_a_trace_that_is_started_again_begins_anew_under_the_same_label() -> None:
    recorder = Recorder(2)
    recorder.set_tracing(False, label="host a")
    for _ in range(2):
        recorder.set_tracing(True)
        recorder.record_batch_start(9, [NegotiationSlice("allreduce", "w", 0, 5, 9)])
    events, _ = recorder.drain_trace(100)
    assert [json.loads(event)["name"] for event in events].count("process_name") == 1
    assert json.loads(events[0])["args"] == {"name": "host a"}
    assert [json.loads(event)["name"] for event in events[3:]] == ["negotiate allreduce"] * 2
