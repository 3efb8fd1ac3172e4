"""Messages that travel together come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.errors import ProtocolError
from ronde.ps.protocol import (
    MAX_BATCH,
    OutgoingMessage,
    PartStaged,
    PartValues,
    Ping,
    ServerMessage,
    StagePart,
    make_batches,
    split_batch,
)


def make_message(to: int, kind: int, number: int) -> OutgoingMessage:
    if kind == 0:
        return OutgoingMessage(to, Ping(number))
    if kind == 1:
        return OutgoingMessage(to, PartStaged(1, number, 0))
    if kind == 2:
        return OutgoingMessage(to, PartValues(1, 1, number, 1), np.zeros(0, np.float64))
    return OutgoingMessage(to, StagePart(1, 1, 1, number), np.full(3, number, np.float32))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40), st.integers(0, 2 * MAX_BATCH))
def test_each_member_gets_its_messages_in_order_and_each_with_its_array(
    chosen: list[tuple[int, int]], num_more: int
) -> None:
    kinds = [*chosen, *[(0, 0)] * num_more]
    messages = [make_message(to, kind, number) for number, (to, kind) in enumerate(kinds)]
    received: dict[int, list[tuple[ServerMessage, float | None]]] = {}
    for to, header, payload in make_batches(messages):
        batch = split_batch(header, payload)
        assert len(batch) <= MAX_BATCH
        received.setdefault(to, []).extend(
            (message, None if array is None else float(array.sum())) for message, array in batch
        )
    for to in range(3):
        expected = [
            (each.message, None if each.payload is None else float(each.payload.sum()))
            for each in messages
            if each.to == to
        ]
        assert received.get(to, []) == expected


def test_the_commit_travels_with_the_last_part() -> None:
    messages = [make_message(1, 3, 0), make_message(1, 3, 1), make_message(1, 0, 2)]
    assert [len(split_batch(header, payload)) for _, header, payload in make_batches(messages)] == [1, 2]


def test_what_no_ronde_sends_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no ronde of this version sends"):
        split_batch(b"\x93\x01\x02\x03", None)
