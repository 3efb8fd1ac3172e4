"""The two sides of a control connection, for tests that ask them for messages."""

from __future__ import annotations

from collections.abc import Callable

from ronde.net.connect import HEARTBEAT_S
from ronde.net.control_connection import FLUSH_S, ControlClient, ControlServer
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey
from ronde.net.messages import CoordinatorMessage, WorkerMessage


class PolledServer(ControlServer):
    def __init__(self, host: str, key: JobKey, *, port: int = 0) -> None:
        self.loop = EventLoop()
        self._messages: list[tuple[str, WorkerMessage]] = []
        super().__init__(host, key, port=port)
        self.num_lost: dict[str, int] = {}
        """By sender, how many of its messages were lost."""
        self.rounds: list[int] = []
        """Those that the messages were sent in."""
        self.start_receiving(self.loop, self._add, self.num_lost.__setitem__)

    def _add(self, sender: str, round: int, message: WorkerMessage) -> None:
        self._messages.append((sender, message))
        self.rounds.append(round)

    def poll(self, timeout_s: float) -> list[tuple[str, WorkerMessage]]:
        """Return what has come, oldest first; waits for a message or a refusal, at most timeout_s."""
        before = self.num_refused
        run_for(self.loop, timeout_s, lambda: bool(self._messages) or self.num_refused != before)
        found, self._messages = self._messages, []
        return found

    def close(self, flush_s: float = FLUSH_S) -> None:
        super().close(flush_s)
        self.loop.close()


class PolledClient(ControlClient):
    def __init__(self, address: str, key: JobKey, name: str = "worker0-0", *, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__(address, key, name, heartbeat_s=heartbeat_s)
        self.loop = EventLoop()
        self.problems: list[str] = []
        """Why messages were lost."""
        self._messages: list[CoordinatorMessage] = []
        self.start_receiving(self.loop, lambda message: self._messages.append(message), self.problems.append)

    def poll(self, timeout_s: float) -> list[CoordinatorMessage]:
        before = self.num_refused
        run_for(self.loop, timeout_s, lambda: bool(self._messages) or self.num_refused != before)
        found, self._messages = self._messages, []
        return found

    def close(self, flush_s: float = FLUSH_S) -> None:
        super().close(flush_s)
        self.loop.close()


def run_for(loop: EventLoop, timeout_s: float, condition: Callable[[], bool]) -> None:
    """Run the loop for at least one turn, until the condition is true or the time is over."""
    turns: list[None] = []
    loop.call_soon(lambda: turns.append(None))
    timer = loop.call_later(max(0.0, timeout_s), lambda: None)
    loop.run_until(lambda: bool(turns) and (condition() or not timer.pending))
    timer.cancel()
