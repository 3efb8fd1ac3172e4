"""What the members of an mpi channel tell each other beside their calls: that they wait, have left, or gave up.

MPI only says that a call is not complete, never because of whom. So a member that waits for long tells the others
where it is; those that tell nothing are the missing ones. A member that aborts or closes its channel says so, and how
far it came: calls that it has finished will complete for the others too, those behind never will.

CLOSED is also the last message of a member on the channel. A communicator may be freed only when that of every member
was received: Open MPI hands a message that comes too late to the next communicator with the same number, and then loses
one of its own.
"""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

import msgspec

from ronde.comm.mpi.requests import Request

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Notice", "NoticeBoard", "Saying"]

TAG_NOTICE = 1


class Saying(enum.IntEnum):
    """What a notice says."""

    WAITING = 0
    CLOSED = 1
    ABORTED = 2


class Notice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One member's message to another."""

    saying: Saying
    num_rounds: int
    """Collective calls I have finished."""
    num_sent: int = 0
    """Messages to you that I have finished sending."""
    num_received: int = 0
    """Messages from you that I have finished receiving."""
    lost: int = -1
    why: str = ""

    def encode(self) -> bytes:
        """Bytes for the wire."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Notice:
        """What encode() made."""
        return msgspec.msgpack.decode(data, type=Notice)


class NoticeBoard:
    """Sends and collects the notices of one channel. Safe from any thread."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._sent: list[Request] = []
        self._freed = False
        self.waiting: dict[int, int] = {}
        """Per member: the collective call at which it told to be waiting, counted from 0."""
        self.gone: dict[int, Notice] = {}
        """Members that closed or aborted the channel."""

    def tell(self, member: int, notice: Notice) -> None:
        """Send a notice; returns at once. After free() nobody listens any more."""
        with self._lock:
            if not self._freed:
                self._sent.append(self._comm.Isend(notice.encode(), member, TAG_NOTICE))
                self._sent = [sent for sent in self._sent if not sent.Test()]

    def read(self) -> None:
        """Take in what has come."""
        from mpi4py import MPI

        status = MPI.Status()
        # Probed and received as one, so that another thread cannot take the message in between.
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, TAG_NOTICE, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            self._take(status.Get_source(), bytes(data))

    def free(self) -> bool:
        """Free the communicator when no message is on its way any more; False as long as that may still come. After
        an abort it is never freed."""
        self.read()
        with self._lock:
            self._sent = [sent for sent in self._sent if not sent.Test()]
            if any(notice.saying is Saying.ABORTED for notice in list(self.gone.values())):
                return True
            if self._sent or len(self.gone) < self._comm.Get_size() - 1:
                return False
            self._freed = True
            self._comm.Free()
        return True

    def _take(self, member: int, data: bytes) -> None:
        try:
            notice = Notice.decode(data)
        except msgspec.DecodeError:  # of a program that uses our communicator: not ours to answer for
            return
        if notice.saying is Saying.WAITING:
            self.waiting[member] = notice.num_rounds
        else:
            self.gone.setdefault(member, notice)
