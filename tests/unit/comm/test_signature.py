"""What members ask for, in words and as a number that is the same in every process."""

from __future__ import annotations

import pytest

from ronde.comm.signature import TEXT_LIMIT, Forms, Options, digest, mismatch
from ronde.types import DType, Kind, Op


@pytest.mark.parametrize(
    ("kind", "shapes", "options", "text"),
    [
        (Kind.ALLREDUCE, ((2, 3),), Options("mean"), "allreduce mean float32[2, 3]"),
        (Kind.ALLREDUCE, ((),), Options("max", 0.5, 2), "allreduce max float32[] prescale 0.5 postscale 2.0"),
        (Kind.ALLREDUCE, ((1,), (2,)), Options(), "allreduce sum float32[1] [2]"),
        (Kind.ALLGATHER, ((5, 3),), Options(), "allgather float32[*, 3]"),
        (Kind.BROADCAST, ((4,),), Options(root=2), "broadcast float32[4] from rank 2"),
        (Kind.BARRIER, (), Options(), "barrier"),
    ],
)
def test_a_form_says_what_is_asked_for(
    kind: Kind, shapes: tuple[tuple[int, ...], ...], options: Options, text: str
) -> None:
    assert Forms().find(kind, DType.FLOAT32, shapes, options).text == text


def test_the_number_is_the_same_in_every_process() -> None:
    assert digest("allreduce sum float32[3]") == 0x62F35C2A10A46FB
    assert digest("a") != digest("b")


def test_a_form_is_made_once() -> None:
    forms = Forms()
    first = forms.find(Kind.ALLREDUCE, DType.INT32, ((3,),), Options())
    assert forms.find(Kind.ALLREDUCE, DType.INT32, ((3,),), Options()) is first
    assert forms.find(Kind.ALLREDUCE, DType.INT32, ((4,),), Options()) is not first
    assert first.num_bytes == 12


def test_rows_that_may_differ_are_no_part_of_the_number() -> None:
    forms = Forms()
    some, more = (forms.find(Kind.ALLGATHER, DType.INT32, ((rows, 2),), Options()) for rows in (1, 9))
    assert some.signature == more.signature and some is not more
    wider = forms.find(Kind.ALLGATHER, DType.INT32, ((1, 3),), Options())
    assert wider.signature != some.signature


def test_texts_that_were_cut_still_differ() -> None:
    forms = Forms()
    shapes = tuple((index,) for index in range(100))
    one = forms.find(Kind.ALLREDUCE, DType.FLOAT32, shapes, Options())
    other = forms.find(Kind.ALLREDUCE, DType.FLOAT32, (*shapes[:-1], (7,)), Options())
    assert one.text != other.text
    assert len(one.text.encode()) <= TEXT_LIMIT + 2


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        (DType.BOOL, Options("mean"), "bool has no mean"),
        (DType.BOOL, Options("sum", 2.0), "cannot be scaled"),
        (DType.INT32, Options("adasum"), "adasum is for allreduce of floating-point numbers"),
        (DType.FLOAT32, Options("average"), "op must be one of sum, mean"),
        (DType.FLOAT32, Options("sum", float("nan")), "prescale must be a finite number"),
        (DType.FLOAT32, Options("sum", 1.0, float("inf")), "postscale must be a finite number"),
    ],
)
def test_what_makes_no_sense_is_refused(dtype: DType, options: Options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Forms().find(Kind.ALLREDUCE, dtype, ((3,),), options)


def test_adasum_is_for_allreduce_only() -> None:
    with pytest.raises(ValueError, match="reduce_scatter: adasum is for allreduce"):
        Forms().find(Kind.REDUCE_SCATTER, DType.FLOAT32, ((3,),), Options(Op.ADASUM))


def test_a_mismatch_puts_equal_answers_together() -> None:
    error = mismatch({0: "barrier", 1: "allreduce", 2: "barrier"})
    assert str(error) == "the members asked for different things: ranks 0, 2: barrier; rank 1: allreduce"


def test_a_mismatch_says_what_who_has_joined_can_do() -> None:
    error = mismatch({0: "allgather float32[*]", 1: "join"})
    assert str(error).endswith("rank 1: join; who calls join() takes part in allreduce only")
