"""Headers that the members of an mpi channel exchange and compare before any data: members that ask for different
things get an error, never a wrong number. A member that has joined learns from them what the others do.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from ronde.comm.call import Call, mismatch_error
from ronde.types import DType, Op, OperationKind

DESCRIPTION_BYTES = 128
_STRUCT = struct.Struct(f"<Q4iQIdd{DESCRIPTION_BYTES}s")
HEADER_BYTES = _STRUCT.size
_COUNTED = (
    OperationKind.ALLREDUCE,
    OperationKind.BROADCAST,
    OperationKind.REDUCE_SCATTER,
    OperationKind.SEND,
    OperationKind.RECEIVE,
)
_SHARED_COUNTS = (OperationKind.ALLGATHER, OperationKind.REDUCE_SCATTER)


class CallHeader(msgspec.Struct, frozen=True, gc=False):
    """What one member asks for. All but the description must be equal on all members."""

    signature_hash: int
    kind: int
    dtype: int
    op: int
    root: int
    count: int
    """Elements, if all members must have the same number."""
    counts: int
    """Checksum of the elements per member, if all members must have the same."""
    prescale: float
    postscale: float
    description: str

    @classmethod
    def from_call(cls, call: Call) -> CallHeader:
        if call.kind is OperationKind.JOIN:
            return cls(0, call.kind, 0, 0, -1, 0, 0, 1.0, 1.0, call.description or "join")
        shared = call.counts if call.kind in _SHARED_COUNTS and call.counts is not None else ()
        return cls(
            call.signature_hash,
            call.kind,
            call.dtype,
            call.op,
            call.peer if call.kind is OperationKind.BROADCAST else -1,
            sum(span.count for span in call.spans) if call.kind in _COUNTED else 0,
            zlib.crc32(struct.pack(f"<{len(shared)}Q", *shared)),
            call.prescale,
            call.postscale,
            call.description or call.kind.name.lower(),
        )

    def encode(self) -> bytes:
        """HEADER_BYTES bytes."""
        return _STRUCT.pack(*self.compared_fields(), self.description.encode()[: DESCRIPTION_BYTES - 1])

    @classmethod
    def decode(cls, data: bytes) -> CallHeader:
        signature, kind, dtype, op, root, count, counts, prescale, postscale, text = _STRUCT.unpack(data)
        numbers = (signature, kind, dtype, op, root, count, counts, prescale, postscale)
        return cls(*numbers, text.rstrip(b"\0").decode(errors="replace"))

    def compared_fields(self) -> tuple[object, ...]:
        return msgspec.structs.astuple(self)[:-1]

    def to_call(self) -> Call:
        """The call without its memory, for a member that contributes zeros."""
        return Call(
            OperationKind(self.kind),
            DType(self.dtype),
            Op(self.op),
            prescale=self.prescale,
            postscale=self.postscale,
            description=self.description,
        )


def match_collective(data: bytes, members: Sequence[int]) -> CallHeader | None:
    """The header that all members share which have not joined, from the headers of all; None when all have joined.
    Raises Mismatch when they ask for different things, or for something that joined members cannot take part in."""
    rows = [data[start : start + HEADER_BYTES] for start in range(0, len(data), HEADER_BYTES)]
    if all(row[:-DESCRIPTION_BYTES] == rows[0][:-DESCRIPTION_BYTES] for row in rows):
        same = CallHeader.decode(rows[0])
        return None if same.kind == OperationKind.JOIN else same
    headers = [CallHeader.decode(row) for row in rows]
    asking = [header for header in headers if header.kind != OperationKind.JOIN]
    alike = all(header.compared_fields() == asking[0].compared_fields() for header in asking)
    if not alike or (len(asking) < len(headers) and asking[0].kind != OperationKind.ALLREDUCE):
        raise mismatch_error({rank: header.description for rank, header in zip(members, headers, strict=True)})
    return asking[0]


def match_pair(sender: tuple[int, CallHeader], receiver: tuple[int, CallHeader]) -> None:
    """Raises Mismatch unless sender and receiver, each given with its rank, ask for the same data."""
    (_, sent), (_, received) = sender, receiver
    if (sent.signature_hash, sent.dtype, sent.count) != (received.signature_hash, received.dtype, received.count):
        raise mismatch_error({rank: header.description for rank, header in (sender, receiver)})
