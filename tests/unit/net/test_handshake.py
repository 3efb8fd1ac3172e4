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
CLIENT_NONCE = bytes(range(32))
SERVER_NONCE = bytes(range(32, 64))


def server_side(key: JobKey = KEY, *, nonce: bytes = SERVER_NONCE, reply: bytes = b"hello") -> ServerHandshake:
    return ServerHandshake(key, nonce, lambda client: reply)


def client_side(key: JobKey = KEY, *, nonce: bytes = CLIENT_NONCE, client: ConnectionRequest = ME) -> ClientHandshake:
    return ClientHandshake(key, nonce, client)


def shake(client: ClientHandshake, server: ServerHandshake, num_bytes: int = 1 << 20) -> list[tuple[str, bytes]]:
    """Carry bytes between the two, at most num_bytes at a time; what each said, in order."""
    said = [("client", client.hello)]
    wire = client.hello
    listener: ClientHandshake | ServerHandshake = server
    while wire:
        answer = b""
        while wire:
            end = min(num_bytes, listener.num_wanted)
            assert end > 0, "more was said than wanted"
            answer += listener.feed(wire[:end])
            wire = wire[end:]
        wire = answer
        said.append(("server" if listener is server else "client", answer))
        listener = client if listener is server else server
    return said[:-1]


@pytest.mark.parametrize("num_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("reply", [b"", b"hello", bytes(64 * 1024)])
def test_two_sides_with_one_key_find_each_other(reply: bytes, num_bytes: int) -> None:
    client, server = client_side(), server_side(reply=reply)
    shake(client, server, num_bytes)
    assert server.request == ME
    assert client.reply == reply
    assert client.num_wanted == server.num_wanted == 0


def test_a_wrong_key_is_refused_with_a_word_about_it() -> None:
    client, server = client_side(OTHER), server_side()
    proof = client.feed(server.feed(client.hello))
    with pytest.raises(HandshakeFailed, match="does not have the job's key") as refused:
        server.feed(proof)
    assert server.request is None
    with pytest.raises(HandshakeFailed, match="refused the job's key; give all ranks the same"):
        client.feed(refused.value.reply)


def test_a_recorded_proof_opens_no_other_door() -> None:
    recorded = [data for who, data in shake(client_side(), server_side()) if who == "client"]
    server = server_side(nonce=bytes(32))
    server.feed(recorded[0])
    with pytest.raises(HandshakeFailed):
        server.feed(recorded[1])


def test_a_recorded_listener_deceives_no_other_peer() -> None:
    recorded = [data for who, data in shake(client_side(), server_side()) if who == "server"]
    client = client_side(nonce=bytes(32))
    client.feed(recorded[0])
    client.feed(recorded[1][:5])
    with pytest.raises(HandshakeFailed):
        client.feed(recorded[1][5:])


def test_a_mirror_is_not_a_listener() -> None:
    client = client_side()
    with pytest.raises(HandshakeFailed, match="not ronde"):
        client.feed(client.hello[: client.num_wanted])
    # … nor when it makes up a challenge and sends the client's own proof back as its own.
    client = client_side()
    proof = client.feed(server_side().feed(client.hello))
    client.feed(handshake._RESULT.pack(0, len(proof) - 32))
    with pytest.raises(HandshakeFailed):
        client.feed(proof)


def test_two_versions_tell_each_other_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_side()
    own = handshake.VERSION
    monkeypatch.setattr(handshake, "VERSION", own + 1)
    with pytest.raises(HandshakeFailed, match=f"speaks version {own} of the handshake, this is {own + 1}") as refused:
        server_side().feed(client.hello)
    monkeypatch.setattr(handshake, "VERSION", own)
    with pytest.raises(HandshakeFailed, match=rf"version {own + 1} .* install the same ronde"):
        client.feed(refused.value.reply)


def test_promises_of_too_many_bytes_are_refused_before_they_come() -> None:
    with pytest.raises(HandshakeFailed, match="at most 4096"):
        server_side().feed(handshake._HELLO.pack(b"RONDc", handshake.VERSION, 4097, bytes(32)))
    client = client_side()
    client.feed(server_side().feed(client.hello))
    with pytest.raises(HandshakeFailed):
        client.feed(handshake._RESULT.pack(0, 64 * 1024 + 1))


def test_a_peer_with_too_much_to_say_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="may take 4096 bytes"):
        client_side(client=ConnectionRequest("data", 0, "x" * 5000))


def test_a_greeting_that_is_too_long_is_not_sent() -> None:
    client, server = client_side(), server_side(reply=bytes(64 * 1024 + 1))
    with pytest.raises(HandshakeFailed) as refused:
        server.feed(client.feed(server.feed(client.hello)))
    with pytest.raises(HandshakeFailed, match="the log of the other side"):
        client.feed(refused.value.reply)


def feed_until_over(side: ClientHandshake | ServerHandshake, data: bytes) -> None:
    while data and side.num_wanted:
        end = side.num_wanted
        side.feed(data[:end])
        data = data[end:]


@settings(deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"RONDc\x03\x00\x04", b"RONDc\x03\x00\x00", b"RONDd\x03"]))
def test_random_bytes_open_nothing_and_raise_nothing_else(data: bytes, start: bytes) -> None:
    server, client = server_side(), client_side()
    for side in (server, client):
        try:
            feed_until_over(side, start + data)
        except HandshakeFailed:
            pass
    assert server.request is None
    assert client.reply is None


@settings(deadline=None)
@given(st.integers(0, 2), st.data())
def test_one_changed_bit_opens_nothing(message: int, data: st.DataObject) -> None:
    """Of CHALLENGE, PROOF and WELCOME; whoever changes HELLO's nonce changes what is proved."""
    client, server = client_side(), server_side()
    wire = server.feed(client.hello)
    for step in range(3):
        if step == message:
            bit = data.draw(st.integers(0, 8 * len(wire) - 1))
            wire = bytes(byte ^ (1 << bit % 8 if index == bit // 8 else 0) for index, byte in enumerate(wire))
        side = client if step != 1 else server
        answer = b""
        try:
            while wire and side.num_wanted:
                end = side.num_wanted
                answer += side.feed(wire[:end])
                wire = wire[end:]
        except HandshakeFailed:
            return
        wire = answer
    assert client.reply is None
