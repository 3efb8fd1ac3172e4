"""Signature and Call: what a member asks for, and what a channel executes.

A signature has all that must be equal on the members: as fields, as a description for errors, and as a hash. It is made
once per kind, shapes, dtype and options and then found in a dictionary, which keeps repeated operations cheap. A call
adds the memory.
"""

from __future__ import annotations

import enum
import hashlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from ronde.errors import Mismatch
from ronde.text import format_rank_answers, shorten
from ronde.types import (
    CPU,
    JOINABLE,
    REDUCING_KINDS,
    VARIABLE_ROW_KINDS,
    DType,
    Op,
    OperationKind,
    find_reduction_error,
    parse_op,
)

Shapes = tuple[tuple[int, ...], ...]

MAX_SIGNATURES = 4096
MAX_DESCRIPTION_BYTES = 120
"""The native library keeps 127 bytes of a description."""


@dataclass(frozen=True, eq=False, slots=True)
class Memory:
    """Contiguous elements in the memory of a device. Collectives take it in place of an array.

    Memory of the CPU is read and written as an array is. **The backends of today take no other**: memory of another
    device is a TypeError. With a backend that takes it, an operation is ordered behind what was put on the stream
    before, and a blocking call returns when the stream waits for it, as the device's own functions do.
    """

    address: int
    """Of the first element, as the device knows it."""
    shape: tuple[int, ...]
    """Of the elements, which lie in C order."""
    dtype: str
    """Name of the element type, such as float32 or bfloat16."""
    device: str = CPU
    """The kind of the device, and its number if there are several: `cpu`, `cuda:1`."""
    stream: int | None = None
    """The stream of the device that writes the elements and will read them; None if they are there, and the host
    waits for the result."""
    owner: object = None
    """Kept until the operation has ended, so that the memory stays alive."""

    @property
    def number(self) -> DType:
        # The element type as channels know it.
        if self.dtype.upper() not in DType.__members__:
            names = ", ".join(dtype.name.lower() for dtype in DType)
            raise TypeError(f"dtype {self.dtype!r} is not supported; supported are {names}")
        return DType[self.dtype.upper()]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.size * self.number.num_bytes


NO_MEMORY = Memory(0, (0,), "uint8")


def kind_of_device(device: str) -> str:
    """The kind of a device: "cuda" of "cuda:1"."""
    return device.partition(":")[0]


class CallOptions(NamedTuple):
    """The options of a collective; not all kinds use all of them."""

    op: str | Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """A rank of the world."""
    device: str = CPU
    """The kind of the device."""


class Signature(msgspec.Struct, frozen=True, gc=False):
    """What an operation asks for, apart from its memory."""

    kind: OperationKind
    dtype: DType
    shapes: Shapes
    op: Op
    prescale: float
    postscale: float
    root: int
    """The root of a broadcast, reduce, gather or scatter, as a rank of the world; otherwise -1."""
    label: str
    """The kind's name, for events."""
    description: str
    hash: int
    num_bytes: int
    device: str = CPU
    """The kind of the device whose memory is used: equal on all members, unlike its number."""

    def make_call(
        self,
        spans: tuple[Span, ...],
        owners: object,
        *,
        name: str = "",
        peer: int = -1,
        counts: tuple[int, ...] | None = None,
        splits: tuple[int, ...] | None = None,
        description: str = "",
        device: str = CPU,
        streams: tuple[int, ...] = (),
    ) -> Call:
        """A call on this memory. The members of an operation with a name have agreed on it before."""
        own = self.description
        return Call(
            self.kind,
            self.dtype,
            self.op,
            spans,
            peer,
            self.prescale,
            self.postscale,
            counts,
            splits,
            description or (f"{name!r}: {own}" if name else own),
            self.hash,
            bool(name),
            owners,
            device=device,
            streams=streams,
        )


def hash_signature(description: str) -> int:
    """64 bits that are equal in every process for an equal description."""
    return int.from_bytes(hashlib.blake2b(description.encode(), digest_size=8).digest(), "little")


def even_shares(count: int, num_shares: int) -> tuple[int, ...]:
    """Shares of so many rows or elements: equally many for each, or one more for the first."""
    least, more = divmod(count, num_shares)
    return tuple(least + (index < more) for index in range(num_shares))


def mismatch_error(descriptions: Mapping[int, str], joined: tuple[int, ...] = ()) -> Mismatch:
    """The error for members that asked for different things, by rank; its words are the same on all of them. Those in
    `joined` have called join()."""
    hint = f"; who calls join() takes part {JOINABLE}" if joined else ""
    error = Mismatch(f"the members asked for different things: {format_rank_answers(descriptions, verb=': ')}{hint}")
    error.joined = joined
    return error


@lru_cache(maxsize=MAX_SIGNATURES)
def get_signature(kind: OperationKind, dtype: DType, shapes: Shapes, options: CallOptions) -> Signature:
    """The signature of these, the same object each time. ValueError when the options make no sense."""
    label, op = kind.name.lower(), parse_op(options.op)
    # A number of NumPy is equal to Python's own, so the cache takes one for the other; but it cannot be sent.
    shapes = tuple([tuple(map(operator.index, shape)) for shape in shapes])
    options = options._replace(root=operator.index(options.root))
    for field, factor in (("prescale", options.prescale), ("postscale", options.postscale)):
        if not math.isfinite(factor):
            raise ValueError(f"{label}: {field} must be a finite number, got {factor}")
    prescale, postscale = float(options.prescale), float(options.postscale)
    if problem := find_reduction_error(kind, dtype, op, scaled=(prescale, postscale) != (1.0, 1.0)):
        raise ValueError(f"{label}: {problem}")
    description = " ".join([label, *_argument_words(kind, dtype, shapes, op, options)])
    hash = hash_signature(description)
    if len(description.encode()) > MAX_DESCRIPTION_BYTES:
        # A description that was cut must still differ where the full one does.
        description = f"{description[: MAX_DESCRIPTION_BYTES - 20]}… #{hash:016x}"
    num_bytes = sum(math.prod(shape) for shape in shapes) * dtype.num_bytes
    factors = (prescale, postscale)
    root, device = options.root, options.device
    return Signature(kind, dtype, shapes, op, *factors, root, label, description, hash, num_bytes, device)


def describe_named(signature: Signature, name: str) -> str:
    """An operation in a stall report, in the coordinator's words: `allreduce 'w' sum float32[3]`."""
    options = CallOptions(signature.op, signature.prescale, signature.postscale, signature.root, signature.device)
    words = _argument_words(signature.kind, signature.dtype, signature.shapes, signature.op, options)
    return f"{signature.label} {name!r} {shorten(' '.join(words), MAX_DESCRIPTION_BYTES)}".rstrip()


def _argument_words(kind: OperationKind, dtype: DType, shapes: Shapes, op: Op, options: CallOptions) -> list[str]:
    """What follows the kind in the description of an operation."""
    words: list[str] = []
    if kind in REDUCING_KINDS:
        words.append(op.name.lower())
    # Where members may give different numbers of rows, the rows are not compared.
    shown = [("*", *shape[1:]) if kind in VARIABLE_ROW_KINDS else shape for shape in shapes]
    if shown:
        words.append(dtype.name.lower() + " ".join(f"[{', '.join(map(str, shape))}]" for shape in shown))
    if options.root >= 0:
        preposition = "to" if kind in (OperationKind.REDUCE, OperationKind.GATHER) else "from"
        words.append(f"{preposition} rank {options.root}")
    for field in ("prescale", "postscale"):
        factor = float(getattr(options, field))
        if factor != 1.0:
            words.append(f"{field} {factor!r}")
    if options.device != CPU:
        words.append(f"on {options.device}")
    return words


class Span(msgspec.Struct, frozen=True, gc=False):
    """A contiguous piece of memory: addresses and number of elements. Its maker keeps the memory alive."""

    input: int
    output: int
    count: int


class MessageFlag(enum.IntFlag):
    """What is special about a send or a receive; the C header's flags of rd_message."""

    ANY_SIZE = 1
    """A receive without memory of its own: it takes any message of its tag, see Received."""
    EXPECTED = 2
    """A send whose receive was started before. It does not wait for space, and is dropped if nobody waits for it."""
    BACKGROUND = 4
    """It is not reported as late."""
    REPORT_LOSSES = 8
    """A receive from any source that ends with PeerLost for each rank that is lost, once."""


class Call(msgspec.Struct, frozen=True, gc=True):
    """One call of one member, as a channel executes it. The first fields are those of the C header's rd_call."""

    kind: OperationKind
    dtype: DType = DType.UINT8
    op: Op = Op.SUM
    spans: tuple[Span, ...] = ()
    peer: int = -1
    """The root of a broadcast, reduce, gather or scatter, or the other side of send and receive, as an index among the
    members; -1 for a receive from any member."""
    prescale: float = 1.0
    postscale: float = 1.0
    counts: tuple[int, ...] | None = None
    """Elements per member; allgather, gather: given by each; reduce_scatter, scatter: for each; alltoall: from each to
    this one."""
    splits: tuple[int, ...] | None = None
    """alltoall: elements that this member gives to each member."""
    description: str = ""
    signature_hash: int = 0
    """Must be equal on all members."""
    pre_agreed: bool = False
    """Whether the members agreed on this call before, by name: they need not compare it again."""
    owners: object = None
    """The objects that own the memory of the spans, kept until the call has ended."""
    tag: int = 0
    """Of a send or receive: only equal tags meet."""
    header: bytes | None = None
    """Of a send to a receive of any size: what arrives along with the array."""
    window_bytes: int = 0
    """A send waits while more of this channel is on its way to the receiver or kept there."""
    flags: int = 0
    """MessageFlag"""
    device: str = CPU
    """Where the memory of the spans is."""
    streams: tuple[int, ...] = ()
    """The streams of the device whose work so far the call has to wait for; none on the CPU."""


class AnnouncedOperation(NamedTuple):
    """An operation that this rank announces in shared memory."""

    signature: Signature
    name: str
    announced_ns: int
    shared_id: int
    spans: tuple[Span, ...]

    @property
    def description(self) -> str:
        return f"{self.name!r}: {self.signature.description}"
