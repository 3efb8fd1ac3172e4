"""What each member asks for, exchanged before the data: the mpi channel compares it, so that members that disagree get
an error and never a wrong number. A member that has joined learns from it what the others do."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from ronde.comm.backend import Call
from ronde.comm.signature import mismatch
from ronde.types import DType, Kind, Op

__all__ = ["HEADER_BYTES", "Header", "agreed", "check_pair"]

TEXT_BYTES = 128
_LAYOUT = struct.Struct(f"<Q4iQIdd{TEXT_BYTES}s")
HEADER_BYTES = _LAYOUT.size
_COUNTED = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE_SCATTER, Kind.SEND, Kind.RECEIVE)
_SHARED_COUNTS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER)


class Header(msgspec.Struct, frozen=True, gc=False):
    """One member's question. All but the text must be equal on all members."""

    signature: int
    kind: int
    dtype: int
    op: int
    root: int
    count: int
    """Elements, where all members must have the same number."""
    counts: int
    """Checksum of the elements per member, where all members must know the same."""
    prescale: float
    postscale: float
    text: str

    @classmethod
    def of(cls, call: Call) -> Header:
        """What a call asks for."""
        if call.kind is Kind.JOIN:
            return cls(0, call.kind, 0, 0, -1, 0, 0, 1.0, 1.0, call.text or "join")
        shared = call.counts if call.kind in _SHARED_COUNTS and call.counts is not None else ()
        return cls(
            call.signature,
            call.kind,
            call.dtype,
            call.op,
            call.peer if call.kind is Kind.BROADCAST else -1,
            sum(part.count for part in call.parts) if call.kind in _COUNTED else 0,
            zlib.crc32(struct.pack(f"<{len(shared)}Q", *shared)),
            call.prescale,
            call.postscale,
            call.text or call.kind.name.lower(),
        )

    def encode(self) -> bytes:
        """Bytes for the wire, always HEADER_BYTES of them."""
        return _LAYOUT.pack(*self.numbers(), self.text.encode()[: TEXT_BYTES - 1])

    @classmethod
    def decode(cls, data: bytes) -> Header:
        """What encode() made."""
        signature, kind, dtype, op, root, count, counts, prescale, postscale, text = _LAYOUT.unpack(data)
        numbers = (signature, kind, dtype, op, root, count, counts, prescale, postscale)
        return cls(*numbers, text.rstrip(b"\0").decode(errors="replace"))

    def numbers(self) -> tuple[object, ...]:
        """All that must be equal."""
        return msgspec.structs.astuple(self)[:-1]

    def call(self) -> Call:
        """The call without its data, for a member that joins in with zeros."""
        return Call(
            Kind(self.kind),
            DType(self.dtype),
            Op(self.op),
            prescale=self.prescale,
            postscale=self.postscale,
            text=self.text,
        )


def agreed(data: bytes, members: Sequence[int]) -> Header | None:
    """What all members that have not joined do now, from the headers of all in a row; None when all have joined.
    Raises Mismatch when they want different things, or something that members who joined cannot take part in."""
    rows = [data[start : start + HEADER_BYTES] for start in range(0, len(data), HEADER_BYTES)]
    if all(row[:-TEXT_BYTES] == rows[0][:-TEXT_BYTES] for row in rows):
        same = Header.decode(rows[0])
        return None if same.kind == Kind.JOIN else same
    headers = [Header.decode(row) for row in rows]
    asking = [header for header in headers if header.kind != Kind.JOIN]
    alike = all(header.numbers() == asking[0].numbers() for header in asking)
    if not alike or (len(asking) < len(headers) and asking[0].kind != Kind.ALLREDUCE):
        raise mismatch({rank: header.text for rank, header in zip(members, headers, strict=True)})
    return asking[0]


def check_pair(sender: tuple[int, Header], receiver: tuple[int, Header]) -> None:
    """Raises Mismatch unless these two ranks mean the same data."""
    (_, sent), (_, received) = sender, receiver
    if (sent.signature, sent.dtype, sent.count) != (received.signature, received.dtype, received.count):
        raise mismatch({rank: header.text for rank, header in (sender, receiver)})
