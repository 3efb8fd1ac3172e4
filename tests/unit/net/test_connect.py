"""Connections that an event loop makes: many at a time, without waiting for any of them."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing

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
    loop: EventLoop,
    address: str,
    key: JobKey,
    outcomes: list[Outcome],
    *,
    rank: int = 0,
    timeout_s: float = PATIENCE_S,
    answer_s: float = math.inf,
) -> PendingConnection:
    request = ConnectionRequest("data", rank)
    return PendingConnection(loop, address, key, request, Deadline(timeout_s), outcomes.append, answer_s=answer_s)


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


def test_a_host_whose_kernel_does_not_answer_cannot_be_reached(
    loop: EventLoop, key: JobKey, silent: socket.socket
) -> None:
    """The kernel drops what comes to a port whose queue is full. Where it answers, the process may take its time."""
    with socket.create_server((LOCAL, 0), backlog=0) as full, ExitStack() as opened:
        for _ in range(3):  # more than it takes
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        outcomes: list[Outcome] = []
        pending = start(loop, f"{LOCAL}:{port_of(silent)}", key, outcomes, answer_s=0.05)
        start(loop, f"{LOCAL}:{port_of(full)}", key, outcomes, answer_s=0.05)
        run_for(loop, PATIENCE_S, lambda: bool(outcomes))
        assert "no answer within 0.05 s; is the network between the hosts cut?" in str(outcomes[0])
        run_for(loop, 0.1, lambda: len(outcomes) == 2)
        assert len(outcomes) == 1
        pending.cancel()


def test_a_connection_that_is_reset_right_after_it_was_made_is_tried_again(
    loop: EventLoop, key: JobKey, silent: socket.socket
) -> None:
    outcomes: list[Outcome] = []
    pending = start(loop, f"{LOCAL}:{port_of(silent)}", key, outcomes)
    run_for(loop, 0.0, lambda: True)  # it connects, and has not seen yet that it is connected
    silent.settimeout(PATIENCE_S)
    there, _ = silent.accept()
    there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
    there.close()
    assert pending._sock is not None
    deadline = Deadline(PATIENCE_S)
    while not pending._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # which forgets the error
        assert not deadline.expired
    run_for(loop, PATIENCE_S, lambda: os.strerror(errno.ENOTCONN) in pending.problem)
    assert outcomes == []
    run_for(loop, PATIENCE_S, lambda: bool(select.select([silent], [], [], 0)[0]))
    silent.accept()[0].close()
    pending.cancel()


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
