"""Whether requests of one name can run together, and what to say when they cannot. Used by the negotiator.

Everything here is a function of the requests. Numbers come from the wire and may be anything: nothing here trusts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ronde.comm.wording import answers
from ronde.net.messages import Request
from ronde.observe.events import name_ranks, shorten
from ronde.types import DType, Kind, Op

__all__ = ["described", "find_fault", "fusion_key", "num_bytes", "rows_of", "title"]

REDUCING = (Kind.ALLREDUCE, Kind.REDUCE_SCATTER)
ALONE = (Kind.REDUCE_SCATTER, Kind.ALLTOALL)
"""Kinds that work on one array: how rows are shared out is said once per operation."""
BY_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)
"""Kinds where members may give different numbers of rows."""
NAMED = (*REDUCING, *BY_ROWS, Kind.BARRIER, Kind.BROADCAST)

Aspect = tuple[str, Callable[[Request], str]]


def title(request: Request) -> str:
    """What an error starts with: `allreduce 'w'`, and the group when it is not the world."""
    where = f" of group {request.group}" if request.group else ""
    return f"{_kind_text(request)} {shorten(request.name)!r}{where}"


def described(request: Request) -> str:
    """In words, for the stall report: `allreduce 'w' sum float32[3, 4]`, as without a name but for that."""
    words = [_kind_text(request), repr(shorten(request.name))]
    if request.kind in REDUCING:
        words.append(_op_text(request))
    if request.shapes:
        shapes = [f"[{', '.join(map(str, shape))}]" for shape in request.shapes[:4]]
        words.append(f"{_dtype_text(request)}{' '.join(shapes)}{' …' if len(request.shapes) > 4 else ''}")
    return " ".join(words)


def num_bytes(request: Request) -> int:
    """Size of what one member gives. The request must be without fault."""
    return sum(map(math.prod, request.shapes)) * DType(request.dtype).num_bytes


def fusion_key(request: Request) -> tuple[int, int, int, float, float] | None:
    """Requests with equal keys may travel as one; None travels alone."""
    if request.kind != Kind.ALLREDUCE or request.op == Op.ADASUM:  # Adasum looks at each tensor as a whole
        return None
    return (request.group, request.dtype, request.op, request.prescale, request.postscale)


def rows_of(requests: Mapping[int, Request], members: tuple[int, ...]) -> tuple[int, ...] | None:
    """RunItem.rows for requests without fault: who gives how many rows, where members may differ in that. Where they
    may not, a member that has joined may be without a request."""
    kind = next(iter(requests.values())).kind
    if kind == Kind.ALLGATHER:
        return tuple(shape[0] for member in members for shape in requests[member].shapes)
    if kind == Kind.ALLTOALL:
        return tuple(rows for member in members for rows in _splits(requests[member], len(members)))
    return None


def find_fault(requests: Mapping[int, Request], members: tuple[int, ...]) -> str:
    """Why these requests, by rank, cannot run as one operation of the members; empty when they can."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if any(requests[rank].kind != first.kind for rank in ranks):
        gave = answers({rank: _kind_text(requests[rank]) for rank in ranks})
        return f"operation {first.name!r}: ranks disagree on what it is: {gave}"
    if any(requests[rank] != first for rank in ranks):
        for what, text in _aspects(first, requests):
            said = {rank: text(requests[rank]) for rank in ranks}
            if len(set(said.values())) > 1:
                return f"{title(first)}: ranks disagree on {what}: {answers(said)}"
    faults = {rank: _fault(requests[rank], members) for rank in ranks}
    wrong = {rank: fault for rank, fault in faults.items() if fault}
    if not wrong:
        return ""
    if len(wrong) == len(ranks) and len(set(wrong.values())) == 1:
        return f"{title(first)}: {wrong[ranks[0]]}"
    return f"{title(first)}: {answers(wrong, verb=': ')}"


def _aspects(first: Request, requests: Mapping[int, Request]) -> Iterator[Aspect]:
    """What has to be equal on all members, in the order in which a difference is told."""
    if first.kind not in NAMED or first.kind == Kind.BARRIER:
        return
    yield "dtype", _dtype_text
    if first.kind in REDUCING:
        yield "op", _op_text
    if first.kind == Kind.BROADCAST:
        yield "root", lambda request: str(request.root)
    yield "the number of arrays", lambda request: str(len(request.shapes))
    yield _first_unequal_shape(first, requests)
    if first.kind in REDUCING:
        yield "prescale", lambda request: repr(request.prescale)
        yield "postscale", lambda request: repr(request.postscale)


def _first_unequal_shape(first: Request, requests: Mapping[int, Request]) -> Aspect:
    """A group of hundreds of arrays is not worth reading: only the first array that differs is shown."""
    text = _rows_text if first.kind in BY_ROWS else str
    differing = (
        index
        for index, shape in enumerate(first.shapes)
        if any(text(request.shapes[index]) != text(shape) for request in requests.values())
    )
    index = next(differing, 0)
    what = "shape" if len(first.shapes) == 1 else f"the shape of array {index}"
    return what, lambda request: text(request.shapes[index]) if request.shapes else ""


def _fault(request: Request, members: tuple[int, ...]) -> str:
    """What is wrong with one request, whatever the others ask for."""
    if request.kind not in NAMED:
        return f"{_kind_text(request)} is nothing that can be asked for by name"
    if request.kind == Kind.BARRIER:
        return ""
    if request.dtype not in DType.__members__.values():
        return f"{_dtype_text(request)} is not known"
    if not request.shapes:
        return "no arrays were given"
    if any(dimension < 0 for shape in request.shapes for dimension in shape):
        return f"a dimension below 0 in {', '.join(map(str, request.shapes))}"
    if request.kind in ALONE and len(request.shapes) > 1:
        return f"it takes one array, got {len(request.shapes)}"
    if request.kind in (*BY_ROWS, Kind.REDUCE_SCATTER) and not all(request.shapes):
        return "it needs arrays of at least 1 dimension, got a scalar"
    if request.kind in REDUCING:
        return _op_fault(request)
    if request.kind == Kind.BROADCAST and request.root not in members:
        return f"root {request.root} is not a member ({name_ranks(members)})"
    if request.kind == Kind.ALLTOALL:
        return _splits_fault(request, len(members))
    return ""


def _op_fault(request: Request) -> str:
    """The same rules as supported() of the native library."""
    if request.op not in Op.__members__.values():
        return f"{_op_text(request)} is not known"
    dtype = DType(request.dtype)
    if request.op == Op.ADASUM:
        if request.kind != Kind.ALLREDUCE:
            return "Adasum is for allreduce only"
        return "" if dtype.is_float else f"Adasum needs floating-point numbers, got {dtype.name.lower()}"
    if dtype == DType.BOOL and request.op == Op.MEAN:
        return "there is no mean of bool"
    if dtype == DType.BOOL and (request.prescale, request.postscale) != (1.0, 1.0):
        return "bool cannot be scaled"
    return ""


def _splits_fault(request: Request, num_members: int) -> str:
    rows = request.shapes[0][0]
    if request.splits is None:
        return f"{rows} rows are no equal shares for {num_members} members; give splits" if rows % num_members else ""
    if len(request.splits) != num_members:
        return f"splits has {len(request.splits)} entries for {num_members} members"
    if min(request.splits) < 0:
        return f"splits {request.splits} has an entry below 0"
    if sum(request.splits) > rows:
        return f"splits {request.splits} asks for {sum(request.splits)} rows of an array with {rows}"
    return ""


def _splits(request: Request, num_members: int) -> tuple[int, ...]:
    if request.splits is not None:
        return request.splits
    return (request.shapes[0][0] // num_members,) * num_members


def _kind_text(request: Request) -> str:
    return Kind(request.kind).name.lower() if request.kind in Kind.__members__.values() else f"kind {request.kind}"


def _dtype_text(request: Request) -> str:
    return (
        DType(request.dtype).name.lower() if request.dtype in DType.__members__.values() else f"dtype {request.dtype}"
    )


def _op_text(request: Request) -> str:
    return Op(request.op).name.lower() if request.op in Op.__members__.values() else f"op {request.op}"


def _rows_text(shape: tuple[int, ...]) -> str:
    """A shape whose first dimension may differ: `(*, 4)`."""
    return f"(*{''.join(f', {dimension}' for dimension in shape[1:])})" if shape else "()"
