"""Shared memory without a name in any file system, its way to another process, and a bell. Used by comm's native
backend (memory), and by door and control (bell)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading

from ronde.errors import ProtocolError, StartFailed
from ronde.types import Deadline

__all__ = ["WakeupFd", "create_shared_memory", "receive_descriptor", "send_descriptor"]

# Not all in Python's fcntl before 3.13; the numbers are Linux's.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL = 0x1
_F_SEAL_SHRINK = 0x2
_F_SEAL_GROW = 0x4

_INT = struct.Struct("i")
_TOKEN = b"f"
"""A descriptor rides on a byte of data: Linux sends none without."""


def create_shared_memory(name: str, num_bytes: int) -> int:
    """A descriptor of fresh, zeroed memory to share. Its size is sealed: nobody can cut it under another's feet.

    The name is for people (/proc/PID/maps); the memory is gone with its last descriptor and mapping.
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
    """Hand a copy of the descriptor to the other side of a Unix socket. The caller still owns his."""
    socket.send_fds(sock, [_TOKEN], [fd])


def receive_descriptor(sock: socket.socket, deadline: Deadline) -> int:
    """The next descriptor from the other side of a Unix socket; the caller owns it. It does not survive exec."""
    before = sock.gettimeout()
    try:
        # A timeout of 0 would mean "do not wait at all" in another way; a passed deadline fails the same.
        sock.settimeout(max(deadline.remaining_s, 1e-6))
        # Not socket.recv_fds: it drops the flags.
        data, extras, _, _ = sock.recvmsg(len(_TOKEN), socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC)
    except (TimeoutError, BlockingIOError):
        raise StartFailed(f"no descriptor came over the Unix socket within {deadline.timeout_s:g} s") from None
    except ConnectionError as error:
        raise StartFailed(f"the other side of the Unix socket is gone ({error.strerror})") from None
    finally:
        sock.settimeout(before)
    found = [fd for level, kind, payload in extras for fd in _rights(level, kind, payload)]
    if len(found) == 1 and data == _TOKEN:
        return found[0]
    for descriptor in found:
        os.close(descriptor)
    if not data:
        raise StartFailed("the other side of the Unix socket hung up before it handed over a descriptor")
    raise ProtocolError(f"expected a descriptor over the Unix socket, got {data!r} and {len(found)} descriptors")


def _rights(level: int, kind: int, payload: bytes) -> list[int]:
    if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        return []
    whole = len(payload) - len(payload) % _INT.size
    return [fd for (fd,) in _INT.iter_unpack(payload[:whole])]


class WakeupFd:
    """Wakes whoever polls its descriptor. ring() is safe from every thread, also during and after close()."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Without it, a late ring could write into a stranger's file that got the same number. Reentrant: a signal
        # handler may ring while its own thread does.
        self._lock = threading.RLock()

    def fileno(self) -> int:
        """For pollers: readable while rung."""
        return self._fd

    def notify(self) -> None:
        """Make it readable."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make it unreadable again; all rings so far count as one."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Free the descriptor. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
