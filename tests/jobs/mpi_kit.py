"""What the cases of the mpi backend share: where this rank is, channels, calls, comparisons. Needs mpiexec."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from ronde.comm.backends.base import BackendChannel, CallTiming, ChannelSpec
from ronde.comm.backends.mpi.backend import MpiBackend
from ronde.comm.buffers import Array, address_of
from ronde.comm.call import Call, Span
from ronde.types import Deadline, DType, Member, OperationKind, Topology
from tests.limits import OPERATION_S

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
EVERYBODY = tuple(range(SIZE))
LONG_S = OPERATION_S
"""For what has to end by itself."""
CASES: dict[str, Callable[[MpiBackend], None]] = {}


def case(function: Callable[[MpiBackend], None]) -> Callable[[MpiBackend], None]:
    """The function is one case; its name is the sentence."""
    CASES[function.__name__] = function
    return function


@contextmanager
def channel(
    backend: MpiBackend, id: str = "0.ordered", members: Sequence[int] = EVERYBODY, bucket_bytes: int = 0
) -> Iterator[BackendChannel]:
    """A channel that is closed at the end, when all members are done with it."""
    me = list(members).index(RANK)
    spec = ChannelSpec(id=id, members=tuple(members), member_index=me, bucket_bytes=bucket_bytes, point_to_point=True)
    opened = backend.open_channel(spec, Deadline(LONG_S))
    try:
        yield opened
    finally:
        opened.close()


def call(
    kind: OperationKind, x: Array | None = None, out: Array | None = None, dtype: DType | None = None, **more: object
) -> Call:
    """A call on one array."""
    if x is None:
        return Call(kind, description=str(more.pop("description", kind.name.lower())), **more)  # type: ignore[arg-type]
    out = x if out is None else out
    dtype = DType[x.dtype.name.upper()] if dtype is None else dtype
    parts = (Span(address_of(x), address_of(out), x.size),)
    text = str(more.pop("description", f"{kind.name.lower()} {dtype.name.lower()}[{x.size}]"))
    return Call(kind, dtype, spans=parts, owners=(x, out), description=text, **more)  # type: ignore[arg-type]


def run(opened: BackendChannel, asked: Call, seconds: float = LONG_S) -> CallTiming:
    return opened.run(asked, Deadline(seconds))


def data(rank: int, count: int, dtype: DType, *, exact: bool = True) -> Array:
    """What a rank gives. Exact: small numbers, so that every order of adding gives the same."""
    random = np.random.default_rng((rank, count, dtype))
    if dtype is DType.BOOL:
        return random.integers(0, 2, count).astype(np.bool_)
    if dtype is DType.BFLOAT16:
        values = random.integers(-4, 5, count).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if not exact and dtype.is_float:
        return random.standard_normal(count).astype(dtype.numpy)
    return random.integers(0 if dtype.numpy.kind == "u" else -4, 5, count).astype(dtype.numpy)


def expect_equal(got: Array, expected: Array, what: object) -> None:
    if got.dtype != expected.dtype or not np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
        raise AssertionError(f"{what}: got {got[:10]} …, expected {expected[:10]} …")


def expect_same_bits_everywhere(opened: BackendChannel, x: Array) -> None:
    bits = np.ascontiguousarray(x).view(np.uint8)
    everybody = np.empty(bits.size * SIZE, np.uint8)
    run(opened, call(OperationKind.ALLGATHER, bits, everybody, counts=(bits.size,) * SIZE))
    assert all(np.array_equal(row, bits) for row in everybody.reshape(SIZE, -1)), "ranks got different bits"


@contextmanager
def raises(*kinds: type[BaseException], says: str = "") -> Iterator[list[str]]:
    """The body must end in one of these errors; its words are in the list."""
    words: list[str] = []
    try:
        yield words
    except kinds as error:
        words.append(str(error))
        assert says in words[0], f"{words[0]!r} does not say {says!r}"
    else:
        raise AssertionError(f"no {kinds} was raised")


def everybody_says(words: str) -> list[str]:
    """What each rank has, over the program's own communicator: it must work beside ronde's."""
    return list(MPI.COMM_WORLD.allgather(words))


def close_enough(got: Array, expected: Array, dtype: DType, *, exact: bool = False) -> None:
    """Equal; or nearly, when the order of adding may matter."""
    if dtype is DType.BFLOAT16 and not exact:
        got, expected = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (got, expected))
    if exact or not dtype.is_float:
        return expect_equal(got, expected, dtype)
    tolerance = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 1e-5}.get(dtype, 1e-12)
    assert np.allclose(got, expected, rtol=tolerance, atol=tolerance), f"{dtype}: got {got}, expected {expected}"
    return None


def topology(size: int = SIZE) -> Topology:
    return Topology(tuple(Member(rank, "here", 0, "") for rank in range(size)), RANK)
