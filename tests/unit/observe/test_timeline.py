"""The timeline: the file is complete at any time, and its events are well-formed whatever ranks send."""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.observe.events import GroupAdded, StallReported
from ronde.observe.timeline import (
    MAX_EVENT_BYTES,
    TRACKS_PER_GROUP,
    NegotiationSlice,
    TimelineWriter,
    TraceEncoder,
    TraceStyle,
)


def slices(step: int = 0, name: str = "w") -> list[bytes]:
    """Three trace events; a track's name comes along only at its first operation, which is left out here."""
    return TraceEncoder(0).encode(("allreduce", name, 0, 64, step, step + 1, step + 2), 0)[1:]


def load(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(path.read_bytes())
    assert trace["otherData"]["written_events"] == len(trace["traceEvents"])
    return trace


def dropped(path: Path) -> Any:
    return load(path)["otherData"]["dropped_events"]


# --- the file ----------------------------------------------------------------------------------------------------


def test_the_file_is_complete_after_every_single_write(tmp_path: Path) -> None:
    path, killed_here = tmp_path / "t.json", tmp_path / "copy.json"
    before_us = (time.time_ns() - time.monotonic_ns()) // 1000
    with closing(TimelineWriter(path, 1000)) as writer:
        assert load(path)["traceEvents"] == []
        assert abs(load(path)["otherData"]["start_time_since_epoch_in_micros"] - before_us) < 10_000_000
        for count in range(1, 51):
            writer.add(slices(count), dropped=count % 2)
            killed_here.write_bytes(path.read_bytes())
            assert len(load(killed_here)["traceEvents"]) == 3 * count
    assert dropped(path) == 25


def test_the_limit_holds_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with closing(TimelineWriter(path, 7)) as writer:
        for step in range(4):
            writer.add(slices(step))
        assert (writer.num_written, writer.num_dropped) == (7, 5)
        writer.add([], dropped=100)
    assert len(load(path)["traceEvents"]) == 7
    assert dropped(path) == 105


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"]}",
        b'{"name":"x"}',
        b'{"name":"x","ph":"X","ts":1,"pid":0,"tid":0},{}',
        b'{"name":"x","ph":"X","ts":NaN,"pid":0,"tid":0}',
        b'{"name":"x","ph":"X","ts":1e999,"pid":0,"tid":0}',
        b'{"name":"\xff","ph":"X","ts":1,"pid":0,"tid":0}',
        b'{"name":"x","ph":"X","ts":1,"pid":0,"tid":0,"args":{"x":"\xff"}}',
        b'{"name":"x","ph":"X","ts":1,"pid":0,"tid":0,"args":{"x":' + b"[" * 5000 + b"]" * 5000 + b"}}",
        b'{"name":"' + b"x" * MAX_EVENT_BYTES + b'","ph":"X","ts":1,"pid":0,"tid":0}',
    ],
    ids=range(10),
)
def test_a_malformed_event_is_dropped_and_the_others_stay(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.json"
    with closing(TimelineWriter(path, 100)) as writer:
        writer.add([*slices(1), data, *slices(2)])
    assert len(load(path)["traceEvents"]) == 6
    assert dropped(path) == 1


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Beyond it, writing fails as on a full disk: first short, then with an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_the_timeline_but_not_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    with closing(TimelineWriter(path, 1000)) as writer, caplog.at_level(logging.WARNING, "ronde.observe"):
        writer.add(slices(1))
        with files_of_at_most(path.stat().st_size + 100):
            writer.add(slices(2))
            assert len(load(path)["traceEvents"]) == 3
            assert dropped(path) == 3
            writer.add(slices(3))
        writer.add(slices(4))
        assert len(load(path)["traceEvents"]) == 3
        assert dropped(path) == 9
    assert [record.getMessage() for record in caplog.records] == [
        f"timeline {path} ends here, later events are only counted: File too large"
    ]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in [
        ("no/t.json", "No such file or directory"),
        (".", "Is a directory"),
        ("pipe", "No such device"),
        ("nul\0", "null"),
    ]:
        with pytest.raises(ValueError, match=why) as error:
            TimelineWriter(tmp_path / name, 10)
        assert str(tmp_path) in str(error.value)
    with pytest.raises(ValueError, match="timeline /dev/null is not a regular file"):
        TimelineWriter("/dev/null", 10)


# --- the events --------------------------------------------------------------------------------------------------


def parsed(events: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events]


def test_a_rank_has_a_name_and_a_position() -> None:
    names = parsed(TraceEncoder(3, 'rank 3 on "a"\n').encode_names())
    assert [(event["name"], event["args"]) for event in names] == [
        ("process_name", {"name": 'rank 3 on "a"\\n'}),
        ("process_sort_index", {"sort_index": 3}),
        ("thread_name", {"name": "events"}),
    ]


def test_an_operation_holds_its_waiting_and_its_moving() -> None:
    track, whole, wait, move = parsed(TraceEncoder(1).encode(("allreduce", "w", 2, 64, 5000, 7500, 8001), 1000))
    assert track["args"] == {"name": "group 2"}
    assert (whole["name"], whole["ts"], whole["dur"]) == ("allreduce w", 6.0, 3.001)
    assert (wait["name"], wait["ts"], wait["dur"]) == ("wait", 6.0, 2.5)
    assert (move["name"], move["ts"], move["dur"]) == ("move", 8.5, 0.501)
    assert whole["args"] == {"bytes": 64, "group": 2}
    assert {(event["pid"], event["tid"]) for event in (track, whole, wait, move)} == {(1, track["tid"])}


def test_times_out_of_order_give_no_negative_length() -> None:
    _, *found = parsed(TraceEncoder(1).encode(("barrier", "", 0, 0, 5000, 0, 4000), 0))
    assert [(event["name"], event["dur"]) for event in found] == [("barrier", 0.0), ("wait", 0.0), ("move", 0.0)]


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=TRACKS_PER_GROUP))
def test_slices_of_one_track_never_cross(spans: list[tuple[int, int]]) -> None:
    encoder = TraceEncoder(0)
    by_track: dict[int, list[tuple[float, float]]] = {}
    for start, took in sorted(spans, key=lambda span: span[0] + span[1]):
        operation = ("allreduce", "", 0, 0, 1000 * start, 1000 * start, 1000 * (start + took))
        whole = next(event for event in parsed(encoder.encode(operation, 0)) if event["name"] == "allreduce")
        by_track.setdefault(whole["tid"], []).append((whole["ts"], whole["ts"] + whole["dur"]))
    for found in by_track.values():
        assert all(before[1] <= after[0] for before, after in pairwise(found))


@pytest.mark.parametrize("letter", ["x", '"', "\n", "\0", "\udc80", "😀"])
def test_a_name_of_a_megabyte_is_cut(tmp_path: Path, letter: str) -> None:
    name, many = letter * 1_000_000, tuple(range(0, 100_000, 2))
    encoder = TraceEncoder(0, label=name)
    with closing(TimelineWriter(tmp_path / "t.json", 100)) as writer:
        writer.add(encoder.encode_names())
        writer.add(encoder.encode(("allreduce", name, 0, 0, 1, 2, 3), 0))
        stall = StallReported(at_ns=1, rank=0, op=name, group=0, waited_s=31.0, missing=many, report=name)
        writer.add(encoder.encode(stall, 0))
        assert writer.num_dropped == 0
    assert all(len(event["name"]) <= 200 for event in load(tmp_path / "t.json")["traceEvents"])


def test_an_event_is_an_instant_with_all_it_says() -> None:
    (instant,) = parsed(TraceEncoder(1).encode(GroupAdded(at_ns=5000, rank=1, group=2, ranks=(0, 1, 2)), 500))
    assert (instant["ph"], instant["ts"], instant["s"]) == ("i", 5.5, "p")
    assert instant["args"] == {"group": 2, "ranks": "ranks 0-2"}


# --- negotiations, and Horovod's names ---------------------------------------------------------------------------

NEGOTIATION = NegotiationSlice("reduce_scatter", "grad", 2, 5_000, 9_000)


def test_a_negotiation_is_a_slice_of_its_own_because_many_overlap() -> None:
    encoder = TraceEncoder(3)
    begin, end = map(json.loads, encoder.encode(NEGOTIATION, 1_000))
    assert (begin["ph"], begin["ts"], end["ph"], end["ts"]) == ("b", 6.0, "e", 10.0)
    assert begin["name"] == end["name"] == "negotiate reduce_scatter"
    assert begin["args"] == {"name": "grad", "group": 2}
    assert begin["id"] == end["id"] != json.loads(encoder.encode(NEGOTIATION, 0)[0])["id"]


def test_batches_are_marked_only_if_that_is_wanted() -> None:
    assert TraceEncoder(0).encode(1_000, 0) == []
    (mark,) = TraceEncoder(0, style=TraceStyle(batch_markers=True)).encode(1_000, 0)
    assert (json.loads(mark)["name"], json.loads(mark)["ts"]) == ("departure", 1.0)


def test_things_can_be_called_as_in_horovods_timeline(tmp_path: Path) -> None:
    encoder = TraceEncoder(0, style=TraceStyle(horovod=True, batch_markers=True))
    events = [
        *encoder.encode(("reduce_scatter", "grad", 0, 64, 1, 2, 3), 0),
        *encoder.encode(("barrier", "", 0, 0, 4, 5, 6), 0),
        *encoder.encode(NEGOTIATION, 0),
        *encoder.encode(7, 0),
    ]
    with closing(TimelineWriter(tmp_path / "t.json", 100)) as writer:
        writer.add(events)
    trace = load(tmp_path / "t.json")
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert names == [
        *("grad", "WAIT", "REDUCESCATTER"),
        *("BARRIER", "WAIT", "BARRIER"),
        *("NEGOTIATE_REDUCESCATTER", "NEGOTIATE_REDUCESCATTER", "CYCLE_START"),
    ]
