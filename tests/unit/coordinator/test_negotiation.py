"""Named operations: when they run, what is fused, who was late, and what happens when members disagree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ronde.coordinator import operation_requests
from ronde.coordinator.negotiation import MAX_STRAGGLERS, MIN_STRAGGLER_DELAY_NS, Negotiator, Send
from ronde.net.messages import (
    MAX_MESSAGE_BYTES,
    AgreedOperation,
    AnnounceOperations,
    CoordinatorMessage,
    OperationRejected,
    OperationRequest,
    RunOperations,
    UnknownOperationId,
    encode,
)
from ronde.observe.stalls import WaitingOperation
from ronde.types import JOINABLE, DType, Op, OperationKind
from tests.unit.coordinator.requests import allreduce

ALLREDUCE, ALLGATHER, ALLTOALL = OperationKind.ALLREDUCE, OperationKind.ALLGATHER, OperationKind.ALLTOALL
BROADCAST, REDUCE_SCATTER, BARRIER = OperationKind.BROADCAST, OperationKind.REDUCE_SCATTER, OperationKind.BARRIER
REDUCE, GATHER, SCATTER = OperationKind.REDUCE, OperationKind.GATHER, OperationKind.SCATTER
F32, I32, BOOL = DType.FLOAT32, DType.INT32, DType.BOOL
MS = 1_000_000
TraceFunction = Callable[[FrameType, str, Any], Any]


def make(kind: int, *shapes: tuple[int, ...], name: str = "w", dtype: int = F32, **options: object) -> OperationRequest:
    return OperationRequest(0, name, kind, dtype, shapes or ((4, 2),), **options)  # type: ignore[arg-type]


def join(group: int = 0) -> OperationRequest:
    return OperationRequest(group, "join", OperationKind.JOIN, 0, ())


@pytest.fixture(autouse=True, params=[False, True], ids=["each message is an object", "equal messages are one object"])
def interning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's server hands over equal announcements as one object, the one inside a process does not."""
    monkeypatch.setattr(Script, "interns", request.param)


class Script:
    """A negotiator with the messages that were sent to each rank so far."""

    interns = False

    def __init__(self, size: int, *, fusion_bytes: int = 64 * 1024, remembered: int = 8192) -> None:
        self.size = size
        self._interned: dict[AnnounceOperations, AnnounceOperations] = {}
        self.negotiator = Negotiator(size, fusion_bytes=fusion_bytes, max_cached=remembered)
        self.sent: dict[int, list[CoordinatorMessage]] = {rank: [] for rank in range(size)}

    def announce(self, rank: int, *requests: OperationRequest, known: Sequence[int] = (), now_ns: int = 0) -> None:
        """A rank announces operations. Nothing is sent before flush()."""
        message = AnnounceOperations(requests, tuple(known))
        if self.interns:
            message = self._interned.setdefault(message, message)
        self.negotiator.announce(rank, message, now_ns)

    def flush(self) -> list[Send]:
        sends = self.negotiator.take_sends()
        for ranks, message in sends:
            for rank in ranks:
                self.sent[rank].append(message)
        return sends

    def announce_all(self, *requests: OperationRequest, known: Sequence[int] = ()) -> None:
        """Every rank announces these, then they run."""
        for rank in range(self.size):
            self.announce(rank, *requests, known=known)
        self.flush()

    def runs(self, rank: int) -> list[RunOperations]:
        return [message for message in self.sent[rank] if isinstance(message, RunOperations)]

    def names_run(self, rank: int) -> list[list[str]]:
        """The names in each RunOperations that was sent to this rank."""
        return [[item.name for item in run.operations] for run in self.runs(rank)]

    def failures(self, rank: int) -> list[str]:
        return [message.reason for message in self.sent[rank] if isinstance(message, OperationRejected)]

    def id_of(self, name: str) -> int:
        """The id that the name has got last."""
        return next(item.id for run in reversed(self.runs(0)) for item in run.operations if item.name == name)


def negotiate(*requests: OperationRequest) -> RunOperations | OperationRejected:
    """One request per rank; returns what is sent to all."""
    script = Script(len(requests), fusion_bytes=0)
    for rank, request in enumerate(requests):
        script.announce(rank, request)
    [(ranks, message)] = script.flush()
    assert ranks == tuple(range(len(requests)))
    assert isinstance(message, RunOperations | OperationRejected)
    return message


def why(*requests: OperationRequest) -> str:
    failed = negotiate(*requests)
    assert isinstance(failed, OperationRejected)
    assert (failed.group, failed.name) == (requests[0].group, requests[0].name)
    return failed.reason


# --- who is waited for -----------------------------------------------------------------------------------------------


def test_an_operation_runs_when_the_last_member_has_announced_it_whatever_else_waits() -> None:
    script = Script(3)
    script.announce(2, *(allreduce(f"late {i}") for i in range(100)), allreduce("w"))
    script.announce(0, allreduce("w"))
    assert script.flush() == []
    script.announce(1, allreduce("w"))
    [send] = script.flush()
    assert send.ranks == (0, 1, 2)
    assert script.names_run(0) == [["w"]]


def test_a_group_waits_for_its_own_members_only_and_has_its_own_names() -> None:
    script = Script(4)
    group = script.negotiator.add_group((1, 3))
    script.announce(0, allreduce("w"))
    script.announce(1, allreduce("w", group=group))
    assert script.flush() == []
    script.announce(3, allreduce("w", group=group))
    [send] = script.flush()
    assert send.ranks == (1, 3)
    assert isinstance(send.message, RunOperations) and send.message.group == group


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (9, "allreduce 'w' of group 9: group 9 does not exist, or was removed"),
        (1, "allreduce 'w' of group 1: rank 0 is not a member (ranks 1, 2)"),
    ],
)
def test_a_rank_outside_of_a_group_is_told_so(group: int, why: str) -> None:
    script = Script(3)
    script.negotiator.add_group((1, 2))
    script.announce(0, allreduce("w", group=group))
    script.flush()
    assert script.failures(0) == [why]
    assert script.sent[1] == script.sent[2] == []


def test_what_is_in_flight_in_a_removed_group_fails_for_those_who_announced_it() -> None:
    script = Script(2)
    group = script.negotiator.add_group((0, 1))
    script.announce(0, allreduce("w", group=group))
    assert script.negotiator.remove_group(group) == (0, 1)
    script.flush()
    assert script.failures(0) == ["allreduce 'w' of group 1: the group was removed before all members announced it"]
    assert script.sent[1] == []


def test_what_waits_is_shown_with_who_is_missing() -> None:
    script = Script(3)
    script.announce_all(allreduce("done"))
    script.announce(0, allreduce("old", (3, 4)), now_ns=10)
    script.announce(2, allreduce("old", (3, 4)), now_ns=20)
    script.announce(0, allreduce("young"), now_ns=30)
    [pending] = script.negotiator.pending(until_ns=29)
    assert pending == WaitingOperation(
        op="allreduce 'old' sum float32[3, 4]", group=0, since_ns=10, missing=(1,), present=(0, 2)
    )
    assert len(list(script.negotiator.pending(until_ns=30))) == 2
    names = ("old", "young", "done", "never heard of")
    assert [script.negotiator.missing(0, name) for name in names] == [(1,), (1, 2), (), ()]
    assert script.negotiator.missing(7, "old") == ()


def test_operations_are_described() -> None:
    script = Script(2)
    script.announce(
        0,
        make(ALLREDUCE, (1,), (2,), (3,), (4,), (5,), name="grads", op=Op.MEAN),
        OperationRequest(0, "b", BARRIER, 0, ()),
        make(ALLGATHER, (2, 3), name="g", dtype=DType.INT8),
    )
    assert [pending.op for pending in script.negotiator.pending(until_ns=0)] == [
        "allreduce 'grads' mean float32[1] [2] [3] [4] …",
        "barrier 'b'",
        "allgather 'g' int8[2, 3]",
    ]


# --- ids -------------------------------------------------------------------------------------------------------------


def test_an_operation_that_ran_can_be_announced_by_its_id_or_in_full() -> None:
    script = Script(2)
    script.announce_all(allreduce("a"), make(ALLGATHER, name="b"))
    ids = [script.id_of("a"), script.id_of("b")]
    assert len(set(ids)) == 2
    script.announce(0, known=ids)
    script.announce(1, allreduce("a"), known=ids[1:])
    script.flush()
    assert script.names_run(1) == [["a"], ["b"], ["a"], ["b"]]
    assert [script.id_of("a"), script.id_of("b")] == ids


def test_a_changed_request_takes_the_place_of_the_one_before() -> None:
    script = Script(2)
    script.announce_all(allreduce("a", (4,)))
    script.announce_all(allreduce("a", (8,)))
    script.announce_all(known=[script.id_of("a")])
    assert script.names_run(0) == [["a"]] * 3
    script.announce(0, allreduce("a", (4,)))
    script.announce(1, known=[script.id_of("a")])
    script.flush()
    assert script.failures(1) == ["allreduce 'a': ranks disagree on shape: rank 0 gave (4,); rank 1 gave (8,)"]


def test_an_id_that_nobody_gave_is_unknown_to_the_one_who_says_it() -> None:
    script = Script(2)
    script.announce(1, known=[77])
    assert script.flush() == [Send((1,), UnknownOperationId(77))]


def test_the_name_that_ran_longest_ago_is_forgotten_first() -> None:
    script = Script(2, remembered=2)
    for name in ("a", "b"):
        script.announce_all(allreduce(name))
    script.announce_all(allreduce("a"))  # now b is the oldest
    a, b = script.id_of("a"), script.id_of("b")
    script.announce_all(allreduce("c"))
    script.announce(0, known=[a, b])
    assert script.flush() == [Send((0,), UnknownOperationId(b))]
    script.announce(0, allreduce("b"))
    script.announce(1, allreduce("b"), known=[a])
    script.flush()
    assert script.names_run(0)[-1] == ["b", "a"]
    assert script.id_of("b") != b


# --- fusion ----------------------------------------------------------------------------------------------------------


def test_allreduces_that_are_ready_together_run_as_one_in_the_order_of_readiness() -> None:
    script = Script(2)
    script.announce(0, allreduce("a"), allreduce("b"), allreduce("c"))
    script.announce(1, allreduce("c"), allreduce("a"), allreduce("b"))
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["c", "a", "b"]]


@pytest.mark.parametrize(
    ("fusion_bytes", "requests", "runs"),
    [
        (32, [allreduce(f"n{i}", (4,)) for i in range(5)], [["n0", "n1"], ["n2", "n3"], ["n4"]]),  # 16 bytes each
        (32, [allreduce("large", (100,)), allreduce("small")], [["large"], ["small"]]),
        (0, [allreduce("a", (0,)), allreduce("b", (0,))], [["a"], ["b"]]),
        (64, [allreduce("pair", (4,), (8,)), allreduce("a"), allreduce("b")], [["pair", "a"], ["b"]]),
        (64, [allreduce("a", op=Op.ADASUM), allreduce("b", op=Op.ADASUM)], [["a"], ["b"]]),
    ],
    ids=["full", "too large", "off", "grouped", "adasum"],
)
def test_no_more_than_fusion_bytes_travel_as_one(
    fusion_bytes: int, requests: list[OperationRequest], runs: list[list[str]]
) -> None:
    script = Script(2, fusion_bytes=fusion_bytes)
    script.announce_all(*requests)
    assert script.names_run(0) == script.names_run(1) == runs


@pytest.mark.parametrize(
    "other",
    [
        allreduce("b", op=Op.MAX),
        allreduce("b", prescale=0.5),
        allreduce("b", postscale=0.5),
        make(ALLREDUCE, name="b", dtype=DType.FLOAT64),
        make(REDUCE_SCATTER, name="b"),
        make(BROADCAST, name="b", root=0),
        OperationRequest(0, "b", BARRIER, 0, ()),
    ],
    ids=lambda request: f"{OperationKind(request.kind).name}-{request.op}-{request.prescale}-{request.postscale}",
)
def test_what_differs_does_not_travel_together(other: OperationRequest) -> None:
    script = Script(2)
    script.announce_all(allreduce("a"), other, allreduce("c"))
    assert script.names_run(0) == script.names_run(1) == [["a", "c"], ["b"]]


# --- loss ------------------------------------------------------------------------------------------------------------


def test_nothing_runs_any_more_in_the_groups_of_a_lost_rank() -> None:
    script = Script(3)
    script.announce_all(allreduce("ran"))
    ran = script.id_of("ran")
    group = script.negotiator.add_group((0, 1))
    script.announce(0, allreduce("w"), allreduce("v", group=group))
    script.negotiator.rank_lost(2)
    assert script.flush() == []
    assert [pending.group for pending in script.negotiator.pending(0)] == [group]
    script.announce(1, allreduce("w"), join(), allreduce("v", group=group), known=[ran])
    script.flush()
    assert script.failures(1) == [], "it is told of the loss, and not that it has made a mistake"
    assert UnknownOperationId(ran) in script.sent[1]
    assert script.names_run(0) == [["ran"], ["v"]]


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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(interleavings(), min_size=1, max_size=3), remembered=st.sampled_from([1, 3, 100]))
def test_every_name_runs_once_per_step_and_in_the_same_order_on_every_rank(
    steps: list[tuple[int, list[tuple[int, str] | None]]], remembered: int
) -> None:
    size = steps[0][0]
    script = Script(size, fusion_bytes=40, remembered=remembered)
    ids: list[dict[str, int]] = [{} for _ in range(size)]
    for _, events in (step for step in steps if step[0] == size):
        before = [len(script.sent[rank]) for rank in range(size)]
        for event in events:
            if event is None:
                _answer_unknown(script, ids)
                continue
            rank, name = event
            if name in ids[rank]:
                script.announce(rank, known=[ids[rank][name]])
            else:
                script.announce(rank, allreduce(name))
        runs = [[m for m in script.sent[rank][before[rank] :] if isinstance(m, RunOperations)] for rank in range(size)]
        assert sorted(item.name for run in runs[0] for item in run.operations) == NAMES
        assert all(run == runs[0] for run in runs)


def _answer_unknown(script: Script, ids: list[dict[str, int]]) -> None:
    """Flush, let each rank learn ids, and announce in full what was forgotten, as NamedOperations does."""
    while sends := script.flush():
        for ranks, message in sends:
            for rank in ranks:
                if isinstance(message, RunOperations):
                    ids[rank].update({item.name: item.id for item in message.operations})
                elif isinstance(message, UnknownOperationId):
                    name = next(name for name, known in ids[rank].items() if known == message.id)
                    del ids[rank][name]
                    script.announce(rank, allreduce(name))


# --- equal messages --------------------------------------------------------------------------------------------------

CHOICES = [
    *(allreduce("a"), allreduce("a", (8,)), allreduce("b"), allreduce("c", group=1)),
    *(make(ALLGATHER, name="g"), make(ALLGATHER, (9, 2), name="g"), join()),
]
Announced = tuple[int, tuple[OperationRequest, ...], tuple[int, ...], int]  # rank, new, known, when


@st.composite
def announcements(draw: st.DrawFn) -> list[Announced | None]:
    """What three ranks announce, often the same, in full or by ids that may exist; None is a flush."""
    requests, ids = st.lists(st.sampled_from(CHOICES), max_size=3, unique=True), st.sets(st.integers(1, 4))
    alike = [(draw(requests), draw(ids)) for _ in range(3)]
    events: list[Announced | None] = []
    for at_ms in range(draw(st.integers(1, 25))):
        new, known = draw(st.sampled_from(alike))
        events.append((draw(st.integers(0, 2)), tuple(new), tuple(sorted(known)), at_ms * MS))
        if draw(st.booleans()):
            events.append(None)
    return [*events, None]


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=announcements(), remembered=st.sampled_from([1, 3, 100]))
def test_the_answers_do_not_depend_on_whether_equal_messages_are_one_object(
    events: list[Announced | None], remembered: int
) -> None:
    sent: list[list[object]] = []
    for interns in (False, True):
        script = Script(3, fusion_bytes=40, remembered=remembered)
        script.negotiator.add_group((0, 2))
        script.interns = interns
        sends: list[object] = []
        for event in events:
            if event is None:
                sends += [script.flush(), list(script.negotiator.pending(until_ns=1 << 60))]
            else:
                rank, new, known, now_ns = event
                script.announce(rank, *new, known=known, now_ns=now_ns)
        sent.append(sends)
    assert sent[0] == sent[1]


def test_one_message_of_all_ranks_is_looked_at_once_for_all_of_its_names() -> None:
    """The work is that of names and ranks added up, not multiplied."""
    names = 50
    message = AnnounceOperations(tuple(allreduce(f"n{i}") for i in range(names)))
    negotiator = Negotiator(1000, fusion_bytes=1 << 20)
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for rank in range(1000):
            negotiator.announce(rank, message, 0)
        sends = negotiator.take_sends()
    finally:
        sys.settrace(before)
    assert [len(send.ranks) for send in sends] == [1000]
    assert num_lines < 40 * (1000 + names) < 1000 * names


# --- members that disagree -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (make(ALLREDUCE), make(ALLGATHER), "what it is: rank 0 gave allreduce; rank 1 gave allgather"),
        (make(ALLREDUCE), make(ALLREDUCE, dtype=I32), "dtype: rank 0 gave float32; rank 1 gave int32"),
        (make(ALLREDUCE, dtype=99), make(ALLREDUCE), "dtype: rank 0 gave dtype 99; rank 1 gave float32"),
        (make(ALLREDUCE), make(ALLREDUCE, op=Op.MAX), "op: rank 0 gave sum; rank 1 gave max"),
        (make(REDUCE_SCATTER), make(REDUCE_SCATTER, op=Op.MIN), "op: rank 0 gave sum; rank 1 gave min"),
        (make(ALLREDUCE), make(ALLREDUCE, prescale=0.5), "prescale: rank 0 gave 1.0; rank 1 gave 0.5"),
        (make(ALLREDUCE), make(ALLREDUCE, postscale=2.0), "postscale: rank 0 gave 1.0; rank 1 gave 2.0"),
        (
            make(ALLREDUCE, (1,), (2,), (3,)),
            make(ALLREDUCE, (1,), (2, 1), (3, 1)),
            "the shape of array 1: rank 0 gave (2,); rank 1 gave (2, 1)",
        ),
        (
            make(ALLREDUCE, (1,), (2,)),
            make(ALLREDUCE, (1,)),
            "the number of arrays: rank 0 gave 2; rank 1 gave 1",
        ),
        (make(ALLGATHER, (3, 4)), make(ALLGATHER, (9, 5)), "shape: rank 0 gave (*, 4); rank 1 gave (*, 5)"),
        (make(ALLTOALL, (2, 4)), make(ALLTOALL, (2,)), "shape: rank 0 gave (*, 4); rank 1 gave (*)"),
        (make(BROADCAST, root=0), make(BROADCAST, root=1), "root: rank 0 gave 0; rank 1 gave 1"),
        (make(BROADCAST, root=0), make(BROADCAST, (4,), root=0), "shape: rank 0 gave (4, 2); rank 1 gave (4,)"),
    ],
)
def test_a_difference_is_told_with_what_each_gave(one: OperationRequest, other: OperationRequest, words: str) -> None:
    assert why(one, other).endswith(f"ranks disagree on {words}")


BOOL_RULE = "bool has no mean and cannot be scaled; convert it to numbers first"
ADASUM_RULE = "adasum is for allreduce of floating-point numbers, got"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make(ALLGATHER, ()), "it needs arrays of at least 1 dimension, got a scalar"),
        (make(ALLTOALL, ()), "it needs arrays of at least 1 dimension, got a scalar"),
        (make(REDUCE_SCATTER, ()), "it needs arrays of at least 1 dimension, got a scalar"),
        *((make(kind, root=5), "root 5 is not a member (ranks 0, 1)") for kind in (BROADCAST, REDUCE, GATHER, SCATTER)),
        (make(ALLREDUCE, dtype=BOOL, op=Op.MEAN), BOOL_RULE),
        (make(ALLREDUCE, dtype=BOOL, prescale=0.5), BOOL_RULE),
        (make(ALLREDUCE, dtype=I32, op=Op.ADASUM), f"{ADASUM_RULE} allreduce of int32"),
        (make(REDUCE, root=0, op=Op.ADASUM), f"{ADASUM_RULE} reduce of float32"),
        (make(ALLREDUCE, op=Op.BIT_AND), "bit_and is for whole numbers and bool, got float32"),
        (make(ALLREDUCE, dtype=I32, op=Op.BIT_XOR, postscale=2.0), "bit_xor cannot be scaled"),
        (make(REDUCE_SCATTER, op=Op.ADASUM), f"{ADASUM_RULE} reduce_scatter of float32"),
        (make(ALLREDUCE, op=77), "op 77 is not known"),
        (make(ALLREDUCE, dtype=99), "dtype 99 is not known"),
        (make(ALLREDUCE, (-1,)), "a dimension below 0 in (-1,)"),
        (make(OperationKind.SEND), "send is nothing that can be asked for by name"),
        (make(99), "kind 99 is nothing that can be asked for by name"),
        (OperationRequest(0, "w", ALLREDUCE, F32, ()), "no arrays were given"),
        (make(ALLTOALL, (5, 2)), "5 rows are no equal shares for 2 members; give splits"),
        (make(ALLTOALL, (4, 2), (2,)), "its arrays must have equally many rows, got 4, 2"),
        (make(SCATTER, (5, 2), root=1, splits=(3, 3)), "splits (3, 3) asks for 6 rows of an array with 5"),
        (make(ALLTOALL, (5, 2), splits=(5,)), "splits has 1 entries for 2 members"),
        (make(ALLTOALL, (5, 2), splits=(6, -1)), "splits (6, -1) has an entry below 0"),
        (make(ALLTOALL, (5, 2), splits=(3, 3)), "splits (3, 3) asks for 6 rows of an array with 5"),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_fails_on_all_members(request_: OperationRequest, words: str) -> None:
    assert why(request_, request_).endswith(f" 'w': {words}")


def test_only_the_ranks_with_a_fault_are_named() -> None:
    good, bad = make(ALLTOALL, (4, 2), splits=(2, 2)), make(ALLTOALL, (4, 2), splits=(4, 4))
    assert why(good, bad) == "alltoall 'w': rank 1: splits (4, 4) asks for 8 rows of an array with 4"


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (make(ALLGATHER, (3, 4), (1,)), make(ALLGATHER, (0, 4), (7,)), (3, 1, 0, 7)),
        (make(ALLTOALL, (6, 1)), make(ALLTOALL, (6, 1)), (3, 3)),
        (make(GATHER, (3, 4), root=1), make(GATHER, (0, 4), root=1), (3, 0)),
        (make(SCATTER, (9, 4), root=1), make(SCATTER, (5, 4), root=1), (3, 2)),  # only the root's rows count
        (make(SCATTER, (9, 4), root=0, splits=(1, 7)), make(SCATTER, (0, 4), root=0), (1, 7)),
        (make(REDUCE, root=1), make(REDUCE, root=1), None),
        (make(REDUCE_SCATTER, (2,), (5,)), make(REDUCE_SCATTER, (2,), (5,)), None),
        (OperationRequest(0, "w", BARRIER, 0, ()), OperationRequest(0, "w", BARRIER, 0, ()), None),
        *((make(ALLREDUCE, dtype=d, op=Op.MEAN), make(ALLREDUCE, dtype=d, op=Op.MEAN), None) for d in (I32, F32)),
    ],
)
def test_all_learn_how_many_rows_each_member_gives(
    one: OperationRequest, other: OperationRequest, rows: tuple[int, ...] | None
) -> None:
    run = negotiate(one, other)
    assert isinstance(run, RunOperations)
    assert run.operations[0].row_counts == rows


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (make(ALLTOALL, (6, 1)), make(ALLTOALL, (5, 1), splits=(0, 4)), [(3, 0), (3, 4)]),  # one row stays at home
        (make(ALLTOALL, (2, 1), (2,)), make(ALLTOALL, (4, 1), (4,), splits=(3, 1)), [(1, 3), (1, 1)]),
    ],
)
def test_of_an_alltoall_each_member_learns_how_many_rows_come_to_it(
    one: OperationRequest, other: OperationRequest, rows: list[tuple[int, ...]]
) -> None:
    script = Script(2)
    for later_ns in (0, MS):  # the second time there is a straggler
        script.announce(0, one)
        script.announce(1, other, now_ns=later_ns)
        script.flush()
        assert [script.runs(rank)[-1].operations[0].row_counts for rank in (0, 1)] == rows
    assert [len(script.runs(rank)) for rank in (0, 1)] == [2, 2]


def test_what_a_member_is_told_of_an_alltoall_grows_with_the_members_and_not_with_their_square() -> None:
    size = 300
    script = Script(size)
    for rank in range(size):
        splits = tuple(rank * other % 3 for other in range(size))
        script.announce(rank, make(ALLTOALL, (3 * size, 1), splits=splits))
    assert max(len(encode(message)) for _, message in script.flush()) < 4 * size
    for rank in range(size):
        [run] = script.runs(rank)
        assert run.operations[0].row_counts == tuple(other * rank % 3 for other in range(size))


def test_more_arrays_than_a_message_has_room_for_are_refused_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 9 * operation_requests.MAX_ROW_COUNTS < MAX_MESSAGE_BYTES  # no number takes more than 9 bytes
    monkeypatch.setattr(operation_requests, "MAX_ROW_COUNTS", 5)
    assert isinstance(negotiate(*[make(ALLGATHER, (1,), (1,))] * 2), RunOperations)
    words = "3 arrays of 2 members are too many at once; give them in parts"
    assert why(*[make(ALLGATHER, (1,), (1,), (1,))] * 2) == f"allgather 'w': {words}"


def test_rows_follow_a_changed_request() -> None:
    script = Script(2)
    for num_rows in (1, 2):
        script.announce_all(make(ALLGATHER, (num_rows, 2)))
        assert script.runs(0)[-1].operations[0].row_counts == (num_rows, num_rows)


@pytest.mark.parametrize(
    ("one", "other", "rows"),
    [
        (make(ALLGATHER, (3, 2)), make(ALLGATHER, (5, 2)), (3, 3)),
        (make(ALLTOALL, (9, 1), splits=(2, 4)), make(ALLTOALL, (9, 1), splits=(3, 4)), (2, 2)),
    ],
)
def test_rows_follow_a_rank_that_asks_for_what_another_has_asked_for_before(
    one: OperationRequest, other: OperationRequest, rows: tuple[int, ...]
) -> None:
    script = Script(2)
    script.announce(0, one)
    script.announce(1, other)
    script.flush()
    script.announce_all(one)  # in full, as when rank 0 has forgotten the id
    assert script.runs(0)[-1].operations[0].row_counts == rows


def test_after_a_fault_the_name_can_be_used_again() -> None:
    script = Script(2)
    for shapes in [((1,), (2,)), ((3,), (3,))]:
        for rank in (0, 1):
            script.announce(rank, allreduce("w", shapes[rank]))
        script.flush()
    assert (len(script.failures(0)), script.names_run(0)) == (1, [["w"]])


def test_a_name_announced_again_while_under_way_fails_for_all_when_all_have_come() -> None:
    script = Script(2)
    script.announce(0, allreduce("w", (1,)))
    script.announce(0, allreduce("w", (2,)))
    assert script.flush() == []
    script.announce(1, allreduce("w", (1,)))
    why = "allreduce 'w': rank 0 announced it again while it was under way"
    assert script.flush() == [Send((0, 1), OperationRejected(0, "w", why))]


def test_a_very_long_name_is_cut_in_the_error_but_not_in_the_answer() -> None:
    assert len(why(*(make(ALLREDUCE, shape, name="x" * 100_000) for shape in [(1,), (2,)]))) < 1000


# --- join ------------------------------------------------------------------------------------------------------------


def test_when_all_have_joined_everybody_learns_who_was_last() -> None:
    script = Script(3)
    for rank in (2, 0, 1):
        script.announce(rank, join())
    script.flush()
    last = RunOperations(0, (AgreedOperation(0, "join", row_counts=(1,)),))
    assert script.sent == {rank: [last] for rank in range(3)}


def test_a_joined_rank_gets_the_others_allreduce_in_full() -> None:
    script = Script(3)
    script.announce(1, join())
    for rank in (0, 2):
        script.announce(rank, allreduce("w"))
    script.flush()
    short, full = (RunOperations(0, (AgreedOperation(1, "w", request),)) for request in (None, allreduce("w")))
    assert script.sent == {0: [short], 1: [full], 2: [short]}


def test_what_a_rank_announced_before_it_joined_runs_as_announced() -> None:
    script = Script(2)
    script.announce(1, make(ALLGATHER, name="g"), join())
    script.announce(0, make(ALLGATHER, name="g"))
    script.flush()
    assert script.names_run(0) == script.names_run(1) == [["g"]]
    assert script.failures(0) == []


def test_other_operations_fail_and_say_who_has_joined() -> None:
    script = Script(3)
    script.announce(2, join())
    script.announce(0, make(ALLGATHER, name="g"))
    assert script.flush() == []  # rank 1 has to get the same answer for the same call
    script.announce(1, make(ALLGATHER, name="g"))
    script.flush()
    words = [f"allgather 'g': rank 2 called join() and takes part {JOINABLE}"]
    assert script.failures(0) == script.failures(1) == words
    assert script.sent[2] == []
    assert [message.joined for message in script.sent[0] if isinstance(message, OperationRejected)] == [(2,)]


@pytest.mark.parametrize(
    ("request_", "runs"),
    [
        (make(ALLREDUCE, op=Op.SUM), True),
        (make(ALLREDUCE, op=Op.MEAN), True),
        (make(ALLREDUCE, dtype=I32, op=Op.BIT_OR), True),
        (make(ALLREDUCE, dtype=I32, op=Op.BIT_XOR), True),
        (make(ALLREDUCE, dtype=DType.UINT8, op=Op.MAX), True),
        (make(ALLREDUCE, dtype=I32, op=Op.MAX), False),
        (make(ALLREDUCE, op=Op.MIN), False),
        (make(ALLREDUCE, op=Op.PRODUCT), False),
        (make(ALLREDUCE, op=Op.ADASUM), False),
        (make(ALLREDUCE, dtype=I32, op=Op.BIT_AND), False),
        (make(REDUCE, root=0), False),
        (OperationRequest(0, "w", BARRIER, 99, (), op=99), False),
        (make(BROADCAST, root=0, op=99), False),
    ],
)
def test_a_rank_that_has_joined_takes_part_in_what_zeros_do_not_change(request_: OperationRequest, runs: bool) -> None:
    script = Script(2)
    script.announce(1, join())
    script.announce(0, request_)
    script.flush()
    assert script.names_run(0) == script.names_run(1) == ([["w"]] if runs else [])
    assert len(script.failures(0)) == (not runs)
    script.announce(0, join())
    script.flush()
    assert script.sent[1][-1] == RunOperations(0, (AgreedOperation(0, "join", row_counts=(0,)),))


def test_a_rank_that_had_joined_has_to_announce_in_full_what_others_changed_meanwhile() -> None:
    script = Script(2)
    script.announce_all(allreduce("w", (4,)))
    number = script.id_of("w")
    script.announce(1, join())
    script.announce(0, allreduce("w", (8,)))
    script.flush()
    script.announce(0, join())
    script.flush()
    script.announce(1, known=[number])
    script.flush()
    assert script.sent[1][-1] == UnknownOperationId(number)
    script.announce(1, allreduce("w", (8,)))
    script.announce(0, known=[number])
    script.flush()
    assert isinstance(script.sent[0][-1], RunOperations) and isinstance(script.sent[1][-1], RunOperations)


def test_a_join_in_one_group_does_not_reach_another() -> None:
    script = Script(2)
    script.negotiator.add_group((0, 1))
    script.announce(1, join(group=1))
    script.announce(0, allreduce("w"), allreduce("v", group=1))
    script.flush()
    assert script.names_run(0) == [["v"]]


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


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=unequal_work())
def test_whatever_some_rank_announced_runs_once_on_all_before_the_join_does(
    events: list[tuple[int, OperationRequest | None]],
) -> None:
    script = Script(3, fusion_bytes=40)
    for rank, request in events:
        if request is None:
            script.flush()
        else:
            script.announce(rank, request)
    script.flush()
    announced = {request.name for _, request in events if request is not None} - {"join"}
    assert script.names_run(0) == script.names_run(1) == script.names_run(2)
    ran = [name for run in script.names_run(0) for name in run]
    assert ran[-1] == "join"
    assert sorted(ran[:-1]) == sorted(announced)
    for rank in range(3):
        runs = [message for message in script.sent[rank] if isinstance(message, RunOperations)]
        filled = {item.name for run in runs for item in run.operations if item.request is not None}
        assert filled == announced - {request.name for other, request in events if request and other == rank}


# --- stragglers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times_ns", "stragglers"),
    [
        ([(rank, 5 * MS + rank * (MIN_STRAGGLER_DELAY_NS // 3)) for rank in range(3)], ()),
        ([(1, 10 * MS), (0, 12 * MS), (2, 30 * MS)], ((2, 0), (0, 18 * MS), (1, 20 * MS))),
    ],
    ids=["together", "far apart"],
)
def test_the_late_are_told_with_how_far_they_were_behind(
    times_ns: list[tuple[int, int]], stragglers: tuple[tuple[int, int], ...]
) -> None:
    script = Script(3)
    for rank, now_ns in times_ns:
        script.announce(rank, allreduce("w"), now_ns=now_ns)
    script.flush()
    assert [script.runs(rank)[-1].stragglers for rank in range(3)] == [stragglers] * 3


def test_of_what_travels_together_the_last_announcement_counts() -> None:
    script = Script(2)
    script.announce(0, allreduce("a"), now_ns=10 * MS)
    script.announce(1, allreduce("b"), now_ns=11 * MS)
    script.announce(0, allreduce("b"), now_ns=12 * MS)
    script.announce(1, allreduce("a"), now_ns=20 * MS)
    script.flush()
    assert script.names_run(0) == [["b", "a"]]
    assert script.runs(0)[-1].stragglers == ((1, 0), (0, 8 * MS))


def test_of_many_only_the_last_are_told() -> None:
    script = Script(3 * MAX_STRAGGLERS)
    for rank in range(script.size):
        script.announce(rank, make(ALLGATHER), now_ns=rank * MS)
    script.flush()
    assert [rank for rank, _ in script.runs(0)[-1].stragglers] == list(
        range(script.size - 1, script.size - 1 - MAX_STRAGGLERS, -1)
    )


def test_who_has_joined_is_never_late() -> None:
    script = Script(3)
    script.announce(2, join(), now_ns=1 * MS)
    script.announce(0, allreduce("w"), now_ns=10 * MS)
    script.announce(1, allreduce("w"), now_ns=30 * MS)
    script.flush()
    for rank in range(3):
        assert script.runs(rank)[-1].stragglers == ((1, 0), (0, 20 * MS))
