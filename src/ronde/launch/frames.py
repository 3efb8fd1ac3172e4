"""Messages as frames in a stream of bytes: a length (4 bytes, big endian), then msgpack. Used at both ends of the ssh
connection: launch/remote and launch/ssh.

The shell that starts an agent may print to the same stream first (a banner, what ~/.bashrc says). So an agent opens
with MARK, and the driver's reader skips what comes before it, and keeps its end: when no agent ever speaks, that is
the best explanation there is.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

from ronde.errors import ProtocolError
from ronde.launch.messages import FromAgent, FromDriver

__all__ = ["LIMIT_BYTES", "MARK", "FrameReader", "encode_frame", "from_agent", "from_driver"]

MARK = b"\0ronde agent\0"
"""What an agent sends before its first frame. No shell prints it by accident."""
LIMIT_BYTES = 2**32 - 1
"""What the length can say."""
NOISE_BYTES = 4096
"""So much of what came before MARK is kept."""

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)

T = TypeVar("T")


def encode_frame(message: FromDriver | FromAgent) -> bytes:
    """One message for the wire."""
    data = bytearray(_LENGTH.size)
    _encoder.encode_into(message, data, _LENGTH.size)
    size = len(data) - _LENGTH.size
    if size > LIMIT_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} takes {size} bytes, more than the {LIMIT_BYTES} that fit into a frame; "
            "pass large data by file, and only its path to the function"
        )
    _LENGTH.pack_into(data, 0, size)
    return bytes(data)


class FrameReader(Generic[T]):
    """Collects bytes as they come and gives out whole messages. Made by from_agent() or from_driver()."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], *, mark: bytes = b"") -> None:
        self._decoder = decoder
        self._mark = mark
        self._half = b""
        """What may be the beginning of the mark."""
        self._parts: list[bytes] = []
        self._num_bytes = 0
        """Of all parts."""
        self._num_wanted = _LENGTH.size
        """With fewer there is no whole message."""
        self.noise = b""
        """The end of what came before the mark: not from an agent."""

    def feed(self, data: bytes) -> list[T]:
        """The messages that are whole now. Raises ProtocolError when it is none; nothing after that makes sense."""
        if self._mark:
            data = self._skip_noise(data)
        self._parts.append(data)
        self._num_bytes += len(data)
        if self._num_bytes < self._num_wanted:  # put together once: a frame may have hundreds of megabytes
            return []
        return self._cut(b"".join(self._parts))

    def _cut(self, data: bytes) -> list[T]:
        found: list[T] = []
        start, self._num_wanted = 0, _LENGTH.size
        with memoryview(data) as view:
            while len(data) - start >= self._num_wanted:
                end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
                if end > len(data):
                    self._num_wanted = end - start
                    break
                found.append(self._decode(view[start + _LENGTH.size : end]))
                start = end
        self._parts, self._num_bytes = [data[start:]], len(data) - start
        return found

    def _skip_noise(self, data: bytes) -> bytes:
        """What comes after the mark; nothing as long as it has not come."""
        before, mark, after = (self._half + data).partition(self._mark)
        if mark:
            self._mark, self._half = b"", b""
        else:
            first = max(0, len(before) - len(self._mark) + 1)
            cut = next(cut for cut in range(first, len(before) + 1) if self._mark.startswith(before[cut:]))
            before, self._half = before[:cut], before[cut:]
        self.noise = (self.noise + before)[-NOISE_BYTES:]
        return after

    def _decode(self, data: memoryview) -> T:
        with data:
            try:
                return self._decoder.decode(data)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise ProtocolError(f"not a message: {error}; is it the same version of ronde on all hosts?") from None


def from_agent() -> FrameReader[FromAgent]:
    """Reads what an agent sends."""
    return FrameReader(_from_agent, mark=MARK)


def from_driver() -> FrameReader[FromDriver]:
    """Reads what the driver sends."""
    return FrameReader(_from_driver)
