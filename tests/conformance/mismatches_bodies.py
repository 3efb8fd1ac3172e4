"""Members that ask for different things all get the same clear error, and go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ronde.comm import objects
from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks


def all_hear_the_same(world: World, ask: Callable[[bool], Any], *words: str) -> None:
    """`ask(odd)` fails on every rank with one text that has all the words; afterwards the world is as good as new."""
    odd = world.rank == world.size - 1
    try:
        ask(odd)
    except Mismatch as error:
        text = str(error)
    else:
        raise AssertionError(f"rank {world.rank} was not told of the mismatch")
    for word in words:
        assert re.search(word, text), f"{word!r} is not in {text!r}"
    assert set(objects.allgather(text, group=world.group)) == {text}
    assert world.group.allreduce(np.ones(2), name="after").tolist() == [world.size] * 2


@on_ranks(2, 3)
def different_shapes(world: World) -> None:
    for name in (None, "x"):
        all_hear_the_same(world, lambda odd, n=name: world.group.allreduce(np.ones(4 if odd else 3), name=n), "3", "4")


@on_ranks(2, 3)
def different_dtypes(world: World) -> None:
    for name in (None, "x"):
        all_hear_the_same(
            world,
            lambda odd, n=name: world.group.allreduce(np.ones(3, np.float32 if odd else np.int64), name=n),
            "float32",
            "int64",
        )


@on_ranks(2)
def different_operations_and_factors(world: World) -> None:
    for name in (None, "x"):
        all_hear_the_same(
            world,
            lambda odd, n=name: world.group.allreduce(np.ones(3), op="max" if odd else "min", name=n),
            "rank 0.*min",
            "rank 1.*max",
        )
        all_hear_the_same(
            world,
            lambda odd, n=name: world.group.allreduce(np.ones(3), prescale=2.0 if odd else 0.5, name=n),
            r"rank 0.*0\.5",
            r"rank 1.*2\.0",
        )


@on_ranks(2, 3)
def different_kinds(world: World) -> None:
    for name in (None, "x"):

        def ask(odd: bool, name: str | None = name) -> None:
            if odd:
                world.group.barrier(name=name)
            else:
                world.group.allreduce(np.ones(3), name=name)

        all_hear_the_same(world, ask, "allreduce", "barrier")


@on_ranks(2)
def different_roots(world: World) -> None:
    for name in (None, "x"):
        all_hear_the_same(world, lambda odd, n=name: world.group.broadcast(np.ones(3), root=int(odd), name=n), "0", "1")


@on_ranks(2)
def rows_of_different_shape(world: World) -> None:
    for name in (None, "x"):
        all_hear_the_same(
            world,
            lambda odd, n=name: world.group.allgather(np.ones((2, 4 if odd else 3)), name=n),
            r"\*, 3",
            r"\*, 4",
        )
        all_hear_the_same(
            world,
            lambda odd, n=name: world.group.alltoall(np.ones((2, 4 if odd else 3)), name=n),
            r"\*, 3",
            r"\*, 4",
        )


@on_ranks(2)
def lists_of_different_length(world: World) -> None:
    for name in (None, "x"):
        all_hear_the_same(
            world, lambda odd, n=name: world.group.allreduce([np.ones(3)] * (3 if odd else 2), name=n), "allreduce"
        )
        all_hear_the_same(
            world, lambda odd, n=name: world.group.allgather([np.ones(3)] * (3 if odd else 2), name=n), "allgather"
        )


@on_ranks(2)
def a_mismatch_in_the_background_comes_with_wait(world: World) -> None:
    for name in (None, "x"):
        before = world.group.allreduce(np.ones(3), wait=False)
        wrong = world.group.allreduce(np.ones(3 + world.rank), name=name, wait=False)
        after = world.group.allreduce(np.ones(3), wait=False)
        assert after.wait().tolist() == before.wait().tolist() == [2, 2, 2]
        all_hear_the_same(world, lambda odd, work=wrong: work.wait(), "3", "4")
