"""The timeline on the coordinator's side: who begins it, who ends it, and when its file is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ronde.coordinator.negotiation import Send
from ronde.coordinator.queries import TraceCollector
from ronde.net.messages import SetTracing, TimelineReply, TimelineRequest, TraceBatch, TraceFlushed

ALL = {0, 1, 2}


@pytest.fixture
def tracing() -> Iterator[TraceCollector]:
    made = TraceCollector("", 100)
    yield made
    made.close()


def batch(name: str) -> TraceBatch:
    return TraceBatch((msgspec.json.encode({"name": name, "ph": "X", "ts": 1, "dur": 1, "pid": 0, "tid": 0}),))


def names(path: Path) -> list[str]:
    trace: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return [event["name"] for event in trace["traceEvents"]]


def test_everybody_is_told_to_begin_before_the_one_who_asked_goes_on(tracing: TraceCollector, tmp_path: Path) -> None:
    wanted = TimelineRequest(str(tmp_path / "t.json"), horovod=True, batch_markers=True)
    assert tracing.handle(1, wanted, ALL) == [
        Send((0, 1, 2), SetTracing(True, True, True)),
        Send((1,), TimelineReply()),
    ]
    assert tracing.handle(0, batch("a"), ALL) == []
    assert names(tmp_path / "t.json") == ["a"]


def test_a_file_that_cannot_be_written_is_the_askers_problem_alone(tracing: TraceCollector, tmp_path: Path) -> None:
    tracing.handle(0, TimelineRequest(str(tmp_path / "t.json")), ALL)
    ((told, answer),) = tracing.handle(1, TimelineRequest(str(tmp_path / "no" / "t.json")), ALL)
    assert isinstance(answer, TimelineReply)
    assert told == (1,) and "cannot be written" in answer.reason
    tracing.handle(0, batch("goes on"), ALL)
    assert names(tmp_path / "t.json") == ["goes on"]


def test_it_has_ended_when_all_have_sent_their_last_events(tracing: TraceCollector, tmp_path: Path) -> None:
    tracing.handle(0, TimelineRequest(str(tmp_path / "t.json")), ALL)
    assert tracing.handle(2, TimelineRequest(""), ALL) == [Send((0, 1, 2), SetTracing(False))]
    assert tracing.handle(1, TimelineRequest(""), ALL) == [], "a second one waits for the same"
    for rank in (0, 1):
        tracing.handle(rank, batch(f"last of {rank}"), ALL)
        assert tracing.handle(rank, TraceFlushed(), ALL) == []
    tracing.handle(2, batch("last of 2"), ALL)
    assert tracing.handle(2, TraceFlushed(), ALL) == [Send((1, 2), TimelineReply())]
    tracing.handle(0, batch("too late"), ALL)
    assert names(tmp_path / "t.json") == ["last of 0", "last of 1", "last of 2"]


def test_who_is_gone_is_not_waited_for(tracing: TraceCollector, tmp_path: Path) -> None:
    tracing.handle(0, TimelineRequest(str(tmp_path / "t.json")), ALL)
    tracing.handle(0, TimelineRequest(""), ALL)
    tracing.handle(0, TraceFlushed(), ALL)
    assert tracing.close_if_complete({0, 2}) == []
    assert tracing.close_if_complete({0}) == [Send((0,), TimelineReply())]


def test_to_end_what_has_not_begun_is_easy(tracing: TraceCollector) -> None:
    assert tracing.handle(0, TimelineRequest(""), ALL) == [Send((0,), TimelineReply())]
    assert tracing.handle(0, TraceFlushed(), ALL) == []


def test_another_file_takes_over(tracing: TraceCollector, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tracing.handle(0, TimelineRequest(str(tmp_path / name)), ALL)
        tracing.handle(0, batch(name), ALL)
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["a"], ["b"])


def test_one_that_a_rank_has_begun_ends_with_its_round_and_one_of_the_settings_does_not(tmp_path: Path) -> None:
    lasting = TraceCollector(str(tmp_path / "t.json"), 100)
    lasting.end_round()
    lasting.handle(0, batch("in the next round"), ALL)
    assert names(tmp_path / "t.json") == ["in the next round"]
    lasting.handle(0, TimelineRequest(str(tmp_path / "u.json")), ALL)
    lasting.end_round()
    lasting.handle(0, batch("later"), ALL)
    assert names(tmp_path / "u.json") == []
    lasting.close()
    lasting.close()
