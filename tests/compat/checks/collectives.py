"""Every collective in every variant, on every dtype: what comes out, and what comes back on the way back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.testing import assert_close as same

import horovod.torch as hvd
from tests.compat.checks.registry import check, counting, of_all

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)
SHAPES = ((7,), (4, 3), (2, 3, 2), (0, 3), ())


def _mean(tensors: list[Tensor]) -> Tensor:
    total = reduce(torch.add, tensors)
    if total.dtype.is_floating_point:
        return total / len(tensors)
    return torch.div(total, len(tensors), rounding_mode="trunc").to(total.dtype)


REDUCTIONS: dict[int, Callable[[list[Tensor]], Tensor]] = {
    hvd.Average: _mean,
    hvd.Sum: lambda tensors: reduce(torch.add, tensors),
    hvd.Min: lambda tensors: reduce(torch.minimum, tensors),
    hvd.Max: lambda tensors: reduce(torch.maximum, tensors),
    hvd.Product: lambda tensors: reduce(torch.mul, tensors),
}

ALLREDUCES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "allreduce": lambda x, op: hvd.allreduce(x, op=op),
    "allreduce_": lambda x, op: hvd.allreduce_(x, op=op),
    "allreduce_async": lambda x, op: hvd.synchronize(hvd.allreduce_async(x, op=op)),
    "allreduce_async_": lambda x, op: hvd.synchronize(hvd.allreduce_async_(x, op=op)),
    "grouped_allreduce": lambda x, op: hvd.grouped_allreduce([x, x + 1], op=op)[0],
    "grouped_allreduce_": lambda x, op: hvd.grouped_allreduce_([x, x + 1], op=op)[0],
    "grouped_allreduce_async": lambda x, op: hvd.synchronize(hvd.grouped_allreduce_async([x, x + 1], op=op))[0],
    "grouped_allreduce_async_": lambda x, op: hvd.synchronize(hvd.grouped_allreduce_async_([x, x + 1], op=op))[0],
}


@check
def every_allreduce_reduces_every_dtype() -> None:
    for (variant, function), op, dtype in itertools.product(ALLREDUCES.items(), REDUCTIONS, DTYPES):
        for shape in SHAPES:
            everybody = of_all(shape, dtype)
            mine = everybody[hvd.rank()].clone()
            result = function(mine, op)
            same(result, REDUCTIONS[op](everybody))
            if variant.endswith("_"):
                assert result is mine, f"{variant} works in place"
            else:
                same(mine, everybody[hvd.rank()])


@check
def average_is_the_default_and_the_old_argument_still_counts() -> None:
    x = torch.full((3,), 1.0 + hvd.rank())
    same(hvd.allreduce(x), torch.full((3,), 1.5))
    same(hvd.allreduce(x, average=False), torch.full((3,), 3.0))
    same(hvd.allreduce(x, True), torch.full((3,), 1.5))


@check
def factors_are_numbers_of_the_dtype() -> None:
    for dtype in (torch.float32, torch.float64, torch.int32):
        everybody = of_all((17,), dtype)
        mine = everybody[hvd.rank()]
        factor = torch.tensor(0.3, dtype=torch.float64 if dtype is torch.int32 else dtype)
        before = reduce(torch.add, [(each * factor).to(dtype) for each in everybody])
        behind = (reduce(torch.add, everybody) * factor).to(dtype)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.3), before)
        assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.3), behind)


@check
def compressed_numbers_travel_in_half_and_come_back_whole() -> None:
    x = torch.full((4,), 1.0 + 2.0**-20)
    result = hvd.allreduce(x, compression=hvd.Compression.fp16)
    assert result.dtype is torch.float32
    same(result, torch.ones(4))
    same(hvd.allreduce(torch.tensor([3, 4]), op=hvd.Sum, compression=hvd.Compression.fp16), torch.tensor([6, 8]))


@check
def rows_are_gathered_whatever_their_number() -> None:
    for dtype in DTYPES:
        everybody = [counting((rank + 1, 3), rank, dtype) for rank in range(hvd.size())]
        mine = everybody[hvd.rank()]
        whole = torch.cat(everybody)
        same(hvd.allgather(mine), whole)
        same(hvd.synchronize(hvd.allgather_async(mine)), whole)
        both = hvd.grouped_allgather([mine, mine[:1]])
        assert isinstance(both, tuple)
        same(list(both), [whole, torch.cat([each[:1] for each in everybody])])


@check
def the_roots_numbers_are_everybodys() -> None:
    for dtype, root in itertools.product(DTYPES, range(hvd.size())):
        everybody = of_all((3, 2), dtype)
        mine = everybody[hvd.rank()].clone()
        same(hvd.broadcast(mine, root), everybody[root])
        same(hvd.synchronize(hvd.broadcast_async(mine, root)), everybody[root])
        same(mine, everybody[hvd.rank()])
        assert hvd.broadcast_(mine, root) is mine
        same(mine, everybody[root])


@check
def rows_are_exchanged() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.arange(2 * size) + 10 * rank
    equal = hvd.alltoall(mine)
    same(equal, torch.cat([torch.arange(2 * rank, 2 * rank + 2) + 10 * peer for peer in range(size)]))
    splits = torch.tensor([1] + [2] * (size - 1), dtype=torch.int32)
    rows, received = hvd.alltoall(mine, splits)
    assert received.dtype is torch.int32
    assert received.tolist() == [splits[rank].item()] * size
    assert len(rows) == int(splits[rank]) * size
    assert len(hvd.synchronize(hvd.alltoall_async(mine))) == 2, "the handle always gives both"


@check
def sums_are_shared_out_by_rows_the_first_get_more() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.int32, torch.float32):
        whole = counting((size + 1, 3), 0, dtype)
        rows = slice(0, 2) if rank == 0 else slice(rank + 1, rank + 2)
        same(hvd.reducescatter(whole, op=hvd.Sum), whole[rows] * size)
        same(hvd.reducescatter(whole), whole[rows])
        same(hvd.grouped_reducescatter([whole, whole + 1], op=hvd.Sum), [whole[rows] * size, (whole[rows] + 1) * size])
        same(hvd.synchronize(hvd.reducescatter_async(whole, op=hvd.Sum)), whole[rows] * size)


@check
def sparse_tensors_are_added_up() -> None:
    indices = torch.tensor([[hvd.rank(), 2]])
    mine = torch.sparse_coo_tensor(indices, torch.ones(2, 3), (4, 3), check_invariants=True)
    total = torch.zeros(4, 3)
    total[: hvd.size()] += 1
    total[2] += hvd.size()
    same(hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)().to_dense(), total)
    same(hvd.sparse_allreduce_async(mine, "sparse", hvd.Average)().to_dense(), total / hvd.size())


@check
def adasum_needs_no_mpi() -> None:
    orthogonal = torch.zeros(8)
    orthogonal[hvd.rank()] = 2.0
    same(hvd.allreduce(orthogonal, op=hvd.Adasum), torch.tensor([2.0, 2.0, 0, 0, 0, 0, 0, 0]))
    same(hvd.allreduce(torch.full((5,), 3.0), op=hvd.Adasum), torch.full((5,), 3.0))


GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], float]]] = {
    "allreduce of a sum": (lambda x: hvd.allreduce(x, op=hvd.Sum), lambda rank: hvd.size()),
    "allreduce of an average": (lambda x: hvd.allreduce(x), lambda rank: 1.0),
    "grouped_allreduce": (lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[0], lambda rank: hvd.size()),
    "allgather": (lambda x: hvd.allgather(x), lambda rank: 1.0),
    "grouped_allgather": (lambda x: hvd.grouped_allgather([x])[0], lambda rank: 1.0),
    "broadcast": (lambda x: hvd.broadcast(x, 0), lambda rank: 1.0 if rank == 0 else 0.0),
    "alltoall": (lambda x: hvd.alltoall(x, [2] * hvd.size())[0], lambda rank: 1.0),
    "reducescatter of a sum": (lambda x: hvd.reducescatter(x, op=hvd.Sum), lambda rank: hvd.size()),
    "reducescatter of an average": (lambda x: hvd.reducescatter(x), lambda rank: 1.0),
    "grouped_reducescatter": (lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum)[0], lambda rank: hvd.size()),
}
"""An operation, and what each number's gradient is when the result is added up."""


@check
def gradients_follow_horovods_rules() -> None:
    for name, (operation, slope) in GRADIENTS.items():
        x = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)
        total: Tensor = operation(x).sum()
        total.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, slope(hvd.rank()))), f"{name}: {x.grad}"
