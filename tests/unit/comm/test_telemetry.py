"""Which operations in program order are reported as late."""

from __future__ import annotations

import pytest

from ronde.comm.backends.base import CurrentCall
from ronde.comm.channel import Channel
from ronde.comm.telemetry import ChannelStallInspector
from ronde.net.messages import WaitingTooLong
from ronde.observe.recorder import Recorder
from tests.unit.comm.scripted_channel import ScriptedChannel

S = 1_000_000_000


@pytest.fixture
def channel() -> ScriptedChannel:
    return ScriptedChannel(members=(3, 5, 8))


@pytest.fixture
def watched(channel: ScriptedChannel) -> Channel:
    return Channel(channel, 2, Recorder(0), 10.0)


def test_an_operation_is_reported_once_when_it_is_late(channel: ScriptedChannel, watched: Channel) -> None:
    watch = ChannelStallInspector(8.0)
    channel.reported_call = CurrentCall("allreduce", 10 * S, (0, 2))
    assert watch.overdue([watched], 12 * S) == []
    assert watch.overdue([watched], 18 * S, 5) == [WaitingTooLong("allreduce", 2, 10 * S + 5, (3, 8))]
    assert watch.overdue([watched], 20 * S) == []
    channel.reported_call = CurrentCall("allreduce", 21 * S, (1,))
    assert watch.overdue([watched], 25 * S) == []
    assert watch.overdue([watched], 30 * S) == [WaitingTooLong("allreduce", 2, 21 * S, (5,))]


def test_idle_channels_and_those_who_joined_are_not_late(channel: ScriptedChannel, watched: Channel) -> None:
    watch = ChannelStallInspector(1.0)
    assert watch.overdue([watched], 100 * S) == []
    channel.reported_call = CurrentCall("join", 1, (1,))
    assert watch.overdue([watched], 200 * S) == []
    channel.reported_call = CurrentCall("allreduce that moves data", 1, ())
    assert watch.overdue([watched], 300 * S) == []
