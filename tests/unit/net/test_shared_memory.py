from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterator

import pytest

from ronde.errors import ProtocolError, StartFailed
from ronde.net.shared_memory import create_shared_memory, receive_descriptor, send_descriptor
from ronde.types import Deadline

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_shared_memory("ronde-test", 8192)
    yield descriptor
    os.close(descriptor)


def test_memory_has_a_size_that_nobody_can_change(memory: int) -> None:
    assert os.fstat(memory).st_size == 8192
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(memory, size)


def test_memory_needs_a_size() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        create_shared_memory("ronde-test", 0)


def test_descriptors_come_in_order_are_the_same_memory_and_do_not_survive_exec(pair: Pair) -> None:
    sent = [create_shared_memory("ronde-test", size) for size in (10, 20, 30)]
    for descriptor in sent:
        send_descriptor(pair[0], descriptor)
    received = [receive_descriptor(pair[1], Deadline(10)) for _ in sent]
    assert [os.fstat(descriptor).st_size for descriptor in received] == [10, 20, 30]
    with mmap.mmap(sent[0], 10) as mine, mmap.mmap(received[0], 10) as theirs:
        mine[5:8] = b"abc"
        assert theirs[5:8] == b"abc"
    for descriptor in sent + received:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(descriptor)


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_the_wait_for_a_descriptor_ends(pair: Pair, seconds: float) -> None:
    with pytest.raises(StartFailed, match="no descriptor came"):
        receive_descriptor(pair[1], Deadline(seconds))
    assert pair[1].gettimeout() is None


def test_a_side_that_hangs_up_is_noticed(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(StartFailed, match="closed it before it sent"):
        receive_descriptor(pair[1], Deadline(10))


def test_data_without_a_descriptor_is_refused(pair: Pair) -> None:
    pair[0].send(b"f")
    with pytest.raises(ProtocolError, match="0 descriptors"):
        receive_descriptor(pair[1], Deadline(10))


def test_too_many_descriptors_leave_none_open(pair: Pair, memory: int) -> None:
    socket.send_fds(pair[0], [b"f"], [memory, memory, memory])
    os.close(receive_descriptor(pair[1], Deadline(10)))  # the leak check sees the others, if any
