"""Messages between a rank and the program that runs its job (Driver.send, on_message): the rank's end. They travel
through pipes of the rank's agent, and from another host through the connection of that agent, so nothing listens for
them and nobody else can send any. Used by the warm workers of ronde.search.
"""

from __future__ import annotations

import os
import select

from ronde.errors import OperationTimeout, ProtocolError
from ronde.launch.agent.rank import MESSAGE_FDS_VARIABLE, MESSAGE_LENGTH

MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class MessagePipes:
    """The two pipes of this rank. Used by one thread at a time. It is there once in a process: the variable with the
    descriptors is removed, and what this process starts does not inherit them."""

    def __init__(self) -> None:
        reading, writing = os.environ.pop(MESSAGE_FDS_VARIABLE).split(",")
        self._reading_fd, self._writing_fd = int(reading), int(writing)
        for fd in (self._reading_fd, self._writing_fd):
            os.set_inheritable(fd, False)

    def send(self, data: bytes) -> None:
        """Send a message. BrokenPipeError when the driver is gone."""
        rest = memoryview(MESSAGE_LENGTH.pack(len(data)) + data)
        while rest:
            rest = rest[os.write(self._writing_fd, rest) :]

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Return the next message. OperationTimeout when none has come in time, EOFError when the driver is gone."""
        if timeout_s is not None and not select.select([self._reading_fd], (), (), timeout_s)[0]:
            raise OperationTimeout(f"the driver of this job has not answered within {timeout_s:g} s")
        length = MESSAGE_LENGTH.unpack(self._read(MESSAGE_LENGTH.size))[0]
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes, more than the {MAX_MESSAGE_BYTES} that are allowed")
        return self._read(length)

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            more = os.read(self._reading_fd, num_bytes - len(data))
            if not more:
                raise EOFError("the driver of this job is gone")
            data += more
        return data
