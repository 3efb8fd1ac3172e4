"""The thread that asks for hosts: answers and errors reach the loop, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from ronde.errors import StartFailed
from ronde.launch.driver.host_source import FixedHosts, HostPoller, HostSource
from ronde.launch.placement import Host
from ronde.net.event_loop import EventLoop


class ScriptedHosts:
    """Gives these answers one after the other, and the last one for ever."""

    poll_interval_s: float | None = 0.0

    def __init__(self, answers: Sequence[tuple[Host, ...] | Exception]) -> None:
        self._answers = list(answers)
        self.is_closed = False

    def hosts(self) -> tuple[Host, ...]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop()) as made:
        yield made


def poll(loop: EventLoop, source: HostSource, num_calls: int) -> list[tuple[Host, ...] | str]:
    """The first calls of the poller."""
    seen: list[tuple[Host, ...] | str] = []
    poller = HostPoller(loop, source, on_hosts=seen.append, on_error=lambda error: seen.append(str(error)))
    with closing(poller):
        poller.start()
        loop.run_until(lambda: len(seen) >= num_calls)
    return seen


def test_hosts_that_never_change_are_asked_for_once(loop: EventLoop) -> None:
    assert poll(loop, FixedHosts((Host("a"),)), 1) == [(Host("a"),)]


def test_answers_are_told_when_they_differ_and_errors_once_in_a_row(loop: EventLoop) -> None:
    a, b = (Host("a"),), (Host("b", 2),)
    down, other = StartFailed("the cloud is down"), ValueError("oh")
    answers: list[tuple[Host, ...] | Exception] = [down, down, a, a, down, down, other, other, a, b, down, ()]
    source = ScriptedHosts(answers)
    seen = poll(loop, source, 7)
    unknown = "the hosts are not known: ValueError('oh')"
    assert seen == [str(down), a, str(down), unknown, b, str(down), ()]
    assert source.is_closed
