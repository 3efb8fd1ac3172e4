"""Too many open files: who needs one says so, how many there are and what to do. The limits here are lowered and raised
again by the test."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from ronde.errors import StartFailed
from ronde.net.connect import connect_authenticated
from ronde.net.control_connection import ControlServer
from ronde.net.event_loop import EventLoop
from ronde.net.handshake import ConnectionRequest
from ronde.net.keys import JobKey
from ronde.net.listener import Listener
from ronde.net.open_files import check_open_files, explain_open_files, raise_open_files_limit
from ronde.net.shared_memory import create_shared_memory, receive_descriptor, send_descriptor
from ronde.types import Deadline
from tests.limits import PATIENCE_S

LOCAL = "127.0.0.1"


@contextmanager
def free_files(num: int) -> Iterator[None]:
    """So many files can be opened in here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as opened:
        highest = max(int(link.name) for link in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        taken: list[int] = []
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(num):
            os.close(taken.pop())
        for fd in taken:
            opened.callback(os.close, fd)
        yield


def test_the_limit_is_raised_as_far_as_possible_and_a_high_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: wanted.append(limits))
    for limits in ((64, 4096), (4096, 4096), (64, 1 << 30), (1 << 21, 1 << 30), (64, -1), (-1, -1)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limits=limits: limits)
        raise_open_files_limit()
    assert wanted == [(4096, 4096), (1 << 20, 1 << 30), (1 << 20, -1)]


@pytest.mark.parametrize(
    "open_one",
    [
        lambda key: check_open_files(1),
        lambda key: EventLoop(),
        lambda key: create_shared_memory("x", 1),
        lambda key: Listener(key, unix=True, tcp_host=None),
        lambda key: Listener(key, unix=False, tcp_host=LOCAL),
        lambda key: connect_authenticated("127.0.0.1:9", key, ConnectionRequest("x", 0), Deadline(PATIENCE_S)),
        lambda key: connect_authenticated("unix:x", key, ConnectionRequest("x", 0), Deadline(PATIENCE_S)),
    ],
    ids=["check", "event loop", "shared memory", "unix listener", "listener", "connection", "unix connection"],
)
def test_who_can_open_no_file_says_how_many_are_open(open_one: Callable[[JobKey], object], key: JobKey) -> None:
    with pytest.raises(StartFailed) as caught, free_files(0), explain_open_files("rank 3 cannot join"):
        open_one(key)
    words = (
        r"rank 3 cannot join: too many open files \((\d+) are open in this process, its limit is (\d+)\).*`ulimit -n`"
    )
    found = re.match(words, str(caught.value))
    assert found is not None, caught.value
    assert int(found[1]) <= int(found[2]) < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_other_errors_stay_as_they_are() -> None:
    for error in (OSError(errno.EACCES, "no"), zmq.ZMQError(errno.EADDRINUSE), ValueError("no")):
        with pytest.raises(type(error)) as caught, explain_open_files("it"):
            raise error
        assert caught.value is error
    with pytest.raises(StartFailed, match="it: too many open files"), explain_open_files("it"):
        raise zmq.ZMQError(errno.ENFILE)


def test_a_descriptor_that_has_no_place_is_no_nonsense() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_descriptor(theirs, 0)
        with free_files(0), pytest.raises(OSError, match="Too many open files"):
            receive_descriptor(ours, Deadline(PATIENCE_S))


def test_a_listener_that_can_accept_no_connection_says_so_until_it_can_again(
    key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ronde.net.listener.OUT_OF_DESCRIPTORS_PAUSE_S", 0.01)
    listener = Listener(key, unix=False, tcp_host=LOCAL)
    address, deadline = (LOCAL, listener.tcp_port), Deadline(PATIENCE_S)
    try:
        with free_files(1), socket.create_connection(address):
            with pytest.raises(StartFailed, match=r"no connection can be accepted: too many open files .*`ulimit -n`"):
                listener.accept("x", 1, deadline)
        connected, _ = connect_authenticated(f"{LOCAL}:{listener.tcp_port}", key, ConnectionRequest("x", 1), deadline)
        listener.accept("x", 1, deadline).close()
        connected.close()
    finally:
        listener.close()


def test_a_port_that_is_taken_is_another_matter(key: JobKey) -> None:
    with socket.create_server((LOCAL, 0)) as taken:
        with pytest.raises(StartFailed, match="choose another port"), explain_open_files("it"):
            ControlServer(LOCAL, key, port=taken.getsockname()[1])
