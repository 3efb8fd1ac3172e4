"""Named operations: who is waited for, what runs together, what is remembered. Ranks are scripted, nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.coordinator.negotiation import Negotiator, Send
from ronde.net.messages import (
    AnnounceOperations,
    CoordinatorMessage,
    OperationRejected,
    OperationRequest,
    RunOperations,
    UnknownOperationId,
)
from ronde.types import DType, Op, OperationKind

KIB = 1024


def allreduce(name: str, *shapes: tuple[int, ...], group: int = 0, **options: object) -> OperationRequest:
    return OperationRequest(group, name, OperationKind.ALLREDUCE, DType.FLOAT32, shapes or ((4,),), **options)  # type: ignore[arg-type]


def allgather(name: str, rows: int = 1) -> OperationRequest:
    return OperationRequest(0, name, OperationKind.ALLGATHER, DType.FLOAT32, ((rows, 2),))


def join(group: int = 0) -> OperationRequest:
    return OperationRequest(group, "join", OperationKind.JOIN, 0, ())


class Script:
    """A negotiator with what each rank has been told so far."""

    def __init__(self, size: int, *, fusion_bytes: int = 64 * KIB, remembered: int = 8192) -> None:
        self.size = size
        self.negotiator = Negotiator(size, fusion_bytes=fusion_bytes, max_cached=remembered)
        self.told: dict[int, list[CoordinatorMessage]] = {rank: [] for rank in range(size)}

    def say(self, rank: int, *requests: OperationRequest, known: Sequence[int] = (), now_ns: int = 0) -> None:
        """A rank announces; nothing is flushed yet."""
        self.negotiator.announce(rank, AnnounceOperations(requests, tuple(known)), now_ns)

    def flush(self) -> list[Send]:
        sends = self.negotiator.take_sends()
        for ranks, message in sends:
            for rank in ranks:
                self.told[rank].append(message)
        return sends

    def all_say(self, *requests: OperationRequest) -> list[Send]:
        for rank in range(self.size):
            self.say(rank, *requests)
        return self.flush()

    def names_run(self, rank: int) -> list[list[str]]:
        """Per Run that this rank was told: the names in it."""
        return [
            [item.name for item in message.operations]
            for message in self.told[rank]
            if isinstance(message, RunOperations)
        ]

    def failures(self, rank: int) -> list[str]:
        return [message.reason for message in self.told[rank] if isinstance(message, OperationRejected)]

    def id_of(self, name: str) -> int:
        runs = [message for told in self.told.values() for message in told if isinstance(message, RunOperations)]
        return next(item.id for run in reversed(runs) for item in run.operations if item.name == name)


# --- who is waited for -----------------------------------------------------------------------------------------------


def test_an_operation_runs_when_the_last_member_has_announced_it() -> None:
    script = Script(3)
    script.say(2, allreduce("w"))
    script.say(0, allreduce("w"))
    assert script.flush() == []
    script.say(1, allreduce("w"))
    [send] = script.flush()
    assert send.ranks == (0, 1, 2)
    assert isinstance(send.message, RunOperations)
    assert [item.name for item in send.message.operations] == ["w"]


def test_a_lone_operation_is_not_held_back_by_others_in_flight() -> None:
    script = Script(2)
    script.say(0, *(allreduce(f"late {i}") for i in range(100)), allreduce("now"))
    script.say(1, allreduce("now"))
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["now"]]


def test_a_round_of_one_runs_everything_at_once() -> None:
    script = Script(1)
    script.all_say(allreduce("a"), allgather("b"))
    assert script.names_run(0) == [["a"], ["b"]]


def test_a_group_waits_for_its_own_members_only() -> None:
    script = Script(4)
    script.negotiator.add_group(7, (1, 3))
    script.say(1, allreduce("w", group=7))
    script.say(3, allreduce("w", group=7))
    [send] = script.flush()
    assert send.ranks == (1, 3)
    assert isinstance(send.message, RunOperations) and send.message.group == 7


def test_the_same_name_in_two_groups_is_two_operations() -> None:
    script = Script(2)
    script.negotiator.add_group(1, (0, 1))
    script.say(0, allreduce("w"))
    script.say(1, allreduce("w", group=1))
    assert script.flush() == []


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (9, "allreduce 'w' of group 9: group 9 does not exist, or was removed"),
        (1, "allreduce 'w' of group 1: rank 0 is not a member (ranks 1, 2)"),
    ],
)
def test_a_rank_outside_of_a_group_is_told_so(group: int, why: str) -> None:
    script = Script(3)
    script.negotiator.add_group(1, (1, 2))
    script.say(0, allreduce("w", group=group))
    script.flush()
    assert script.failures(0) == [why]
    assert script.told[1] == script.told[2] == []


def test_what_is_in_flight_in_a_removed_group_fails_for_those_who_announced_it() -> None:
    script = Script(2)
    script.negotiator.add_group(1, (0, 1))
    script.say(0, allreduce("w", group=1))
    script.negotiator.remove_group(1)
    script.flush()
    assert script.failures(0) == ["allreduce 'w' of group 1: the group was removed before all members announced it"]
    assert script.told[1] == []


def test_what_waits_is_shown_with_who_is_missing() -> None:
    script = Script(3)
    script.say(0, allreduce("old", (3, 4)), now_ns=10)
    script.say(2, allreduce("old", (3, 4)), now_ns=20)
    script.say(0, allreduce("young"), now_ns=30)
    [pending] = script.negotiator.pending(until_ns=29)
    assert pending == (0, "old", "allreduce 'old' sum float32[3, 4]", 10, (0, 2), (1,))
    assert len(list(script.negotiator.pending(until_ns=30))) == 2
    assert script.negotiator.missing(0, "old") == (1,)
    assert script.negotiator.missing(0, "young") == (1, 2)


def test_what_does_not_wait_misses_nobody() -> None:
    script = Script(2)
    script.all_say(allreduce("done"))
    script.say(0, allreduce("w"), join(group=7))
    missing = script.negotiator.missing
    assert [missing(0, "done"), missing(0, "never heard of"), missing(7, "w")] == [(), (), ()]


def test_an_operation_in_a_group_is_described_without_it() -> None:
    script = Script(2)
    script.negotiator.add_group(1, (0, 1))
    many = tuple((rows,) for rows in range(1, 6))
    wanted = {
        "grads": OperationRequest(1, "grads", OperationKind.ALLREDUCE, DType.FLOAT32, many, op=Op.MEAN),
        "b": OperationRequest(1, "b", OperationKind.BARRIER, 0, ()),
        "g": OperationRequest(1, "g", OperationKind.ALLGATHER, DType.INT8, ((2, 3),)),
    }
    script.say(0, *wanted.values())
    assert [pending.description for pending in script.negotiator.pending(until_ns=0)] == [
        "allreduce 'grads' mean float32[1] [2] [3] [4] …",
        "barrier 'b'",
        "allgather 'g' int8[2, 3]",
    ]


# --- ids -------------------------------------------------------------------------------------------------------------


def test_an_operation_that_ran_can_be_announced_by_its_id() -> None:
    script = Script(2)
    script.all_say(allreduce("a"), allgather("b"))
    ids = [script.id_of("a"), script.id_of("b")]
    assert len(set(ids)) == 2
    for rank in (0, 1):
        script.say(rank, known=ids)
    script.flush()
    assert script.names_run(1) == [["a"], ["b"], ["a"], ["b"]]
    assert [script.id_of("a"), script.id_of("b")] == ids


def test_a_rank_may_say_in_full_what_another_says_by_id() -> None:
    script = Script(2)
    script.all_say(allreduce("a"))
    script.say(0, known=[script.id_of("a")])
    script.say(1, allreduce("a"))
    script.flush()
    assert script.names_run(0) == [["a"], ["a"]]


def test_a_changed_request_takes_the_place_of_the_one_before() -> None:
    script = Script(2)
    script.all_say(allreduce("a", (4,)))
    script.all_say(allreduce("a", (8,)))
    for rank in (0, 1):
        script.say(rank, known=[script.id_of("a")])
    script.flush()
    assert script.names_run(0) == [["a"]] * 3
    script.say(0, allreduce("a", (4,)))
    script.say(1, known=[script.id_of("a")])
    script.flush()
    assert script.failures(1) == ["allreduce 'a': ranks disagree on shape: rank 0 gave (4,); rank 1 gave (8,)"]


def test_an_id_that_nobody_gave_is_unknown_to_the_one_who_says_it() -> None:
    script = Script(2)
    script.say(1, known=[77])
    assert script.flush() == [Send((1,), UnknownOperationId(77))]


def test_the_name_that_ran_longest_ago_is_forgotten_first() -> None:
    script = Script(2, remembered=2)
    for name in ("a", "b"):
        script.all_say(allreduce(name))
    script.all_say(allreduce("a"))  # now b is the oldest
    a, b = script.id_of("a"), script.id_of("b")
    script.all_say(allreduce("c"))
    script.say(0, known=[a, b])
    assert script.flush() == [Send((0,), UnknownOperationId(b))]
    script.say(0, allreduce("b"))
    script.say(1, allreduce("b"), known=[a])
    script.flush()
    assert script.names_run(0)[-1] == ["b", "a"]
    assert script.id_of("b") != b


def test_what_is_in_flight_is_never_forgotten() -> None:
    script = Script(2, remembered=1)
    script.say(0, *(allreduce(f"n{i}") for i in range(10)))
    script.flush()
    script.say(1, *(allreduce(f"n{i}") for i in range(10)))
    script.flush()
    assert [name for run in script.names_run(0) for name in run] == [f"n{i}" for i in range(10)]


# --- fusion ----------------------------------------------------------------------------------------------------------


def test_allreduces_that_are_ready_together_run_as_one_in_the_order_of_readiness() -> None:
    script = Script(2)
    script.say(0, allreduce("a"), allreduce("b"), allreduce("c"))
    script.say(1, allreduce("c"), allreduce("a"), allreduce("b"))
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["c", "a", "b"]]


def test_no_more_than_fusion_bytes_travel_as_one() -> None:
    script = Script(2, fusion_bytes=32)
    script.all_say(*(allreduce(f"n{i}", (4,)) for i in range(5)))  # 16 bytes each
    assert script.names_run(0) == [["n0", "n1"], ["n2", "n3"], ["n4"]]


def test_an_operation_larger_than_fusion_bytes_runs_alone() -> None:
    script = Script(2, fusion_bytes=32)
    script.all_say(allreduce("large", (100,)), allreduce("small"))
    assert script.names_run(0) == [["large"], ["small"]]


def test_without_fusion_bytes_everything_runs_alone() -> None:
    script = Script(2, fusion_bytes=0)
    script.all_say(allreduce("a", (0,)), allreduce("b", (0,)))
    assert script.names_run(0) == [["a"], ["b"]]


@pytest.mark.parametrize(
    "other",
    [
        allreduce("b", op=Op.MAX),
        allreduce("b", prescale=0.5),
        allreduce("b", postscale=0.5),
        OperationRequest(0, "b", OperationKind.ALLREDUCE, DType.FLOAT64, ((4,),)),
        OperationRequest(0, "b", OperationKind.REDUCE_SCATTER, DType.FLOAT32, ((4,),)),
        OperationRequest(0, "b", OperationKind.BROADCAST, DType.FLOAT32, ((4,),), root=0),
        OperationRequest(0, "b", OperationKind.BARRIER, 0, ()),
    ],
    ids=lambda request: f"{OperationKind(request.kind).name}-{request.op}-{request.prescale}-{request.postscale}",
)
def test_what_differs_does_not_travel_together(other: OperationRequest) -> None:
    script = Script(2)
    script.all_say(allreduce("a"), other, allreduce("c"))
    assert script.names_run(0) == script.names_run(1) == [["a", "c"], ["b"]]


def test_adasum_travels_alone() -> None:
    script = Script(2)
    script.all_say(allreduce("a", op=Op.ADASUM), allreduce("b", op=Op.ADASUM))
    assert script.names_run(0) == [["a"], ["b"]]


def test_a_grouped_operation_counts_with_all_its_arrays() -> None:
    script = Script(2, fusion_bytes=64)
    script.all_say(allreduce("pair", (4,), (8,)), allreduce("a"), allreduce("b"))
    assert script.names_run(0) == [["pair", "a"], ["b"]]


# --- loss ------------------------------------------------------------------------------------------------------------


def test_nothing_runs_any_more_in_the_groups_of_a_lost_rank() -> None:
    script = Script(3)
    script.negotiator.add_group(1, (0, 1))
    script.say(0, allreduce("w"), allreduce("v", group=1))
    script.negotiator.rank_lost(2, "killed by signal 9")
    assert script.flush() == []
    assert [pending.name for pending in script.negotiator.pending(0)] == ["v"]
    script.say(1, allreduce("w"), allreduce("v", group=1))
    script.flush()
    assert script.failures(1) == ["allreduce 'w': rank 2 is gone: killed by signal 9"]
    assert script.names_run(0) == [["v"]]


def test_an_id_of_a_lost_ranks_group_is_unknown() -> None:
    script = Script(2)
    script.all_say(allreduce("w"))
    script.negotiator.rank_lost(1, "gone")
    script.say(0, known=[script.id_of("w")])
    assert script.flush() == [Send((0,), UnknownOperationId(script.id_of("w")))]


# --- any order -------------------------------------------------------------------------------------------------------

NAMES = [f"n{i}" for i in range(6)]


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, list[tuple[int, str] | None]]:
    """Who announces which name, each rank in an order of its own; None is a flush in between."""
    size = draw(st.integers(1, 4))
    left = [list(draw(st.permutations(NAMES))) for _ in range(size)]
    events: list[tuple[int, str] | None] = []
    while any(left):
        if draw(st.integers(0, 3)) == 0:
            events.append(None)
        rank = draw(st.sampled_from([rank for rank in range(size) if left[rank]]))
        events.append((rank, left[rank].pop()))
    return size, [*events, None]


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(interleavings(), min_size=1, max_size=3), remembered=st.sampled_from([1, 3, 100]))
def test_every_name_runs_once_per_step_and_in_the_same_order_on_every_rank(
    steps: list[tuple[int, list[tuple[int, str] | None]]], remembered: int
) -> None:
    size = steps[0][0]
    script = Script(size, fusion_bytes=40, remembered=remembered)
    ids: list[dict[str, int]] = [{} for _ in range(size)]
    for _, events in (step for step in steps if step[0] == size):
        before = [len(script.told[rank]) for rank in range(size)]
        for event in events:
            if event is None:
                _answer_unknown(script, ids)
                continue
            rank, name = event
            if name in ids[rank]:
                script.say(rank, known=[ids[rank][name]])
            else:
                script.say(rank, allreduce(name))
        runs = [[m for m in script.told[rank][before[rank] :] if isinstance(m, RunOperations)] for rank in range(size)]
        assert sorted(item.name for run in runs[0] for item in run.operations) == NAMES
        assert all(run == runs[0] for run in runs)


def _answer_unknown(script: Script, ids: list[dict[str, int]]) -> None:
    """Flush as a coordinator does; let each rank learn ids, and say in full what was forgotten, as an engine does."""
    while sends := script.flush():
        for ranks, message in sends:
            for rank in ranks:
                if isinstance(message, RunOperations):
                    ids[rank].update({item.name: item.id for item in message.operations})
                elif isinstance(message, UnknownOperationId):
                    name = next(name for name, known in ids[rank].items() if known == message.id)
                    del ids[rank][name]
                    script.say(rank, allreduce(name))
