from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ronde.errors import ProtocolError
from ronde.net import messages
from ronde.net.messages import (
    VERSION,
    AbortChannel,
    ActivityReport,
    AgreedOperation,
    AnnounceOperations,
    ArrivalSamples,
    CanShareIds,
    ChangeGroups,
    ChannelAborted,
    CoordinatorMessage,
    EndRound,
    FinishConfirmed,
    GroupsChanged,
    JoinRefused,
    JoinRound,
    LeaveConfirmed,
    LeaveReason,
    LeaveRound,
    MissingRanks,
    MissingRanksQuery,
    OperationRejected,
    OperationRequest,
    ProposeValue,
    RankHeartbeat,
    RankHeartbeatReply,
    RankLost,
    RanksLost,
    RefusalKind,
    RefuseOperation,
    RevokeSharedIds,
    RoundChangeWanted,
    RoundStarted,
    RunOperations,
    SetTracing,
    StackReply,
    StackRequest,
    StallReport,
    TimelineReply,
    TimelineRequest,
    TraceBatch,
    TraceFlushed,
    TrainingFinished,
    UnknownOperationId,
    ValueDecided,
    WaitingTooLong,
    WorkerMessage,
    WorkerMessageDecoder,
    decode_from_coordinator,
    decode_from_worker,
    encode,
)
from ronde.observe.activity import ActivitySample, CurrentOperation
from ronde.observe.stragglers import ArrivalSample
from ronde.types import Member

MEMBER = Member(rank=1, host="b", pid=7, unix_socket="ronde-x", tcp_addresses=("10.0.0.1:5", "[::1]:6"))
REQUEST = OperationRequest(
    group=0, name="loss", kind=1, dtype=10, shapes=((2, 3), ()), op=1, prescale=0.5, splits=(1, 0)
)
CURRENT = CurrentOperation("barrier", 8, (1, 2), is_waiting=False, named_operation=(0, "w"))
READING = ActivitySample(1, 2, 3, 4, 5, 6, waited_for=((1, 7),), current_operation=CURRENT)
ARRIVALS = ArrivalSamples("0.ordered", 0, (ArrivalSample(2**33, 3, 2**62, 5, 4),))
WORKER: list[WorkerMessage] = [
    JoinRound(version=1, size=2, member=MEMBER, groups=((0, 1), (1,)), must_be_equal={"algorithm": "ring"}),
    AnnounceOperations(new=(REQUEST,), known_ids=(3, 2**40)),
    CanShareIds(group=3),
    ChangeGroups(ranks=(0, 2)),
    RankHeartbeat(sent_ns=2**62),
    MissingRanksQuery(group=0, name="loss"),
    RefuseOperation(group=0, name="loss", reason="it runs twice at once"),
    ProposeValue(key="0.epoch 2", value=b"\x00\xff"),
    WaitingTooLong(op="allreduce", group=0, since_ns=1, missing=(1,), call="0.ordered 3", present=(0, 2)),
    StackReply(query_id=3, line="train.py:42", stack="…"),
    TraceBatch(events=(b"{}", b"\xff"), dropped=2),
    TimelineRequest(path="/tmp/t.json", horovod=True),
    TraceFlushed(),
    ActivityReport(activity=READING, arrivals=(ARRIVALS,)),
    AbortChannel("0.ordered", 3, 1, 110, "cut"),
    TrainingFinished(),
    LeaveRound(LeaveReason.FAILED, "ValueError"),
]
COORDINATOR: list[CoordinatorMessage] = [
    RoundStarted(round=1, members=(MEMBER,), timeline="trace.json"),
    JoinRefused(reason="late", kind=RefusalKind.LEFT_BEHIND),
    RoundChangeWanted(reason="worker 4 will join"),
    RunOperations(
        group=0,
        operations=(AgreedOperation(1, "loss"), AgreedOperation(2, "x", REQUEST, (4, 5), 7)),
        stragglers=((1, 0), (0, 5)),
    ),
    OperationRejected(group=0, name="loss", reason="shapes differ", joined=(1, 3)),
    UnknownOperationId(id=9),
    RevokeSharedIds(group=0, ids=(0, 16_383)),
    MissingRanks(group=0, name="loss", ranks=(1, 2)),
    ValueDecided(key="0.epoch 2", value=b"\x00\xff"),
    GroupsChanged(ranks=(0, 2), id=3, reason="no"),
    RankLost(rank=1, reason="killed"),
    RanksLost(((1, "killed"), (2, "PeerLost: rank 1"))),
    ChannelAborted("0.ordered", 5, -1),
    ChannelAborted("0.ordered", 5, 1, 110, reporter=2),
    EndRound(reason="rank 0 left"),
    StackRequest(query_id=3),
    StallReport(op="allreduce", group=0, waited_s=31.5, missing=(1,), report="…"),
    SetTracing(enabled=True, batch_markers=True),
    TimelineReply(reason="no such folder"),
    RankHeartbeatReply(sent_ns=1, coordinator_ns=2),
    FinishConfirmed(),
    LeaveConfirmed(),
]
Decode = Callable[[bytes], object]
DECODERS: list[Decode] = [decode_from_worker, decode_from_coordinator]
EVERY = [(decode_from_worker, message) for message in WORKER] + [(decode_from_coordinator, m) for m in COORDINATOR]
VALID = [encode(message) for _, message in EVERY]


def only_protocol_errors(data: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(data)
        except ProtocolError as error:
            assert len(str(error)) < 500


@pytest.mark.parametrize(("decode", "message"), EVERY, ids=lambda value: type(value).__name__)
def test_a_message_arrives_as_it_was_sent(decode: Decode, message: WorkerMessage | CoordinatorMessage) -> None:
    assert decode(encode(message)) == message


def test_every_message_is_tried_here() -> None:
    assert {type(message) for _, message in EVERY} == {
        *WorkerMessage.__subclasses__(),
        *CoordinatorMessage.__subclasses__(),
    }


@pytest.mark.parametrize(("decode", "message"), EVERY, ids=lambda value: type(value).__name__)
def test_a_message_cut_short_or_grown_is_refused(decode: Decode, message: WorkerMessage | CoordinatorMessage) -> None:
    data = encode(message)
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:end])
    for more in (b"\0", data, data[1:]):
        with pytest.raises(ProtocolError):
            decode(data + more)


@pytest.mark.parametrize("decode", DECODERS)
def test_another_version_is_named(decode: Decode) -> None:
    for version in set(range(256)) - {VERSION}:
        with pytest.raises(ProtocolError, match=f"version {version};"):
            decode(bytes([version]) + VALID[0][1:])


def test_what_a_worker_says_is_not_what_a_coordinator_says() -> None:
    for message in WORKER:
        with pytest.raises(ProtocolError):
            decode_from_coordinator(encode(message))
    for answer in COORDINATOR:
        with pytest.raises(ProtocolError):
            decode_from_worker(encode(answer))


def test_a_message_over_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(LeaveRound(LeaveReason.SHUTDOWN, "x" * 100))
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(ProtocolError, match="at most 100"):
        decode_from_worker(data)
    with pytest.raises(ProtocolError, match=r"LeaveRound message of .* at most 100"):
        encode(LeaveRound(LeaveReason.SHUTDOWN, "x" * 100))


MANY_MEMBERS = tuple(Member(rank, f"host-{rank % 100}", 1000 + rank, f"ronde-{rank}") for rank in range(1000))


def test_a_long_message_for_many_ranks_is_compressed_and_arrives_as_it_was_sent() -> None:
    started = RoundStarted(3, MANY_MEMBERS)
    data = encode(started, for_many=True)
    assert len(data) < len(encode(started)) / 3
    assert decode_from_coordinator(data) == started
    short = RankLost(1, "killed")
    assert encode(short, for_many=True) == encode(short)


def test_a_compressed_message_that_is_damaged_or_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(RoundStarted(3, MANY_MEMBERS), for_many=True)
    for damaged in (data[:-1], data + b"x", data[:2], data[:100] + b"\xff" * 8 + data[108:]):
        with pytest.raises(ProtocolError):
            decode_from_coordinator(damaged)
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", len(data) + 1)
    with pytest.raises(ProtocolError, match="has more than"):
        decode_from_coordinator(data)


def test_equal_announcements_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = WorkerMessageDecoder()
    first, other = (encode(AnnounceOperations(known_ids=ids)) for ids in ((1, 2), (1, 3)))
    assert decoder.decode(first) is decoder.decode(bytes(bytearray(first)))
    assert decoder.decode(other) == AnnounceOperations(known_ids=(1, 3))
    heartbeat = encode(RankHeartbeat(5))
    assert decoder.decode(heartbeat) is not decoder.decode(heartbeat)
    with pytest.raises(ProtocolError):
        decoder.decode(first[:-1])


def test_the_memory_of_decoded_announcements_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = WorkerMessageDecoder()
    datas = [encode(AnnounceOperations(known_ids=(number,))) for number in range(3)]
    monkeypatch.setattr(messages, "MAX_INTERNED_BYTES", 2 * len(datas[0]))
    kept = [decoder.decode(data) for data in datas]
    again = [decoder.decode(data) for data in reversed(datas)]
    assert [old is new for old, new in zip(kept, reversed(again), strict=True)] == [False, True, True]


@pytest.mark.parametrize(
    "header",
    [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\x91" * 100_000],
    ids=["array", "short array", "bytes", "text", "deep nest"],
)
def test_a_header_that_promises_too_much_takes_no_memory(header: bytes) -> None:
    for start in (b"", b"\x93\xb2AnnounceOperations", b"\x92\xaaTraceBatch"):
        only_protocol_errors(bytes([VERSION]) + start + header)


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"")
def test_random_bytes_raise_nothing_but_protocol_errors(data: bytes) -> None:
    only_protocol_errors(data)
    only_protocol_errors(bytes([VERSION]) + data)


@settings(deadline=None)
@given(st.sampled_from(VALID), st.data())
def test_damaged_messages_raise_nothing_but_protocol_errors(valid: bytes, data: st.DataObject) -> None:
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        if not damaged:
            break
    only_protocol_errors(bytes(damaged))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.sampled_from([type(message).__name__ for _, message in EVERY]), st.lists(ANYTHING, max_size=6))
def test_fields_of_the_wrong_kind_raise_nothing_but_protocol_errors(tag: str, fields: list[object]) -> None:
    only_protocol_errors(bytes([VERSION]) + msgspec.msgpack.encode([tag, *fields]))


def test_a_level_that_would_weigh_more_than_anything_is_refused() -> None:
    data = [
        encode(ActivityReport(READING, (ArrivalSamples("0", 0, (ArrivalSample(1, level, 1, 1, 1),)),)))
        for level in (30, 31)
    ]
    assert isinstance(decode_from_worker(data[0]), ActivityReport)
    with pytest.raises(ProtocolError, match="30"):
        decode_from_worker(data[1])
