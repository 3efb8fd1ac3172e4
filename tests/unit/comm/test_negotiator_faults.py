"""Members that ask for different things under one name: one clear error, the same on all of them."""

from __future__ import annotations

import pytest

from ronde.coordinator.negotiation import Negotiator
from ronde.net.messages import AnnounceOperations, OperationRejected, OperationRequest, RunOperations
from ronde.types import DType, Op, OperationKind

F32, I32, BOOL = DType.FLOAT32, DType.INT32, DType.BOOL


def make(
    kind: OperationKind, *shapes: tuple[int, ...], dtype: int = F32, name: str = "w", **options: object
) -> OperationRequest:
    return OperationRequest(0, name, kind, dtype, shapes or ((4, 2),), **options)  # type: ignore[arg-type]


def negotiate(*requests: OperationRequest) -> list[RunOperations | OperationRejected]:
    """One request per rank; returns what rank 0 is told, after checking that all are told the same."""
    negotiator = Negotiator(len(requests), fusion_bytes=0)
    for rank, request in enumerate(requests):
        negotiator.announce(rank, AnnounceOperations((request,)), 0)
    sends = negotiator.take_sends()
    assert all(send.ranks == tuple(range(len(requests))) for send in sends)
    return [send.message for send in sends if isinstance(send.message, RunOperations | OperationRejected)]


def why(*requests: OperationRequest) -> str:
    [failed] = negotiate(*requests)
    assert isinstance(failed, OperationRejected)
    assert (failed.group, failed.name) == (requests[0].group, requests[0].name)
    return failed.reason


def rows(*requests: OperationRequest) -> tuple[int, ...] | None:
    [run] = negotiate(*requests)
    assert isinstance(run, RunOperations)
    return run.operations[0].row_counts


def test_equal_answers_of_several_ranks_are_told_together() -> None:
    one, other = make(OperationKind.ALLREDUCE, (3, 4)), make(OperationKind.ALLREDUCE, (3, 5))
    assert why(one, other, one) == (
        "allreduce 'w': ranks disagree on shape: ranks 0, 2 gave (3, 4); rank 1 gave (3, 5)"
    )


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            make(OperationKind.ALLREDUCE),
            make(OperationKind.ALLGATHER),
            "what it is: rank 0 gave allreduce; rank 1 gave allgather",
        ),
        (
            make(OperationKind.ALLREDUCE),
            make(OperationKind.ALLREDUCE, dtype=I32),
            "dtype: rank 0 gave float32; rank 1 gave int32",
        ),
        (
            make(OperationKind.ALLREDUCE),
            make(OperationKind.ALLREDUCE, op=Op.MAX),
            "op: rank 0 gave sum; rank 1 gave max",
        ),
        (
            make(OperationKind.ALLREDUCE),
            make(OperationKind.ALLREDUCE, prescale=0.5),
            "prescale: rank 0 gave 1.0; rank 1 gave 0.5",
        ),
        (
            make(OperationKind.ALLREDUCE),
            make(OperationKind.ALLREDUCE, postscale=2.0),
            "postscale: rank 0 gave 1.0; rank 1 gave 2.0",
        ),
        (
            make(OperationKind.ALLREDUCE, (1,), (2,), (3,)),
            make(OperationKind.ALLREDUCE, (1,), (2, 1), (3, 1)),
            "the shape of array 1: rank 0 gave (2,); rank 1 gave (2, 1)",
        ),
        (
            make(OperationKind.ALLREDUCE, (1,), (2,)),
            make(OperationKind.ALLREDUCE, (1,)),
            "the number of arrays: rank 0 gave 2; rank 1 gave 1",
        ),
        (
            make(OperationKind.ALLGATHER, (3, 4)),
            make(OperationKind.ALLGATHER, (9, 5)),
            "shape: rank 0 gave (*, 4); rank 1 gave (*, 5)",
        ),
        (
            make(OperationKind.ALLTOALL, (2, 4)),
            make(OperationKind.ALLTOALL, (2,)),
            "shape: rank 0 gave (*, 4); rank 1 gave (*)",
        ),
        (
            make(OperationKind.BROADCAST, root=0),
            make(OperationKind.BROADCAST, root=1),
            "root: rank 0 gave 0; rank 1 gave 1",
        ),
        (
            make(OperationKind.BROADCAST, root=0),
            make(OperationKind.BROADCAST, (4,), root=0),
            "shape: rank 0 gave (4, 2); rank 1 gave (4,)",
        ),
        (
            make(OperationKind.REDUCE_SCATTER),
            make(OperationKind.REDUCE_SCATTER, op=Op.MIN),
            "op: rank 0 gave sum; rank 1 gave min",
        ),
        (
            make(OperationKind.ALLREDUCE, dtype=99),
            make(OperationKind.ALLREDUCE),
            "dtype: rank 0 gave dtype 99; rank 1 gave float32",
        ),
    ],
)
def test_a_difference_is_told_with_what_each_gave(one: OperationRequest, other: OperationRequest, words: str) -> None:
    assert why(one, other).endswith(f"ranks disagree on {words}")


BOOL_RULE = "bool has no mean and cannot be scaled; convert it to numbers first"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make(OperationKind.ALLGATHER, ()), "it needs arrays of at least 1 dimension, got a scalar"),
        (make(OperationKind.ALLTOALL, ()), "it needs arrays of at least 1 dimension, got a scalar"),
        (make(OperationKind.REDUCE_SCATTER, ()), "it needs arrays of at least 1 dimension, got a scalar"),
        (make(OperationKind.REDUCE_SCATTER, (2,), (2,)), "it takes one array, got 2"),
        (make(OperationKind.BROADCAST, root=5), "root 5 is not a member (ranks 0, 1)"),
        (make(OperationKind.ALLREDUCE, dtype=BOOL, op=Op.MEAN), BOOL_RULE),
        (make(OperationKind.ALLREDUCE, dtype=BOOL, prescale=0.5), BOOL_RULE),
        (
            make(OperationKind.ALLREDUCE, dtype=I32, op=Op.ADASUM),
            "adasum is for allreduce of floating-point numbers, got int32",
        ),
        (
            make(OperationKind.REDUCE_SCATTER, op=Op.ADASUM),
            "adasum is for allreduce of floating-point numbers, got float32",
        ),
        (make(OperationKind.ALLREDUCE, op=77), "op 77 is not known"),
        (make(OperationKind.ALLREDUCE, dtype=99), "dtype 99 is not known"),
        (make(OperationKind.ALLREDUCE, (-1,)), "a dimension below 0 in (-1,)"),
        (make(OperationKind.SEND), "send is nothing that can be asked for by name"),
        (OperationRequest(0, "w", 99, F32, ((1,),)), "kind 99 is nothing that can be asked for by name"),
        (OperationRequest(0, "w", OperationKind.ALLREDUCE, F32, ()), "no arrays were given"),
        (make(OperationKind.ALLTOALL, (5, 2)), "5 rows are no equal shares for 2 members; give splits"),
        (make(OperationKind.ALLTOALL, (5, 2), splits=(5,)), "splits has 1 entries for 2 members"),
        (make(OperationKind.ALLTOALL, (5, 2), splits=(6, -1)), "splits (6, -1) has an entry below 0"),
        (make(OperationKind.ALLTOALL, (5, 2), splits=(3, 3)), "splits (3, 3) asks for 6 rows of an array with 5"),
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_fails_on_all_members(request_: OperationRequest, words: str) -> None:
    assert why(request_, request_).endswith(f" 'w': {words}")


def test_only_the_ranks_with_a_fault_are_named() -> None:
    good, bad = make(OperationKind.ALLTOALL, (4, 2), splits=(2, 2)), make(OperationKind.ALLTOALL, (4, 2), splits=(4, 4))
    assert why(good, bad) == "alltoall 'w': rank 1: splits (4, 4) asks for 8 rows of an array with 4"


@pytest.mark.parametrize("dtype", [DType.INT64, DType.UINT8])
def test_integers_have_a_mean(dtype: DType) -> None:
    assert rows(make(OperationKind.ALLREDUCE, dtype=dtype, op=Op.MEAN)) is None


def test_a_barrier_needs_no_array() -> None:
    barrier = OperationRequest(0, "here", OperationKind.BARRIER, 0, ())
    assert rows(barrier, barrier) is None


def test_allgather_says_how_many_rows_each_member_gives_of_each_array() -> None:
    assert rows(make(OperationKind.ALLGATHER, (3, 4), (1,)), make(OperationKind.ALLGATHER, (0, 4), (7,))) == (
        3,
        1,
        0,
        7,
    )


def test_alltoall_says_who_gives_how_many_rows_to_whom() -> None:
    shared, split = (
        make(OperationKind.ALLTOALL, (6, 1)),
        make(OperationKind.ALLTOALL, (5, 1), splits=(0, 4)),
    )  # one row stays at home
    assert rows(shared, split) == (3, 3, 0, 4)


def test_rows_follow_a_changed_request() -> None:
    negotiator = Negotiator(2, fusion_bytes=0)
    for given in (1, 2):
        for rank in (0, 1):
            negotiator.announce(rank, AnnounceOperations((make(OperationKind.ALLGATHER, (given, 2)),)), 0)
        [send] = negotiator.take_sends()
        assert isinstance(send.message, RunOperations)
        assert send.message.operations[0].row_counts == (given, given)


def test_after_a_fault_the_name_can_be_used_again() -> None:
    negotiator = Negotiator(2, fusion_bytes=0)
    for shapes in [((1,), (2,)), ((3,), (3,))]:
        for rank in (0, 1):
            negotiator.announce(rank, AnnounceOperations((make(OperationKind.ALLREDUCE, shapes[rank]),)), 0)
        [send] = negotiator.take_sends()
    assert isinstance(send.message, RunOperations)


def test_a_name_announced_again_while_under_way_fails_for_all_when_all_have_come() -> None:
    negotiator = Negotiator(2, fusion_bytes=0)
    negotiator.announce(0, AnnounceOperations((make(OperationKind.ALLREDUCE, (1,)),)), 0)
    negotiator.announce(0, AnnounceOperations((make(OperationKind.ALLREDUCE, (2,)),)), 0)
    assert negotiator.take_sends() == []
    negotiator.announce(1, AnnounceOperations((make(OperationKind.ALLREDUCE, (1,)),)), 0)
    [send] = negotiator.take_sends()
    assert send.ranks == (0, 1)
    assert send.message == OperationRejected(0, "w", "allreduce 'w': rank 0 announced it again while it was under way")


def test_a_very_long_name_is_cut_in_the_error_but_not_in_the_answer() -> None:
    name = "x" * 100_000
    [failed] = negotiate(make(OperationKind.ALLREDUCE, (1,), name=name), make(OperationKind.ALLREDUCE, (2,), name=name))
    assert isinstance(failed, OperationRejected)
    assert failed.name == name
    assert len(failed.reason) < 1000
