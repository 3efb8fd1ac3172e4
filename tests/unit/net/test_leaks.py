"""Opening and closing many times leaves nothing behind; the shared leak check looks after each test, too."""

from __future__ import annotations

import socket

from ronde.net.connect import connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.messages import RankHeartbeat, WorkerMessage
from ronde.types import Deadline
from tests.conftest import Held
from tests.unit.net.polled import PolledClient, PolledServer

LOCAL = "127.0.0.1"
NUM_ROUNDS = 50


def test_doors_leave_nothing(key: JobKey) -> None:
    before = Held.now()
    for _ in range(NUM_ROUNDS):
        with Listener(key, unix=True, tcp_host=LOCAL) as listener:
            silent = socket.create_connection((LOCAL, listener.tcp_port))
            untaken, _ = connect_authenticated(
                f"{LOCAL}:{listener.tcp_port}", key, ConnectionRequest("data", 1), Deadline(20)
            )
            here, _ = connect_authenticated(
                f"unix:{listener.unix_name}", key, ConnectionRequest("data", 0), Deadline(20)
            )
            there = listener.accept("data", 0, Deadline(20))
        for sock in (silent, untaken, here, there):
            sock.close()
    assert Held.now().beyond(before) == []


def test_control_ends_leave_nothing(key: JobKey) -> None:
    before = Held.now()
    for number in range(NUM_ROUNDS):
        server = PolledServer(LOCAL, key)
        client = PolledClient(f"{LOCAL}:{server.port}", key, 0)
        client.send(RankHeartbeat(number))
        heard: list[tuple[int, WorkerMessage]] = []
        while not heard:
            heard = server.poll(20)
        assert heard == [(0, RankHeartbeat(number))]
        client.close()
        server.close()
    assert Held.now().beyond(before) == []
