"""Shared memory that is in no file system, and descriptors that travel over a Unix socket."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from ronde.errors import ProtocolError, StartFailed
from ronde.types import Deadline

# Not all in Python's fcntl before 3.13; the numbers are Linux's.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL = 0x1
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4

_INT = struct.Struct("i")
_TOKEN = b"f"
"""Linux sends a descriptor only along with data."""


def create_shared_memory(name: str, num_bytes: int) -> int:
    """Return a descriptor of zeroed memory, whose size is sealed: no process can shrink it while others use it.

    The name is shown in /proc/PID/maps. The memory is freed with its last descriptor and mapping.
    """
    if num_bytes < 1:
        raise ValueError(f"shared memory needs at least 1 byte, got {num_bytes}")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def send_descriptor(sock: socket.socket, fd: int) -> None:
    """Send a copy of the descriptor over a Unix socket."""
    socket.send_fds(sock, [_TOKEN], [fd])


def receive_descriptor(sock: socket.socket, deadline: Deadline) -> int:
    """Return the next descriptor sent over a Unix socket, which the caller owns. It does not survive exec. Raises
    OSError if this process has too many open files."""
    before = sock.gettimeout()
    try:
        # A timeout of 0 would mean non-blocking mode, whose error is another one.
        sock.settimeout(max(deadline.remaining_s, 1e-6))
        # Not socket.recv_fds: it drops the flags.
        data, extras, flags, _ = sock.recvmsg(len(_TOKEN), socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
    except (TimeoutError, BlockingIOError):
        raise StartFailed(f"no descriptor came over the Unix socket within {deadline.timeout_s:g} s") from None
    except ConnectionError as error:
        raise StartFailed(f"the other side of the Unix socket is gone ({error.strerror})") from None
    finally:
        sock.settimeout(before)
    found: list[int] = []
    for level, kind, payload in extras:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(payload) - len(payload) % _INT.size
            found += [fd for (fd,) in _INT.iter_unpack(payload[:whole])]
    if len(found) == 1 and data == _TOKEN:
        return found[0]
    if flags & socket.MSG_CTRUNC and not found:  # Linux drops a descriptor that has no place in this process
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for descriptor in found:
        os.close(descriptor)
    if not data:
        raise StartFailed("the other side of the Unix socket closed it before it sent a descriptor")
    raise ProtocolError(f"expected a descriptor over the Unix socket, got {data!r} and {len(found)} descriptors")
