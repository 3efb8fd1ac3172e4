"""Which operations in program order are reported as late."""

from __future__ import annotations

import math

import pytest

from ronde.comm.backend import Looking
from ronde.comm.lane import Lane
from ronde.comm.watch import LaneWatch
from ronde.net.messages import Waiting
from ronde.observe.recorder import Recorder
from tests.unit.comm.scripted_channel import ScriptedChannel

S = 1_000_000_000


@pytest.fixture
def channel() -> ScriptedChannel:
    return ScriptedChannel(members=(3, 5, 8))


@pytest.fixture
def lane(channel: ScriptedChannel) -> Lane:
    return Lane(channel, 2, Recorder(0), 10.0)


def test_an_operation_is_reported_once_when_it_is_late(channel: ScriptedChannel, lane: Lane) -> None:
    watch = LaneWatch(8.0)
    channel.looking = Looking("allreduce", 10 * S, (0, 2))
    assert watch.due([lane], 12 * S) == []
    assert watch.due([lane], 18 * S, 5) == [Waiting("allreduce", 2, 10 * S + 5, (3, 8))]
    assert watch.due([lane], 20 * S) == []
    channel.looking = Looking("allreduce", 21 * S, (1,))
    assert watch.due([lane], 25 * S) == []
    assert watch.due([lane], 30 * S) == [Waiting("allreduce", 2, 21 * S, (5,))]


def test_it_looks_four_times_per_limit(channel: ScriptedChannel, lane: Lane) -> None:
    watch = LaneWatch(8.0)
    channel.looking = Looking("barrier", 1, (1,))
    assert len(watch.due([lane], 100 * S)) == 1
    assert watch.left_s(101 * S) == 1.0
    channel.looking = Looking("barrier", 2, (1,))
    assert watch.due([lane], 101 * S) == []
    assert len(watch.due([lane], 102 * S)) == 1


def test_idle_lanes_and_those_who_joined_are_not_late(channel: ScriptedChannel, lane: Lane) -> None:
    watch = LaneWatch(1.0)
    assert watch.due([lane], 100 * S) == []
    channel.looking = Looking("join", 1, (1,))
    assert watch.due([lane], 200 * S) == []
    channel.looking = Looking("allreduce that moves data", 1, ())
    assert watch.due([lane], 300 * S) == []


def test_a_limit_of_0_turns_it_off(channel: ScriptedChannel, lane: Lane) -> None:
    watch = LaneWatch(0.0)
    channel.looking = Looking("barrier", 1, (1,))
    assert watch.due([lane], 100 * S) == []
    assert watch.left_s(100 * S) == math.inf
