from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.net import handshake
from ronde.net.handshake import ClientHandshake, ConnectionRequest, HandshakeFailed, ServerHandshake
from ronde.net.keys import JobKey

KEY = JobKey("11" * 32)
OTHER = JobKey("22" * 32)
ME = ConnectionRequest("data", 3, "0.ordered")
CALLER_NONCE = bytes(range(32))
DOOR_NONCE = bytes(range(32, 64))


def door_side(key: JobKey = KEY, *, nonce: bytes = DOOR_NONCE, greeting: bytes = b"hello") -> ServerHandshake:
    return ServerHandshake(key, nonce, lambda caller: greeting)


def caller_side(key: JobKey = KEY, *, nonce: bytes = CALLER_NONCE, caller: ConnectionRequest = ME) -> ClientHandshake:
    return ClientHandshake(key, nonce, caller)


def shake(caller: ClientHandshake, door: ServerHandshake, num_bytes: int = 1 << 20) -> list[tuple[str, bytes]]:
    """Carry bytes between the two, at most num_bytes at a time; what each said, in order."""
    said = [("caller", caller.hello)]
    wire = caller.hello
    listener: ClientHandshake | ServerHandshake = door
    while wire:
        answer = b""
        while wire:
            end = min(num_bytes, listener.num_wanted)
            assert end > 0, "more was said than wanted"
            answer += listener.feed(wire[:end])
            wire = wire[end:]
        wire = answer
        said.append(("door" if listener is door else "caller", answer))
        listener = caller if listener is door else door
    return said[:-1]


@pytest.mark.parametrize("num_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("greeting", [b"", b"hello", bytes(64 * 1024)])
def test_two_sides_with_one_key_find_each_other(greeting: bytes, num_bytes: int) -> None:
    caller, door = caller_side(), door_side(greeting=greeting)
    shake(caller, door, num_bytes)
    assert door.request == ME
    assert caller.reply == greeting
    assert caller.num_wanted == door.num_wanted == 0


def test_a_wrong_key_is_refused_with_a_word_about_it() -> None:
    caller, door = caller_side(OTHER), door_side()
    proof = caller.feed(door.feed(caller.hello))
    with pytest.raises(HandshakeFailed, match="does not have the job's key") as refused:
        door.feed(proof)
    assert door.request is None
    with pytest.raises(HandshakeFailed, match="refused the job's key; give all ranks the same"):
        caller.feed(refused.value.reply)


def test_a_door_that_only_claims_to_know_the_key_is_refused() -> None:
    caller, door = caller_side(), door_side()
    welcome = door.feed(caller.feed(door.feed(caller.hello)))
    caller.feed(welcome[:5])
    with pytest.raises(HandshakeFailed, match="it does not have the job's key"):
        caller.feed(welcome[5:-1] + bytes([welcome[-1] ^ 1]))
    assert caller.reply is None


def test_a_changed_greeting_is_refused() -> None:
    caller, door = caller_side(), door_side(greeting=b"29500")
    welcome = door.feed(caller.feed(door.feed(caller.hello))).replace(b"29500", b"29501")
    caller.feed(welcome[:5])
    with pytest.raises(HandshakeFailed):
        caller.feed(welcome[5:])


def test_a_changed_rank_is_refused() -> None:
    caller, door = caller_side(), door_side()
    proof = caller.feed(door.feed(caller.hello)).replace(b"\xa4rank\x03", b"\xa4rank\x04")
    with pytest.raises(HandshakeFailed):
        door.feed(proof)


def test_a_recorded_proof_opens_no_other_door() -> None:
    recorded = [data for who, data in shake(caller_side(), door_side()) if who == "caller"]
    door = door_side(nonce=bytes(32))
    door.feed(recorded[0])
    with pytest.raises(HandshakeFailed):
        door.feed(recorded[1])


def test_a_recorded_door_deceives_no_other_caller() -> None:
    recorded = [data for who, data in shake(caller_side(), door_side()) if who == "door"]
    caller = caller_side(nonce=bytes(32))
    caller.feed(recorded[0])
    caller.feed(recorded[1][:5])
    with pytest.raises(HandshakeFailed):
        caller.feed(recorded[1][5:])


def test_a_mirror_is_not_a_door() -> None:
    caller = caller_side()
    with pytest.raises(HandshakeFailed, match="not ronde"):
        caller.feed(caller.hello[: caller.num_wanted])
    # … nor when it makes up a challenge and sends the caller's own proof back as its own.
    caller = caller_side()
    proof = caller.feed(door_side().feed(caller.hello))
    caller.feed(handshake._RESULT.pack(0, len(proof) - 32))
    with pytest.raises(HandshakeFailed):
        caller.feed(proof)


def test_the_two_proofs_have_labels_of_their_own() -> None:
    (_, _), (_, _), (_, proof), (_, welcome) = shake(caller_side(), door_side(greeting=b"hello"))
    parts = (CALLER_NONCE, DOOR_NONCE, proof[:-32])
    assert proof[-32:] == KEY.mac(b"client", *parts)
    assert welcome[-32:] == KEY.mac(b"server", *parts, b"hello")


def test_two_versions_tell_each_other_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = caller_side()
    monkeypatch.setattr(handshake, "VERSION", 3)
    with pytest.raises(HandshakeFailed, match="speaks version 2 of the handshake, this is 3") as refused:
        door_side().feed(caller.hello)
    monkeypatch.setattr(handshake, "VERSION", 2)
    with pytest.raises(HandshakeFailed, match=r"version 3 .* install the same ronde"):
        caller.feed(refused.value.reply)


def test_promises_of_too_many_bytes_are_refused_before_they_come() -> None:
    with pytest.raises(HandshakeFailed, match="at most 4096"):
        door_side().feed(handshake._HELLO.pack(b"RONDc", 2, 4097, bytes(32)))
    caller = caller_side()
    caller.feed(door_side().feed(caller.hello))
    with pytest.raises(HandshakeFailed):
        caller.feed(handshake._RESULT.pack(0, 64 * 1024 + 1))


def test_a_caller_with_too_much_to_say_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="may take 4096 bytes"):
        caller_side(caller=ConnectionRequest("data", 0, "x" * 5000))


def test_a_greeting_that_is_too_long_is_not_sent() -> None:
    caller, door = caller_side(), door_side(greeting=bytes(64 * 1024 + 1))
    with pytest.raises(HandshakeFailed) as refused:
        door.feed(caller.feed(door.feed(caller.hello)))
    with pytest.raises(HandshakeFailed, match="the log of the other side"):
        caller.feed(refused.value.reply)


def feed_until_over(side: ClientHandshake | ServerHandshake, data: bytes) -> None:
    while data and side.num_wanted:
        end = side.num_wanted
        side.feed(data[:end])
        data = data[end:]


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"RONDc\x02\x00\x04", b"RONDc\x02\x00\x00", b"RONDd\x02"]))
def test_random_bytes_open_nothing_and_raise_nothing_else(data: bytes, start: bytes) -> None:
    door, caller = door_side(), caller_side()
    for side in (door, caller):
        try:
            feed_until_over(side, start + data)
        except HandshakeFailed:
            pass
    assert door.request is None
    assert caller.reply is None


@settings(deadline=None)
@given(st.integers(0, 2), st.data())
def test_one_changed_bit_opens_nothing(message: int, data: st.DataObject) -> None:
    """Of CHALLENGE, PROOF and WELCOME; whoever changes HELLO's nonce changes what is proved."""
    caller, door = caller_side(), door_side()
    wire = door.feed(caller.hello)
    for step in range(3):
        if step == message:
            bit = data.draw(st.integers(0, 8 * len(wire) - 1))
            wire = bytes(byte ^ (1 << bit % 8 if index == bit // 8 else 0) for index, byte in enumerate(wire))
        side = caller if step != 1 else door
        answer = b""
        try:
            while wire and side.num_wanted:
                end = side.num_wanted
                answer += side.feed(wire[:end])
                wire = wire[end:]
        except HandshakeFailed:
            return
        wire = answer
    assert caller.reply is None
