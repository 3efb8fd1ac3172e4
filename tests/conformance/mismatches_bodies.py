"""Members that ask for different things all get the same clear error, and go on; with a name and without."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ronde.comm import objects
from ronde.comm.world import World
from ronde.errors import Mismatch
from tests.conformance.cases import on_ranks

Ask: TypeAlias = Callable[[bool, str | None], Any]


def all_get_the_same_error(world: World, ask: Ask, *words: str) -> None:
    """`ask(odd, name)` fails on every rank with one text that has all the words; afterwards all is as good as new."""
    for name in (None, "x"):
        text = mismatch_text(lambda name=name: ask(world.rank == world.size - 1, name))  # type: ignore[misc]  # bound now
        for word in words:
            assert re.search(word, text), f"{word!r} is not in {text!r}"
        assert set(objects.allgather(text, group=world.group)) == {text}
        assert world.group.allreduce(np.ones(2), name="after").tolist() == [world.size] * 2


def mismatch_text(ask: Callable[[], Any]) -> str:
    """The text of the Mismatch that this rank gets."""
    try:
        ask()
    except Mismatch as error:
        return str(error)
    raise AssertionError("this rank got no Mismatch")


@on_ranks(2, 3)
def different_shapes(world: World) -> None:
    all_get_the_same_error(
        world, lambda odd, name: world.group.allreduce(np.ones(4 if odd else 3), name=name), "3", "4"
    )


@on_ranks(2, 3)
def different_dtypes(world: World) -> None:
    def ask(odd: bool, name: str | None) -> None:
        world.group.allreduce(np.ones(3, np.float32 if odd else np.int64), name=name)

    all_get_the_same_error(world, ask, "float32", "int64")


@on_ranks(2)
def different_operations(world: World) -> None:
    def ask(odd: bool, name: str | None) -> None:
        world.group.allreduce(np.ones(3), op="max" if odd else "min", name=name)

    all_get_the_same_error(world, ask, "rank 0.*min", "rank 1.*max")


@on_ranks(2)
def different_factors(world: World) -> None:
    def ask(odd: bool, name: str | None) -> None:
        world.group.allreduce(np.ones(3), prescale=2.0 if odd else 0.5, name=name)

    all_get_the_same_error(world, ask, r"rank 0.*0\.5", r"rank 1.*2\.0")


@on_ranks(2, 3)
def different_kinds(world: World) -> None:
    def ask(odd: bool, name: str | None) -> None:
        if odd:
            world.group.barrier(name=name)
        else:
            world.group.allreduce(np.ones(3), name=name)

    all_get_the_same_error(world, ask, "allreduce", "barrier")


@on_ranks(2)
def different_roots(world: World) -> None:
    all_get_the_same_error(
        world, lambda odd, name: world.group.broadcast(np.ones(3), root=int(odd), name=name), "0", "1"
    )


@on_ranks(2)
def rows_of_different_shape(world: World) -> None:
    def gather(odd: bool, name: str | None) -> None:
        world.group.allgather(np.ones((2, 4 if odd else 3)), name=name)

    def exchange(odd: bool, name: str | None) -> None:
        world.group.alltoall(np.ones((2, 4 if odd else 3)), name=name)

    for ask in (gather, exchange):
        all_get_the_same_error(world, ask, r"\*, 3", r"\*, 4")


@on_ranks(2)
def lists_of_different_length(world: World) -> None:
    def reduce(odd: bool, name: str | None) -> None:
        world.group.allreduce([np.ones(3)] * (3 if odd else 2), name=name)

    def gather(odd: bool, name: str | None) -> None:
        world.group.allgather([np.ones(3)] * (3 if odd else 2), name=name)

    all_get_the_same_error(world, reduce, "allreduce")
    all_get_the_same_error(world, gather, "allgather")


@on_ranks(2)
def a_mismatch_in_the_background_comes_with_wait(world: World) -> None:
    def ask(odd: bool, name: str | None) -> None:
        before = world.group.allreduce(np.ones(3), wait=False)
        wrong = world.group.allreduce(np.ones(4 if odd else 3), name=name, wait=False)
        after = world.group.allreduce(np.ones(3), wait=False)
        assert after.wait().tolist() == before.wait().tolist() == [2, 2, 2]
        wrong.wait()

    all_get_the_same_error(world, ask, "3", "4")
