"""An agent on a loop of the test's own, with all that it reports."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ronde.launch.agent.agent import Agent
from ronde.launch.protocol import AgentMessage, RankExit, RankOrder, RankOutput, StartRanks, StdStream
from ronde.net.event_loop import EventLoop
from tests.limits import PATIENCE_S

__all__ = ["PATIENCE_S", "Watched", "an_agent", "ends", "order", "python"]

T = TypeVar("T")


def python(text: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", text)


def order(
    argv: tuple[str, ...], rank: int = 0, *, env: Mapping[str, str] | None = None, **more: Any
) -> RankOrder:  # the fields of RankOrder
    return RankOrder(rank, argv, {**os.environ, **(env or {})}, **{"cwd": str(Path.cwd()), **more})


class Watched:
    """The agent, and its reports so far."""

    def __init__(self) -> None:
        self.loop = EventLoop()
        self.reports: list[AgentMessage] = []
        self.agent = Agent(self.loop, self.reports.append)

    def until(self, condition: Callable[[], bool]) -> None:
        """Run the loop until it is true."""
        late: list[bool] = []
        timer = self.loop.call_later(PATIENCE_S, lambda: late.append(True))
        self.loop.run_until(condition=lambda: bool(late) or condition())
        timer.cancel()
        assert not late, f"it did not happen; the last reports were {self.reports[-5:]}"

    def all(self, kind: type[T]) -> list[T]:
        """The reports of this kind."""
        return [report for report in self.reports if isinstance(report, kind)]

    def first(self, kind: type[T]) -> T:
        """The first report of this kind, as soon as it comes."""
        self.until(lambda: bool(self.all(kind)))
        return self.all(kind)[0]

    def printed(self, rank: int = 0, stream: StdStream = "out") -> bytes:
        """All that a rank printed so far."""
        return b"".join(each.data for each in self.all(RankOutput) if (each.rank, each.stream) == (rank, stream))

    def run(self, *orders: RankOrder, pickled_call: bytes = b"") -> dict[int, int]:
        """Start these ranks, wait for their ends: their exit codes."""
        self.agent.handle(StartRanks(orders, pickled_call))
        self.until(lambda: len(self.all(RankExit)) == len(orders))
        return {each.rank: each.exit_code for each in self.all(RankExit)}


@contextmanager
def an_agent() -> Iterator[Watched]:
    """An agent that is closed at the end."""
    watched = Watched()
    try:
        yield watched
    finally:
        watched.agent.close()
        watched.loop.close()


def ends(pid: int, patience_s: float = PATIENCE_S) -> bool:
    """Whether the process ends in time; it may be nobody's child any more."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    try:
        return bool(poll.poll(patience_s * 1000))
    finally:
        os.close(fd)
