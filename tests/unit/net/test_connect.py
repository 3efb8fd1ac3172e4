"""How a connection ended, and what is said of it."""

from __future__ import annotations

import errno
import os
import select
import socket

from ronde.net.connect import describe_disconnect, socket_error


def test_only_a_host_that_the_kernel_gave_up_is_called_unreachable() -> None:
    for error in (0, errno.ECONNRESET, errno.EPIPE):
        assert describe_disconnect(error) == ""
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
    with open(os.devnull) as file:  # noqa: PTH123  # not a socket
        assert socket_error(file.fileno()) == 0
