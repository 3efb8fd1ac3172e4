"""Members compare what they ask for before any data moves."""

from __future__ import annotations

import pytest

from ronde.comm.backend import Call, Part
from ronde.comm.mpi.header import HEADER_BYTES, Header, agreed, check_pair
from ronde.errors import Mismatch
from ronde.types import DType, Kind, Op

SUM = Call(
    Kind.ALLREDUCE, DType.FLOAT32, Op.SUM, (Part(0, 0, 3), Part(0, 0, 4)), text="allreduce float32[7]", signature=9
)
JOIN = Call(Kind.JOIN, text="join")


def together(*calls: Call) -> bytes:
    return b"".join(Header.of(call).encode() for call in calls)


def changed(call: Call, **fields: object) -> Call:
    return Call(**{name: getattr(call, name) for name in call.__struct_fields__} | fields)


def test_a_header_survives_the_way() -> None:
    header = Header.of(changed(SUM, prescale=0.1, text="w" * 300))
    data = header.encode()
    assert len(data) == HEADER_BYTES
    assert Header.decode(data).numbers() == header.numbers()
    assert Header.decode(data).text == "w" * 127


def test_a_text_cut_inside_a_character_is_still_text() -> None:
    assert Header.decode(Header.of(changed(SUM, text="ä" * 100)).encode()).text.startswith("ä" * 63)


def test_members_that_ask_for_the_same_agree() -> None:
    found = agreed(together(SUM, changed(SUM, text="in other words")), (0, 1))
    assert found is not None and (found.kind, found.count) == (Kind.ALLREDUCE, 7)


@pytest.mark.parametrize(
    "other",
    [
        {"kind": Kind.BARRIER},
        {"dtype": DType.INT32},
        {"op": Op.MAX},
        {"parts": (Part(0, 0, 8),)},
        {"signature": 10},
        {"prescale": 2.0},
        {"postscale": 2.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_difference_in_anything_is_a_mismatch_that_names_both_sides(other: dict[str, object]) -> None:
    with pytest.raises(Mismatch, match=r"rank 7: something else") as error:
        agreed(together(SUM, changed(SUM, text="something else", **other), SUM), (5, 7, 8))
    assert "ranks 5, 8: allreduce float32[7]" in str(error.value)


def test_members_may_give_and_get_different_numbers_in_an_alltoall() -> None:
    x, y = (Call(Kind.ALLTOALL, parts=(Part(0, 0, n),), counts=(n, 0), splits=(0, n)) for n in (1, 2))
    assert agreed(together(x, y), (0, 1)) is not None


def test_members_must_know_the_same_counts_of_an_allgather() -> None:
    x, y = (Call(Kind.ALLGATHER, parts=(Part(0, 0, 1),), counts=(1, n), text=f"[{n}]") for n in (1, 2))
    with pytest.raises(Mismatch):
        agreed(together(x, y), (0, 1))


def test_who_has_joined_learns_what_the_others_do() -> None:
    found = agreed(together(JOIN, SUM, JOIN), (0, 1, 2))
    assert found is not None
    call = found.call()
    assert (call.kind, call.dtype, call.op, found.count) == (Kind.ALLREDUCE, DType.FLOAT32, Op.SUM, 7)


def test_all_have_joined() -> None:
    assert agreed(together(JOIN, JOIN), (0, 1)) is None


def test_who_has_joined_takes_part_in_nothing_but_allreduce() -> None:
    with pytest.raises(Mismatch, match="rank 0: join; rank 1: barrier"):
        agreed(together(JOIN, Call(Kind.BARRIER)), (0, 1))


def test_a_sender_and_a_receiver_must_mean_the_same_data() -> None:
    send = Header.of(Call(Kind.SEND, DType.INT8, parts=(Part(0, 0, 2),), peer=1, text="send int8[2]"))
    receive = Header.of(Call(Kind.RECEIVE, DType.INT8, parts=(Part(0, 0, 2),), peer=0))
    longer = Header.of(Call(Kind.RECEIVE, DType.INT8, parts=(Part(0, 0, 3),), peer=0, text="receive int8[3]"))
    check_pair((3, send), (1, receive))
    with pytest.raises(Mismatch, match=r"rank 1: receive int8\[3\]; rank 3: send int8\[2\]"):
        check_pair((3, send), (1, longer))
