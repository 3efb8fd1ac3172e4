"""Works and the flights they are on: waited for any number of times, by any thread, or by nobody."""

from __future__ import annotations

import functools
import threading
import weakref

import pytest

from ronde.comm.call import Call
from ronde.comm.channel import CallRecord, Channel
from ronde.comm.work import Work
from ronde.errors import OperationTimeout, PeerLost
from ronde.observe.recorder import Recorder
from ronde.types import OperationKind
from tests.unit.comm.scripted_channel import ScriptedChannel

ENTRY = (CallRecord("allreduce", "w", 8),)


@pytest.fixture
def channel() -> ScriptedChannel:
    return ScriptedChannel()


@pytest.fixture
def lane(channel: ScriptedChannel) -> Channel:
    return Channel(channel, 0, Recorder(0), 10.0)


def barrier() -> Call:
    return Call(kind=OperationKind.BARRIER, description="barrier")


def recorder_of(lane: Channel) -> Recorder:
    return lane._recorder


def test_a_work_gives_the_same_result_each_time(channel: ScriptedChannel, lane: Channel) -> None:
    made: list[str] = []

    def finish() -> str:
        made.append("result")
        return made[-1]

    work = Work((lane.submit(barrier(), ENTRY),), finish, 10.0)
    assert not work.done()
    with pytest.raises(ValueError, match="still under way; wait"):
        work.result()
    channel.running_calls[0].end()
    assert work.done()
    assert work.wait() == work.wait() == work.result() == "result"
    assert made == ["result"]
    assert recorder_of(lane).metrics().of(0, "allreduce").operations == 1


def test_a_work_gives_the_same_error_each_time(channel: ScriptedChannel, lane: Channel) -> None:
    work = Work((lane.submit(barrier(), ENTRY),), lambda: None, 10.0)
    channel.running_calls[0].end(PeerLost(rank=0, peer=1))
    for _ in range(2):
        with pytest.raises(PeerLost):
            work.wait()
    assert work.done()
    assert [event.words() for event in recorder_of(lane).events()] == [
        "barrier (group 0) failed: rank 0 lost rank 1; start a new round, or look at the output of rank 1"
    ]


def test_a_wait_that_runs_out_of_time_can_be_repeated(channel: ScriptedChannel, lane: Channel) -> None:
    work = Work((lane.submit(barrier(), ENTRY),), lambda: "result", 10.0)
    for _ in range(2):
        with pytest.raises(OperationTimeout):
            work.wait(0.001)
    channel.running_calls[0].end()
    assert work.wait() == "result"


def test_an_operation_that_ran_out_of_time_stays_so(channel: ScriptedChannel, lane: Channel) -> None:
    work = Work((lane.submit(barrier(), ENTRY),), lambda: "result", 10.0)
    channel.running_calls[0].end(OperationTimeout("its own deadline"))
    for _ in range(2):
        with pytest.raises(OperationTimeout, match="its own deadline"):
            work.wait(0.001)
    assert work.done()


def test_a_work_on_several_flights_waits_for_all(channel: ScriptedChannel, lane: Channel) -> None:
    work = Work(tuple(lane.submit(barrier(), ()) for _ in range(3)), lambda: "result", 10.0)
    for ticket in channel.running_calls[:2]:
        ticket.end()
    assert not work.done()
    channel.running_calls[2].end(ValueError("the last one"))
    with pytest.raises(ValueError, match="the last one"):
        work.wait()


def test_threads_may_wait_for_the_same_flight(channel: ScriptedChannel, lane: Channel) -> None:
    flight = lane.submit(barrier(), ENTRY)
    works = [Work((flight,), lambda: "result", 10.0) for _ in range(8)]
    results: list[str] = []

    def wait(work: Work) -> None:
        results.append(work.wait())

    threads = [threading.Thread(target=wait, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    channel.running_calls[0].end()
    for thread in threads:
        thread.join(10)
    assert results == ["result"] * 8
    assert channel.running_calls[0].num_waits == 1
    assert recorder_of(lane).metrics().of(0, "allreduce").operations == 1


def test_what_nobody_waits_for_is_recorded_and_let_go(channel: ScriptedChannel, lane: Channel) -> None:
    over: list[int] = []
    for index in range(3):
        lane.submit(barrier(), ENTRY, on_done=functools.partial(over.append, index))
    channel.running_calls[0].end()
    channel.running_calls[1].end(ValueError("nobody looks"))
    lane.submit(barrier(), ENTRY)
    assert over == [0, 1]
    assert recorder_of(lane).metrics().of(0, "allreduce").operations == 1
    assert len(lane._running_calls) == 2


def test_memory_is_kept_until_the_call_is_over(channel: ScriptedChannel, lane: Channel) -> None:
    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    lane.submit(Call(kind=OperationKind.BARRIER, owners=memory), ENTRY)
    ticket = channel.running_calls.pop()
    del memory, ticket.call
    assert alive() is not None
    ticket.end()
    lane.submit(barrier(), ENTRY)
    assert alive() is None


def test_a_failed_call_is_an_event(channel: ScriptedChannel, lane: Channel) -> None:
    channel.refusal = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        lane.run(barrier(), "barrier", 0)
    assert [event.words() for event in recorder_of(lane).events()] == ["barrier (group 0) failed: no"]


def test_a_lane_closes_once_and_is_silent_afterwards(channel: ScriptedChannel, lane: Channel) -> None:
    lane.close()
    lane.close()
    lane.abort(why="late")
    assert channel.closed == 1 and channel.aborted == [] and lane.current_call() is None
