"""How a connection ended, and what is said of it."""

from __future__ import annotations

import errno
import os
import select
import socket

import pytest

from ronde.net.connect import describe_disconnect, socket_error


@pytest.mark.parametrize("error", [0, errno.ECONNRESET, errno.EPIPE])
def test_a_connection_that_was_closed_is_not_called_unreachable(error: int) -> None:
    assert describe_disconnect(error) == ""


def test_a_host_that_the_kernel_gave_up_is_called_unreachable_and_why() -> None:
    assert describe_disconnect(errno.ETIMEDOUT) == f"its host cannot be reached: {os.strerror(errno.ETIMEDOUT)}"


def test_the_error_of_a_connection_is_found_and_its_descriptor_stays_open() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = free.getsockname()
    with socket.socket() as line:
        line.setblocking(False)
        line.connect_ex(nobody)
        select.select([], [line], [], 10.0)
        assert socket_error(line.fileno()) == errno.ECONNREFUSED
        assert line.fileno() >= 0 and os.fstat(line.fileno())
    one, other = socket.socketpair()
    other.close()
    with one:
        assert socket_error(one.fileno()) == 0


def test_what_is_no_socket_has_no_error() -> None:
    reading, writing = os.pipe()
    try:
        assert socket_error(reading) == 0
        assert socket_error(1 << 20) == 0
    finally:
        os.close(reading)
        os.close(writing)
