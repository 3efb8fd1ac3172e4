"""Random bytes against an open door: it goes on serving honest callers."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.net.connect import connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline

HELLO = b"RONDc\x01\x00\x10" + bytes(32)


@pytest.mark.parametrize("start", [b"", HELLO], ids=["from the start", "after a hello"])
def test_noise_does_not_stop_the_door(start: bytes) -> None:
    key = JobKey("77" * 32)
    with Listener(key, unix=True, tcp_host=None) as door:

        @settings(deadline=None, max_examples=50)
        @given(st.binary(max_size=200))
        def make(noise: bytes) -> None:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(20)
                stranger.connect("\0" + door.unix_name)
                try:
                    stranger.sendall(start + noise)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(100):
                        pass
                except ConnectionError:
                    pass  # refused before all was sent
            here, _ = connect_authenticated(f"unix:{door.unix_name}", key, ConnectionRequest("data", 0), Deadline(20))
            with here, door.accept("data", 0, Deadline(20)):
                pass

        make()
        assert door.num_refused > 0
