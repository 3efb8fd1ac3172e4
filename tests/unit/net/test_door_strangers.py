"""Who has no key learns and changes nothing at the door, and the door goes on whatever happens around it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ronde.errors import StartFailed
from ronde.net import connect as sockets
from ronde.net import listener as door_module
from ronde.net.connect import connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline
from tests.unit.net.callers import address, ends, meet, raw

NOISE = [
    b"\0",
    b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n" * 3,
    b"RONDc\x01\xff\xff" + bytes(32),
    bytes(1 << 20),
]


@pytest.mark.parametrize("noise", [*NOISE, b""], ids=["a byte", "http", "too much announced", "a flood", "nothing"])
def test_a_stranger_is_refused_and_delays_nobody(
    door: Listener,
    link: str,
    key: JobKey,
    noise: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 0.3)
    with raw(door, link) as stranger:
        try:
            stranger.sendall(noise)
        except ConnectionError:
            pass  # refused before all was sent
        meet(door, link, key)
        assert ends(stranger)
    meet(door, link, key)
    assert door.num_refused == 1
    assert [record.name for record in caplog.records if "refused a caller" in record.getMessage()] == ["ronde.net"]


def test_a_silent_stranger_has_five_seconds_at_most() -> None:
    assert door_module.HANDSHAKE_S <= 5


def test_many_strangers_make_few_lines(door: Listener, key: JobKey, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        with raw(door, "tcp") as stranger:
            stranger.sendall(bytes(40))
            assert ends(stranger)
    meet(door, "tcp", key)
    assert door.num_refused == 50
    assert len(caplog.records) == 1


def test_a_crowd_of_silent_strangers_keeps_nobody_out(
    door: Listener, link: str, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MAX_PENDING_HANDSHAKES", 4)
    monkeypatch.setattr(door_module, "EVICT_AFTER_S", 0.05)
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 600.0)
    strangers = [raw(door, link) for _ in range(12)]
    meet(door, link, key)
    for stranger in strangers:
        stranger.close()


def test_the_log_says_nothing_secret(
    door: Listener, key: JobKey, other_key: JobKey, caplog: pytest.LogCaptureFixture, link: str
) -> None:
    with pytest.raises(StartFailed) as refused:
        connect_authenticated(address(door, link), other_key, ConnectionRequest("data", 0), Deadline(20))
    for text in (caplog.text, str(refused.value), door.unix_name):
        assert "5a5a" not in text
        assert "a5a5" not in text


def test_another_user_is_refused_even_with_the_key(
    door: Listener, key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "peer_uid", lambda sock: os.getuid() + 1)
    with raw(door, "unix") as stranger:
        assert ends(stranger)
    monkeypatch.undo()
    monkeypatch.setattr(sockets, "peer_uid", lambda sock: os.getuid() + 1)
    with pytest.raises(StartFailed, match="its owner is another user"):
        connect_authenticated(address(door, "unix"), key, ConnectionRequest("data", 0), Deadline(20))


class Heard(logging.Handler):
    """Waits for a line in the log."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.event.set()


@pytest.fixture
def heard() -> Iterator[Callable[[str], threading.Event]]:
    handlers: list[Heard] = []

    def listen(words: str) -> threading.Event:
        handlers.append(Heard(words))
        door_module.logger.addHandler(handlers[-1])
        return handlers[-1].event

    yield listen
    for handler in handlers:
        door_module.logger.removeHandler(handler)


def test_a_process_out_of_descriptors_lets_callers_in_later(
    door: Listener, key: JobKey, heard: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = heard("cannot accept a connection")
    (listener,) = (sock for sock in door._listening_sockets if sock.family == socket.AF_INET)

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if self is listener and not warned.is_set():
            raise OSError(24, "Too many open files")
        return real(self)

    real = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", accept)
    meet(door, "tcp", key)
    assert warned.is_set()


def test_a_door_that_breaks_tells_whoever_waits(
    key: JobKey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Listener(key, unix=True, tcp_host=None) as door:
        monkeypatch.setattr(door, "_check_timeouts", lambda: 1 / 0)
        with raw(door, "unix"), pytest.raises(StartFailed, match="the door broke: ZeroDivisionError"):
            door.accept("data", 0, Deadline(20))
    assert "the door broke" in caplog.text
