"""Tensors in, tensors out: dtypes, memory, lists, works, sparse tensors, mistakes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.torch.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from ronde.torch.tensors import TensorWork
from tests.conformance.ranks import run_threads

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_every_dtype_travels_and_comes_back_as_itself(dtype: torch.dtype) -> None:
    def body(world: World) -> None:
        group, rank = world.group, world.rank
        first, second = (torch.tensor([[1, 0], [each, 1]], dtype=dtype) for each in (0, 1))
        x = second if rank else first
        total = allreduce(x, group=group)
        assert total.dtype is dtype
        assert total.tolist() == torch.tensor([[2, 0], [1, 2]], dtype=dtype).tolist()
        assert allgather(x, group=group).tolist() == [*first.tolist(), *second.tolist()]
        assert broadcast(x, root=1, group=group).tolist() == second.tolist()
        rows, received = alltoall(x, group=group)
        assert rows.dtype is dtype and received.tolist() == [1, 1]
        for shape in ((), (0,), (0, 3)):
            empty = x.new_zeros(shape)
            assert allreduce(empty, group=group).shape == broadcast(empty, group=group).shape == shape
            assert allgather(empty, group=group).shape == (shape or (2,))
        assert reduce_scatter(x, group=group).tolist() == total[rank : rank + 1].tolist()
        assert scatter(x, root=1, group=group).tolist() == second[rank : rank + 1].tolist()
        at_root = reduce(x, group=group), gather(x, group=group)
        if rank == 0:
            assert at_root[0].dtype is at_root[1].dtype is dtype
            assert [each.tolist() for each in at_root] == [total.tolist(), [*first.tolist(), *second.tolist()]]
        else:
            assert at_root == (None, None)

    run_threads(2, body)


def test_the_root_of_a_reduction_gets_it_in_place_and_in_the_background() -> None:
    def body(world: World) -> None:
        group, rank = world.group, world.rank
        xs = [torch.full((3,), rank + 1.0), torch.full((2, 2), rank + 1, dtype=torch.int64)]
        outs = [torch.zeros_like(x) for x in xs]
        assert reduce(xs, root=1, op="mean", out=outs, prescale=2.0, group=group) == (outs if rank == 1 else [None] * 2)
        assert outs[0].tolist() == ([3.0] * 3 if rank == 1 else [0.0] * 3)
        work = gather(xs[0], root=1, name="g", group=group, wait=False)
        rows = scatter(xs[1], splits=torch.tensor([0, 2]), name="s", group=group, wait=False).wait()
        assert rows.tolist() == ([[1, 1], [1, 1]] if rank == 1 else [])
        assert (work.wait().tolist() == [1.0] * 3 + [2.0] * 3) if rank == 1 else work.wait() is None
        for collective in (reduce, gather, scatter):
            with pytest.raises(ValueError, match=f"{collective.__name__} has no gradient; pass x.detach"):
                collective(torch.ones(2, requires_grad=True), group=group)

    run_threads(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_may_be_the_tensor_itself_and_autograd_notices(dtype: torch.dtype) -> None:
    def body(world: World) -> None:
        x = torch.full((3,), world.rank + 1.0, dtype=dtype)
        where, version = x.data_ptr(), x._version
        assert allreduce(x, out=x, op="mean", group=world.group) is x
        assert x.data_ptr() == where and x.tolist() == [1.5] * 3
        assert x._version > version
        parameter = torch.nn.Parameter(torch.full((2,), float(world.rank)))
        assert broadcast(parameter, root=1, out=parameter, group=world.group) is parameter
        assert parameter.tolist() == [1.0, 1.0] and parameter.requires_grad

    run_threads(2, body)


def test_tensors_that_are_not_contiguous_are_read_and_written_right() -> None:
    def body(world: World) -> None:
        x = torch.arange(6.0).reshape(2, 3).t()
        out = torch.zeros(4, 3)[::2].t()
        assert not x.is_contiguous() and not out.is_contiguous()
        assert allreduce(x, out=out, group=world.group) is out
        assert torch.equal(out, 2 * x)
        assert torch.equal(allreduce(torch.ones(1).expand(4), group=world.group), torch.full((4,), 2.0))
        halves = torch.arange(6.0).bfloat16().reshape(2, 3).t()
        assert torch.equal(allreduce(halves, group=world.group), 2 * halves)
        negated = torch.tensor([1.0 + 2.0j]).conj().imag
        assert negated.is_neg() and allreduce(negated, group=world.group).tolist() == [-4.0]
        with pytest.raises(ValueError, match="out is read-only"):
            allreduce(negated, out=negated, group=world.group)

    run_threads(2, body)


def test_a_list_of_several_dtypes_gives_a_list() -> None:
    def body(world: World) -> None:
        xs = [torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones((), dtype=torch.float32)]
        for name in (None, "grads"):
            sums = allreduce(xs, name=name, group=world.group)
            assert [total.dtype for total in sums] == [x.dtype for x in xs]
            assert [total.tolist() for total in sums] == [[2.0, 2.0], [2, 2, 2], 2.0]
        assert allreduce(xs, out=xs, group=world.group)[1] is xs[1]
        assert xs[2].item() == 2.0
        for name in (None, "rows"):
            assert [each.shape[0] for each in allgather(xs[:2], name=name, group=world.group)] == [4, 6]
            assert len(broadcast(xs, name=name, group=world.group)) == 3
            rows = reduce_scatter([torch.ones(4), torch.ones(2)], group=world.group)
            assert [each.shape[0] for each in rows] == [2, 1]

    run_threads(2, body)


def test_a_work_gives_the_tensor_when_it_is_done() -> None:
    def body(world: World) -> None:
        group = world.group
        x = torch.ones(4)
        works = [
            allreduce(x, wait=False, group=group),
            allreduce([x, x], wait=False, name="two", group=group),
            allgather(x, wait=False, name="rows", group=group),
            broadcast(x, wait=False, group=group),
            reduce_scatter(x, wait=False, group=group),
            alltoall(x, wait=False, name="all", group=group),
        ]
        assert all(isinstance(work, TensorWork) for work in works)
        total, two, rows, given, mine, (came, received) = [work.wait(10.0) for work in works]
        assert total.tolist() == two[1].tolist() == [2.0] * 4
        assert rows.shape == (8,) and given.tolist() == [1.0] * 4 and mine.tolist() == [2.0] * 2
        assert came.shape == (4,) and received.tolist() == [2, 2]
        assert works[0].done() and works[0].result() is total and works[0].wait() is total
        assert works[1].name == "two" and "over" in repr(works[0])
        out = torch.zeros(4)
        assert allreduce(x, out=out, wait=False, group=group).wait() is out
        assert out.tolist() == [2.0] * 4

    run_threads(2, body)


def test_members_may_give_different_numbers_of_rows() -> None:
    def body(world: World) -> None:
        rank = world.rank
        assert allgather(torch.full((rank, 2), rank), group=world.group).tolist() == [[1, 1], [2, 2], [2, 2]]
        splits = torch.tensor([rank, 0, 1])
        rows, received = alltoall(torch.full((4,), rank), splits=splits, group=world.group)
        expected = {0: [1, 2, 2], 1: [], 2: [0, 1, 2]}[rank]
        assert rows.tolist() == expected and received.dtype is torch.int64

    run_threads(3, body)


@pytest.mark.parametrize(("op", "share"), [("sum", 1.0), ("mean", 0.5)])
@pytest.mark.parametrize("wait", [True, False])
def test_sparse_tensors_are_summed_by_their_indices(op: str, share: float, wait: bool) -> None:
    def body(world: World) -> None:
        indices = [[0, 2, 2]] if world.rank == 0 else [[2]]
        values = torch.ones(len(indices[0]), 2)
        x = torch.sparse_coo_tensor(torch.tensor(indices), values, (4, 2), check_invariants=True)
        outcome = allreduce(x, op=op, group=world.group, wait=wait, prescale=2.0)
        total = outcome if wait else outcome.wait()
        assert total.is_sparse and total.is_coalesced()
        expected = allreduce(x.to_dense(), op=op, group=world.group, prescale=2.0)
        assert torch.equal(total.to_dense(), expected)
        assert total.to_dense()[0, 0] == 2.0 * share
        own = allreduce(x, op=op, group=world.group, prescale=1.0 + world.rank)  # a member's factor may be its own
        assert own.to_dense()[:, 0].tolist() == [share, 0.0, 4.0 * share, 0.0]
        empty = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (3,), check_invariants=True
        )
        assert allreduce(empty, group=world.group).values().numel() == 0

    run_threads(2, body)


def test_sparse_tensors_of_different_shapes_are_told_apart() -> None:
    def body(world: World) -> None:
        x = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3 + world.rank,), check_invariants=True)
        with pytest.raises(Mismatch, match=r"member 0: \[3\]; member 1: \[4\]"):
            allreduce(x, group=world.group)

    run_threads(2, body)


def test_mistakes_are_explained() -> None:
    def body(world: World) -> None:
        group = world.group
        with pytest.raises(TypeError, match="takes a tensor, got ndarray"):
            allreduce(np.ones(3), group=group)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="view_as_real"):
            allreduce(torch.ones(2, dtype=torch.complex64), group=group)
        with pytest.raises(TypeError, match="meta device"):
            broadcast(torch.ones(2, device="meta"), group=group)
        with pytest.raises(TypeError, match="only allreduce takes sparse"):
            allgather(torch.ones(2, 2).to_sparse(), group=group)
        with pytest.raises(TypeError, match="float8_e4m3fn cannot be exchanged"):
            broadcast(torch.ones(2).to(torch.float8_e4m3fn), group=group)
        with pytest.raises(ValueError, match="list of 2 tensors"):
            allreduce([torch.ones(1)] * 2, out=torch.ones(1), group=group)
        with pytest.raises(ValueError, match="empty"):
            allreduce([], group=group)
        with pytest.raises(ValueError, match="sum and mean, got max"):
            allreduce(torch.ones(2, 2).to_sparse(), op="max", group=group)
        with pytest.raises(ValueError, match="out is float32"):
            allreduce(torch.ones(2), out=torch.ones(3), group=group)

    run_threads(1, body)
