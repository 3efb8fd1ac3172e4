"""A rank's line to the test that started it: what it has done goes out, what it is to do comes in. For the scripts.

Every message is one JSON object in one packet. `at` is time.monotonic(), one clock for all processes of a host.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tests.limits import RANK_S, TEST_S

MOST_BYTES = 1 << 16


class Talk:
    """The line to the test. Any thread may say something, one of them hears."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(TEST_S)  # while the test waits for others; when it gives up, it hangs up
        self._socket.connect(os.environ["TEST_TALK"])
        self.rank = int(os.environ["RONDE_RANK"])
        self.say("here", rank=self.rank, pid=os.getpid())

    def say(self, what: str, **facts: object) -> None:
        """Tell the test."""
        self._socket.send(json.dumps({"what": what, "at": time.monotonic(), **facts}).encode())

    def hear(self) -> dict[str, Any]:
        """What the test wants next. It ends the process if the test is gone."""
        data = self._socket.recv(MOST_BYTES)
        if not data:
            raise SystemExit("the test has hung up")
        heard: dict[str, Any] = json.loads(data)
        return heard

    def listen(self) -> threading.Event:
        """An event that is set when the test says something, whatever it is."""
        told = threading.Event()

        def wait() -> None:
            self.hear()
            told.set()

        threading.Thread(target=wait, name="listener", daemon=True).start()
        return told

    def __enter__(self) -> Talk:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Hang up."""
        self._socket.close()


def until(condition: Callable[[], bool], what: str) -> None:
    """Return as soon as the condition holds."""
    give_up = time.monotonic() + RANK_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {RANK_S:g} s for {what}")
        time.sleep(0.001)
