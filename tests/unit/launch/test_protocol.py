"""Frames: whatever is sent comes out whole and equal, and nothing else comes out."""

from __future__ import annotations

import msgspec
import pytest

from ronde.errors import ProtocolError
from ronde.launch.protocol import (
    MAX_TEXT_BEFORE_PREAMBLE_BYTES,
    PREAMBLE,
    AgentError,
    AgentHello,
    AgentMessage,
    DriverHeartbeat,
    DriverMessage,
    ExitReason,
    FunctionResult,
    PauseOutput,
    PortCounts,
    ProbeReply,
    ProbeRequest,
    RankExit,
    RankInput,
    RankOrder,
    RankOutput,
    RankStarted,
    ResizeTerminal,
    SignalRanks,
    StartRanks,
    StopAgent,
    UsageReport,
    encode_frame,
    make_agent_message_reader,
    make_driver_message_reader,
)

ORDERS: list[DriverMessage] = [
    StartRanks((RankOrder(3, ("python", "train.py"), {"A": "ä"}, "/", cpus=(1, 2), output_ptys=True),), b"\0\xff"),
    SignalRanks((0, 1), 15),
    RankInput(0, b"\x03"),
    ResizeTerminal(0, 50, 132),
    ProbeRequest("k", (("a:1", "b:2"), ()), 1.5, PortCounts(2, 3)),
    PauseOutput(True),
    DriverHeartbeat(30.0),
    StopAgent(),
]
REPORTS: list[AgentMessage] = [
    AgentHello("0.1.0", "3.12.1", "here", (0, 1), 2),
    ProbeReply((("a:1",), ()), ("", "no route"), (29500,)),
    RankStarted(0, 42),
    AgentError("its disk is full"),
    RankOutput(0, "err", b"\xff\0\r\n"),
    FunctionResult(0, b"x" * 100_000),
    RankExit(0, -9, ExitReason.OOM_KILLED),
    UsageReport(((0, 0.5, 1024),), ((0.9, 5),)),
]


def test_every_order_arrives_as_it_was_sent() -> None:
    assert make_driver_message_reader().feed(b"".join(map(encode_frame, ORDERS))) == ORDERS


def test_every_report_arrives_as_it_was_sent_however_it_is_cut() -> None:
    data = PREAMBLE + b"".join(map(encode_frame, REPORTS))
    for size in (1, 7, 4096, len(data)):
        reader = make_agent_message_reader()
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        assert [message for part in parts for message in reader.feed(part)] == REPORTS


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_what_a_shell_says_before_the_agent_or_instead_of_it_is_skipped_and_kept(size: int) -> None:
    noise = b"Welcome to the cluster!\r\n\0ronde? " + b"." * 5000 + b"the end"
    data = noise + PREAMBLE + encode_frame(REPORTS[0])
    reader, silent = make_agent_message_reader(), make_agent_message_reader()
    assert [m for start in range(0, len(data), size) for m in reader.feed(data[start : start + size])] == REPORTS[:1]
    assert not [m for start in range(0, len(noise), size) for m in silent.feed(noise[start : start + size])]
    for kept in (reader.text_before_preamble, silent.text_before_preamble):
        assert noise.endswith(kept) and len(kept) > MAX_TEXT_BEFORE_PREAMBLE_BYTES - len(PREAMBLE)


def test_a_later_hello_can_still_be_read() -> None:
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(REPORTS[0])), "more", 1])
    assert make_agent_message_reader().feed(PREAMBLE + len(longer).to_bytes(4, "big") + longer) == REPORTS[:1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode(["Unknown", 1]),
        msgspec.msgpack.encode(["SignalRanks", [0], "nine"]),
        msgspec.msgpack.encode(["SignalRanks", [0], 9, "more"]),
        msgspec.msgpack.encode(["RankStarted", 0, 1]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_order_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message"):
        make_driver_message_reader().feed(len(data).to_bytes(4, "big") + data)


def test_a_message_that_fits_into_no_frame_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.launch.protocol.MAX_FRAME_BYTES", 1000)
    with pytest.raises(ProtocolError, match=r"Result takes 10\d\d bytes, more than .* pass large data by file"):
        encode_frame(FunctionResult(0, b"x" * 1001))
