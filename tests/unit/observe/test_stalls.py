"""Stalls: each operation that waits too long is reported once, with what the missing ranks do."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.observe.stalls import MAX_SHOWN, Stall, StallInspector, WaitingOperation, describe_stall
from ronde.types import Member

S = 1_000_000_000


def wait(
    op: str = "allreduce 'w'", *, group: int = 0, since_s: float = 0, missing: tuple[int, ...] = (2,), present: int = 0
) -> WaitingOperation:
    """One member's view: it is there itself and misses others."""
    return WaitingOperation(op=op, group=group, since_ns=int(since_s * S), missing=missing, present=(present,))


def member(rank: int, host: str = "a") -> Member:
    return Member(rank=rank, host=host, pid=100 + rank, unix_socket="")


@pytest.fixture
def inspector() -> StallInspector:
    return StallInspector(30, reply_timeout_s=2)


def test_an_operation_is_late_at_the_limit_and_reported_once(inspector: StallInspector) -> None:
    assert inspector.overdue(int(29.9 * S), [wait()]) == []
    assert [stall.longest_waiting.op for stall in inspector.overdue(30 * S, [wait()])] == ["allreduce 'w'"]
    assert inspector.overdue(31 * S, [wait()]) == []
    assert inspector.overdue(500 * S, [wait()]) == []
    assert inspector.overdue(500 * S, [wait(group=1)]), "another group is another operation"
    assert StallInspector(0).overdue(500 * S, [wait()]) == [], "0 turns it off"


def test_a_call_is_reported_once_and_the_next_one_is_another(inspector: StallInspector) -> None:
    first, next_one = (msgspec.structs.replace(wait(since_s=s), call=f"0.ordered {s}") for s in (0, 31))
    assert inspector.overdue(30 * S, [first])
    late = msgspec.structs.replace(first, present=(1,), since_ns=32 * S)  # a member that came after the report
    assert inspector.overdue(62 * S, [late]) == []
    assert [stall.longest_waiting for stall in inspector.overdue(63 * S, [next_one])] == [next_one]


def test_the_same_operation_of_a_later_step_is_reported(inspector: StallInspector) -> None:
    assert inspector.overdue(30 * S, [wait()])
    assert inspector.overdue(50 * S, [wait(since_s=40)]) == []
    assert inspector.overdue(71 * S, [wait(since_s=40)])


def test_who_waits_in_it_is_not_missing(inspector: StallInspector) -> None:
    assert inspector.overdue(40 * S, [wait("barrier", missing=(1,)), wait("barrier", present=1, missing=(0,))]) == []
    (stall,) = inspector.overdue(40 * S, [wait(missing=(1, 2, 5)), wait(present=1, since_s=5, missing=(2, 5))])
    assert stall.longest_waiting == WaitingOperation(
        op="allreduce 'w'", group=0, since_ns=0, missing=(2, 5), present=(0, 1)
    )


def test_operations_that_wait_for_the_same_ranks_are_one_stall(inspector: StallInspector) -> None:
    waits = [wait(f"allreduce 'grad.{index}'", since_s=-index) for index in range(200)]
    (stall,) = inspector.overdue(30 * S, waits)
    assert stall.longest_waiting.op == "allreduce 'grad.199'"
    assert len(stall.operations) == 200
    last = describe_stall(stall, 30 * S, members=[member(2)]).splitlines()[-1]
    assert last.startswith("  for the same ranks wait also allreduce 'grad.198', ")
    assert last.endswith(" and 183 more")


def test_a_stall_is_finished_when_all_ranks_have_answered(inspector: StallInspector) -> None:
    (stall,) = inspector.overdue(30 * S, [wait(missing=(2, 5))])
    assert stall.asked_ranks == (2, 5)
    inspector.add_reply(stall.query_id, 2, "a.py:1 in f")
    inspector.add_reply(stall.query_id, 7, "nobody asked me")
    inspector.add_reply(stall.query_id + 1, 5, "of another stall")
    assert inspector.take_finished(31 * S) == []
    inspector.add_reply(stall.query_id, 5, "b.py:1 in g")
    assert inspector.take_finished(31 * S) == [stall]
    assert stall.lines == {2: "a.py:1 in f", 5: "b.py:1 in g"}
    assert inspector.take_finished(99 * S) == []


def test_a_stall_is_finished_after_the_reply_timeout(inspector: StallInspector) -> None:
    (stall,) = inspector.overdue(30 * S, [wait()])
    assert inspector.take_finished(int(31.9 * S)) == []
    assert inspector.take_finished(32 * S) == [stall]
    inspector.add_reply(stall.query_id, 2, "too late")
    assert stall.lines == {}


def test_the_report_says_who_where_and_what() -> None:
    late = WaitingOperation(op="allreduce 'grad.3'", group=0, since_ns=0, missing=(2, 5), present=(0, 1, 3, 4))
    stall = Stall(1, (late,), 30 * S, {2: "train.py:42 in step: time.sleep(100)"})
    text = describe_stall(
        stall,
        int(31.2 * S),
        members=[member(2), member(5, host="b")],
        process_state=lambda silent: f"stopped ({silent.pid})",
    )
    assert text == (
        "allreduce 'grad.3' (group 0) has waited 31.2 s for rank 2, rank 5 (ranks 0, 1, 3, 4 are there)\n"
        "  rank 2 on host a, pid 102, is at train.py:42 in step: time.sleep(100)\n"
        "  rank 5 on host b, pid 105, does not answer; its process is stopped (105)"
    )


def test_the_report_says_what_it_does_not_know() -> None:
    late = WaitingOperation(op="barrier", group=1, since_ns=0, missing=(2, 5, 9), present=(0,))
    text = describe_stall(
        Stall(1, (late, wait("allreduce 'v'")), 30 * S, {2: ""}), 30 * S, members=[member(2), member(5)]
    )
    assert text == (
        "barrier (group 1) has waited 30.0 s for rank 2, rank 5, rank 9 (rank 0 is there)\n"
        "  rank 2 on host a, pid 102, answers, but cannot say where it is\n"
        "  rank 5 on host a, pid 105, does not answer\n"
        "  rank 9 is not a member of this round\n"
        "  for the same ranks waits also allreduce 'v'"
    )


def test_a_thousand_missing_ranks_make_a_report_one_can_read(inspector: StallInspector) -> None:
    (stall,) = inspector.overdue(30 * S, [wait(missing=tuple(range(1, 1000)))])
    text = describe_stall(stall, 30 * S, members=[member(rank) for rank in range(1000)])
    assert text.startswith("allreduce 'w' (group 0) has waited 30.0 s for ranks 1-999 (rank 0 is there)\n")
    assert text.endswith(f"\n  and {999 - MAX_SHOWN} more ranks, not asked")
    assert len(text.splitlines()) == MAX_SHOWN + 2


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.text(st.characters()), st.text(st.characters()))
def test_no_name_and_no_line_can_break_the_report(op: str, line: str) -> None:
    late = WaitingOperation(op=op, group=0, since_ns=0, missing=(2,))
    text = describe_stall(Stall(1, (late,), 0, {2: line}), S, members=[member(2)])
    assert len(text.splitlines()) == 2
    text.encode()


def test_the_memory_of_a_long_job_is_bounded(inspector: StallInspector) -> None:
    for hour in range(20):
        now = (hour + 1) * 3600 * S
        waits = [wait(f"allreduce '{hour}.{index}'", since_s=hour * 3600) for index in range(500)]
        assert inspector.overdue(now, waits)
        assert inspector.overdue(now, waits) == []
        inspector.take_finished(now + 2 * S)
    assert len(inspector._reported) == 4096
    assert not inspector._open
