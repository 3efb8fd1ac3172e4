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

from ronde.comm.backend import Call, Part
from ronde.comm.wording import answers
from ronde.errors import Mismatch
from ronde.types import DType, Kind, Op, parse_op

__all__ = ["Form", "Forms", "Options", "Shapes", "digest", "mismatch"]

Shapes = tuple[tuple[int, ...], ...]

MOST_FORMS = 4096
TEXT_LIMIT = 120
"""The native library keeps 127 bytes of a text."""


class Options(NamedTuple):
    """How a collective is to be done; not all kinds use all of them."""

    op: str | Op = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    """A rank of the world."""


class Form(msgspec.Struct, frozen=True, gc=False):
    """One kind of call with all that is equal each time it is made."""

    kind: Kind
    dtype: DType
    shapes: Shapes
    op: Op
    prescale: float
    postscale: float
    root: int
    """A broadcast's root, as a rank of the world; otherwise -1."""
    label: str
    """The kind's name, for events."""
    text: str
    signature: int
    num_bytes: int
    """Of what this member gives."""

    def call(
        self,
        parts: tuple[Part, ...],
        keep: object,
        *,
        peer: int = -1,
        counts: tuple[int, ...] | None = None,
        splits: tuple[int, ...] | None = None,
        trusted: bool = False,
        text: str = "",
    ) -> Call:
        """The call that a channel takes."""
        return Call(
            self.kind,
            self.dtype,
            self.op,
            parts,
            peer,
            self.prescale,
            self.postscale,
            counts,
            splits,
            text or self.text,
            self.signature,
            trusted,
            keep,
        )


class Forms:
    """The forms of one group that were used lately."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Form] = {}

    def find(self, kind: Kind, dtype: DType, shapes: Shapes, options: Options) -> Form:
        """The form for these, made and checked when it is new."""
        key = (kind, dtype, shapes, options)
        found = self._known.get(key)
        if found is None:
            found = _make(kind, dtype, shapes, options)
            if len(self._known) >= MOST_FORMS:
                self._known.clear()
            self._known[key] = found
        return found


def digest(text: str) -> int:
    """64 bits that are equal in every process for an equal text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mismatch(asked: Mapping[int, str]) -> Mismatch:
    """The error for members that do not agree, in the same words on all of them; given is what each rank asked for."""
    hint = "; who calls join() takes part in allreduce only" if "join" in asked.values() else ""
    return Mismatch(f"the members asked for different things: {answers(asked, verb=': ')}{hint}")


def _make(kind: Kind, dtype: DType, shapes: Shapes, options: Options) -> Form:
    op = parse_op(options.op)
    _check(kind, dtype, op, options)
    # Members may give different numbers of rows in these two, so those are no part of what must agree.
    free_rows = kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    full = _words(kind, dtype, shapes, options._replace(op=op), free_rows)
    signature = digest(full)
    # A text that was cut must still differ where the full one does.
    text = full if len(full.encode()) <= TEXT_LIMIT else f"{full[: TEXT_LIMIT - 20]}… #{signature:016x}"
    return Form(
        kind=kind,
        dtype=dtype,
        shapes=shapes,
        op=op,
        prescale=float(options.prescale),
        postscale=float(options.postscale),
        root=options.root,
        label=kind.name.lower(),
        text=text,
        signature=signature,
        num_bytes=sum(math.prod(shape) for shape in shapes) * dtype.num_bytes,
    )


def _check(kind: Kind, dtype: DType, op: Op, options: Options) -> None:
    name = kind.name.lower()
    for field in ("prescale", "postscale"):
        if not math.isfinite(getattr(options, field)):
            raise ValueError(f"{name}: {field} must be a finite number, got {getattr(options, field)}")
    scaled = options.prescale != 1.0 or options.postscale != 1.0
    if dtype is DType.BOOL and (op is Op.MEAN or scaled):
        raise ValueError(f"{name}: bool has no mean and cannot be scaled; convert it to numbers first")
    if op is Op.ADASUM and (not dtype.is_float or kind is not Kind.ALLREDUCE):
        raise ValueError(f"{name}: adasum is for allreduce of floating-point numbers, got {dtype.name.lower()}")


def _words(kind: Kind, dtype: DType, shapes: Shapes, options: Options, free_rows: bool) -> str:
    words = [kind.name.lower()]
    if kind in (Kind.ALLREDUCE, Kind.REDUCE_SCATTER):
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
