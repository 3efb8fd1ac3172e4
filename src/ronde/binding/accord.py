"""What ranks tell each other before gradients travel, and what follows from it: one list of parameters, one order.
Used by the Reducer, once per plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest

import msgspec
import numpy as np

from ronde.binding.adapter import Parameter
from ronde.comm.group import Group
from ronde.comm.wording import answers
from ronde.errors import Mismatch

__all__ = ["Account", "Accord", "all_present", "settle", "tell_all", "trade"]

JOINED = re.compile(r": join\b")


class Account(msgspec.Struct, frozen=True):
    """What one rank has to say."""

    settings: dict[str, str]
    """Everything else that must be equal, in words."""
    parameters: tuple[Parameter, ...]
    ready: tuple[int, ...]
    """The order in which gradients came here."""
    overlap: bool
    """Whether this rank wants buckets to travel while the backward pass runs."""


class Accord(msgspec.Struct, frozen=True):
    """What all ranks go by."""

    parameters: tuple[Parameter, ...]
    ready: tuple[int, ...]
    overlap: bool


def trade(group: Group, mine: Account) -> Accord:
    """Agree with the other members, or Mismatch on all of them. Collective, in program order."""
    with all_present():
        everybody = group.allgather_each(np.frombuffer(msgspec.json.encode(mine), np.uint8))
    accounts = [msgspec.json.decode(data.tobytes(), type=Account) for data in everybody]
    return settle(dict(zip(group.ranks, accounts, strict=True)))


def tell_all(group: Group, words: str) -> dict[int, str]:
    """What every member has to say, by rank. Collective, in program order."""
    everybody = group.allgather_each(np.frombuffer(msgspec.json.encode(words), np.uint8))
    return {
        rank: msgspec.json.decode(data.tobytes(), type=str) for rank, data in zip(group.ranks, everybody, strict=True)
    }


@contextmanager
def all_present() -> Iterator[None]:
    """Around what a member that has joined cannot do, as it gives zeros to buckets only: the error says so."""
    try:
        yield
    except Mismatch as error:
        if not JOINED.search(str(error)):
            raise
        raise Mismatch(
            f"{error}. While a rank is in join() only gradients travel that all ranks agreed on before: every rank "
            "needs a step before the first one joins, sparse gradients cannot travel, and no parameter may begin or "
            "cease to train. Or give all ranks equally many steps"
        ) from None


def settle(accounts: Mapping[int, Account]) -> Accord:
    """One list for all: a gradient that is sparse on one rank is sparse on all; the first rank says the order."""
    _compare_settings({rank: account.settings for rank, account in accounts.items()})
    rows = list(zip_longest(*(account.parameters for account in accounts.values())))
    for index, row in enumerate(rows):
        sides = {rank: _side(parameter) for rank, parameter in zip(accounts, row, strict=True)}
        if len(set(sides.values())) > 1:
            raise Mismatch(
                f"the models differ at parameter {index} of those that train: {answers(sides, ' has ')}; "
                "every rank must build the same model and freeze the same parameters"
            )
    merged = tuple(msgspec.structs.replace(row[0], sparse=any(each.sparse for each in row)) for row in rows)
    first = next(iter(accounts.values()))
    return Accord(merged, first.ready, first.overlap)


def _compare_settings(settings: Mapping[int, Mapping[str, str]]) -> None:
    every = dict.fromkeys(name for each in settings.values() for name in each)
    odd = [name for name in every if len({each.get(name) for each in settings.values()}) > 1]
    if odd:
        sides = {rank: ", ".join(f"{name}={each.get(name)}" for name in odd) for rank, each in settings.items()}
        raise Mismatch(f"the ranks' optimizers differ: {answers(sides, ' has ')}")


def _side(parameter: Parameter | None) -> str:
    return "no such parameter" if parameter is None else str(parameter)
