"""Members that ask for different things all get the same clear error, and go on; with a name and without."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks, raises

Ask: TypeAlias = Callable[[Group, bool, str | None], object]


def expect_mismatch(world: World, ask: Ask, words: str) -> None:
    """`ask(group, odd, name)` fails on every rank with one text that has these words; afterwards all is as good as
    new."""
    for name in (None, "x"):
        with raises(Mismatch, match=words) as texts:
            ask(world.group, world.rank == world.size - 1, name)
        assert set(objects.allgather(texts[0], group=world.group)) == set(texts)
        assert world.group.allreduce(np.ones(2), name="after").tolist() == [world.size] * 2


def mismatch_on(*sizes: int, words: str) -> Callable[[Ask], object]:
    """The function is a behaviour: what it asks for on the odd rank is something else."""

    def add(ask: Ask) -> object:
        body = functools.wraps(ask)(lambda world: expect_mismatch(world, ask, words))
        return on_ranks(*sizes)(body)

    return add


@mismatch_on(2, 3, words="3.*4")
def different_shapes(group: Group, odd: bool, name: str | None) -> None:
    group.allreduce(np.ones(4 if odd else 3), name=name)


@mismatch_on(2, 3, words="int64.*float32")
def different_dtypes(group: Group, odd: bool, name: str | None) -> None:
    group.allreduce(np.ones(3, np.float32 if odd else np.int64), name=name)


@mismatch_on(2, words="rank 0.*min.*rank 1.*max")
def different_operations(group: Group, odd: bool, name: str | None) -> None:
    group.allreduce(np.ones(3), op="max" if odd else "min", name=name)


@mismatch_on(2, words=r"rank 0.*0\.5.*rank 1.*2\.0")
def different_factors(group: Group, odd: bool, name: str | None) -> None:
    group.allreduce(np.ones(3), prescale=2.0 if odd else 0.5, name=name)


@mismatch_on(2, 3, words="allreduce.*barrier")
def different_kinds(group: Group, odd: bool, name: str | None) -> None:
    if odd:
        group.barrier(name=name)
    else:
        group.allreduce(np.ones(3), name=name)


@mismatch_on(2, words="0.*1")
def different_roots(group: Group, odd: bool, name: str | None) -> None:
    group.broadcast(np.ones(3), root=int(odd), name=name)


@on_ranks(2)
def roots_of_all_kinds_may_differ(world: World) -> None:
    x = np.ones((2, 2))
    expect_mismatch(world, lambda group, odd, name: group.reduce(x, root=int(odd), name=name), "reduce.*0.*1")
    expect_mismatch(world, lambda group, odd, name: group.gather(x, root=int(odd), name=name), "gather.*0.*1")
    expect_mismatch(world, lambda group, odd, name: group.scatter(x, root=int(odd), name=name), "scatter.*0.*1")


@mismatch_on(2, 3, words="int64.*float32")
def different_dtypes_for_one_root(group: Group, odd: bool, name: str | None) -> None:
    group.reduce(np.ones(3, np.float32 if odd else np.int64), name=name)


@on_ranks(2)
def rows_of_different_shape(world: World) -> None:
    words = r"\*, 3.*\*, 4"
    expect_mismatch(world, lambda group, odd, name: group.gather(np.ones((2, 3 + odd)), name=name), words)
    expect_mismatch(world, lambda group, odd, name: group.scatter(np.ones((2, 3 + odd)), name=name), words)
    expect_mismatch(world, lambda group, odd, name: group.allgather(np.ones((2, 3 + odd)), name=name), words)
    expect_mismatch(world, lambda group, odd, name: group.alltoall(np.ones((2, 3 + odd)), name=name), words)


@on_ranks(2)
def lists_of_different_length(world: World) -> None:
    def arrays(odd: bool) -> list[Array]:
        return [np.ones(3)] * (3 if odd else 2)

    expect_mismatch(world, lambda group, odd, name: group.allreduce(arrays(odd), name=name), "allreduce")
    expect_mismatch(world, lambda group, odd, name: group.allreduce(arrays(odd), op="adasum", name=name), "allreduce")
    expect_mismatch(world, lambda group, odd, name: group.allgather(arrays(odd), name=name), "allgather")
    expect_mismatch(world, lambda group, odd, name: group.reduce_scatter(arrays(odd), name=name), "reduce_scatter")
    expect_mismatch(world, lambda group, odd, name: group.gather(arrays(odd), name=name), "gather")


@mismatch_on(2, words="3.*4")
def a_mismatch_in_the_background_comes_with_wait(group: Group, odd: bool, name: str | None) -> None:
    before = group.allreduce(np.ones(3), wait=False)
    wrong = group.allreduce(np.ones(4 if odd else 3), name=name, wait=False)
    after = group.allreduce(np.ones(3), wait=False)
    assert after.wait().tolist() == before.wait().tolist() == [2, 2, 2]
    wrong.wait()
