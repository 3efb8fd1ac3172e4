"""The messages between the front and its replicas. They travel over authenticated connections: a Unix socket on one
host, TCP between hosts. A frame is a message in msgpack, and the bytes of tensors or of a file behind it, which are not
copied when it is sent:

    16 bytes    length of the message, length of the bytes
    message     and zeros, so that the bytes begin at a multiple of ALIGNMENT
    bytes       of a batch: all rows of the first input, request by request, then those of the second, and so on: what
                arrives is the batch, and nobody had to put it together
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Generic, TypeAlias, TypeVar

import msgspec

from ronde.errors import ProtocolError
from ronde.serve.inference_protocol import Buffer, ModelSignature

ALIGNMENT = 64
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_DATA_BYTES = 1 << 40
_PREFIX = struct.Struct("<QQ")

REPLICA_PURPOSE = "replica"
"""For which a replica connects to the front (ConnectionRequest.purpose)."""


class ServeMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# --- from the front --------------------------------------------------------------------------------------------------


class LoadModel(ServeMessage, frozen=True):
    """Load a model, warm it up and check it, while others go on. Answered by ModelLoaded or ModelFailed."""

    version: int
    path: str
    """On the front's host. Replicas of other hosts ask for the files (FetchModel)."""
    files: tuple[str, ...]
    entry: str = ""
    """The file to load, of a model without metadata; otherwise the folder is."""


class ModelFile(ServeMessage, frozen=True):
    """A piece of a file of a model, in order; the bytes are behind the message."""

    version: int
    name: str
    is_last: bool = False
    """Of all files."""


class UnloadModel(ServeMessage, frozen=True):
    version: int


class PredictBatch(ServeMessage, frozen=True):
    number: int
    version: int
    num_rows: tuple[int, ...]
    """Of each request."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each input, without its first axis if the model is batched, and then the same in all requests."""
    sizes: tuple[tuple[int, ...], ...]
    """Of each input, its bytes in each request."""


FrontMessage: TypeAlias = LoadModel | ModelFile | UnloadModel | PredictBatch


# --- from a replica --------------------------------------------------------------------------------------------------


class ModelLoaded(ServeMessage, frozen=True):
    version: int
    signature: ModelSignature
    name: str
    load_s: float


class ModelFailed(ServeMessage, frozen=True):
    version: int
    reason: str


class FetchModel(ServeMessage, frozen=True):
    """Send the files of a model: this replica is on another host."""

    version: int


class RequestResult(msgspec.Struct, frozen=True, array_like=True):
    """What became of one request of a batch."""

    status: int
    """As in HTTP: 200, 400 if the request cannot be predicted, 500 if predicting it has failed."""
    message: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of each output."""
    sizes: tuple[int, ...] = ()
    """Of each output, its bytes; those of all requests are behind the message in this order."""


class BatchDone(ServeMessage, frozen=True):
    number: int
    version: int
    results: tuple[RequestResult, ...]
    predict_s: float


ReplicaMessage: TypeAlias = ModelLoaded | ModelFailed | FetchModel | BatchDone

_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode_frame(message: FrontMessage | ReplicaMessage, data: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers of a frame, to be sent one behind the other."""
    encoded = _encoder.encode(message)
    padding = bytes(-(_PREFIX.size + len(encoded)) % ALIGNMENT)
    return [_PREFIX.pack(len(encoded), sum(map(len, data))) + encoded + padding, *data]


class FrameAssembler(Generic[M]):
    """Makes messages of what is received."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._start = b""
        """Of a frame whose length is not known yet."""
        self._frame: bytearray | None = None
        """Of a frame that is not complete."""
        self._num_filled = 0

    @property
    def missing(self) -> memoryview | None:
        """What is missing of a frame, to be written directly, followed by filled(); None if its size is not known."""
        return None if self._frame is None else memoryview(self._frame)[self._num_filled :]

    def filled(self, num_bytes: int) -> list[tuple[M, memoryview]]:
        """So many bytes were written into `missing`. Return what is complete now."""
        assert self._frame is not None
        self._num_filled += num_bytes
        if self._num_filled < len(self._frame):
            return []
        frame, self._frame = memoryview(self._frame), None
        return [self._decode(frame)]

    def feed(self, data: bytes) -> list[tuple[M, memoryview]]:
        """Return the messages that are complete now, each with the bytes behind it. ProtocolError if it is none."""
        found: list[tuple[M, memoryview]] = []
        view = memoryview(data)
        if self._frame is not None:
            num_bytes = min(len(view), len(self._frame) - self._num_filled)
            self._frame[self._num_filled : self._num_filled + num_bytes] = view[:num_bytes]
            found += self.filled(num_bytes)
            view = view[num_bytes:]
        if self._start:
            view = memoryview(self._start + bytes(view))
            self._start = b""
        while len(view) >= _PREFIX.size:
            size = _frame_bytes(*_PREFIX.unpack_from(view))
            if len(view) < size:
                self._frame = bytearray(size)
                self._frame[: len(view)] = view
                self._num_filled = len(view)
                return found
            found.append(self._decode(view[:size]))
            view = view[size:]
        self._start = bytes(view)
        return found

    def _decode(self, frame: memoryview) -> tuple[M, memoryview]:
        num_message_bytes, num_data_bytes = _PREFIX.unpack_from(frame)
        try:
            message = self._decoder.decode(frame[_PREFIX.size : _PREFIX.size + num_message_bytes])
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a message: {error}; is it the same version of ronde on all hosts?") from None
        return message, frame[len(frame) - num_data_bytes :]


def _frame_bytes(num_message_bytes: int, num_data_bytes: int) -> int:
    if num_message_bytes > MAX_MESSAGE_BYTES or num_data_bytes > MAX_DATA_BYTES:
        raise ProtocolError(f"a frame of {num_message_bytes} and {num_data_bytes} bytes is none of ronde")
    start = _PREFIX.size + num_message_bytes
    return start + -start % ALIGNMENT + num_data_bytes


def make_front_assembler() -> FrameAssembler[ReplicaMessage]:
    """For what the front receives."""
    return FrameAssembler(msgspec.msgpack.Decoder(ReplicaMessage))


def make_replica_assembler() -> FrameAssembler[FrontMessage]:
    """For what a replica receives."""
    return FrameAssembler(msgspec.msgpack.Decoder(FrontMessage))
