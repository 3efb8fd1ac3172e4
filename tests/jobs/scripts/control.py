"""The socket of a rank to the test that started it. Every message is one JSON object in one packet.

`at` is time.monotonic(), one clock for all processes of a host.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.limits import RANK_S, TEST_S

MAX_MESSAGE_BYTES = 1 << 16


class ControlSocket:
    """A context. Any thread may send; one of them receives."""

    def __init__(self, timeout_s: float | None = TEST_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)  # while the test waits for others; when it gives up, it closes the socket
        self._socket.connect(os.environ["TEST_SOCKET"])
        self.rank = int(os.environ.get("RONDE_WORKER") or os.environ["RONDE_RANK"])
        """In an elastic job, the number of the worker."""
        self.send("connected", rank=self.rank, pid=os.getpid())

    def send(self, kind: str, **facts: object) -> None:
        self._socket.send(json.dumps({"kind": kind, "at": time.monotonic(), **facts}).encode())

    def receive(self) -> dict[str, Any]:
        """The next message of the test. Ends the process if the test is gone."""
        data = self._socket.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise SystemExit("the test has closed the connection")
        message: dict[str, Any] = json.loads(data)
        return message

    def next_message(self) -> threading.Event:
        """An event that is set when the test sends something."""
        received = threading.Event()

        def wait() -> None:
            self.receive()
            received.set()

        threading.Thread(target=wait, name="receiver", daemon=True).start()
        return received

    def __enter__(self) -> ControlSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Return as soon as the condition holds."""
    give_up = time.monotonic() + RANK_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {RANK_S:g} s for {what}")
        time.sleep(0.001)
