"""What the members ask for under one name: whether their requests agree and make sense, the rows of all of them, and
requests in words. Pure functions, used by the negotiation.

Numbers in requests come from the network and may be anything: nothing relies on them before find_mismatch() has checked
them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping

from ronde.net.messages import OperationRequest
from ronde.text import format_rank_answers, format_ranks, shorten
from ronde.types import (
    REDUCING_KINDS,
    ROOTED_KINDS,
    VARIABLE_ROW_KINDS,
    DType,
    Op,
    OperationKind,
    find_reduction_error,
)

SPLIT_KINDS = (OperationKind.ALLTOALL, OperationKind.SCATTER)
"""Kinds whose rows are split as `splits` says, once for all arrays of an operation."""
GATHERING_KINDS = (OperationKind.ALLGATHER, OperationKind.GATHER)
"""Kinds whose numbers of rows all members have to know, for each array."""
NAMED_KINDS = (*REDUCING_KINDS, *VARIABLE_ROW_KINDS, OperationKind.BARRIER, OperationKind.BROADCAST)

MAX_ROW_COUNTS = 4_000_000
"""Numbers of rows in one RunOperations. However large they are, it stays below MAX_MESSAGE_BYTES."""

ComparedField = tuple[str, Callable[[OperationRequest], str]]


def title_of(request: OperationRequest) -> str:
    """The start of an error text: `allreduce 'w'`, and the group if it is not the world."""
    where = f" of group {request.group}" if request.group else ""
    return f"{_format_kind(request)} {shorten(request.name)!r}{where}"


def describe_request(request: OperationRequest) -> str:
    """The text for stall reports: `allreduce 'w' sum float32[3, 4]`."""
    words = [_format_kind(request), repr(shorten(request.name))]
    if request.kind in REDUCING_KINDS:
        words.append(_format_op(request))
    if request.shapes:
        shapes = [f"[{', '.join(map(str, shape))}]" for shape in request.shapes[:4]]
        words.append(f"{_format_dtype(request)}{' '.join(shapes)}{' …' if len(request.shapes) > 4 else ''}")
    return " ".join(words)


def find_row_counts(
    requests: Mapping[int, OperationRequest], common: OperationRequest, members: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return AgreedOperation.row_counts for valid requests, or a common one if there are none. None for kinds where all
    members have the same number of rows; a member that has called join() has no request then. None for an alltoall:
    find_received_rows() has what each member gets."""
    if common.kind in GATHERING_KINDS:
        return tuple(shape[0] for member in members for shape in requests.get(member, common).shapes)
    if common.kind == OperationKind.SCATTER:
        return _splits_of(requests.get(common.root, common), len(members))
    return None


def find_received_rows(
    requests: Mapping[int, OperationRequest], common: OperationRequest, members: tuple[int, ...]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return AgreedOperation.row_counts of an alltoall, and the members to which they apply. The requests are as in
    find_row_counts()."""
    shared = _splits_of(common, len(members))
    splits = [_splits_of(requests[rank], len(members)) if rank in requests else shared for rank in members]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, rows in zip(members, zip(*splits, strict=True), strict=True):
        found.setdefault(rows, []).append(rank)
    return {rows: tuple(ranks) for rows, ranks in found.items()}


def _splits_of(request: OperationRequest, num_members: int) -> tuple[int, ...]:
    if request.splits is not None:
        return request.splits
    least, more = divmod(request.shapes[0][0], num_members)
    return tuple(least + (index < more) for index in range(num_members))


def find_mismatch(requests: Mapping[int, OperationRequest], members: tuple[int, ...]) -> str:
    """Return why these requests, by rank, cannot run as one operation; empty if they can."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if any(requests[rank].kind != first.kind for rank in ranks):
        kinds = format_rank_answers({rank: _format_kind(requests[rank]) for rank in ranks})
        return f"operation {first.name!r}: ranks disagree on what it is: {kinds}"
    if any(requests[rank] != first for rank in ranks):
        for what, text in _compared_fields(first, requests):
            answers = {rank: text(requests[rank]) for rank in ranks}
            if len(set(answers.values())) > 1:
                return f"{title_of(first)}: ranks disagree on {what}: {format_rank_answers(answers)}"
    errors = {rank: _find_invalid(requests[rank], members) for rank in ranks}
    wrong = {rank: error for rank, error in errors.items() if error}
    if len(wrong) == len(ranks) and len(set(wrong.values())) == 1:
        return f"{title_of(first)}: {wrong[ranks[0]]}"
    return f"{title_of(first)}: {format_rank_answers(wrong, verb=': ')}" if wrong else ""


def _compared_fields(first: OperationRequest, requests: Mapping[int, OperationRequest]) -> Iterator[ComparedField]:
    """What has to be equal on all members. The first difference in this order is reported."""
    if first.kind not in NAMED_KINDS or first.kind == OperationKind.BARRIER:
        return
    yield "dtype", _format_dtype
    yield "the device", lambda request: shorten(request.device)
    if first.kind in REDUCING_KINDS:
        yield "op", _format_op
    if first.kind in ROOTED_KINDS:
        yield "root", lambda request: str(request.root)
    yield "the number of arrays", lambda request: str(len(request.shapes))
    yield _first_unequal_shape(first, requests)
    if first.kind in REDUCING_KINDS:
        yield "prescale", lambda request: repr(request.prescale)
        yield "postscale", lambda request: repr(request.postscale)


def _first_unequal_shape(first: OperationRequest, requests: Mapping[int, OperationRequest]) -> ComparedField:
    """Of a group of hundreds of arrays, only the first one that differs is shown."""
    has_rows = first.kind in VARIABLE_ROW_KINDS

    def text(shape: tuple[int, ...]) -> str:
        """A shape; if its first dimension may differ, with a star in its place: `(*, 4)`."""
        return f"(*{''.join(f', {dimension}' for dimension in shape[1:])})" if has_rows and shape else str(shape)

    differing = (
        index
        for index, shape in enumerate(first.shapes)
        if any(text(request.shapes[index]) != text(shape) for request in requests.values())
    )
    index = next(differing, 0)
    what = "shape" if len(first.shapes) == 1 else f"the shape of array {index}"
    return what, lambda request: text(request.shapes[index]) if request.shapes else ""


def _find_invalid(request: OperationRequest, members: tuple[int, ...]) -> str:
    """Return what is wrong with one request by itself."""
    if request.kind not in NAMED_KINDS:
        return f"{_format_kind(request)} is nothing that can be asked for by name"
    if request.kind == OperationKind.BARRIER:
        return ""
    if request.dtype not in DType.__members__.values():
        return f"{_format_dtype(request)} is not known"
    if not request.shapes:
        return "no arrays were given"
    if any(dimension < 0 for shape in request.shapes for dimension in shape):
        return f"a dimension below 0 in {', '.join(map(str, request.shapes))}"
    if request.kind in (*VARIABLE_ROW_KINDS, OperationKind.REDUCE_SCATTER) and not all(request.shapes):
        return "it needs arrays of at least 1 dimension, got a scalar"
    if request.kind in ROOTED_KINDS and request.root not in members:
        return f"root {request.root} is not a member ({format_ranks(members)})"
    if request.kind in REDUCING_KINDS:
        if request.op not in Op.__members__.values():
            return f"{_format_op(request)} is not known"
        scaled = (request.prescale, request.postscale) != (1.0, 1.0)
        return find_reduction_error(OperationKind(request.kind), DType(request.dtype), Op(request.op), scaled=scaled)
    if request.kind in GATHERING_KINDS and len(request.shapes) * len(members) > MAX_ROW_COUNTS:
        return f"{len(request.shapes)} arrays of {len(members)} members are too many at once; give them in parts"
    return _find_invalid_splits(request, len(members)) if request.kind in SPLIT_KINDS else ""


def _find_invalid_splits(request: OperationRequest, num_members: int) -> str:
    rows = request.shapes[0][0]
    if request.kind == OperationKind.ALLTOALL and any(shape[0] != rows for shape in request.shapes):
        return f"its arrays must have equally many rows, got {', '.join(str(shape[0]) for shape in request.shapes)}"
    if request.splits is None:
        uneven = request.kind == OperationKind.ALLTOALL and rows % num_members
        return f"{rows} rows are no equal shares for {num_members} members; give splits" if uneven else ""
    if len(request.splits) != num_members:
        return f"splits has {len(request.splits)} entries for {num_members} members"
    if min(request.splits) < 0:
        return f"splits {request.splits} has an entry below 0"
    if sum(request.splits) > rows:
        return f"splits {request.splits} asks for {sum(request.splits)} rows of an array with {rows}"
    return ""


def _format_kind(request: OperationRequest) -> str:
    return _format_enum(OperationKind, request.kind, "kind")


def _format_dtype(request: OperationRequest) -> str:
    return _format_enum(DType, request.dtype, "dtype")


def _format_op(request: OperationRequest) -> str:
    return _format_enum(Op, request.op, "op")


def _format_enum(type: type[enum.IntEnum], value: int, what: str) -> str:
    return type(value).name.lower() if value in type.__members__.values() else f"{what} {value}"
