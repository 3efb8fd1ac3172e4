"""What a lane notes for those who watch the job: when it came to operations, and when its callers were blocked."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ronde.comm.backends.base import CallTiming, CurrentCall
from ronde.comm.call import Call
from ronde.comm.channel import SEQUENCE_EPOCH, CallRecord, Channel
from ronde.comm.work import Work
from ronde.observe.recorder import Recorder
from ronde.types import Deadline, OperationKind
from tests.unit.comm.scripted_channel import ScriptedChannel, ScriptedRunningCall

MS = 1_000_000
ENTRY = (CallRecord("bucket", "0", 8),)


class TimedChannel(ScriptedChannel):
    """Its calls take the times that the test gives."""

    def __init__(self) -> None:
        super().__init__(members=(0, 1))
        self.outcome = CallTiming(0, 0, 0)

    def run(self, call: Call, deadline: Deadline) -> CallTiming:
        return self.outcome

    def submit(self, call: Call, deadline: Deadline) -> ScriptedRunningCall:
        self.running_calls.append(TimedRunningCall(call, self.outcome))
        return self.running_calls[-1]


class TimedRunningCall(ScriptedRunningCall):
    """A call that was over at its time, however long the test takes."""

    def __init__(self, call: Call, outcome: CallTiming) -> None:
        super().__init__(call)
        self._outcome = outcome

    def wait(self, deadline: Deadline) -> CallTiming:
        super().wait(deadline)
        return self._outcome


class Clock:
    """Stands in for the module time of comm/lane."""

    def __init__(self) -> None:
        self.moments: list[int] = []

    def monotonic_ns(self) -> int:
        return self.moments.pop(0) if self.moments else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("ronde.comm.channel.time", made)
    return made


@pytest.fixture
def channel() -> TimedChannel:
    return TimedChannel()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(0)


@pytest.fixture
def lane(channel: TimedChannel, recorder: Recorder) -> Channel:
    return Channel(channel, 0, recorder, 10.0, sample_arrivals=True)


def noted(lane: Channel) -> list[tuple[int, int, int, int]]:
    return [
        (note.sequence, note.arrived_ns, note.waited_ns, note.blocked_ns)
        for note in lane.arrival_sampler.take_samples()
    ]


def blocked_ms(recorder: Recorder) -> tuple[float, float]:
    reading = recorder.sample_activity(0, None)
    return round(reading.waiting_ns / MS, 3), round(reading.moving_ns / MS, 3)


def call(kind: OperationKind = OperationKind.ALLREDUCE, peer: int = -1) -> Call:
    return Call(kind=kind, peer=peer, description=kind.name.lower())


def start(
    lane: Channel, channel: TimedChannel, *at: int, kind: OperationKind = OperationKind.ALLREDUCE, over: bool = True
) -> Work:
    """A call in the background that starts, is ready and ends at the given milliseconds."""
    begin, ready, end = at
    channel.outcome = CallTiming(begin * MS, ready * MS, end * MS)
    work = Work((lane.submit(call(kind, peer=1), ENTRY),), lambda: None, 10.0)
    if over:
        channel.running_calls[-1].end()
    return work


def test_a_blocking_operation_is_noted_with_its_number(
    lane: Channel, channel: TimedChannel, recorder: Recorder
) -> None:
    for at in (10, 20):
        channel.outcome = CallTiming(at * MS, (at + 3) * MS, (at + 4) * MS)
        lane.run(call(), "allreduce", 8)
    assert noted(lane) == [(0, 10 * MS, 3 * MS, 3 * MS), (1, 20 * MS, 3 * MS, 3 * MS)]
    assert blocked_ms(recorder) == (6, 2)


def test_a_message_between_two_has_no_number_and_names_the_other(
    lane: Channel, channel: TimedChannel, recorder: Recorder
) -> None:
    channel.outcome = CallTiming(10 * MS, 15 * MS, 16 * MS)
    lane.send_or_receive(call(OperationKind.RECEIVE, peer=1), "receive", 8)
    lane.run(call(), "allreduce", 8)
    assert [number for number, *_ in noted(lane)] == [0]
    assert recorder.sample_activity(0, None).waited_for == ((1, 5 * MS),)


def test_in_the_background_only_the_time_of_a_blocked_caller_counts(
    lane: Channel, channel: TimedChannel, recorder: Recorder, clock: Clock
) -> None:
    work = start(lane, channel, 10, 20, 30)
    clock.moments = [15 * MS, 31 * MS]  # it waits from the middle of the waiting on
    work.wait()
    assert noted(lane) == [(0, 10 * MS, 10 * MS, 5 * MS)]
    assert blocked_ms(recorder) == (5, 10)


def test_what_was_over_when_it_was_asked_for_has_blocked_nobody(
    lane: Channel, channel: TimedChannel, recorder: Recorder, clock: Clock
) -> None:
    work = start(lane, channel, 10, 20, 30)
    clock.moments = [50 * MS, 50 * MS + 1000]
    work.wait()
    assert noted(lane) == [(0, 10 * MS, 10 * MS, 0)]
    assert blocked_ms(recorder) == (0, 0)


def test_who_waits_for_the_second_waits_for_the_first_too(
    lane: Channel, channel: TimedChannel, recorder: Recorder, clock: Clock
) -> None:
    first = start(lane, channel, 10, 20, 30, over=False)
    second = start(lane, channel, 30, 32, 40)
    channel.running_calls[0].end()
    clock.moments = [15 * MS, 40 * MS]
    second.wait()
    clock.moments = [50 * MS, 50 * MS + 1000]
    first.wait()
    assert sorted(noted(lane)) == [(0, 10 * MS, 10 * MS, 5 * MS), (1, 30 * MS, 2 * MS, 2 * MS)]
    assert blocked_ms(recorder) == (7, 18)


def test_several_on_board_of_one_flight_have_waited_once(
    lane: Channel, channel: TimedChannel, recorder: Recorder, clock: Clock
) -> None:
    channel.outcome = CallTiming(10 * MS, 20 * MS, 30 * MS)
    flight = lane.submit(call(), ENTRY * 5)
    channel.running_calls[0].end()
    clock.moments = [10 * MS, 30 * MS]
    flight.wait(Deadline(1.0))
    assert blocked_ms(recorder) == (10, 10)
    assert recorder.metrics().total.operations == 5


def test_numbers_begin_anew_after_a_join(lane: Channel, channel: TimedChannel, clock: Clock) -> None:
    lane.run(call(), "allreduce", 8)
    start(lane, channel, 10, 10, 90, kind=OperationKind.JOIN).wait()
    lane.run(call(), "allreduce", 8)
    assert [number for number, *_ in noted(lane)] == [0, SEQUENCE_EPOCH]


def test_time_in_join_is_waiting(lane: Channel, channel: TimedChannel, recorder: Recorder, clock: Clock) -> None:
    work = start(lane, channel, 10, 10, 90, kind=OperationKind.JOIN)
    clock.moments = [10 * MS, 90 * MS]
    work.wait()
    assert blocked_ms(recorder) == (80, 0)


def test_without_a_launcher_nothing_is_noted(channel: TimedChannel, recorder: Recorder) -> None:
    lane = Channel(channel, 0, recorder, 10.0)
    channel.outcome = CallTiming(0, 10**12, 10**12)
    lane.run(call(), "allreduce", 8)
    start(lane, channel, 10, 10**6, 10**6).wait()
    assert noted(lane) == []


# --- what a caller is blocked in right now ----------------------------------------------------------------------------


def test_an_idle_channel_blocks_nobody(lane: Channel) -> None:
    assert lane.blocked_operation() is None


def test_a_blocking_operation_under_way_is_told(lane: Channel, channel: TimedChannel) -> None:
    channel.reported_call = CurrentCall("allreduce sum float32[3]", 5 * MS, (1,))
    doing = lane.blocked_operation()
    assert doing is not None
    assert (doing.op, doing.since_ns, doing.missing, doing.is_waiting) == (
        "allreduce sum float32[3]",
        5 * MS,
        (1,),
        True,
    )
    channel.reported_call = CurrentCall("allreduce sum float32[3]", 5 * MS, ())
    doing = lane.blocked_operation()
    assert doing is not None and not doing.is_waiting


def test_an_operation_in_the_background_blocks_only_who_waits_for_it(lane: Channel, channel: TimedChannel) -> None:
    work = Work((lane.submit(call(), ENTRY),), lambda: None, 10.0)
    channel.reported_call = CurrentCall("bucket 0", 5 * MS, (1,))
    assert lane.blocked_operation() is None, "its caller computes"
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    until(lambda: lane.blocked_operation() is not None)
    doing = lane.blocked_operation()
    assert doing is not None and doing.since_ns > 5 * MS
    channel.running_calls[0].end()
    waiter.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(10.0)
    while not condition():
        assert not deadline.expired
