"""Signatures: what members ask for, in words and as a hash that is the same in every process."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.call import (
    MAX_DESCRIPTION_BYTES,
    CallOptions,
    Shapes,
    Signature,
    describe_named,
    get_signature,
    mismatch_error,
)
from ronde.types import JOINABLE, DType, Op, OperationKind

ALLREDUCE = OperationKind.ALLREDUCE
DEFAULTS = CallOptions()


def make(
    kind: OperationKind, shapes: Shapes, options: CallOptions = DEFAULTS, dtype: DType = DType.FLOAT32
) -> Signature:
    return get_signature(kind, dtype, shapes, options)


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "text"),
    [
        (ALLREDUCE, ((2, 3),), CallOptions("mean"), "allreduce mean float32[2, 3]"),
        (ALLREDUCE, ((),), CallOptions("max", 0.5, 2), "allreduce max float32[] prescale 0.5 postscale 2.0"),
        (ALLREDUCE, ((1,), (2,)), CallOptions(), "allreduce sum float32[1] [2]"),
        (OperationKind.ALLGATHER, ((5, 3),), CallOptions(), "allgather float32[*, 3]"),
        (OperationKind.BROADCAST, ((4,),), CallOptions(root=2), "broadcast float32[4] from rank 2"),
        (OperationKind.REDUCE, ((4,),), CallOptions("max", root=1), "reduce max float32[4] to rank 1"),
        (OperationKind.GATHER, ((4, 2),), CallOptions(root=2), "gather float32[*, 2] to rank 2"),
        (OperationKind.SCATTER, ((4, 2),), CallOptions(root=0), "scatter float32[*, 2] from rank 0"),
        (OperationKind.BARRIER, (), CallOptions(), "barrier"),
    ],
)
def test_a_signature_describes_what_is_asked_for(
    kind: OperationKind, shapes: Shapes, options: CallOptions, text: str
) -> None:
    assert make(kind, shapes, options).description == text


def test_numbers_of_numpy_are_the_same_as_pythons_and_kept_as_these() -> None:
    numbers = np.array([713, 3, 2])
    signature = make(OperationKind.BROADCAST, (tuple(numbers[:2]),), CallOptions(root=numbers[2]))
    assert make(OperationKind.BROADCAST, ((713, 3),), CallOptions(root=2)) is signature
    assert [type(number) for number in (*signature.shapes[0], signature.root)] == [int] * 3
    assert signature.description == "broadcast float32[713, 3] from rank 2"


def test_a_signature_is_made_once_and_its_hash_is_the_same_in_every_process() -> None:
    first = make(ALLREDUCE, ((3,),))
    assert make(ALLREDUCE, ((3,),)) is first and first.num_bytes == 12
    assert first.hash == 0x62F35C2A10A46FB
    # The rows may differ where members may give different numbers of them.
    some, more, wider = (make(OperationKind.ALLGATHER, (shape,)) for shape in ((1, 2), (9, 2), (1, 3)))
    assert some.hash == more.hash != wider.hash


def test_descriptions_that_were_cut_still_differ() -> None:
    shapes = tuple((index,) for index in range(100))
    one, other = make(ALLREDUCE, shapes), make(ALLREDUCE, (*shapes[:-1], (7,)))
    assert one.description != other.description
    assert len(one.description.encode()) <= MAX_DESCRIPTION_BYTES + 2


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "words"),
    [
        (ALLREDUCE, DType.BOOL, CallOptions("mean"), "bool has no mean"),
        (ALLREDUCE, DType.BOOL, CallOptions("sum", 2.0), "cannot be scaled"),
        (ALLREDUCE, DType.INT32, CallOptions("adasum"), "adasum is for allreduce of floating-point numbers"),
        (ALLREDUCE, DType.FLOAT32, CallOptions("bit_and"), "bit_and is for whole numbers and bool, got float32"),
        (ALLREDUCE, DType.INT8, CallOptions("bit_and", 2.0), "bit_and cannot be scaled"),
        (ALLREDUCE, DType.FLOAT32, CallOptions("average"), "op must be one of sum, mean"),
        (ALLREDUCE, DType.FLOAT32, CallOptions("sum", float("nan")), "prescale must be a finite number"),
        (ALLREDUCE, DType.FLOAT32, CallOptions("sum", 1.0, float("inf")), "postscale must be a finite number"),
        (
            OperationKind.REDUCE_SCATTER,
            DType.FLOAT32,
            CallOptions(Op.ADASUM),
            "reduce_scatter: adasum is for allreduce",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kind: OperationKind, dtype: DType, options: CallOptions, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(kind, ((3,),), options, dtype)


@pytest.mark.parametrize(
    ("asked", "joined", "words"),
    [
        ({0: "barrier", 1: "allreduce", 2: "barrier"}, (), "ranks 0, 2: barrier; rank 1: allreduce"),
        ({0: "gather", 1: "join"}, (1,), f"rank 0: gather; rank 1: join; who calls join() takes part {JOINABLE}"),
    ],
)
def test_a_mismatch_puts_equal_answers_together(asked: dict[int, str], joined: tuple[int, ...], words: str) -> None:
    error = mismatch_error(asked, joined)
    assert str(error) == f"the members asked for different things: {words}" and error.joined == joined


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "words"),
    [
        (ALLREDUCE, ((3, 4),), CallOptions("max"), "allreduce 'w' max float32[3, 4]"),
        (OperationKind.GATHER, ((3, 4),), CallOptions(root=2), "gather 'w' float32[*, 4] to rank 2"),
        (OperationKind.BARRIER, (), CallOptions(), "barrier 'w'"),
        (ALLREDUCE, ((1,),) * 99, CallOptions(), f"allreduce 'w' sum float32[1]{' [1]' * 26} …"),
    ],
)
def test_an_operation_with_a_name_is_described_with_it(
    kind: OperationKind, shapes: Shapes, options: CallOptions, words: str
) -> None:
    assert describe_named(make(kind, shapes, options), "w") == words
