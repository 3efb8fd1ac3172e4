"""The in-process backend: what channels promise, seen from the seam."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ronde.comm.backends.base import BackendChannel, ChannelSpec
from ronde.comm.buffers import address_of
from ronde.comm.call import Call, Span
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded, StartFailed
from ronde.types import Deadline, DType, OperationKind
from tests.conformance.threads_backend import ThreadsBackend, ThreadsHub

Array = np.ndarray[Any, np.dtype[Any]]


def spec(me: int, size: int = 2, bucket_bytes: int = 0) -> ChannelSpec:
    return ChannelSpec(id="0.ordered", members=tuple(range(size)), member_index=me, bucket_bytes=bucket_bytes)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs at the same time; their results or errors."""
    results: list[Any] = [None] * len(jobs)

    def one(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def open_channels(size: int = 2, bucket_bytes: int = 0) -> list[BackendChannel]:
    hub = ThreadsHub()
    return together(
        *(
            lambda me=me: ThreadsBackend(hub).open_channel(spec(me, size, bucket_bytes), Deadline(10))
            for me in range(size)
        )
    )


def allreduce(array: Array, text: str = "allreduce", signature: int = 1) -> Call:
    part = Span(address_of(array), address_of(array), array.size)
    return Call(
        kind=OperationKind.ALLREDUCE,
        dtype=DType.INT64,
        spans=(part,),
        description=text,
        signature_hash=signature,
        owners=array,
    )


def test_members_that_do_not_come_are_named() -> None:
    with pytest.raises(StartFailed, match=r"channel 0.ordered: ranks 0, 2 did not come within 0.01 s"):
        ThreadsBackend(ThreadsHub()).open_channel(spec(1, 3), Deadline(0.01))


def test_a_lost_member_ends_the_opening() -> None:
    backend = ThreadsBackend(ThreadsHub())
    backend.rank_lost(1, "it fell")
    with pytest.raises(PeerLost, match=r"lost rank 1 during opening channel 0.ordered .it fell"):
        backend.open_channel(spec(0), Deadline(10))


def test_members_must_agree_on_who_they_are() -> None:
    hub = ThreadsHub()
    ThreadsBackend(hub).open_channel(ChannelSpec(id="x", members=(0,), member_index=0), Deadline(1))
    with pytest.raises(ValueError, match="different members: rank 0 and ranks 0, 1"):
        ThreadsBackend(hub).open_channel(ChannelSpec(id="x", members=(0, 1), member_index=0), Deadline(1))


def test_calls_run_in_the_order_they_were_submitted() -> None:
    one, two = open_channels()
    x, y = np.array([1]), np.array([10])
    tickets = [one.submit(allreduce(x), Deadline(10)) for _ in range(3)]
    assert not any(ticket.done() for ticket in tickets)
    for _ in range(3):
        two.run(allreduce(y), Deadline(10))
    assert all(ticket.done() for ticket in tickets)
    outcome = tickets[0].wait(Deadline(0))
    assert x.tolist() == y.tolist() == [44]
    assert outcome.start_ns <= outcome.ready_ns <= outcome.end_ns


def test_what_is_missing_can_be_seen() -> None:
    one, two, _ = open_channels(3)
    assert one.current_call() is None
    x = np.array([1])
    one.submit(allreduce(x, "allreduce of x"), Deadline(10))
    two.submit(allreduce(x), Deadline(10))
    looking = one.current_call()
    assert looking is not None
    assert looking.description == "allreduce of x" and looking.missing == (2,)
    one.submit(Call(kind=OperationKind.RECEIVE, peer=2, description="receive"), Deadline(10))
    assert one.current_call() == looking


def test_a_mismatch_is_the_same_for_all_and_the_channel_goes_on() -> None:
    channels = open_channels(3)
    x = np.array([1])
    calls = [allreduce(x, "apples", 1), allreduce(x, "pears", 2), allreduce(x, "apples", 1)]
    errors = together(
        *(lambda c=c, call=call: c.run(call, Deadline(10)) for c, call in zip(channels, calls, strict=True))
    )
    assert {str(error) for error in errors} == {
        "the members asked for different things: ranks 0, 2: apples; rank 1: pears"
    }
    assert all(isinstance(error, Mismatch) for error in errors)
    assert x.tolist() == [1]
    together(*(lambda c=c: c.run(Call(kind=OperationKind.BARRIER), Deadline(10)) for c in channels))


def test_a_deadline_ends_the_channel_for_all_and_names_who_is_missing() -> None:
    one, two = open_channels()
    with pytest.raises(OperationTimeout, match=r"barrier took over 0.01 s, waiting for rank 1"):
        one.run(Call(kind=OperationKind.BARRIER, description="barrier"), Deadline(0.01))
    with pytest.raises(RoundEnded, match="rank 0 gave up"):
        two.run(Call(kind=OperationKind.BARRIER, description="barrier"), Deadline(10))


def test_a_wait_that_ends_early_leaves_the_call_under_way() -> None:
    one, two = open_channels()
    ticket = one.submit(Call(kind=OperationKind.BARRIER, description="barrier"), Deadline(10))
    with pytest.raises(OperationTimeout):
        ticket.wait(Deadline(0.01))
    two.run(Call(kind=OperationKind.BARRIER), Deadline(10))
    ticket.wait(Deadline(0))


def test_an_abort_ends_all_waits_and_the_first_reason_stays() -> None:
    one, two = open_channels()
    ticket = one.submit(Call(kind=OperationKind.BARRIER, description="barrier"), Deadline(10))
    two.abort(lost_rank=1, why="it fell")
    two.abort(why="later")
    assert ticket.done()
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1.*it fell"):
        ticket.wait(Deadline(10))
    with pytest.raises(PeerLost, match=r"rank 0 lost rank 1.*it fell"):
        one.run(Call(kind=OperationKind.BARRIER), Deadline(10))


def test_who_closes_is_lost_to_those_who_wait() -> None:
    one, two = open_channels()
    ticket = one.submit(Call(kind=OperationKind.BARRIER, description="barrier"), Deadline(10))
    two.close()
    two.close()
    with pytest.raises(PeerLost, match=r"lost rank 1 during barrier .it has closed channel 0.ordered"):
        ticket.wait(Deadline(10))
    with pytest.raises(RoundEnded, match="closed channel"):
        two.run(Call(kind=OperationKind.BARRIER, description="barrier"), Deadline(10))


def test_buckets_are_aligned_and_empty() -> None:
    one, two = open_channels(bucket_bytes=1000)
    for channel in (one, two):
        assert channel.bucket().size == 1000 and not channel.bucket().any()
        assert address_of(channel.bucket()) % 64 == 0
    assert one.bucket() is one.bucket() and one.bucket() is not two.bucket()


def test_messages_stand_outside_of_the_order() -> None:
    one, two = open_channels()
    x, y = np.array([5]), np.array([0])
    barrier = one.submit(Call(kind=OperationKind.BARRIER), Deadline(10))
    send = Call(kind=OperationKind.SEND, dtype=DType.INT64, peer=1, spans=(Span(address_of(x), 0, 1),))
    receive = Call(kind=OperationKind.RECEIVE, dtype=DType.INT64, peer=0, spans=(Span(0, address_of(y), 1),))
    ticket = one.submit(send, Deadline(10))
    two.run(receive, Deadline(10))
    ticket.wait(Deadline(0))
    assert y.tolist() == [5] and not barrier.done()
