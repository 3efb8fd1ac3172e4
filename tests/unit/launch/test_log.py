"""What ronde's modules log in the driver's process becomes notes, from any thread, and none is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from ronde.launch.driver.driver import log_to_output
from ronde.net.event_loop import EventLoop

logger = logging.getLogger("ronde.launch")


@contextmanager
def unhandled() -> Iterator[None]:
    """As in a process that has not set up its log: pytest has handlers of its own."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers


def test_warnings_of_any_thread_are_noted_in_the_loop() -> None:
    notes: list[tuple[str, threading.Thread]] = []

    def note(text: str) -> None:
        notes.append((text, threading.current_thread()))

    with unhandled(), closing(EventLoop()) as loop, log_to_output(loop, note):
        thread = threading.Thread(target=lambda: logger.warning("rank %d is lost", 3))
        thread.start()
        thread.join()
        logger.info("nobody needs this")
        assert not notes
        loop.run_until(lambda: bool(notes))
    assert notes == [("rank 3 is lost", threading.main_thread())]
    assert not logging.getLogger("ronde").handlers


def test_the_last_ones_are_noted_at_the_end() -> None:
    notes: list[str] = []
    with unhandled(), closing(EventLoop()) as loop, log_to_output(loop, notes.append):
        logger.error("too late for the loop")
    assert notes == ["too late for the loop"]


def test_a_program_with_handlers_of_its_own_keeps_its_log(caplog: pytest.LogCaptureFixture) -> None:
    with closing(EventLoop()) as loop, log_to_output(loop, pytest.fail):
        logger.warning("for the program")
    assert caplog.messages == ["for the program"]
