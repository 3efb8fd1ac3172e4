"""What a member asks for, in words and as a number that is equal on all members when they ask for the same.

Used by every collective. A form is made once per kind, shapes, dtype and options, and found again in a dictionary:
that keeps repeated calls cheap.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from ronde.errors import Mismatch
from ronde.text import format_rank_answers
from ronde.types import DType, Op, OperationKind, parse_op

__all__ = ["Call", "CallOptions", "Shapes", "Signature", "SignatureCache", "Span", "hash_signature", "mismatch_error"]

Shapes = tuple[tuple[int, ...], ...]

MAX_SIGNATURES = 4096
MAX_DESCRIPTION_BYTES = 120
"""The native library keeps 127 bytes of a text."""


class CallOptions(NamedTuple):
    """How a collective is to be done; not all kinds use all of them."""

    op: str | Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """A rank of the world."""


class Signature(msgspec.Struct, frozen=True, gc=False):
    """One kind of call with all that is equal each time it is made."""

    kind: OperationKind
    dtype: DType
    shapes: Shapes
    op: Op
    prescale: float
    postscale: float
    root: int
    """A broadcast's root, as a rank of the world; otherwise -1."""
    label: str
    """The kind's name, for events."""
    description: str
    hash: int
    num_bytes: int
    """Of what this member gives."""

    def make_call(
        self,
        spans: tuple[Span, ...],
        owners: object,
        *,
        peer: int = -1,
        counts: tuple[int, ...] | None = None,
        splits: tuple[int, ...] | None = None,
        pre_agreed: bool = False,
        description: str = "",
    ) -> Call:
        """The call that a channel takes."""
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
            description or self.description,
            self.hash,
            pre_agreed,
            owners,
        )


class SignatureCache:
    """The forms of one group that were used lately."""

    def __init__(self) -> None:
        self._signatures: dict[tuple[object, ...], Signature] = {}

    def find(self, kind: OperationKind, dtype: DType, shapes: Shapes, options: CallOptions) -> Signature:
        """The form for these, made and checked when it is new."""
        key = (kind, dtype, shapes, options)
        found = self._signatures.get(key)
        if found is None:
            found = _make_signature(kind, dtype, shapes, options)
            if len(self._signatures) >= MAX_SIGNATURES:
                self._signatures.clear()
            self._signatures[key] = found
        return found


def hash_signature(description: str) -> int:
    """64 bits that are equal in every process for an equal text."""
    return int.from_bytes(hashlib.blake2b(description.encode(), digest_size=8).digest(), "little")


def mismatch_error(descriptions: Mapping[int, str]) -> Mismatch:
    """The error for members that do not agree, in the same words on all of them; given is what each rank asked for."""
    joined = tuple(rank for rank, description in descriptions.items() if description == "join")
    hint = "; who calls join() takes part in allreduce only" if joined else ""
    error = Mismatch(f"the members asked for different things: {format_rank_answers(descriptions, verb=': ')}{hint}")
    error.joined = joined
    return error


def _make_signature(kind: OperationKind, dtype: DType, shapes: Shapes, options: CallOptions) -> Signature:
    op = parse_op(options.op)
    _check_options(kind, dtype, op, options)
    # Members may give different numbers of rows in these two, so those are no part of what must agree.
    free_rows = kind in (OperationKind.ALLGATHER, OperationKind.ALLTOALL)
    full = _describe(kind, dtype, shapes, options._replace(op=op), free_rows)
    signature = hash_signature(full)
    # A text that was cut must still differ where the full one does.
    text = (
        full
        if len(full.encode()) <= MAX_DESCRIPTION_BYTES
        else f"{full[: MAX_DESCRIPTION_BYTES - 20]}… #{signature:016x}"
    )
    return Signature(
        kind=kind,
        dtype=dtype,
        shapes=shapes,
        op=op,
        prescale=float(options.prescale),
        postscale=float(options.postscale),
        root=options.root,
        label=kind.name.lower(),
        description=text,
        hash=signature,
        num_bytes=sum(math.prod(shape) for shape in shapes) * dtype.num_bytes,
    )


def _check_options(kind: OperationKind, dtype: DType, op: Op, options: CallOptions) -> None:
    name = kind.name.lower()
    for field in ("prescale", "postscale"):
        if not math.isfinite(getattr(options, field)):
            raise ValueError(f"{name}: {field} must be a finite number, got {getattr(options, field)}")
    scaled = options.prescale != 1.0 or options.postscale != 1.0
    if dtype is DType.BOOL and (op is Op.MEAN or scaled):
        raise ValueError(f"{name}: bool has no mean and cannot be scaled; convert it to numbers first")
    if op is Op.ADASUM and (not dtype.is_float or kind is not OperationKind.ALLREDUCE):
        raise ValueError(f"{name}: adasum is for allreduce of floating-point numbers, got {dtype.name.lower()}")


def _describe(kind: OperationKind, dtype: DType, shapes: Shapes, options: CallOptions, free_rows: bool) -> str:
    words = [kind.name.lower()]
    if kind in (OperationKind.ALLREDUCE, OperationKind.REDUCE_SCATTER):
        words.append(parse_op(options.op).name.lower())
    shown = [("*", *shape[1:]) if free_rows else shape for shape in shapes]
    if shown:
        words.append(dtype.name.lower() + " ".join(f"[{', '.join(map(str, shape))}]" for shape in shown))
    if options.root >= 0:
        words.append(f"from rank {options.root}")
    for field in ("prescale", "postscale"):
        factor = float(getattr(options, field))
        if factor != 1.0:
            words.append(f"{field} {factor!r}")
    return " ".join(words)


class Span(msgspec.Struct, frozen=True, gc=False):
    """A piece of memory: address and number of elements. Whoever makes it keeps the memory alive."""

    input: int
    output: int
    count: int


class Call(msgspec.Struct, frozen=True, gc=True):
    """One collective as one member asks for it. Field for field the C header's rd_call."""

    kind: OperationKind
    dtype: DType = DType.UINT8
    op: Op = Op.SUM
    spans: tuple[Span, ...] = ()
    peer: int = -1
    """A broadcast's root or the other side of send and receive, as an index among the members."""
    prescale: float = 1.0
    postscale: float = 1.0
    counts: tuple[int, ...] | None = None
    """Elements per member; allgather: given by each; reduce_scatter: for each; alltoall: from each to me."""
    splits: tuple[int, ...] | None = None
    """alltoall: elements I give to each member."""
    description: str = ""
    """In words, for errors and events."""
    signature_hash: int = 0
    """Equal on all members, or the call is a Mismatch."""
    pre_agreed: bool = False
    """Members agreed on this call before (negotiated, planned): no need to compare again."""
    owners: object = None
    """Owners of the memory behind parts, kept until the call is over."""
