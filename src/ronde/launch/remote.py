"""An agent at the other end of an ssh connection: `python -m ronde.launch.remote`. Orders come as frames on standard
input, reports leave as frames on standard output. The end of either is the end of the agent and of all its ranks.

The driver waits for this program to start, so it imports little.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ronde.errors import ProtocolError
from ronde.launch.agent import Agent
from ronde.launch.frames import MARK, encode_frame, from_driver
from ronde.launch.loop import Loop
from ronde.launch.messages import Beat, Failed, FromAgent, Quit
from ronde.launch.pipes import Reader, Writer
from ronde.launch.variables import own_words

__all__ = ["Remote", "main"]

FULL_BYTES = 1024 * 1024
"""When so much waits to be sent, ranks have to wait with what they print."""
LOW_BYTES = 256 * 1024
"""Then they go on."""
FAREWELL_S = 0.5
"""For the last report to get away, when orders make no sense."""


class Remote:
    """An agent between two descriptors, which it owns."""

    def __init__(self, loop: Loop, orders: int, reports: int) -> None:
        self.over = ""
        """Why it has ended; empty as long as it has not."""
        self._loop = loop
        self._frames = from_driver()
        self._heard_s = time.monotonic()
        self._silence_s = 0.0
        self._full = False
        self._reports = Writer(loop, reports, moved=self._sent, broken=lambda: self.quit("the driver does not listen"))
        self._orders = Reader(loop, orders, self._hear, lambda: self.quit("the driver has gone"))
        self._reports.write(MARK)
        self._agent = Agent(loop, self._report, own=own_words(os.environ))

    def quit(self, why: str) -> None:
        """End. Safe in a signal handler."""
        self.over = self.over or why

    def close(self) -> None:
        """Kill the ranks, and free everything. Idempotent."""
        self._agent.close()
        self._orders.close()
        self._reports.close()

    def _hear(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        try:
            messages = self._frames.feed(data)
        except ProtocolError as error:
            self._orders.close()
            self._report(Failed(-1, f"the agent did not understand its orders: {error}"))
            self._loop.at(FAREWELL_S, lambda: self.quit("it was told nonsense"))
            return
        for message in messages:
            if isinstance(message, Beat):
                self._beat(message)
            elif isinstance(message, Quit):
                return self.quit("the driver said so")
            else:
                self._agent.handle(message)

    def _beat(self, beat: Beat) -> None:
        if not self._silence_s:
            self._loop.at(beat.silence_s, self._listen)
        self._silence_s = beat.silence_s

    def _listen(self) -> None:
        silent_s = time.monotonic() - self._heard_s
        if silent_s >= self._silence_s:
            self.quit(f"the driver was silent for {silent_s:.0f} s")
        else:
            self._loop.at(self._silence_s - silent_s, self._listen)

    def _report(self, message: FromAgent) -> None:
        self._reports.write(encode_frame(message))
        if not self._full and self._reports.num_waiting_bytes > FULL_BYTES:
            self._full = True
            self._agent.pause(True)

    def _sent(self) -> None:
        if self._full and self._reports.num_waiting_bytes < LOW_BYTES:
            self._full = False
            self._agent.pause(False)


def main() -> None:
    """Serve the driver until it ends."""
    # What else this process or its libraries print must not get between the frames.
    orders, reports = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    loop = Loop()
    remote = Remote(loop, orders, reports)

    def stop(number: int, _: object) -> None:
        remote.quit(f"it got signal {number}")
        loop.soon(lambda: None)  # wakes it

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        loop.run(until=lambda: bool(remote.over))
    finally:
        remote.close()
        loop.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
