"""Connections that an event loop makes: many at a time, without waiting for any of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from ronde.errors import StartFailed
from ronde.net.connect import PendingConnection
from ronde.net.event_loop import EventLoop
from ronde.net.keys import JobKey, new_job_key
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline
from tests.limits import PATIENCE_S
from tests.unit.net.polled import run_for

LOCAL = "127.0.0.1"
Outcome = socket.socket | StartFailed


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop()) as made:
        yield made


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A port where connections are made and nothing is answered."""
    with socket.create_server((LOCAL, 0)) as server:
        yield server


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


def start(
    loop: EventLoop, address: str, key: JobKey, outcomes: list[Outcome], *, rank: int = 0, timeout_s: float = PATIENCE_S
) -> PendingConnection:
    request = ConnectionRequest("data", rank)
    return PendingConnection(loop, address, key, request, Deadline(timeout_s), outcomes.append)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_one_loop_makes_many_connections_to_a_listener_of_the_same_loop(
    loop: EventLoop, key: JobKey, kind: str
) -> None:
    with closing(Listener(key, unix=True, tcp_host=LOCAL, loop=loop)) as listener:
        address = f"unix:{listener.unix_name}" if kind == "unix" else f"{LOCAL}:{listener.tcp_port}"
        outcomes: list[Outcome] = []
        for rank in range(100):
            start(loop, address, key, outcomes, rank=rank)
        run_for(loop, PATIENCE_S, lambda: len(outcomes) == 100)
        theirs = [listener.accept("data", rank, Deadline(0)) for rank in range(100)]
        for rank, sock in enumerate(theirs):
            sock.sendall(b"%d" % rank)
        mine = [outcome for outcome in outcomes if isinstance(outcome, socket.socket)]
        assert sorted(int(sock.recv(9)) for sock in mine) == list(range(100))
        for sock in (*mine, *theirs):
            assert sock.gettimeout() is None
            sock.close()


def test_a_listener_that_opens_late_is_found(loop: EventLoop, key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as reserved:
        port = port_of(reserved)
    outcomes: list[Outcome] = []
    start(loop, f"{LOCAL}:{port}", key, outcomes)
    run_for(loop, 0.02, lambda: bool(outcomes))
    assert outcomes == []
    with closing(Listener(key, unix=False, tcp_host=LOCAL, port=port, loop=loop)):
        run_for(loop, PATIENCE_S, lambda: bool(outcomes))
        [sock] = outcomes
        assert isinstance(sock, socket.socket)
        sock.close()


def test_a_wrong_key_fails_at_once(loop: EventLoop, key: JobKey) -> None:
    with closing(Listener(key, unix=False, tcp_host=LOCAL, loop=loop)) as listener:
        outcomes: list[Outcome] = []
        start(loop, f"{LOCAL}:{listener.tcp_port}", JobKey(new_job_key()), outcomes, rank=3)
        run_for(loop, PATIENCE_S, lambda: bool(outcomes))
        assert str(outcomes[0]).startswith(f"rank 3 could not connect to {LOCAL}:{listener.tcp_port} for 'data': it ")
        assert "refused the job's key" in str(outcomes[0])


def test_who_does_not_answer_or_does_not_listen_is_reported_after_the_deadline(
    loop: EventLoop, key: JobKey, silent: socket.socket
) -> None:
    with socket.create_server((LOCAL, 0)) as reserved:
        nobody = port_of(reserved)
    outcomes: list[Outcome] = []
    start(loop, f"{LOCAL}:{port_of(silent)}", key, outcomes, timeout_s=0.05)
    run_for(loop, PATIENCE_S, lambda: bool(outcomes))
    start(loop, f"{LOCAL}:{nobody}", key, outcomes, timeout_s=0.05)
    run_for(loop, PATIENCE_S, lambda: len(outcomes) == 2)
    assert "something listens there but does not answer" in str(outcomes[0])
    assert "nobody listens there (connection refused), for 0.05 s" in str(outcomes[1])


def test_one_that_was_cancelled_reports_nothing_and_leaves_nothing_open(
    loop: EventLoop, key: JobKey, silent: socket.socket
) -> None:
    outcomes: list[Outcome] = []
    pending = start(loop, f"{LOCAL}:{port_of(silent)}", key, outcomes, timeout_s=0.05)
    run_for(loop, 0.0, lambda: True)
    pending.cancel()
    pending.cancel()
    silent.settimeout(PATIENCE_S)
    there, _ = silent.accept()
    with there:
        there.settimeout(PATIENCE_S)
        while there.recv(1000):  # until its end
            pass
    run_for(loop, 0.1, lambda: bool(outcomes))
    assert outcomes == []
