"""Events: each is described in a sentence."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ronde.observe import events
from ronde.observe.events import Event

AT: Any = {"at_ns": 5, "rank": 3}

EVENTS: list[tuple[Event, str]] = [
    (
        events.Started(**AT, size=4, host="a", pid=7, backend="native"),
        "started as one of 4 on host a, pid 7, through native",
    ),
    (events.Stopped(**AT), "left in order"),
    (events.Stopped(**AT, orderly=False, why="killed"), "left out of order: killed"),
    (
        events.RoundChanged(at_ns=7_000_000, rank=3, size=2, why="rank 1 is gone", noticed_ns=2_000_000, joined_ns=4),
        "one of 2 ranks after 5 ms: rank 1 is gone",
    ),
    (
        events.OperationFailed(**AT, op="allreduce 'w'", group=1, why="shapes differ"),
        "allreduce 'w' (group 1) failed: shapes differ",
    ),
    (events.PeerGone(**AT, peer=2, why="signal 9"), "lost rank 2: signal 9"),
    (
        events.StallReported(
            **AT, op="barrier", group=0, waited_s=31.5, missing=(2,), report="barrier waits\n  rank 2"
        ),
        "barrier waits\n  rank 2",
    ),
    (events.GroupAdded(**AT, group=2, ranks=(0, 3)), "group 2 added: ranks 0, 3"),
    (events.GroupRemoved(**AT, group=2), "group 2 removed"),
    (
        events.ChannelOpened(**AT, channel="0.ordered", members=(3,)),
        "channel 0.ordered opened: rank 3",
    ),
    (events.ChannelClosed(**AT, channel="0.ordered"), "channel 0.ordered closed"),
]


@pytest.mark.parametrize(("event", "text"), EVENTS, ids=lambda value: type(value).__name__)
def test_an_event_is_described_in_a_sentence_and_encoded_with_its_type(event: Event, text: str) -> None:
    assert event.words() == text
    assert json.loads(msgspec.json.encode(event))["type"] == type(event).__name__


def test_every_event_is_in_the_table_above() -> None:
    assert {type(event) for event, _ in EVENTS} == set(Event.__subclasses__())


def test_a_log_line_cannot_be_forged_by_a_name() -> None:
    event = events.OperationFailed(**AT, op="x\nrank 0: left in order", group=0, why="\x1b[2J")
    assert event.words() == r"x\nrank 0: left in order (group 0) failed: \x1b[2J"
