"""Whether every kind of call leaves the right numbers: dtypes, operations, sizes. Run by tests/jobs/mpi_ranks.py."""

from __future__ import annotations

import itertools

import numpy as np

from ronde.comm.backends.base import BackendChannel
from ronde.comm.backends.mpi import collectives as moves
from ronde.comm.backends.mpi.backend import MpiBackend
from ronde.comm.buffers import Array, address_of
from ronde.comm.call import Call, Span
from ronde.types import DType, Op, OperationKind
from tests.conformance.reference_arithmetic import reduce
from tests.jobs.mpi_kit import (
    EVERYBODY,
    RANK,
    SIZE,
    call,
    case,
    channel,
    close_enough,
    data,
    expect_equal,
    expect_same_bits_everywhere,
    run,
)


def ops_of(dtype: DType) -> list[Op]:
    return [
        op for op in Op if (op is not Op.ADASUM or dtype.is_float) and (op is not Op.MEAN or dtype is not DType.BOOL)
    ]


@case
def allreduce_is_right_for_every_dtype_and_op(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, count, pre_agreed in itertools.product(DType, (0, 1, 33), (False, True)):
            for op in ops_of(dtype):
                everybody = [data(rank, count, dtype) for rank in EVERYBODY]
                expected = reduce(everybody, dtype, op, 1.0, 1.0)
                x, out = everybody[RANK].copy(), np.zeros_like(everybody[RANK])
                run(opened, call(OperationKind.ALLREDUCE, x, out, dtype, op=op, pre_agreed=pre_agreed))
                close_enough(out, expected, dtype, exact=op is not Op.ADASUM)
                expect_equal(x, everybody[RANK], "the input stays")
                run(opened, call(OperationKind.ALLREDUCE, x, x, dtype, op=op, pre_agreed=pre_agreed))
                expect_equal(x, out, "in place")
        expect_same_bits_everywhere(opened, x)


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
                run(opened, call(OperationKind.ALLREDUCE, x, out, dtype, op=op, prescale=0.5, postscale=4.0))
                expect_equal(out, expected, (dtype, op))


@case
def large_floats_have_the_same_bits_on_all_ranks(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, op in itertools.product((DType.FLOAT32, DType.FLOAT64, DType.FLOAT16), (Op.MEAN, Op.ADASUM)):
            everybody = [data(rank, 30_011, dtype, exact=False) for rank in EVERYBODY]
            x = everybody[RANK].copy()
            run(opened, call(OperationKind.ALLREDUCE, x, op=op, pre_agreed=dtype is DType.FLOAT64))
            close_enough(x, reduce(everybody, dtype, op, 1.0, 1.0), dtype)
            expect_same_bits_everywhere(opened, x)


@case
def nan_wins_and_integers_wrap(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, op in itertools.product((DType.FLOAT32, DType.FLOAT64, DType.FLOAT16), (Op.MIN, Op.MAX)):
            x = np.array([RANK, -RANK, np.inf, -np.inf, -0.5], dtype.numpy)
            x[0 if RANK == SIZE - 1 else 1 :][:1] = np.nan
            run(opened, call(OperationKind.ALLREDUCE, x, op=op))
            assert np.isnan(x[:2]).all() and not np.isnan(x[2:]).any(), f"{op}: {x}"
        x = np.full(3, 100, np.int8)
        run(opened, call(OperationKind.ALLREDUCE, x))
        expect_equal(x, np.full(3, SIZE * 100 % 256, np.uint8).view(np.int8), "int8")
        x = np.full(3, np.iinfo(np.int64).max, np.int64)
        run(opened, call(OperationKind.ALLREDUCE, x, op=Op.PRODUCT))
        expect_equal(x, np.full(3, 1 if SIZE % 2 == 0 else np.iinfo(np.int64).max, np.int64), "int64")


@case
def several_parts_are_one_array(backend: MpiBackend) -> None:
    arrays = [np.full(n, RANK + n, np.float32) for n in (3, 0, 5)]
    outs = [np.zeros_like(array) for array in arrays]
    parts = tuple(Span(address_of(x), address_of(out), x.size) for x, out in zip(arrays, outs, strict=True))
    with channel(backend) as opened:
        run(opened, Call(OperationKind.ALLREDUCE, DType.FLOAT32, spans=parts))
        for array, out in zip(arrays, outs, strict=True):
            expect_equal(out, np.full(array.size, sum(EVERYBODY) + SIZE * array.size, np.float32), "allreduce")
        run(opened, Call(OperationKind.BROADCAST, DType.FLOAT32, spans=parts, peer=1))
        for array, out in zip(arrays, outs, strict=True):
            expect_equal(out, np.full(array.size, 1 + array.size, np.float32), "broadcast")


def all_moves(opened: BackendChannel, dtype: DType, *, pre_agreed: bool) -> None:
    """Each kind that moves data, with sizes that differ between members."""
    counts = (*((rank * 7 + 3) % 11 for rank in EVERYBODY[:-1]), 0)
    pieces = [data(rank, count, dtype) for rank, count in enumerate(counts)]
    total = sum(counts)
    out = np.zeros(total, dtype.numpy)
    run(opened, call(OperationKind.ALLGATHER, pieces[RANK], out, dtype, counts=counts, pre_agreed=pre_agreed))
    expect_equal(out, np.concatenate(pieces), "allgather")
    for root in EVERYBODY:
        x = data(RANK, total, dtype)
        run(opened, call(OperationKind.BROADCAST, x, dtype=dtype, peer=root, pre_agreed=pre_agreed))
        expect_equal(x, data(root, total, dtype), "broadcast")
    everybody = [data(rank, total, dtype) for rank in EVERYBODY]
    out = np.zeros(counts[RANK], dtype.numpy)
    run(
        opened,
        call(OperationKind.REDUCE_SCATTER, everybody[RANK].copy(), out, dtype, counts=counts, pre_agreed=pre_agreed),
    )
    start = sum(counts[:RANK])
    expect_equal(out, reduce(everybody, dtype, Op.SUM, 1.0, 1.0)[start : start + counts[RANK]], "reduce_scatter")
    alltoall(opened, dtype, pre_agreed=pre_agreed)
    run(opened, call(OperationKind.BARRIER, pre_agreed=pre_agreed))


def alltoall(opened: BackendChannel, dtype: DType, *, pre_agreed: bool) -> None:
    def given(source: int, target: int) -> Array:
        return data(source * SIZE + target, (source * 5 + target * 3) % 13, dtype)

    x = np.concatenate([given(RANK, rank) for rank in EVERYBODY])
    expected = np.concatenate([given(rank, RANK) for rank in EVERYBODY])
    splits = tuple(given(RANK, rank).size for rank in EVERYBODY)
    counts = tuple(given(rank, RANK).size for rank in EVERYBODY)
    out = np.zeros_like(expected)
    run(opened, call(OperationKind.ALLTOALL, x, out, dtype, counts=counts, splits=splits, pre_agreed=pre_agreed))
    expect_equal(out, expected, "alltoall")


@case
def data_moves_right_for_every_kind_and_dtype(backend: MpiBackend) -> None:
    with channel(backend) as opened:
        for dtype, pre_agreed in itertools.product(DType, (False, True)):
            all_moves(opened, dtype, pre_agreed=pre_agreed)


@case
def arrays_beyond_the_limit_of_one_mpi_call_travel_in_pieces(backend: MpiBackend) -> None:
    limit, moves.MAX_ELEMENTS_PER_CALL = moves.MAX_ELEMENTS_PER_CALL, 4
    try:
        with channel(backend) as opened:
            for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.UINT8):
                all_moves(opened, dtype, pre_agreed=False)
                for op in ops_of(dtype):
                    everybody = [data(rank, 15, dtype) for rank in EVERYBODY]
                    x = everybody[RANK].copy()
                    run(opened, call(OperationKind.ALLREDUCE, x, dtype=dtype, op=op))
                    close_enough(x, reduce(everybody, dtype, op, 1.0, 1.0), dtype, exact=op is not Op.ADASUM)
    finally:
        moves.MAX_ELEMENTS_PER_CALL = limit


@case
def buckets_are_memory_of_my_own(backend: MpiBackend) -> None:
    with channel(backend, bucket_bytes=4096) as opened:
        bucket = opened.bucket().view(np.float32)
        assert bucket.nbytes == 4096
        bucket[:] = RANK
        run(opened, call(OperationKind.ALLREDUCE, bucket, op=Op.MEAN, pre_agreed=True))
        expect_equal(bucket, np.full(1024, sum(EVERYBODY) / SIZE, np.float32), "bucket")
