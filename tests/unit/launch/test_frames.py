"""Frames: whatever is sent comes out whole and equal, and nothing else comes out."""

from __future__ import annotations

import msgspec
import pytest

from ronde.errors import ProtocolError
from ronde.launch.frames import MARK, NOISE_BYTES, encode_frame, from_agent, from_driver
from ronde.launch.messages import (
    Beat,
    Exited,
    Failed,
    FromAgent,
    FromDriver,
    Hello,
    Input,
    Launch,
    Load,
    Output,
    Probe,
    Probed,
    Quit,
    RankOrder,
    Resize,
    Result,
    Signal,
    Started,
)

ORDERS: list[FromDriver] = [
    Launch((RankOrder(3, ("python", "train.py"), {"A": "ä"}, "/", cpus=(1, 2), progress=True, call=b"\0\xff"),)),
    Signal((0, 1), 15),
    Input(0, b"\x03"),
    Resize(0, 50, 132),
    Probe("k", (("a:1", "b:2"), ()), 1.5, 2),
    Beat(30.0),
    Quit(),
]
REPORTS: list[FromAgent] = [
    Hello("0.1.0", "3.12.1", "here", 7, 2, (0, 1), ("10.0.0.1",)),
    Probed((("a:1",), ()), ("", "no route"), (29500,)),
    Started(0, 42),
    Failed(-1, "no"),
    Output(0, "err", b"\xff\0\r\n"),
    Result(0, b"x" * 100_000),
    Exited(0, -9, "the host ran out of memory"),
    Load(((0, 0.5, 1024),), ((0.9, 5),)),
]


def test_every_order_arrives_as_it_was_sent() -> None:
    assert from_driver().feed(b"".join(map(encode_frame, ORDERS))) == ORDERS


def test_every_report_arrives_as_it_was_sent_however_it_is_cut() -> None:
    data = MARK + b"".join(map(encode_frame, REPORTS))
    for size in (1, 7, 4096, len(data)):
        reader = from_agent()
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        assert [message for part in parts for message in reader.feed(part)] == REPORTS


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_what_a_shell_says_before_the_agent_is_skipped_and_kept(size: int) -> None:
    noise = b"Welcome to the cluster!\r\n\0ronde? " + b"." * 5000 + b"the end"
    data = noise + MARK + encode_frame(REPORTS[0])
    reader = from_agent()
    messages = [m for start in range(0, len(data), size) for m in reader.feed(data[start : start + size])]
    assert messages == REPORTS[:1]
    assert reader.noise == noise[-NOISE_BYTES:]


def test_what_a_shell_says_instead_of_the_agent_is_kept() -> None:
    reader = from_agent()
    assert reader.feed(b"sh: python: not found\n" + b" " * len(MARK)) == []
    assert b"not found" in reader.noise


def test_a_later_hello_can_still_be_read() -> None:
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(REPORTS[0])), "more", 1])
    assert from_agent().feed(MARK + len(longer).to_bytes(4, "big") + longer) == REPORTS[:1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode(["Unknown", 1]),
        msgspec.msgpack.encode(["Signal", [0], "nine"]),
        msgspec.msgpack.encode(["Signal", [0], 9, "more"]),
        msgspec.msgpack.encode(["Started", 0, 1]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        from_driver().feed(len(data).to_bytes(4, "big") + data)


def test_a_message_that_fits_into_no_frame_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.launch.frames.LIMIT_BYTES", 1000)
    with pytest.raises(ProtocolError, match=r"Result takes 10\d\d bytes, more than .* pass large data by file"):
        encode_frame(Result(0, b"x" * 1001))
