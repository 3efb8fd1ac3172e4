"""Opening and closing many times leaves nothing behind; the shared leak check looks after each test, too."""

from __future__ import annotations

import socket

from ronde.net.control import ControlClient, ControlServer
from ronde.net.door import Caller, Door, knock
from ronde.net.keys import JobKey
from ronde.net.messages import Beat, FromWorker
from ronde.types import Deadline
from tests.conftest import Held

LOCAL = "127.0.0.1"
NUM_ROUNDS = 50


def test_doors_leave_nothing(key: JobKey) -> None:
    before = Held.now()
    for _ in range(NUM_ROUNDS):
        with Door(key, unix=True, tcp=LOCAL) as door:
            silent = socket.create_connection((LOCAL, door.tcp_port))
            untaken, _ = knock(f"{LOCAL}:{door.tcp_port}", key, Caller("data", 1), Deadline(20))
            here, _ = knock(f"unix:{door.unix_name}", key, Caller("data", 0), Deadline(20))
            there = door.take("data", 0, Deadline(20))
        for sock in (silent, untaken, here, there):
            sock.close()
    assert Held.now().beyond(before) == []


def test_control_ends_leave_nothing(key: JobKey) -> None:
    before = Held.now()
    for number in range(NUM_ROUNDS):
        server = ControlServer(LOCAL, key)
        client = ControlClient(f"{LOCAL}:{server.port}", key, 0)
        client.send(Beat(number))
        heard: list[tuple[int, FromWorker]] = []
        while not heard:
            heard = server.poll(20)
        assert heard == [(0, Beat(number))]
        client.close()
        server.close()
    assert Held.now().beyond(before) == []
