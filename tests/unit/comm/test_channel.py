"""A channel over a scripted backend: works waited for any number of times, by any thread or by nobody; what is
recorded of operations, and of the time that callers were blocked; and which operations are late."""

from __future__ import annotations

import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ronde.comm.backends.base import CallTiming, CurrentCall, Received, RunningCall
from ronde.comm.buffers import ReceiveBuffer
from ronde.comm.call import Call
from ronde.comm.channel import SEQUENCE_EPOCH, Channel
from ronde.comm.operations import ReceiveAnyWork
from ronde.comm.telemetry import ChannelStallInspector
from ronde.comm.work import Work
from ronde.errors import OperationTimeout, PeerLost, RoundEnded
from ronde.net.messages import WaitingTooLong
from ronde.observe.events import OperationFailed
from ronde.observe.recorder import Recorder
from ronde.types import Deadline, OperationKind
from tests.limits import PATIENCE_S
from tests.unit.comm.scripted import SIGNATURE, ScriptedChannel

ALLREDUCE = OperationKind.ALLREDUCE
MS = 1_000_000
S = 1000 * MS
RECORD = ((SIGNATURE, ""),)


class Clock:
    """Replaces the module time of the seam."""

    def __init__(self) -> None:
        self.moments: list[int] = []

    def monotonic_ns(self) -> int:
        return self.moments.pop(0) if self.moments else 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("ronde.comm.backends.base.time", made)
    return made


@pytest.fixture
def backend() -> ScriptedChannel:
    return ScriptedChannel(members=(0, 1))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(0)


@pytest.fixture
def channel(backend: ScriptedChannel, recorder: Recorder) -> Channel:
    return Channel(backend, 0, recorder, 10.0, sample_arrivals=True)


def call(kind: OperationKind = OperationKind.ALLREDUCE, peer: int = -1) -> Call:
    return Call(kind=kind, peer=peer, description=kind.name.lower())


def make_work(*running_calls: RunningCall) -> Work:
    return Work(SIGNATURE, "", (), "result", running_calls=running_calls, timeout_s=10.0)


def start(channel: Channel, kind: OperationKind = OperationKind.ALLREDUCE, num_operations: int = 1) -> Work:
    return make_work(channel.submit(call(kind, peer=1), RECORD * num_operations))


def start_timed(
    channel: Channel,
    backend: ScriptedChannel,
    *at_ms: int,
    kind: OperationKind = OperationKind.ALLREDUCE,
    num_operations: int = 1,
    ended: bool = True,
) -> Work:
    """A call in the background that starts, is ready and ends at these times."""
    begin, ready, end = at_ms
    backend.timing = CallTiming(begin * MS, ready * MS, end * MS)
    work = start(channel, kind, num_operations)
    if ended:
        backend.running_calls[-1].end()
    return work


def num_recorded(recorder: Recorder) -> int:
    return recorder.metrics().of(0, SIGNATURE.label).operations


def samples(channel: Channel) -> list[tuple[int, int, int, int]]:
    return [
        (sample.sequence, sample.arrived_ns, sample.waited_ns, sample.blocked_ns)
        for sample in channel.arrival_sampler.take_samples()
    ]


def blocked_ms(recorder: Recorder) -> tuple[float, float]:
    reading = recorder.sample_activity(0, None)
    return round(reading.waiting_ns / MS, 3), round(reading.moving_ns / MS, 3)


# --- works -----------------------------------------------------------------------------------------------------------


def test_a_work_gives_the_same_result_each_time(backend: ScriptedChannel, channel: Channel, recorder: Recorder) -> None:
    work = start(channel)
    assert not work.done()
    with pytest.raises(ValueError, match="still under way; wait"):
        work.result()
    for _ in range(2):
        with pytest.raises(OperationTimeout, match=r"allreduce is still under way after 0.001 s"):
            work.wait(0.001)
    backend.running_calls[0].end()
    assert work.done()
    assert work.wait() == work.wait() == work.result() == "result"
    assert num_recorded(recorder) == 1


@pytest.mark.parametrize("error", [PeerLost(rank=0, peer=1), OperationTimeout("its own deadline")])
def test_a_work_gives_the_same_error_each_time(
    backend: ScriptedChannel, channel: Channel, recorder: Recorder, error: Exception
) -> None:
    work = start(channel)
    backend.running_calls[0].end(error)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            work.wait(0.001)
    assert work.done()
    (event,) = recorder.events()
    assert isinstance(event, OperationFailed) and event.why == str(error)


def test_a_wait_that_took_too_long_does_not_end_work_that_ends_meanwhile(
    channel: Channel, backend: ScriptedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = start(channel)
    running_call = backend.running_calls[0]
    make_timeout = running_call.make_timeout

    def end_meanwhile(deadline: Deadline) -> OperationTimeout:
        running_call.end()
        return make_timeout(deadline)

    monkeypatch.setattr(running_call, "make_timeout", end_meanwhile)
    with pytest.raises(OperationTimeout, match="still under way"):
        work.wait(0.001)
    assert work.wait() == "result"


def test_a_work_of_several_calls_waits_for_all(backend: ScriptedChannel, channel: Channel) -> None:
    work = make_work(*(channel.submit(call()) for _ in range(3)))
    for running_call in backend.running_calls[:2]:
        running_call.end()
    assert not work.done()
    backend.running_calls[2].end(ValueError("the last one"))
    with pytest.raises(ValueError, match="the last one"):
        work.wait()


def test_threads_may_wait_for_the_same_call(backend: ScriptedChannel, channel: Channel, recorder: Recorder) -> None:
    running_call = channel.submit(call(), RECORD)
    works = [make_work(running_call) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        waits = [threads.submit(work.wait) for work in works]
        backend.running_calls[0].end()
        assert [wait.result(10) for wait in waits] == ["result"] * 8
    assert backend.running_calls[0].num_waits == num_recorded(recorder) == 1


def test_the_result_is_copied_once_before_any_thread_that_waits_returns(
    backend: ScriptedChannel, channel: Channel
) -> None:
    copied_by: list[threading.Thread] = []

    class SlowArray(np.ndarray[Any, np.dtype[Any]]):
        def __setitem__(self, key: Any, value: Any) -> None:
            copied_by.append(threading.current_thread())
            if len(copied_by) == 1:  # meanwhile the other one waits for the same work
                other.start()
                other.join(0.2)
            super().__setitem__(key, value)

    out = np.zeros(2).view(SlowArray)
    target = ReceiveBuffer(np.ones(2), out, out)
    backend.timing = CallTiming(1, 2, 3, received=Received(source=1))
    running_call = channel.submit(call(OperationKind.RECEIVE, peer=1), RECORD)
    backend.running_calls[0].end()
    work = ReceiveAnyWork(SIGNATURE, call(), target, (0, 1))
    work.started_on((running_call,))
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(work.wait()))
    first = work.wait(PATIENCE_S)
    other.join()
    assert copied_by == [threading.current_thread()] and out.tolist() == [1.0, 1.0]
    assert first is results[0] and first[0] is out and first[1] == 1


def test_what_nobody_waits_for_is_recorded_and_its_memory_kept_until_then(
    backend: ScriptedChannel, channel: Channel, recorder: Recorder
) -> None:
    class Memory:
        pass

    done: list[int] = []
    memory = Memory()
    alive = weakref.ref(memory)
    channel.submit(Call(kind=OperationKind.BARRIER, owners=memory), RECORD, on_done=functools.partial(done.append, 0))
    channel.submit(call(), RECORD, on_done=functools.partial(done.append, 1))
    del memory, backend.running_calls[0].submitted
    assert alive() is not None
    backend.running_calls[0].end()
    backend.running_calls[1].end(ValueError("nobody waits"))
    channel.submit(call())
    assert done == [0, 1]
    assert num_recorded(recorder) == 1
    assert alive() is None


def test_a_failed_call_is_an_event(backend: ScriptedChannel, channel: Channel, recorder: Recorder) -> None:
    backend.refusal = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        channel.run(call(), SIGNATURE)
    (event,) = recorder.events()
    assert isinstance(event, OperationFailed) and (event.op, event.group, event.why) == ("allreduce", 0, "no")


def test_a_channel_closes_once_and_then_does_nothing(backend: ScriptedChannel, channel: Channel) -> None:
    channel.close()
    channel.close()
    channel.abort(RoundEnded("late"))
    assert backend.closed == 1 and backend.aborted == [] and channel.current_call() is None


# --- what is recorded ------------------------------------------------------------------------------------------------


def test_a_blocking_operation_is_sampled_with_its_number_and_a_message_names_the_other(
    channel: Channel, backend: ScriptedChannel, recorder: Recorder
) -> None:
    for at in (10, 20):
        backend.timing = CallTiming(at * MS, (at + 3) * MS, (at + 4) * MS)
        channel.run(call(), SIGNATURE)
    assert blocked_ms(recorder) == (6, 2)
    channel.send_or_receive(call(OperationKind.RECEIVE, peer=1), SIGNATURE)
    assert samples(channel) == [(0, 10 * MS, 3 * MS, 3 * MS), (1, 20 * MS, 3 * MS, 3 * MS)]
    assert recorder.sample_activity(0, None).waited_for == ((1, 3 * MS),)


@pytest.mark.parametrize(
    ("wait_ms", "sampled_ms", "recorded_ms"),
    [((15, 31), 5, (5, 10)), ((50, 50), 0, (0, 0))],
    ids=["from-the-middle", "after-the-end"],
)
def test_in_the_background_only_the_time_of_a_blocked_caller_counts(
    channel: Channel,
    backend: ScriptedChannel,
    recorder: Recorder,
    clock: Clock,
    wait_ms: tuple[int, int],
    sampled_ms: int,
    recorded_ms: tuple[int, int],
) -> None:
    work = start_timed(channel, backend, 10, 20, 30)
    clock.moments = [moment * MS for moment in wait_ms]
    work.wait()
    assert samples(channel) == [(0, 10 * MS, 10 * MS, sampled_ms * MS)]
    assert blocked_ms(recorder) == recorded_ms


def test_a_wait_for_the_second_call_is_one_for_the_first_too(
    channel: Channel, backend: ScriptedChannel, recorder: Recorder, clock: Clock
) -> None:
    first = start_timed(channel, backend, 10, 20, 30, ended=False)
    second = start_timed(channel, backend, 30, 32, 40)
    backend.running_calls[0].end()
    clock.moments = [15 * MS, 40 * MS]
    second.wait()
    clock.moments = [50 * MS, 50 * MS + 1000]
    first.wait()
    assert sorted(samples(channel)) == [(0, 10 * MS, 10 * MS, 5 * MS), (1, 30 * MS, 2 * MS, 2 * MS)]
    assert blocked_ms(recorder) == (7, 18)


def test_several_operations_of_one_call_have_waited_once(
    channel: Channel, backend: ScriptedChannel, recorder: Recorder, clock: Clock
) -> None:
    work = start_timed(channel, backend, 10, 20, 30, num_operations=5)
    clock.moments = [10 * MS, 30 * MS]
    work.wait()
    assert blocked_ms(recorder) == (10, 10)
    assert recorder.metrics().total.operations == 5


def test_after_a_join_numbers_begin_at_the_next_epoch(
    channel: Channel, backend: ScriptedChannel, recorder: Recorder, clock: Clock
) -> None:
    channel.run(call(), SIGNATURE)
    work = start_timed(channel, backend, 10, 10, 90, kind=OperationKind.JOIN)
    clock.moments = [10 * MS, 90 * MS]
    work.wait()
    assert blocked_ms(recorder) == (80, 0), "the time in join is waiting"
    channel.run(call(), SIGNATURE)
    assert [number for number, *_ in samples(channel)] == [0, SEQUENCE_EPOCH]


# --- what a caller is blocked in right now, and what is late ---------------------------------------------------------


def test_an_operation_in_the_background_blocks_only_who_waits_for_it(
    channel: Channel, backend: ScriptedChannel
) -> None:
    assert channel.blocked_operation() is None
    backend.reported_call = CurrentCall(ALLREDUCE, "bucket 0", 5 * MS, (1,))
    blocked = channel.blocked_operation()
    assert blocked is not None and (blocked.op, blocked.since_ns) == ("bucket 0", 5 * MS)
    assert blocked.missing == (1,) and blocked.is_waiting
    work = start(channel)
    assert channel.blocked_operation() is None, "its caller computes"
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    deadline = Deadline(10.0)
    while (blocked := channel.blocked_operation()) is None:
        assert not deadline.expired
    assert blocked.since_ns > 5 * MS
    backend.running_calls[0].end()
    waiter.join()


def test_an_operation_is_reported_once_when_it_is_late() -> None:
    backend = ScriptedChannel(members=(3, 5, 8))
    channel = Channel(backend, 2, Recorder(0), 10.0)
    inspector = ChannelStallInspector(8.0)
    for current, now_s, reported in (
        (None, 10, []),
        (CurrentCall(OperationKind.JOIN, "leaving early", 0, (1,)), 10, []),
        (CurrentCall(ALLREDUCE, "allreduce that moves data", 0, ()), 10, []),
        (CurrentCall(ALLREDUCE, "allreduce", 10 * S, (0, 2)), 12, []),
        (CurrentCall(ALLREDUCE, "allreduce", 10 * S, (0, 2)), 18, [WaitingTooLong("allreduce", 2, 10 * S + 5, (3, 8))]),
        (CurrentCall(ALLREDUCE, "allreduce", 10 * S, (0, 2)), 20, []),
        (CurrentCall(ALLREDUCE, "allreduce", 21 * S, (1,)), 25, []),
        (CurrentCall(ALLREDUCE, "allreduce", 21 * S, (1,)), 30, [WaitingTooLong("allreduce", 2, 21 * S + 5, (5,))]),
    ):
        backend.reported_call = current
        assert inspector.overdue([channel], now_s * S, 5) == reported
