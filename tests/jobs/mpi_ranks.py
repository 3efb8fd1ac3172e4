"""What each rank of tests/jobs/test_mpi.py does under mpiexec: every case in turn, results to a file per rank.

Runs where there is no pytest: in the small environments that hold an MPI library. `python -m tests.jobs.mpi_ranks
FOLDER` writes FOLDER/rank-N.json: {case: "" or what went wrong}.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI

from ronde.comm import mpi_moves
from ronde.comm.arithmetic import reduce
from ronde.comm.backend import Call, Channel, ChannelSpec, Outcome, Part
from ronde.comm.buffers import Array, address
from ronde.comm.mpi import MpiBackend, mpi_settings
from ronde.comm.mpi_requests import complete
from ronde.errors import Mismatch, OperationTimeout, PeerLost, RoundEnded, StartFailed
from ronde.settings import Settings
from ronde.types import Deadline, DType, Kind, Member, Op, Topology

RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
EVERYBODY = tuple(range(SIZE))
LONG_S = 20.0
CASES: dict[str, Callable[[MpiBackend], None]] = {}


def case(function: Callable[[MpiBackend], None]) -> Callable[[MpiBackend], None]:
    """The function is one case; its name is the sentence."""
    CASES[function.__name__] = function
    return function


@contextmanager
def channel(backend: MpiBackend, id: str = "0.ordered", members: Sequence[int] = EVERYBODY) -> Iterator[Channel]:
    """A channel that is closed at the end, when all members are done with it."""
    spec = ChannelSpec(id=id, members=tuple(members), me=list(members).index(RANK), bucket_bytes=4096, direct=True)
    opened = backend.open_channel(spec, Deadline(LONG_S))
    try:
        yield opened
    finally:
        opened.close()


def call(
    kind: Kind, x: Array | None = None, out: Array | None = None, dtype: DType | None = None, **more: object
) -> Call:
    """A call on one array."""
    if x is None:
        return Call(kind, text=str(more.pop("text", kind.name.lower())), **more)  # type: ignore[arg-type]
    out = x if out is None else out
    dtype = DType[x.dtype.name.upper()] if dtype is None else dtype
    parts = (Part(address(x), address(out), x.size),)
    text = str(more.pop("text", f"{kind.name.lower()} {dtype.name.lower()}[{x.size}]"))
    return Call(kind, dtype, parts=parts, keep=(x, out), text=text, **more)  # type: ignore[arg-type]


def run(opened: Channel, asked: Call, seconds: float = LONG_S) -> Outcome:
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


def expect_same_bits_everywhere(opened: Channel, x: Array) -> None:
    bits = np.ascontiguousarray(x).view(np.uint8)
    everybody = np.empty(bits.size * SIZE, np.uint8)
    run(opened, call(Kind.ALLGATHER, bits, everybody, counts=(bits.size,) * SIZE))
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


# --- results ---------------------------------------------------------------------------------------------------------


def ops_of(dtype: DType) -> list[Op]:
    return [
        op for op in Op if (op is not Op.ADASUM or dtype.is_float) and (op is not Op.MEAN or dtype is not DType.BOOL)
    ]


@case
def allreduce_is_right_for_every_dtype_and_op(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, count, trusted in itertools.product(DType, (0, 1, 33), (False, True)):
            for op in ops_of(dtype):
                everybody = [data(rank, count, dtype) for rank in EVERYBODY]
                expected = reduce(everybody, dtype, op, 1.0, 1.0)
                x, out = everybody[RANK].copy(), np.zeros_like(everybody[RANK])
                run(opened, call(Kind.ALLREDUCE, x, out, dtype, op=op, trusted=trusted))
                close_enough(out, expected, dtype, exact=op is not Op.ADASUM)
                expect_equal(x, everybody[RANK], "the input stays")
                run(opened, call(Kind.ALLREDUCE, x, x, dtype, op=op, trusted=trusted))
                expect_equal(x, out, "in place")
        expect_same_bits_everywhere(opened, x)


def close_enough(got: Array, expected: Array, dtype: DType, *, exact: bool = False) -> None:
    """Equal; or nearly, when the order of adding may matter."""
    if dtype is DType.BFLOAT16 and not exact:
        got, expected = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (got, expected))
    if exact or not dtype.is_float:
        return expect_equal(got, expected, dtype)
    tolerance = {DType.BFLOAT16: 1e-2, DType.FLOAT16: 2e-3, DType.FLOAT32: 1e-5}.get(dtype, 1e-12)
    assert np.allclose(got, expected, rtol=tolerance, atol=tolerance), f"{dtype}: got {got}, expected {expected}"
    return None


@case
def scales_are_applied_before_and_after(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype in (
            DType.FLOAT32,
            DType.FLOAT64,
            DType.FLOAT16,
            DType.BFLOAT16,
            DType.INT32,
            DType.UINT8,
            DType.INT64,
        ):
            for op in (Op.SUM, Op.MEAN, Op.MAX):
                everybody = [data(rank, 50, dtype) for rank in EVERYBODY]
                expected = reduce(everybody, dtype, op, 0.5, 4.0)
                x, out = everybody[RANK], np.empty_like(everybody[0])
                run(opened, call(Kind.ALLREDUCE, x, out, dtype, op=op, prescale=0.5, postscale=4.0))
                expect_equal(out, expected, (dtype, op))


@case
def large_floats_have_the_same_bits_on_all_ranks(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, op in itertools.product((DType.FLOAT32, DType.FLOAT64, DType.FLOAT16), (Op.MEAN, Op.ADASUM)):
            everybody = [data(rank, 30_011, dtype, exact=False) for rank in EVERYBODY]
            x = everybody[RANK].copy()
            run(opened, call(Kind.ALLREDUCE, x, op=op))
            close_enough(x, reduce(everybody, dtype, op, 1.0, 1.0), dtype)
            expect_same_bits_everywhere(opened, x)


@case
def nan_wins_and_integers_wrap(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, op in itertools.product((DType.FLOAT32, DType.FLOAT64, DType.FLOAT16), (Op.MIN, Op.MAX)):
            x = np.array([RANK, -RANK, np.inf, -np.inf, -0.5], dtype.numpy)
            x[0 if RANK == SIZE - 1 else 1 :][:1] = np.nan
            run(opened, call(Kind.ALLREDUCE, x, op=op))
            assert np.isnan(x[:2]).all() and not np.isnan(x[2:]).any(), f"{op}: {x}"
        x = np.full(3, 100, np.int8)
        run(opened, call(Kind.ALLREDUCE, x))
        expect_equal(x, np.full(3, SIZE * 100 % 256, np.uint8).view(np.int8), "int8")
        x = np.full(3, np.iinfo(np.int64).max, np.int64)
        run(opened, call(Kind.ALLREDUCE, x, op=Op.PRODUCT))
        expect_equal(x, np.full(3, 1 if SIZE % 2 == 0 else np.iinfo(np.int64).max, np.int64), "int64")


@case
def several_parts_are_one_array(backend: MpiBackend) -> None:
    arrays = [np.full(n, RANK + n, np.float32) for n in (3, 0, 5)]
    outs = [np.zeros_like(array) for array in arrays]
    parts = tuple(Part(address(x), address(out), x.size) for x, out in zip(arrays, outs, strict=True))
    with channel(backend) as opened:
        run(opened, Call(Kind.ALLREDUCE, DType.FLOAT32, parts=parts))
        for array, out in zip(arrays, outs, strict=True):
            expect_equal(out, np.full(array.size, sum(EVERYBODY) + SIZE * array.size, np.float32), "allreduce")
        run(opened, Call(Kind.BROADCAST, DType.FLOAT32, parts=parts, peer=1))
        for array, out in zip(arrays, outs, strict=True):
            expect_equal(out, np.full(array.size, 1 + array.size, np.float32), "broadcast")


def all_moves(opened: Channel, dtype: DType, *, trusted: bool) -> None:
    """Each kind that moves data, with sizes that differ between members."""
    counts = (*((rank * 7 + 3) % 11 for rank in EVERYBODY[:-1]), 0)
    pieces = [data(rank, count, dtype) for rank, count in enumerate(counts)]
    total = sum(counts)
    out = np.zeros(total, dtype.numpy)
    run(opened, call(Kind.ALLGATHER, pieces[RANK], out, dtype, counts=counts, trusted=trusted))
    expect_equal(out, np.concatenate(pieces), "allgather")
    for root in EVERYBODY:
        x = data(RANK, total, dtype)
        run(opened, call(Kind.BROADCAST, x, dtype=dtype, peer=root, trusted=trusted))
        expect_equal(x, data(root, total, dtype), "broadcast")
    everybody = [data(rank, total, dtype) for rank in EVERYBODY]
    out = np.zeros(counts[RANK], dtype.numpy)
    run(opened, call(Kind.REDUCE_SCATTER, everybody[RANK].copy(), out, dtype, counts=counts, trusted=trusted))
    start = sum(counts[:RANK])
    expect_equal(out, reduce(everybody, dtype, Op.SUM, 1.0, 1.0)[start : start + counts[RANK]], "reduce_scatter")
    alltoall(opened, dtype, trusted=trusted)
    run(opened, call(Kind.BARRIER, trusted=trusted))


def alltoall(opened: Channel, dtype: DType, *, trusted: bool) -> None:
    def given(source: int, target: int) -> Array:
        return data(source * SIZE + target, (source * 5 + target * 3) % 13, dtype)

    x = np.concatenate([given(RANK, rank) for rank in EVERYBODY])
    expected = np.concatenate([given(rank, RANK) for rank in EVERYBODY])
    splits = tuple(given(RANK, rank).size for rank in EVERYBODY)
    counts = tuple(given(rank, RANK).size for rank in EVERYBODY)
    out = np.zeros_like(expected)
    run(opened, call(Kind.ALLTOALL, x, out, dtype, counts=counts, splits=splits, trusted=trusted))
    expect_equal(out, expected, "alltoall")


@case
def data_moves_right_for_every_kind_and_dtype(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, trusted in itertools.product(DType, (False, True)):
            all_moves(opened, dtype, trusted=trusted)


@case
def arrays_beyond_the_limit_of_one_mpi_call_travel_in_pieces(backend: MpiBackend) -> None:
    limit, mpi_moves.PIECE = mpi_moves.PIECE, 4
    try:
        with channel(backend) as opened:
            for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.UINT8):
                all_moves(opened, dtype, trusted=False)
                for op in ops_of(dtype):
                    everybody = [data(rank, 15, dtype) for rank in EVERYBODY]
                    x = everybody[RANK].copy()
                    run(opened, call(Kind.ALLREDUCE, x, dtype=dtype, op=op))
                    close_enough(x, reduce(everybody, dtype, op, 1.0, 1.0), dtype, exact=op is not Op.ADASUM)
    finally:
        mpi_moves.PIECE = limit


@case
def buckets_are_memory_of_my_own(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        bucket = opened.bucket().view(np.float32)
        assert bucket.nbytes == 4096
        bucket[:] = RANK
        run(opened, call(Kind.ALLREDUCE, bucket, op=Op.MEAN, trusted=True))
        expect_equal(bucket, np.full(1024, sum(EVERYBODY) / SIZE, np.float32), "bucket")


# --- order -----------------------------------------------------------------------------------------------------------


@case
def submitted_calls_run_in_order(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        arrays = [np.full(5, index + RANK, np.int32) for index in range(10)]
        tickets = [opened.submit(call(Kind.ALLREDUCE, x), Deadline(LONG_S)) for x in arrays]
        last = np.ones(1, np.int32)
        run(opened, call(Kind.ALLREDUCE, last))
        assert all(ticket.done() for ticket in tickets), "run() waits for those before it"
        outcomes = [ticket.wait(Deadline(LONG_S)) for ticket in tickets]
        for index, x in enumerate(arrays):
            expect_equal(x, np.full(5, SIZE * index + sum(EVERYBODY), np.int32), index)
        for before, after in itertools.pairwise(outcomes):
            assert before.start_ns <= before.ready_ns <= before.end_ns <= after.start_ns


@case
def channels_do_not_wait_for_each_other(backend: MpiBackend) -> None:
    with channel(backend, "0.a") as a, channel(backend, "0.b") as b:
        x, y = np.ones(1), np.ones(1)
        first, second = (a, b) if RANK % 2 else (b, a)
        tickets = [each.submit(call(Kind.ALLREDUCE, z), Deadline(LONG_S)) for each, z in ((first, x), (second, y))]
        for ticket in tickets:
            ticket.wait(Deadline(LONG_S))
        assert x[0] == y[0] == SIZE


@case
def groups_have_channels_of_their_own(backend: MpiBackend) -> None:
    mine = EVERYBODY[RANK % 2 :: 2]
    with channel(backend, f"{1 + RANK % 2}.ordered", mine) as opened:
        x = np.array([RANK])
        run(opened, call(Kind.ALLREDUCE, x))
        assert x[0] == sum(mine)


@case
def messages_wait_for_nothing_but_their_other_side(backend: MpiBackend) -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    with channel(backend) as opened:
        for count in (1, 100_000):  # beyond what MPI sends without being asked for
            x, y = np.full(count, RANK, np.float16), np.empty(count, np.float16)
            sent = opened.submit(call(Kind.SEND, x, peer=after, text="message"), Deadline(LONG_S))
            got = opened.submit(call(Kind.RECEIVE, y, peer=before, text="message"), Deadline(LONG_S))
            run(opened, call(Kind.BARRIER))  # in another order than the messages on some ranks
            got.wait(Deadline(LONG_S))
            sent.wait(Deadline(LONG_S))
            expect_equal(y, np.full(count, before, np.float16), "message")


# --- disagreement and join -------------------------------------------------------------------------------------------


@case
def members_that_disagree_all_get_the_same_error(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        x = np.ones(3 if RANK == 1 else 4, np.float32)
        with raises(Mismatch, says="rank 1: allreduce float32[3]") as words:
            run(opened, call(Kind.ALLREDUCE, x))
        expect_equal(x, np.ones_like(x), "no data moved")
        with raises(Mismatch) as more:
            run(opened, call(Kind.BARRIER) if RANK else call(Kind.BROADCAST, np.ones(2), peer=0))
        with raises(Mismatch) as signatures:
            run(opened, call(Kind.BARRIER, signature=RANK, text=f"barrier of rank {RANK}"))
        y = np.ones(2)
        run(opened, call(Kind.ALLREDUCE, y))
        assert y[0] == SIZE, "the channel goes on"
    assert len(set(everybody_says(words[0] + more[0] + signatures[0]))) == 1


@case
def a_sender_and_a_receiver_that_disagree_both_know(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        if RANK < 2:
            kind = Kind.SEND if RANK == 0 else Kind.RECEIVE
            with raises(Mismatch, says="rank 0: send float32[1]; rank 1: receive float32[2]"):
                run(opened, call(kind, np.ones(1 + RANK, np.float32), peer=1 - RANK))
            x = np.full(1, RANK)
            run(opened, call(kind, x, peer=1 - RANK, text="message"))
            assert x[0] == 0
        run(opened, call(Kind.BARRIER))


@case
def a_mistake_is_refused_before_anything_is_sent(backend: MpiBackend) -> None:
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
    )
    with channel(backend) as opened:
        for each in wrong:
            with raises(ValueError):
                run(opened, each)
        run(opened, call(Kind.BARRIER))


@case
def who_has_joined_takes_part_with_zeros(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for step in range(RANK):  # rank 0 joins at once, the last one last
            for dtype, op in ((DType.FLOAT32, Op.SUM), (DType.BFLOAT16, Op.SUM), (DType.FLOAT64, Op.ADASUM)):
                ones = (
                    np.full(step + 1, 0x3F80, np.uint16) if dtype is DType.BFLOAT16 else np.ones(step + 1, dtype.numpy)
                )
                here = [rank for rank in EVERYBODY if rank > step]
                everybody = [ones if rank in here else np.zeros_like(ones) for rank in EVERYBODY]
                out = np.empty_like(ones)
                run(opened, call(Kind.ALLREDUCE, ones, out, dtype, op=op))
                close_enough(out, reduce(everybody, dtype, op, 1.0, 1.0), dtype)
        run(opened, call(Kind.JOIN))
        run(opened, call(Kind.BARRIER))


@case
def who_has_joined_cannot_take_part_in_anything_else(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        with raises(Mismatch, says="rank 0: join"):
            run(opened, call(Kind.BARRIER if RANK else Kind.JOIN))
        run(opened, call(Kind.BARRIER))


# --- the world's faults ----------------------------------------------------------------------------------------------


@case
def a_deadline_ends_the_call_for_all_and_names_who_is_missing(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(Kind.BARRIER))
        if RANK:
            with raises(OperationTimeout, RoundEnded, says="waiting for rank 0"):
                run(opened, call(Kind.ALLREDUCE, np.ones(4)), 1.0)
            with raises(RoundEnded):
                run(opened, call(Kind.BARRIER))
        MPI.COMM_WORLD.barrier()
        if not RANK:
            with raises(RoundEnded, says="gave up"):
                run(opened, call(Kind.ALLREDUCE, np.ones(4)))


@case
def a_submitted_call_ends_at_its_deadline_too(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(Kind.BARRIER))
        if RANK:
            first = opened.submit(call(Kind.BARRIER), Deadline(0.5))
            second = opened.submit(call(Kind.BARRIER), Deadline(LONG_S))
            with raises(OperationTimeout, says="still under way"):
                first.wait(Deadline(0.01))
            with raises(OperationTimeout, RoundEnded):
                first.wait(Deadline(LONG_S))
            with raises(RoundEnded):
                second.wait(Deadline(LONG_S))
        MPI.COMM_WORLD.barrier()


@case
def an_abort_ends_the_waits_of_all_members(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        ticket = None
        if RANK:
            ticket = opened.submit(call(Kind.ALLREDUCE, np.ones(100_000), text="allreduce 'w'"), Deadline(LONG_S))
        MPI.COMM_WORLD.barrier()
        if not RANK:
            opened.abort(lost=SIZE - 1, why="it was killed")
            opened.abort(why="the first one wins")
            with raises(PeerLost, says=f"rank 0 lost rank {SIZE - 1} during barrier (it was killed)"):
                run(opened, call(Kind.BARRIER))
        else:
            assert ticket is not None
            with raises(PeerLost, says=f"rank {RANK} lost rank {SIZE - 1} during allreduce 'w' (it was killed)"):
                ticket.wait(Deadline(LONG_S))
        MPI.COMM_WORLD.barrier()


@case
def my_own_abort_ends_my_waits_at_once(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        if RANK:
            ticket = opened.submit(call(Kind.BARRIER), Deadline(LONG_S))
            opened.abort(why="the test says so")
            with raises(RoundEnded, says="barrier cannot finish: the test says so"):
                ticket.wait(Deadline(LONG_S))
            with raises(RoundEnded):
                run(opened, call(Kind.SEND, np.ones(1), peer=0))
        MPI.COMM_WORLD.barrier()


@case
def who_waits_for_a_member_that_closed_is_told(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        run(opened, call(Kind.BARRIER))
        if not RANK:
            opened.close()
            opened.close()
            with raises(RoundEnded, says="closed"):
                run(opened, call(Kind.BARRIER))
        else:
            with raises(RoundEnded, says="rank 0 has closed channel 0.ordered"):
                run(opened, call(Kind.BARRIER))
        MPI.COMM_WORLD.barrier()


@case
def closing_right_after_a_call_harms_nobody(backend: MpiBackend) -> None:
    for repeat in range(10):
        with channel(backend, f"{repeat}.ordered") as opened:
            x = np.full(50_000, RANK, np.float32)
            run(opened, call(Kind.BROADCAST, x, peer=repeat % SIZE))
        expect_equal(x, np.full(50_000, repeat % SIZE, np.float32), "broadcast")


@case
def a_look_names_who_is_missing(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        assert opened.look() is None
        ticket = opened.submit(call(Kind.BARRIER, text="barrier 7"), Deadline(LONG_S)) if RANK else None
        deadline = Deadline(LONG_S)
        while ticket is not None:
            look = opened.look()
            if look is not None and look.missing == (0,):
                assert look.text == "barrier 7"
                assert look.since_ns <= time.monotonic_ns()
                break
            assert not deadline.passed, f"{look}"
            time.sleep(0.01)
        MPI.COMM_WORLD.barrier()
        if ticket is None:
            run(opened, call(Kind.BARRIER))
        else:
            ticket.wait(Deadline(LONG_S))
        assert opened.look() is None


@case
def opening_names_who_did_not_come(backend: MpiBackend) -> None:
    spec = ChannelSpec(id="0.late", members=EVERYBODY, me=RANK)
    if RANK:
        with raises(StartFailed, says="opening channel 0.late: rank 0 did not come within 0.3 s"):
            backend.open_channel(spec, Deadline(0.3))
        backend.lost(0, "it was killed")
        with raises(PeerLost, says=f"rank {RANK} lost rank 0 during opening channel 0.later"):
            backend.open_channel(ChannelSpec(id="0.later", members=EVERYBODY, me=RANK), Deadline(LONG_S))
    MPI.COMM_WORLD.barrier()


@case
def settings_come_from_mpi(backend: MpiBackend) -> None:
    settings = mpi_settings(Settings(backend="mpi", start_s=LONG_S))
    assert (settings.rank, settings.size) == (RANK, SIZE)
    assert len(set(everybody_says(f"{settings.coordinator} {settings.key}"))) == 1
    assert settings.coordinator.startswith("127.0.0.1:") and len(settings.key) == 64
    with raises(StartFailed, says="MPI says that there are"):
        mpi_settings(Settings(backend="mpi", size=SIZE + 1))


@case
def ranks_that_do_not_fit_mpi_are_refused(backend: MpiBackend) -> None:
    with raises(StartFailed, says=f"MPI says rank {RANK} of {SIZE}"):
        MpiBackend(topology(SIZE + 1), Settings(backend="mpi"))


# --- running the cases -----------------------------------------------------------------------------------------------


def topology(size: int = SIZE) -> Topology:
    return Topology(tuple(Member(rank, "here", 0, "") for rank in range(size)), RANK)


def meet() -> None:
    """Cases begin together, whatever the one before came to."""
    deadline = Deadline(LONG_S)

    def check() -> None:
        assert not deadline.passed, "some rank is stuck in the case before"

    complete([MPI.COMM_WORLD.Ibarrier()], check)


def outcome(function: Callable[[MpiBackend], None]) -> str:
    try:
        backend = MpiBackend(topology(), Settings(backend="mpi", start_s=LONG_S))
        try:
            function(backend)
        finally:
            backend.close()
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("ronde")]
        assert not left, f"threads are left: {left}"
    except Exception:  # the edge of the process: the test shows it
        return traceback.format_exc()
    return ""


def main(folder: Path) -> None:
    results: dict[str, str] = {}
    for name, function in CASES.items():
        meet()
        results[name] = outcome(function)
        (folder / f"rank-{RANK}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    assert math.log2(SIZE) >= 1, "start me with mpiexec -n 2 or more"
    main(Path(sys.argv[1]))
