"""Operations with names: any order, repeats, fusion, joining."""

from __future__ import annotations

import numpy as np

from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks, raises


@on_ranks(2, 3)
def the_order_of_names_does_not_matter(world: World) -> None:
    names = [f"gradient.{index}" for index in range(30)]
    mine = np.random.default_rng(world.rank).permutation(30)
    for step in range(3):
        works = {i: world.group.allreduce(np.full(7, i + step, np.float32), name=names[i], wait=False) for i in mine}
        for i in range(30):
            assert (works[i].wait() == (i + step) * world.size).all()
            assert works[i].name == names[i]


@on_ranks(2)
def kinds_and_dtypes_mix_under_different_names(world: World) -> None:
    order = ("a", "b", "c", "d") if world.rank == 0 else ("d", "b", "a", "c")
    x = np.arange(4)
    start = {
        "a": lambda: world.group.allreduce(x, name="a", wait=False),
        "b": lambda: world.group.allgather(x, name="b", wait=False),
        "c": lambda: world.group.allreduce(x.astype(np.float32), name="c", op="max", wait=False),
        "d": lambda: world.group.broadcast(x, root=1, name="d", wait=False),
    }
    works = {name: start[name]() for name in order}
    assert works["a"].wait().tolist() == [0, 2, 4, 6]
    assert works["b"].wait().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert works["c"].wait().tolist() == [0, 1, 2, 3]
    assert works["d"].wait().tolist() == [0, 1, 2, 3]


@on_ranks(2, 3)
def a_name_may_mean_something_else_the_next_time(world: World) -> None:
    for _ in range(2):
        for shape in ((3,), (4, 5), ()):
            for dtype in (np.float32, np.int64):
                result = world.group.allreduce(np.ones(shape, dtype), name="x")
                assert result.shape == shape and (result == world.size).all()
        assert world.group.allgather(np.ones(world.rank + 1), name="x").shape == (sum(range(1, world.size + 1)),)


@on_ranks(2)
def thousands_of_names_may_be_under_way(world: World) -> None:
    order = range(2000) if world.rank == 0 else reversed(range(2000))
    works = {i: world.group.allreduce(np.array([i, 1]), name=str(i), wait=False) for i in order}
    for i, work in works.items():
        assert work.wait().tolist() == [2 * i, 2]


@on_ranks(2)
def a_name_under_way_cannot_be_used_again(world: World) -> None:
    if world.rank == 0:
        work = world.group.allreduce(np.ones(3), name="w", wait=False)
        with raises(ValueError, match="'w' of group 0 is still under way"):
            world.group.allreduce(np.ones(3), name="w", wait=False)
        world.group.barrier()
        assert work.wait().tolist() == [2, 2, 2]
    else:
        world.group.barrier()
        world.group.allreduce(np.ones(3), name="w")
    assert world.group.allreduce(np.ones(1), name="w").tolist() == [2]


@on_ranks(2)
def named_and_unnamed_operations_do_not_wait_for_each_other(world: World) -> None:
    if world.rank == 0:
        named = world.group.allreduce(np.ones(2), name="n", wait=False)
        assert world.group.allreduce(np.ones(2)).tolist() == [2, 2]
    else:
        unnamed = world.group.allreduce(np.ones(2), wait=False)
        named = world.group.allreduce(np.ones(2), name="n", wait=False)
        assert unnamed.wait().tolist() == [2, 2]
    assert named.wait().tolist() == [2, 2]


@on_ranks(1, 2, 3)
def a_rank_that_joins_gives_zeros_to_the_others(world: World) -> None:
    for round in range(2):
        last = world.size - 1
        for step in range(3 if world.rank == last else 0):
            x = np.full(5, 2.0, np.float32)
            assert (world.group.allreduce(x) == 2.0).all()
            assert (world.group.allreduce(x, name=f"{round}.{step}") == 2.0).all()
            works = [world.group.allreduce(x, name=str(i), wait=False) for i in range(10)]
            assert all((work.wait() == 2.0).all() for work in works)
        assert world.group.join() == last
        assert world.group.allreduce(np.ones(1)).tolist() == [world.size]


@on_ranks(2)
def joining_says_who_was_last(world: World) -> None:
    for last in (0, 1, 0):
        if world.rank == last:
            # The other one cannot have taken part in this but as one that has joined.
            assert world.group.allreduce(np.ones(3)).tolist() == [1, 1, 1]
        assert world.group.join() == last


@on_ranks(2, 3)
def what_zeros_would_change_is_refused_while_a_rank_has_joined(world: World) -> None:
    if world.rank:
        for dtype, op in (
            (np.float32, "min"),
            (np.float32, "max"),
            (np.int16, "max"),
            (np.float64, "product"),
            (np.float32, "adasum"),
            (np.uint8, "bit_and"),
        ):
            for name in (None, op):
                with raises(Mismatch if name is None else ValueError, match="join.*zeros do not change"):
                    world.group.allreduce(np.full(3, 2, dtype), op=op, name=name)
        for name in (None, "after"):  # who has joined is still there
            assert world.group.allreduce(np.full(3, 2.0), name=name).tolist() == [2.0 * (world.size - 1)] * 3
            mean = world.group.allreduce(np.full(3, 2.0), op="mean", name=name)
            assert np.allclose(mean, 2.0 * (world.size - 1) / world.size)
            assert world.group.allreduce(np.full(3, 6, np.uint8), op="max", name=name).tolist() == [6] * 3
            assert world.group.allreduce(np.full(3, 6), op="bit_or", name=name).tolist() == [6] * 3
    world.group.join()
    assert world.group.allreduce(np.full(3, 2.0), op="min").tolist() == [2.0] * 3


@on_ranks(2)
def a_rank_that_has_joined_takes_part_in_allreduce_only(world: World) -> None:
    if world.rank == 0:
        with raises(ValueError, match="join"):
            world.group.broadcast(np.ones(3), name="b")
        assert world.group.allreduce(np.ones(3), name="a").tolist() == [1, 1, 1]
    world.group.join()
