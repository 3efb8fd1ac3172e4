"""Mailboxes where threads and signals are the point. What they do on every backend is in tests/conformance."""

from __future__ import annotations

import signal
import threading

import pytest

from ronde.comm.mailbox import Mailbox, MailboxMessage
from ronde.comm.world import World
from ronde.errors import RondeError, RoundEnded, StartFailed
from tests.conformance.ranks import run_threads
from tests.limits import OPERATION_S
from tests.unit.thread_limit import no_new_threads


def test_a_mailbox_whose_thread_cannot_start_can_be_opened_later() -> None:
    def ask(world: World) -> bytes:
        group = world.group
        group.barrier()  # both have all other threads
        if world.rank == 0:
            channels = world._open_channels.channels
            with no_new_threads(), pytest.raises(StartFailed, match="ronde-mailbox could not be started"):
                group.open_mailbox(lambda message: None)
            assert world._open_channels.channels == channels
        group.barrier()
        with group.open_mailbox(lambda message: message.reply(b"here")) as mailbox:
            header: bytes = mailbox.request(1 - world.rank).header  # both have opened the same one
            group.barrier()
        return header

    assert run_threads(2, ask) == [b"here", b"here"]


def test_a_signal_handler_may_close_a_mailbox_in_the_middle_of_a_request(alone: World) -> None:
    is_closing = threading.Event()

    def handle(message: MailboxMessage) -> None:  # which never replies
        signal.raise_signal(signal.SIGUSR1)  # its handler runs in the main thread
        assert is_closing.wait(OPERATION_S)

    def close(*_: object) -> None:
        is_closing.set()
        mailbox.close()

    mailbox: Mailbox = alone.group.open_mailbox(handle)
    before = signal.signal(signal.SIGUSR1, close)
    try:
        with pytest.raises(RondeError, match="rank 0 has closed its mailbox"):
            mailbox.request(0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_close_gives_up_waiting_for_a_handler_that_does_not_return(
    alone: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.comm.mailbox.CLOSE_TIMEOUT_S", 0.05)
    errors: list[RoundEnded] = []
    is_handling, may_go_on, has_ended = threading.Event(), threading.Event(), threading.Event()

    def handle(message: MailboxMessage) -> None:
        is_handling.set()
        assert may_go_on.wait(OPERATION_S)
        try:
            message.reply()
        except RoundEnded as error:
            errors.append(error)
        has_ended.set()

    mailbox = alone.group.open_mailbox(handle)
    work = mailbox.request(0, wait=False)
    assert is_handling.wait(OPERATION_S)
    mailbox.close()
    with pytest.raises(RondeError, match="rank 0 has closed its mailbox"):
        work.wait()
    may_go_on.set()
    assert has_ended.wait(OPERATION_S) and len(errors) == 1
