"""Signatures: what members ask for, in words and as a hash that is the same in every process."""

from __future__ import annotations

import pytest

from ronde.comm.call import MAX_DESCRIPTION_BYTES, CallOptions, get_signature, hash_signature, mismatch_error
from ronde.types import DType, Op, OperationKind


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "text"),
    [
        (OperationKind.ALLREDUCE, ((2, 3),), CallOptions("mean"), "allreduce mean float32[2, 3]"),
        (
            OperationKind.ALLREDUCE,
            ((),),
            CallOptions("max", 0.5, 2),
            "allreduce max float32[] prescale 0.5 postscale 2.0",
        ),
        (OperationKind.ALLREDUCE, ((1,), (2,)), CallOptions(), "allreduce sum float32[1] [2]"),
        (OperationKind.ALLGATHER, ((5, 3),), CallOptions(), "allgather float32[*, 3]"),
        (OperationKind.BROADCAST, ((4,),), CallOptions(root=2), "broadcast float32[4] from rank 2"),
        (OperationKind.BARRIER, (), CallOptions(), "barrier"),
    ],
)
def test_a_signature_describes_what_is_asked_for(
    kind: OperationKind, shapes: tuple[tuple[int, ...], ...], options: CallOptions, text: str
) -> None:
    assert get_signature(kind, DType.FLOAT32, shapes, options).description == text


def test_the_hash_is_the_same_in_every_process() -> None:
    assert hash_signature("allreduce sum float32[3]") == 0x62F35C2A10A46FB
    assert hash_signature("a") != hash_signature("b")


def test_a_signature_is_made_once() -> None:
    first = get_signature(OperationKind.ALLREDUCE, DType.INT32, ((3,),), CallOptions())
    assert get_signature(OperationKind.ALLREDUCE, DType.INT32, ((3,),), CallOptions()) is first
    assert get_signature(OperationKind.ALLREDUCE, DType.INT32, ((4,),), CallOptions()) is not first
    assert first.num_bytes == 12


def test_rows_that_may_differ_are_no_part_of_the_hash() -> None:
    some, more = (get_signature(OperationKind.ALLGATHER, DType.INT32, ((rows, 2),), CallOptions()) for rows in (1, 9))
    assert some.hash == more.hash and some is not more
    wider = get_signature(OperationKind.ALLGATHER, DType.INT32, ((1, 3),), CallOptions())
    assert wider.hash != some.hash


def test_descriptions_that_were_cut_still_differ() -> None:
    shapes = tuple((index,) for index in range(100))
    one = get_signature(OperationKind.ALLREDUCE, DType.FLOAT32, shapes, CallOptions())
    other = get_signature(OperationKind.ALLREDUCE, DType.FLOAT32, (*shapes[:-1], (7,)), CallOptions())
    assert one.description != other.description
    assert len(one.description.encode()) <= MAX_DESCRIPTION_BYTES + 2


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        (DType.BOOL, CallOptions("mean"), "bool has no mean"),
        (DType.BOOL, CallOptions("sum", 2.0), "cannot be scaled"),
        (DType.INT32, CallOptions("adasum"), "adasum is for allreduce of floating-point numbers"),
        (DType.FLOAT32, CallOptions("average"), "op must be one of sum, mean"),
        (DType.FLOAT32, CallOptions("sum", float("nan")), "prescale must be a finite number"),
        (DType.FLOAT32, CallOptions("sum", 1.0, float("inf")), "postscale must be a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused(dtype: DType, options: CallOptions, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        get_signature(OperationKind.ALLREDUCE, dtype, ((3,),), options)
    with pytest.raises(ValueError, match="reduce_scatter: adasum is for allreduce"):
        get_signature(OperationKind.REDUCE_SCATTER, DType.FLOAT32, ((3,),), CallOptions(Op.ADASUM))


def test_a_mismatch_puts_equal_answers_together() -> None:
    error = mismatch_error({0: "barrier", 1: "allreduce", 2: "barrier"})
    assert str(error) == "the members asked for different things: ranks 0, 2: barrier; rank 1: allreduce"


def test_a_mismatch_says_what_who_has_joined_can_do() -> None:
    error = mismatch_error({0: "allgather float32[*]", 1: "join"})
    assert str(error).endswith("rank 1: join; who calls join() takes part in allreduce only")
