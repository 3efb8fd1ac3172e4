"""Calls in order, in the caller's thread when possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from ronde.comm.backends.base import CallTiming
from ronde.comm.backends.mpi.channel import CallQueue, WaitReason
from ronde.comm.call import Call
from ronde.errors import OperationTimeout, RoundEnded
from ronde.types import Deadline, OperationKind

SOON = 10.0


class Work:
    """Executes calls when it is allowed to, and remembers where."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.may_go.set()
        self.done: list[tuple[str, str]] = []
        self.wrong: dict[str, BaseException] = {}

    def execute(self, call: Call, deadline: Deadline) -> CallTiming:
        assert self.may_go.wait(SOON)
        self.done.append((call.description, threading.current_thread().name))
        if call.description in self.wrong:
            raise self.wrong[call.description]
        return CallTiming(1, 2, 3, call.description)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def executor(work: Work) -> Iterator[CallQueue]:
    made = CallQueue("test", work.execute)
    yield made
    work.may_go.set()
    assert made.close(Deadline(SOON))


def call(text: str) -> Call:
    return Call(OperationKind.BARRIER, description=text)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, name="other")
    thread.start()
    return thread


def test_a_call_that_finds_nothing_before_it_runs_in_the_callers_thread(executor: CallQueue, work: Work) -> None:
    assert executor.run(call("a"), Deadline(SOON)).algorithm == "a"
    assert work.done == [("a", threading.current_thread().name)]
    assert executor.current_call() is None and not executor.is_busy()


def test_submitted_calls_run_in_their_order_and_run_waits_behind_them(executor: CallQueue, work: Work) -> None:
    work.may_go.clear()
    tickets = [executor.submit(call(text), Deadline(SOON)) for text in "abc"]
    assert executor.is_busy() and not any(ticket.done() for ticket in tickets)
    last = in_thread(lambda: executor.run(call("d"), Deadline(SOON)))
    work.may_go.set()
    last.join(SOON)
    assert [ticket.wait(Deadline(0)).algorithm for ticket in tickets] == ["a", "b", "c"]
    assert [text for text, _ in work.done] == ["a", "b", "c", "d"]
    assert {thread for _, thread in work.done[:3]} == {"ronde-test"}


def test_a_submitted_call_waits_for_one_that_runs_in_another_thread(executor: CallQueue, work: Work) -> None:
    work.may_go.clear()
    first = in_thread(lambda: executor.run(call("a"), Deadline(SOON)))
    while executor.current_call() is None:
        pass
    ticket = executor.submit(call("b"), Deadline(SOON))
    current = executor.current_call()
    assert current is not None and current[0].description == "a"
    work.may_go.set()
    ticket.wait(Deadline(SOON))
    first.join(SOON)
    assert work.done == [("a", "other"), ("b", "ronde-test")]


def test_an_error_belongs_to_its_call_only(executor: CallQueue, work: Work) -> None:
    work.wrong["a"] = ValueError("wrong")
    ticket, after = executor.submit(call("a"), Deadline(SOON)), executor.submit(call("b"), Deadline(SOON))
    with pytest.raises(ValueError, match="wrong"):
        ticket.wait(Deadline(SOON))
    after.wait(Deadline(SOON))
    with pytest.raises(ValueError, match="wrong"):
        executor.run(call("a"), Deadline(SOON))
    executor.run(call("b"), Deadline(SOON))


def test_a_wait_that_takes_too_long_leaves_the_call_under_way(executor: CallQueue, work: Work) -> None:
    work.may_go.clear()
    ticket = executor.submit(call("a"), Deadline(SOON))
    with pytest.raises(OperationTimeout, match="a is still under way"):
        ticket.wait(Deadline(0))
    work.may_go.set()
    assert ticket.wait(Deadline(SOON)).algorithm == "a"


def test_a_wait_that_takes_too_long_says_what_for(work: Work) -> None:
    made = CallQueue("test", work.execute, explain=lambda call: WaitReason("a", (7,)), grace_s=0.01)
    work.may_go.clear()
    made.submit(call("a"), Deadline(SOON))
    with pytest.raises(OperationTimeout, match=r"after a wait of 0.0 s, behind a, waiting for rank 7") as raised:
        made.run(call("b"), Deadline(0))
    assert raised.value.missing == (7,)
    work.may_go.set()
    assert made.close(Deadline(SOON))


def test_closing_lets_calls_end_and_takes_no_more(executor: CallQueue, work: Work) -> None:
    ticket = executor.submit(call("a"), Deadline(SOON))
    assert executor.close(Deadline(SOON)) and executor.close(Deadline(SOON))
    assert ticket.done()
    for refused in (executor.run, executor.submit):
        with pytest.raises(RoundEnded, match="closed"):
            refused(call("b"), Deadline(SOON))


def test_closing_says_when_a_call_does_not_end(executor: CallQueue, work: Work) -> None:
    work.may_go.clear()
    executor.submit(call("a"), Deadline(SOON))
    assert not executor.close(Deadline(0.01))
