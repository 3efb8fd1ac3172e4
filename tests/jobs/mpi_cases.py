"""Cases of the mpi backend, run by tests/jobs/mpi_ranks.py under mpiexec: results, order, disagreement, failures."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from ronde.comm.backends.base import BackendChannel, CallTiming, ChannelSpec, RunningCall
from ronde.comm.backends.mpi import collectives as moves
from ronde.comm.backends.mpi.backend import MpiBackend, settings_from_mpi
from ronde.comm.buffers import Array, address_of, as_array
from ronde.comm.call import Call, Span
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RondeError, RoundEnded, StartFailed
from ronde.settings import Settings
from ronde.types import Deadline, DType, Member, Op, Topology, find_reduction_error
from ronde.types import OperationKind as Kind
from tests.conformance.cases import raises
from tests.conformance.reference_arithmetic import reduce
from tests.limits import OPERATION_S

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
EVERYBODY = tuple(range(SIZE))
LONG_S = OPERATION_S
"""For what has to end by itself."""
CASES: dict[str, Callable[[MpiBackend], None]] = {}


def case(function: Callable[[BackendChannel], None]) -> None:
    """The function is one case, on a channel of all ranks; its name is the sentence."""

    def on_channel(backend: MpiBackend) -> None:
        with channel(backend) as opened:
            function(opened)

    CASES[function.__name__] = on_channel


def case_of_backend(function: Callable[[MpiBackend], None]) -> None:
    CASES[function.__name__] = function


@contextmanager
def channel(
    backend: MpiBackend,
    id: str = "0.ordered",
    members: Sequence[int] = EVERYBODY,
    bucket_bytes: int = 0,
    point_to_point: bool = False,
) -> Iterator[BackendChannel]:
    """A channel that is closed at the end, when all members are done with it."""
    me = list(members).index(RANK)
    spec = ChannelSpec(
        id=id,
        members=tuple(members),
        member_index=me,
        bucket_bytes=bucket_bytes,
        point_to_point=point_to_point,
    )
    opened = backend.open_channel(spec, Deadline(LONG_S))
    try:
        yield opened
    finally:
        opened.close()


def call(kind: Kind, x: Array | None = None, out: Array | None = None, dtype: DType | None = None, **more: Any) -> Call:
    """A call on one array."""
    if x is None:
        return Call(kind, description=str(more.pop("description", kind.name.lower())), **more)
    out = x if out is None else out
    dtype = DType[x.dtype.name.upper()] if dtype is None else dtype
    parts = (Span(address_of(x), address_of(out), x.size),)
    text = str(more.pop("description", f"{kind.name.lower()} {dtype.name.lower()}[{x.size}]"))
    return Call(kind, dtype, spans=parts, owners=(x, out), description=text, **more)


def run(opened: BackendChannel, *what: Any, seconds: float = LONG_S, **more: Any) -> CallTiming:
    """Run a call, which call() makes of the arguments."""
    return opened.run(what[0] if isinstance(what[0], Call) else call(*what, **more), Deadline(seconds))


def submit(opened: BackendChannel, *what: Any, seconds: float = LONG_S, **more: Any) -> RunningCall:
    return opened.submit(call(*what, **more), Deadline(seconds))


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
    run(opened, Kind.ALLGATHER, bits, everybody, counts=(bits.size,) * SIZE)
    assert all(np.array_equal(row, bits) for row in everybody.reshape(SIZE, -1)), "ranks got different bits"


def gather_texts(words: str) -> list[str]:
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


# --- results ---------------------------------------------------------------------------------------------------------


def ops_of(dtype: DType) -> list[Op]:
    return [op for op in Op if not find_reduction_error(Kind.ALLREDUCE, dtype, op, scaled=False)]


@case
def allreduce_is_right_for_every_dtype_and_op(opened: BackendChannel) -> None:
    for dtype, count, pre_agreed in itertools.product(DType, (0, 1, 33), (False, True)):
        for op in ops_of(dtype):
            everybody = [data(rank, count, dtype) for rank in EVERYBODY]
            expected = reduce(everybody, dtype, op, 1.0, 1.0)
            x, out = everybody[RANK].copy(), np.zeros_like(everybody[RANK])
            run(opened, Kind.ALLREDUCE, x, out, dtype, op=op, pre_agreed=pre_agreed)
            close_enough(out, expected, dtype, exact=op is not Op.ADASUM)
            expect_equal(x, everybody[RANK], "the input stays")
            run(opened, Kind.ALLREDUCE, x, x, dtype, op=op, pre_agreed=pre_agreed)
            expect_equal(x, out, "in place")
    expect_same_bits_everywhere(opened, x)


@case
def scales_are_applied_before_and_after(opened: BackendChannel) -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.INT32, DType.UINT8, DType.INT64):
        for op in (Op.SUM, Op.MEAN, Op.MAX):
            everybody = [data(rank, 50, dtype) for rank in EVERYBODY]
            expected = reduce(everybody, dtype, op, 0.5, 4.0)
            x, out = everybody[RANK], np.empty_like(everybody[0])
            run(opened, Kind.ALLREDUCE, x, out, dtype, op=op, prescale=0.5, postscale=4.0)
            expect_equal(out, expected, (dtype, op))


@case
def large_floats_have_the_same_bits_on_all_ranks(opened: BackendChannel) -> None:
    for dtype, op in itertools.product((DType.FLOAT32, DType.FLOAT64, DType.FLOAT16), (Op.MEAN, Op.ADASUM)):
        everybody = [data(rank, 30_011, dtype, exact=False) for rank in EVERYBODY]
        x = everybody[RANK].copy()
        run(opened, Kind.ALLREDUCE, x, op=op, pre_agreed=dtype is DType.FLOAT64)
        close_enough(x, reduce(everybody, dtype, op, 1.0, 1.0), dtype)
        expect_same_bits_everywhere(opened, x)


@case
def nan_wins_and_integers_wrap(opened: BackendChannel) -> None:
    for dtype, op in itertools.product((DType.FLOAT32, DType.FLOAT64, DType.FLOAT16), (Op.MIN, Op.MAX)):
        x = np.array([RANK, -RANK, np.inf, -np.inf, -0.5], dtype.numpy)
        x[0 if RANK == SIZE - 1 else 1 :][:1] = np.nan
        run(opened, Kind.ALLREDUCE, x, op=op)
        assert np.isnan(x[:2]).all() and not np.isnan(x[2:]).any(), f"{op}: {x}"
    x = np.full(3, 100, np.int8)
    run(opened, Kind.ALLREDUCE, x)
    expect_equal(x, np.full(3, SIZE * 100 % 256, np.uint8).view(np.int8), "int8")
    x = np.full(3, np.iinfo(np.int64).max, np.int64)
    run(opened, Kind.ALLREDUCE, x, op=Op.PRODUCT)
    expect_equal(x, np.full(3, 1 if SIZE % 2 == 0 else np.iinfo(np.int64).max, np.int64), "int64")


@case
def several_parts_are_one_array(opened: BackendChannel) -> None:
    arrays = [np.full(n, RANK + n, np.float32) for n in (3, 0, 5)]
    outs = [np.zeros_like(array) for array in arrays]
    parts = tuple(Span(address_of(x), address_of(out), x.size) for x, out in zip(arrays, outs, strict=True))
    run(opened, Call(Kind.ALLREDUCE, DType.FLOAT32, spans=parts))
    for array, out in zip(arrays, outs, strict=True):
        expect_equal(out, np.full(array.size, sum(EVERYBODY) + SIZE * array.size, np.float32), "allreduce")
    run(opened, Call(Kind.BROADCAST, DType.FLOAT32, spans=parts, peer=1))
    for array, out in zip(arrays, outs, strict=True):
        expect_equal(out, np.full(array.size, 1 + array.size, np.float32), "broadcast")


def all_moves(opened: BackendChannel, dtype: DType, *, pre_agreed: bool) -> None:
    """Each kind that moves data, with sizes that differ between members."""
    counts = (*((rank * 7 + 3) % 11 for rank in EVERYBODY[:-1]), 0)
    pieces = [data(rank, count, dtype) for rank, count in enumerate(counts)]
    total = sum(counts)
    out = np.zeros(total, dtype.numpy)
    run(opened, Kind.ALLGATHER, pieces[RANK], out, dtype, counts=counts, pre_agreed=pre_agreed)
    expect_equal(out, np.concatenate(pieces), "allgather")
    for root in EVERYBODY:
        x = data(RANK, total, dtype)
        run(opened, Kind.BROADCAST, x, dtype=dtype, peer=root, pre_agreed=pre_agreed)
        expect_equal(x, data(root, total, dtype), "broadcast")
    everybody = [data(rank, total, dtype) for rank in EVERYBODY]
    out = np.zeros(counts[RANK], dtype.numpy)
    run(opened, call(Kind.REDUCE_SCATTER, everybody[RANK].copy(), out, dtype, counts=counts, pre_agreed=pre_agreed))
    start = sum(counts[:RANK])
    expect_equal(out, reduce(everybody, dtype, Op.SUM, 1.0, 1.0)[start : start + counts[RANK]], "reduce_scatter")
    alltoall(opened, dtype, pre_agreed=pre_agreed)
    for root in EVERYBODY:
        more: dict[str, Any] = {"dtype": dtype, "peer": root, "pre_agreed": pre_agreed}
        out = np.zeros(total, dtype.numpy)
        run(opened, Kind.REDUCE, everybody[RANK].copy(), out, **more)
        gathered = np.zeros(total, dtype.numpy)
        run(opened, Kind.GATHER, pieces[RANK].copy(), gathered, counts=counts, **more)
        if root == RANK:
            expect_equal(out, reduce(everybody, dtype, Op.SUM, 1.0, 1.0), "reduce")
            expect_equal(gathered, np.concatenate(pieces), "gather")
        mine = np.zeros(counts[RANK], dtype.numpy)
        parts = (Span(address_of(gathered), address_of(mine), mine.size),)
        text = f"scatter {total}"
        run(
            opened,
            Call(Kind.SCATTER, dtype, spans=parts, counts=counts, peer=root, description=text, pre_agreed=pre_agreed),
        )
        expect_equal(mine, pieces[RANK], "scatter")
    run(opened, Kind.BARRIER, pre_agreed=pre_agreed)


def alltoall(opened: BackendChannel, dtype: DType, *, pre_agreed: bool) -> None:
    def given(source: int, target: int) -> Array:
        return data(source * SIZE + target, (source * 5 + target * 3) % 13, dtype)

    x = np.concatenate([given(RANK, rank) for rank in EVERYBODY])
    expected = np.concatenate([given(rank, RANK) for rank in EVERYBODY])
    splits = tuple(given(RANK, rank).size for rank in EVERYBODY)
    counts = tuple(given(rank, RANK).size for rank in EVERYBODY)
    out = np.zeros_like(expected)
    run(opened, Kind.ALLTOALL, x, out, dtype, counts=counts, splits=splits, pre_agreed=pre_agreed)
    expect_equal(out, expected, "alltoall")


@case
def data_moves_right_for_every_kind_and_dtype(opened: BackendChannel) -> None:
    for dtype, pre_agreed in itertools.product(DType, (False, True)):
        all_moves(opened, dtype, pre_agreed=pre_agreed)


@case_of_backend
def arrays_beyond_the_limit_of_one_mpi_call_travel_in_pieces(backend: MpiBackend) -> None:
    limit, moves.MAX_ELEMENTS_PER_CALL = moves.MAX_ELEMENTS_PER_CALL, 4
    try:
        with channel(backend) as opened:
            for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.UINT8):
                all_moves(opened, dtype, pre_agreed=False)
                for op in ops_of(dtype):
                    everybody = [data(rank, 15, dtype) for rank in EVERYBODY]
                    x = everybody[RANK].copy()
                    run(opened, Kind.ALLREDUCE, x, dtype=dtype, op=op)
                    close_enough(x, reduce(everybody, dtype, op, 1.0, 1.0), dtype, exact=op is not Op.ADASUM)
    finally:
        moves.MAX_ELEMENTS_PER_CALL = limit


@case_of_backend
def buckets_are_memory_of_my_own(backend: MpiBackend) -> None:
    with channel(backend, bucket_bytes=4096) as opened:
        areas = as_array(opened.bucket()).view(np.float32)
        assert areas.nbytes == 2 * 4096
        bucket = areas[:1024]
        bucket[:] = RANK
        run(opened, Kind.ALLREDUCE, bucket, op=Op.MEAN, pre_agreed=True)
        expect_equal(bucket, np.full(1024, sum(EVERYBODY) / SIZE, np.float32), "bucket")


# --- order -----------------------------------------------------------------------------------------------------------


@case
def submitted_calls_run_in_order(opened: BackendChannel) -> None:
    arrays = [np.full(5, index + RANK, np.int32) for index in range(10)]
    submitted = [submit(opened, Kind.ALLREDUCE, x) for x in arrays]
    last = np.ones(1, np.int32)
    run(opened, Kind.ALLREDUCE, last)
    assert all(work.done() for work in submitted), "run() waits for those before it"
    outcomes = [work.wait(Deadline(LONG_S)) for work in submitted]
    for index, x in enumerate(arrays):
        expect_equal(x, np.full(5, SIZE * index + sum(EVERYBODY), np.int32), index)
    for before, after in itertools.pairwise(outcomes):
        assert before.start_ns <= before.ready_ns <= before.end_ns <= after.start_ns


@case_of_backend
def channels_do_not_wait_for_each_other(backend: MpiBackend) -> None:
    with channel(backend, "0.a") as a, channel(backend, "0.b") as b:
        x, y = np.ones(1), np.ones(1)
        first, second = (a, b) if RANK % 2 else (b, a)
        submitted = [submit(each, Kind.ALLREDUCE, z) for each, z in ((first, x), (second, y))]
        for work in submitted:
            work.wait(Deadline(LONG_S))
        assert x[0] == y[0] == SIZE


@case_of_backend
def groups_have_channels_of_their_own(backend: MpiBackend) -> None:
    mine = EVERYBODY[RANK % 2 :: 2]
    with channel(backend, f"{1 + RANK % 2}.ordered", mine) as opened:
        x = np.array([RANK])
        run(opened, Kind.ALLREDUCE, x)
        assert x[0] == sum(mine)


@case_of_backend
def messages_wait_for_nothing_but_their_other_side(backend: MpiBackend) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    with channel(backend) as opened, channel(backend, "0.messages", point_to_point=True) as messages:
        for count in (1, 100_000):  # beyond what MPI sends without being asked for
            x, y = np.full(count, RANK, np.float16), np.empty(count, np.float16)
            sent = submit(messages, Kind.SEND, x, peer=after, description="message")
            got = submit(messages, Kind.RECEIVE, y, peer=before, description="message")
            run(opened, Kind.BARRIER)  # in another order than the messages on some ranks
            got.wait(Deadline(LONG_S))
            sent.wait(Deadline(LONG_S))
            expect_equal(y, np.full(count, before, np.float16), "message")


# --- disagreement and join -------------------------------------------------------------------------------------------


@case_of_backend
def members_that_disagree_all_get_the_same_error(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        x = np.ones(3 if RANK == 1 else 4, np.float32)
        with raises(Mismatch, match=re.escape("rank 1: allreduce float32[3]")) as words:
            run(opened, Kind.ALLREDUCE, x)
        expect_equal(x, np.ones_like(x), "no data moved")
        with raises(Mismatch) as more:
            run(opened, call(Kind.BARRIER) if RANK else call(Kind.BROADCAST, np.ones(2), peer=0))
        with raises(Mismatch) as signatures:
            run(opened, Kind.BARRIER, signature_hash=RANK, description=f"barrier of rank {RANK}")
        y = np.ones(2)
        run(opened, Kind.ALLREDUCE, y)
        assert y[0] == SIZE, "the channel goes on"
    assert len(set(gather_texts(words[0] + more[0] + signatures[0]))) == 1


@case
def a_mistake_is_refused_before_anything_is_sent(opened: BackendChannel) -> None:
    x = np.ones(4, np.bool_)
    wrong = (
        call(Kind.ALLREDUCE, x, op=Op.MEAN),
        call(Kind.ALLREDUCE, np.ones(1, np.int32), op=Op.ADASUM),
        call(Kind.ALLREDUCE, x, prescale=2.0),
        call(Kind.BROADCAST, x, peer=SIZE),
        call(Kind.ALLGATHER, x, counts=(1,)),
        call(Kind.ALLGATHER, x, counts=(3,) * SIZE),
        call(Kind.ALLTOALL, x, counts=(1,) * SIZE),
        call(Kind.REDUCE_SCATTER, x, counts=(9,) * SIZE),
        call(Kind.REDUCE, x, peer=SIZE),
        call(Kind.GATHER, x, peer=0, counts=(3,) * SIZE),
        call(Kind.SCATTER, x, peer=0),
        call(Kind.ALLREDUCE, np.ones(1), op=Op.BIT_OR),
    )
    for each in wrong:
        with raises(ValueError):
            run(opened, each)
    run(opened, Kind.BARRIER)


@case
def who_has_joined_takes_part_with_zeros(opened: BackendChannel) -> None:
    for step in range(RANK):  # rank 0 joins at once, the last one last
        for dtype, op in ((DType.FLOAT32, Op.SUM), (DType.BFLOAT16, Op.SUM), (DType.FLOAT64, Op.MEAN)):
            ones = np.full(step + 1, 0x3F80, np.uint16) if dtype is DType.BFLOAT16 else np.ones(step + 1, dtype.numpy)
            here = [rank for rank in EVERYBODY if rank > step]
            everybody = [ones if rank in here else np.zeros_like(ones) for rank in EVERYBODY]
            out = np.empty_like(ones)
            run(opened, Kind.ALLREDUCE, ones, out, dtype, op=op)
            close_enough(out, reduce(everybody, dtype, op, 1.0, 1.0), dtype)
    run(opened, Kind.JOIN)
    run(opened, Kind.BARRIER)


@case
def who_has_joined_cannot_take_part_in_anything_else(opened: BackendChannel) -> None:
    if RANK:
        with raises(Mismatch, match="rank 0: join"):
            run(opened, Kind.BARRIER)
        for op in (Op.ADASUM, Op.PRODUCT, Op.MIN, Op.MAX):
            with raises(Mismatch, match="rank 0: join.*zeros do not change"):
                run(opened, Kind.ALLREDUCE, np.ones(3), op=op)
        ones = np.ones(3)
        run(opened, Kind.ALLREDUCE, ones)
        expect_equal(ones, np.full(3, SIZE - 1.0), "who has joined is still there")
    run(opened, Kind.JOIN)
    run(opened, Kind.BARRIER)


# --- the world's faults ----------------------------------------------------------------------------------------------


LATE_S = 3.0
"""A time limit that only who does not come at all misses, also when ranks share few cores."""


@case
def a_deadline_ends_the_call_for_all_and_names_who_is_missing(opened: BackendChannel) -> None:
    run(opened, Kind.BARRIER)
    if RANK:
        with raises((OperationTimeout, RoundEnded), match="waiting for rank 0"):
            run(opened, Kind.ALLREDUCE, np.ones(4), seconds=LATE_S)
        with raises(RoundEnded):
            run(opened, Kind.BARRIER)
    MPI.COMM_WORLD.barrier()
    if not RANK:
        with raises(RoundEnded, match="gave up"):
            run(opened, Kind.ALLREDUCE, np.ones(4))


@case
def a_call_whose_time_was_over_before_its_turn_names_who_is_missing(opened: BackendChannel) -> None:
    if RANK:
        first = submit(opened, Kind.BARRIER, description="first")
        second = submit(opened, Kind.BARRIER, description="second", seconds=0.0)
        MPI.COMM_WORLD.barrier()
        first.wait(Deadline(LONG_S))
        with raises((OperationTimeout, RoundEnded)) as words:
            second.wait(Deadline(LONG_S))
        assert re.search("waiting for ranks? 0", words[0]), words
    else:
        MPI.COMM_WORLD.barrier()
        run(opened, Kind.BARRIER, description="first")
    MPI.COMM_WORLD.barrier()


@case
def a_call_behind_one_that_waits_names_for_whom(opened: BackendChannel) -> None:
    run(opened, Kind.BARRIER)
    if RANK:
        first = submit(opened, Kind.BARRIER, description="first")
        with raises((OperationTimeout, RoundEnded)) as words:
            run(opened, Kind.BARRIER, description="second", seconds=0.1)
        assert re.search("waiting for ranks? 0", words[0]), words
        with raises((OperationTimeout, RoundEnded)):
            first.wait(Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case
def a_submitted_call_ends_at_its_deadline_too(opened: BackendChannel) -> None:
    run(opened, Kind.BARRIER)
    if RANK:
        first = submit(opened, Kind.BARRIER, seconds=LATE_S)
        second = submit(opened, Kind.BARRIER)
        with raises(OperationTimeout, match="still under way"):
            first.wait(Deadline(0.01))
        with raises((OperationTimeout, RoundEnded)):
            first.wait(Deadline(LONG_S))
        with raises(RoundEnded):
            second.wait(Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case
def an_abort_ends_the_waits_of_all_members(opened: BackendChannel) -> None:
    work = None
    if RANK:
        work = submit(opened, Kind.ALLREDUCE, np.ones(100_000), description="allreduce 'w'")
    MPI.COMM_WORLD.barrier()
    if not RANK:
        opened.abort(lost_rank=SIZE - 1, why="it was killed")
        opened.abort(why="the first one wins")
        with raises(PeerLost, match=re.escape(f"rank 0 lost rank {SIZE - 1} during barrier (it was killed)")):
            run(opened, Kind.BARRIER)
    else:
        assert work is not None
        told = f"rank {RANK} lost rank {SIZE - 1} during allreduce 'w' (it was killed)"
        if RANK == SIZE - 1:
            told = f"allreduce 'w' failed on rank {RANK}: it was killed"
        with raises(RondeError if RANK == SIZE - 1 else PeerLost, match=re.escape(told)):
            work.wait(Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case
def my_own_abort_ends_my_waits_at_once(opened: BackendChannel) -> None:
    if RANK:
        work = submit(opened, Kind.BARRIER)
        opened.abort(why="the test says so")
        with raises(RoundEnded, match="barrier cannot finish: the test says so"):
            work.wait(Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case
def who_waits_for_a_member_that_closed_is_told(opened: BackendChannel) -> None:
    run(opened, Kind.BARRIER)
    if not RANK:
        opened.close()
        opened.close()
        with raises(RoundEnded, match="closed"):
            run(opened, Kind.BARRIER)
    else:
        with raises(RoundEnded, match=re.escape("rank 0 has closed channel 0.ordered")):
            run(opened, Kind.BARRIER)
    MPI.COMM_WORLD.barrier()


@case_of_backend
def closing_right_after_a_call_harms_nobody(backend: MpiBackend) -> None:
    for repeat in range(10):
        with channel(backend, f"{repeat}.ordered") as opened:
            x = np.full(50_000, RANK, np.float32)
            run(opened, Kind.BROADCAST, x, peer=repeat % SIZE)
        expect_equal(x, np.full(50_000, repeat % SIZE, np.float32), "broadcast")


@case
def a_look_names_who_is_missing(opened: BackendChannel) -> None:
    assert opened.current_call() is None
    work = submit(opened, Kind.BARRIER, description="barrier 7") if RANK else None
    deadline = Deadline(LONG_S)
    while work is not None:
        look = opened.current_call()
        if look is not None and look.missing == (0,):
            assert look.description == "barrier 7"
            assert look.since_ns <= time.monotonic_ns()
            break
        assert not deadline.expired, f"{look}"
        time.sleep(0.01)
    MPI.COMM_WORLD.barrier()
    if work is None:
        run(opened, Kind.BARRIER)
    else:
        work.wait(Deadline(LONG_S))
    assert opened.current_call() is None


@case_of_backend
def opening_names_who_did_not_come(backend: MpiBackend) -> None:
    spec = ChannelSpec(id="0.late", members=EVERYBODY, member_index=RANK)
    if RANK:
        with raises(StartFailed, match=re.escape(f"opening channel 0.late: rank 0 did not come within {LATE_S:g} s")):
            backend.open_channel(spec, Deadline(LATE_S))
        backend.rank_lost(0, "it was killed")
        with raises(PeerLost, match=re.escape(f"rank {RANK} lost rank 0 during opening channel 0.later")):
            backend.open_channel(ChannelSpec(id="0.later", members=EVERYBODY, member_index=RANK), Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case_of_backend
def settings_come_from_mpi(backend: MpiBackend) -> None:
    settings = settings_from_mpi(Settings(backend="mpi", start_s=LONG_S))
    assert (settings.rank, settings.size) == (RANK, SIZE)
    assert len(set(gather_texts(f"{settings.coordinator} {settings.key}"))) == 1
    assert settings.coordinator.startswith("127.0.0.1:") and len(settings.key) == 64
    with raises(StartFailed, match="MPI says that there are"):
        settings_from_mpi(Settings(backend="mpi", size=SIZE + 1))


@case_of_backend
def ranks_that_do_not_fit_mpi_are_refused(backend: MpiBackend) -> None:
    with raises(StartFailed, match=re.escape(f"MPI says rank {RANK} of {SIZE}")):
        MpiBackend(topology(SIZE + 1), Settings(backend="mpi"))
