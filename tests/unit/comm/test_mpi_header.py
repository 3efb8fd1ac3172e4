"""Members compare what they ask for before any data moves."""

from __future__ import annotations

import pytest

from ronde.comm.backends.mpi.matching import HEADER_BYTES, CallHeader, match_collective, match_pair
from ronde.comm.call import Call, Span
from ronde.errors import Mismatch
from ronde.types import DType, Op, OperationKind

SUM = Call(
    OperationKind.ALLREDUCE,
    DType.FLOAT32,
    Op.SUM,
    (Span(0, 0, 3), Span(0, 0, 4)),
    description="allreduce float32[7]",
    signature_hash=9,
)
JOIN = Call(OperationKind.JOIN, description="join")


def together(*calls: Call) -> bytes:
    return b"".join(CallHeader.from_call(call).encode() for call in calls)


def changed(call: Call, **fields: object) -> Call:
    return Call(**{name: getattr(call, name) for name in call.__struct_fields__} | fields)


def test_a_header_survives_the_way() -> None:
    header = CallHeader.from_call(changed(SUM, prescale=0.1, description="w" * 300))
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert CallHeader.decode(data).compared_fields() == header.compared_fields()
    assert CallHeader.decode(data).description == "w" * 127


def test_a_text_cut_inside_a_character_is_still_text() -> None:
    assert CallHeader.decode(CallHeader.from_call(changed(SUM, description="ä" * 100)).encode()).description.startswith(
        "ä" * 63
    )


def test_members_that_ask_for_the_same_agree() -> None:
    found = match_collective(together(SUM, changed(SUM, description="in other words")), (0, 1))
    assert found is not None and (found.kind, found.count) == (OperationKind.ALLREDUCE, 7)


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
    with pytest.raises(Mismatch, match=r"rank 7: something else") as error:
        match_collective(together(SUM, changed(SUM, description="something else", **other), SUM), (5, 7, 8))
    assert "ranks 5, 8: allreduce float32[7]" in str(error.value)


def test_members_may_give_and_get_different_numbers_in_an_alltoall() -> None:
    x, y = (Call(OperationKind.ALLTOALL, spans=(Span(0, 0, n),), counts=(n, 0), splits=(0, n)) for n in (1, 2))
    assert match_collective(together(x, y), (0, 1)) is not None


def test_members_must_know_the_same_counts_of_an_allgather() -> None:
    x, y = (Call(OperationKind.ALLGATHER, spans=(Span(0, 0, 1),), counts=(1, n), description=f"[{n}]") for n in (1, 2))
    with pytest.raises(Mismatch):
        match_collective(together(x, y), (0, 1))


def test_who_has_joined_learns_what_the_others_do() -> None:
    found = match_collective(together(JOIN, SUM, JOIN), (0, 1, 2))
    assert found is not None
    call = found.to_call()
    assert (call.kind, call.dtype, call.op, found.count) == (OperationKind.ALLREDUCE, DType.FLOAT32, Op.SUM, 7)


def test_all_have_joined() -> None:
    assert match_collective(together(JOIN, JOIN), (0, 1)) is None


def test_who_has_joined_takes_part_in_nothing_but_allreduce() -> None:
    with pytest.raises(Mismatch, match="rank 0: join; rank 1: barrier"):
        match_collective(together(JOIN, Call(OperationKind.BARRIER)), (0, 1))


def test_a_sender_and_a_receiver_must_mean_the_same_data() -> None:
    send = CallHeader.from_call(
        Call(OperationKind.SEND, DType.INT8, spans=(Span(0, 0, 2),), peer=1, description="send int8[2]")
    )
    receive = CallHeader.from_call(Call(OperationKind.RECEIVE, DType.INT8, spans=(Span(0, 0, 2),), peer=0))
    longer = CallHeader.from_call(
        Call(OperationKind.RECEIVE, DType.INT8, spans=(Span(0, 0, 3),), peer=0, description="receive int8[3]")
    )
    match_pair((3, send), (1, receive))
    with pytest.raises(Mismatch, match=r"rank 1: receive int8\[3\]; rank 3: send int8\[2\]"):
        match_pair((3, send), (1, longer))
