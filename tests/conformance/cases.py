"""The list of behaviours that every backend must have: functions that run on every rank at once.

A body is written once, against a World, with plain asserts, and says on how many ranks it makes sense:

    @on_ranks(2, 3)
    def everybody_gets_the_sum(world: World) -> None: ...
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ronde.comm.world import World

MODULES = (
    "allreduce",
    "rows",
    "named",
    "repeats",
    "groups",
    "plans",
    "messages",
    "mailboxes",
    "mismatches",
    "failures",
    "works",
)


@dataclass(frozen=True)
class Case:
    """One behaviour."""

    name: str
    body: Callable[[World], None]
    sizes: tuple[int, ...]
    spoils: bool
    """Whether the world cannot be used afterwards."""


CASES: dict[str, Case] = {}


def on_ranks(*sizes: int, spoils: bool = False) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Add a function to the behaviours."""

    def add(body: Callable[[World], None]) -> Callable[[World], None]:
        name = f"{body.__module__.rpartition('.')[2].removesuffix('_bodies')}.{body.__name__}"
        assert name not in CASES, f"{name} is there twice"
        CASES[name] = Case(name, body, sizes, spoils)
        return body

    return add


def all_cases() -> dict[str, Case]:
    """Every behaviour, by name."""
    for name in MODULES:
        importlib.import_module(f"tests.conformance.{name}_bodies")
    return CASES


@contextmanager
def raises(kinds: type[BaseException] | tuple[type[BaseException], ...], match: str = "") -> Iterator[list[str]]:
    """As pytest.raises, for ranks in environments without pytest. The text of the error is then in the list."""
    texts: list[str] = []
    try:
        yield texts
    except kinds as error:
        texts.append(str(error))
        assert re.search(match, str(error)), f"{match!r} is not in {error!r}"
    else:
        raise AssertionError(f"nothing was raised, expected was {kinds}")
