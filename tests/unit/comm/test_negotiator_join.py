"""join(): ranks that are out of data take part in the others' allreduces until everybody is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.net.messages import AgreedOperation, OperationRejected, OperationRequest, RunOperations, UnknownOperationId
from tests.unit.comm.test_negotiator import Script, allgather, allreduce, join


def test_when_all_have_joined_everybody_learns_who_was_last() -> None:
    script = Script(3)
    for rank in (2, 0, 1):
        script.say(rank, join())
    script.flush()
    assert (
        script.told[0]
        == script.told[1]
        == script.told[2]
        == [RunOperations(0, (AgreedOperation(0, "join", row_counts=(1,)),))]
    )


def test_nobody_waits_for_a_rank_that_has_joined() -> None:
    script = Script(3)
    script.say(2, join())
    script.say(0, allreduce("w"))
    assert script.negotiator.missing(0, "w") == (1,)


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_a_joined_rank_gets_the_others_allreduce_in_full(joined: int) -> None:
    script = Script(3)
    script.say(joined, join())
    others = [rank for rank in range(3) if rank != joined]
    for rank in others:
        script.say(rank, allreduce("w"))
    script.flush()
    [run] = script.told[joined]
    assert isinstance(run, RunOperations)
    assert run.operations[0].request == allreduce("w")
    assert [script.told[rank] for rank in others] == [
        [RunOperations(0, (AgreedOperation(run.operations[0].id, "w"),))]
    ] * 2


def test_a_join_completes_what_the_others_have_announced_before() -> None:
    script = Script(2)
    script.say(0, allreduce("w"), allreduce("v"))
    assert script.flush() == []
    script.say(1, join())
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["w", "v"]]


def test_what_a_rank_announced_before_it_joined_runs_as_announced() -> None:
    script = Script(2)
    script.say(1, allgather("g"), join())
    script.say(0, allgather("g"))
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["g"]]
    assert script.failures(0) == []


def test_other_operations_fail_and_say_who_has_joined() -> None:
    script = Script(3)
    script.say(2, join())
    script.say(0, allgather("g"))
    assert script.flush() == []  # rank 1 has to get the same answer for the same call
    script.say(1, allgather("g"))
    script.flush()
    words = ["allgather 'g': rank 2 called join() and takes part in allreduce only"]
    assert script.failures(0) == script.failures(1) == words
    assert script.told[2] == []


def test_members_that_disagree_while_another_has_joined_are_told() -> None:
    script = Script(3)
    script.say(2, join())
    script.say(0, allreduce("w", (1,)))
    script.say(1, allreduce("w", (2,)))
    script.flush()
    assert script.failures(0) == ["allreduce 'w': ranks disagree on shape: rank 0 gave (1,); rank 1 gave (2,)"]


def test_after_all_have_joined_everybody_is_needed_again() -> None:
    script = Script(2)
    for rank in (0, 1):
        script.say(rank, join())
    script.flush()
    script.say(0, allreduce("w"))
    assert script.flush() == []
    script.say(1, allreduce("w"))
    script.flush()
    assert script.names_run(0)[-1] == ["w"]


def test_an_operation_of_ranks_that_joined_later_runs_before_the_join_does() -> None:
    script = Script(2)
    script.say(0, allreduce("w"), join())
    script.say(1, join())
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["w"], ["join"]]
    [run, _] = script.told[1]
    assert isinstance(run, RunOperations) and run.operations[0].request == allreduce("w")


def test_a_rank_that_had_joined_has_to_announce_in_full_what_others_changed_meanwhile() -> None:
    script = Script(2)
    script.all_say(allreduce("w", (4,)))
    number = script.id_of("w")
    script.say(1, join())
    script.say(0, allreduce("w", (8,)))
    script.flush()
    script.say(0, join())
    script.flush()
    script.say(1, known=[number])
    script.flush()
    assert script.told[1][-1] == UnknownOperationId(number)
    script.say(1, allreduce("w", (8,)))
    script.say(0, known=[number])
    script.flush()
    assert isinstance(script.told[0][-1], RunOperations) and isinstance(script.told[1][-1], RunOperations)


def test_fused_operations_are_filled_in_one_by_one() -> None:
    script = Script(2)
    script.say(1, allreduce("mine"), join())
    script.say(0, allreduce("yours"), allreduce("mine"))
    script.flush()
    [run] = script.told[1]
    assert isinstance(run, RunOperations)
    assert [(item.name, item.request is None) for item in run.operations] == [("yours", False), ("mine", True)]
    assert script.names_run(0) == [["yours", "mine"]]


def test_a_join_in_one_group_does_not_reach_another() -> None:
    script = Script(2)
    script.negotiator.add_group(1, (0, 1))
    script.say(1, join(group=1))
    script.say(0, allreduce("w"), allreduce("v", group=1))
    script.flush()
    assert script.names_run(0) == [["v"]]


def test_a_join_where_a_rank_is_gone_fails() -> None:
    script = Script(2)
    script.negotiator.rank_lost(1, "exited with code 1")
    script.say(0, join())
    script.flush()
    assert script.told[0] == [OperationRejected(0, "join", "join 'join': rank 1 is gone: exited with code 1")]


def test_who_has_joined_is_not_missing() -> None:
    script = Script(3)
    script.say(2, join())
    script.say(0, allreduce("w"))
    assert [pending.missing for pending in script.negotiator.pending(0)] == [(1,)]


NAMES = [f"n{i}" for i in range(5)]


@st.composite
def unequal_work(draw: st.DrawFn) -> list[tuple[int, OperationRequest | None]]:
    """Three ranks announce some of the names, each in an order of its own, then join; None is a flush in between."""
    left: list[list[OperationRequest]] = []
    for _ in range(3):
        names = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
        left.append([join(), *(allreduce(name) for name in names)])
    events: list[tuple[int, OperationRequest | None]] = []
    while any(left):
        rank = draw(st.sampled_from([rank for rank in range(3) if left[rank]]))
        events.append((rank, left[rank].pop()))
        if draw(st.booleans()):
            events.append((rank, None))
    return events


@settings(max_examples=200, deadline=None)
@given(events=unequal_work())
def test_whatever_some_rank_announced_runs_once_on_all_before_the_join_does(
    events: list[tuple[int, OperationRequest | None]],
) -> None:
    script = Script(3, fusion_bytes=40)
    for rank, request in events:
        if request is None:
            script.flush()
        else:
            script.say(rank, request)
    script.flush()
    announced = {request.name for _, request in events if request is not None} - {"join"}
    assert script.names_run(0) == script.names_run(1) == script.names_run(2)
    ran = [name for run in script.names_run(0) for name in run]
    assert ran[-1] == "join"
    assert sorted(ran[:-1]) == sorted(announced)
    for rank in range(3):
        runs = [message for message in script.told[rank] if isinstance(message, RunOperations)]
        filled = {item.name for run in runs for item in run.operations if item.request is not None}
        assert filled == announced - {request.name for other, request in events if request and other == rank}
