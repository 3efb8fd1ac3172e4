"""What ranks compare before they exchange tensors: lists of names, and the plan for the buckets of gradients.

When they differ, every member raises the same Mismatch, which names the first difference and who has what there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import MappingProxyType

import msgspec
import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.errors import Mismatch
from ronde.text import format_rank_answers
from ronde.training.gradients.adapter import ParameterInfo

FINGERPRINT_BYTES = 16


def check_equal(group: Group, what: str, entries: Sequence[str]) -> None:
    """Raise Mismatch, the same on every member, naming the first entry in which the members' lists differ."""
    if all_equal(group, "\n".join(entries).encode()):
        return
    lists = dict(zip(group.ranks, objects.allgather(list(entries), group=group), strict=True))
    error = Mismatch(f"{what}: the ranks differ. {first_difference(lists)}")
    error.answers = lists
    raise error


def check_settings(
    group: Group, what: str, settings: Mapping[str, object], *, hints: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise Mismatch, the same on every member, naming the first setting that differs. `hints` say for some settings
    what may have been meant. Collective."""
    told: list[dict[str, str]] = objects.allgather({name: repr(each) for name, each in settings.items()}, group=group)
    for name in told[0]:
        answers = {rank: f"{name}={each.get(name)}" for rank, each in zip(group.ranks, told, strict=True)}
        if len(set(answers.values())) > 1:
            hint = hints.get(name, "")
            raise Mismatch(f"{what} needs the same settings on all ranks: {format_rank_answers(answers)}{hint}")


def all_equal(group: Group, data: bytes) -> bool:
    """Whether all members give the same bytes: they compare a fingerprint of 16 bytes. Collective."""
    gathered = group.allgather(fingerprint(data).reshape(1, -1))
    return bool((gathered == gathered[0]).all())


def fingerprint(data: bytes) -> Array:
    """FINGERPRINT_BYTES numbers, which are equal for equal bytes."""
    return np.frombuffer(hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest(), np.uint8)


def first_difference(lists: Mapping[int, Sequence[str]]) -> str:
    """The first position at which the lists of some ranks differ, and what each rank has there, as text."""
    for index, row in enumerate(zip_longest(*lists.values(), fillvalue="nothing")):
        if len(set(row)) > 1:
            return f"At position {index}, {format_rank_answers(dict(zip(lists, row, strict=True)), ': ')}"
    return "Every entry is equal"


class PlanProposal(msgspec.Struct, frozen=True):
    """What one rank sends to the others before buckets are made."""

    settings: dict[str, str]
    """All that must be equal beside the parameters."""
    parameters: tuple[ParameterInfo, ...]
    ready_order: tuple[int, ...]
    """The indices of parameters in the order in which their gradients became ready."""
    overlap: bool
    """Whether this rank would reduce buckets while the backward pass runs."""


def agree_on_plan(group: Group, name: str, proposal: PlanProposal) -> PlanProposal:
    """What all members make the buckets from, or Mismatch on all of them. Collective, matched by this name."""
    own = np.frombuffer(msgspec.json.encode(proposal), np.uint8)
    with explain_joined_ranks():
        gathered = group.allgather_each(own, name)
    proposals = [msgspec.json.decode(data.tobytes(), type=PlanProposal) for data in gathered]
    return merge_proposals(dict(zip(group.ranks, proposals, strict=True)))


@contextmanager
def explain_joined_ranks() -> Iterator[None]:
    """Around an operation in which a member that is in join() cannot take part: the error says what to do."""
    try:
        yield
    except Mismatch as error:
        if not error.joined:
            raise
        explained = Mismatch(
            f"{error}. While a rank is in join() only gradients are reduced that all ranks agreed on before, and only "
            "with op mean or sum: every rank needs a step before the first one joins, sparse gradients cannot be "
            "reduced, and no parameter may begin or cease to train. Or give all ranks equally many steps"
        )
        explained.joined = error.joined
        raise explained from None


def merge_proposals(proposals: Mapping[int, PlanProposal]) -> PlanProposal:
    """What follows from the proposals of all ranks: a gradient that is sparse on one rank is sparse on all, and the
    first rank decides on order and overlap. Mismatch if settings or parameters differ."""
    settings = {rank: proposal.settings for rank, proposal in proposals.items()}
    names = dict.fromkeys(name for each in settings.values() for name in each)
    different = [name for name in names if len({each.get(name) for each in settings.values()}) > 1]
    if different:
        sides = {rank: ", ".join(f"{name}={each.get(name)}" for name in different) for rank, each in settings.items()}
        raise Mismatch(f"the ranks' optimizers differ: {format_rank_answers(sides, ' has ')}")
    rows = list(zip_longest(*(proposal.parameters for proposal in proposals.values())))
    for index, row in enumerate(rows):
        sides = {rank: str(parameter or "no such parameter") for rank, parameter in zip(proposals, row, strict=True)}
        if len(set(sides.values())) > 1:
            raise Mismatch(
                f"the models differ at parameter {index} of those that train: {format_rank_answers(sides, ' has ')}; "
                "every rank must build the same model and freeze the same parameters"
            )
    merged = tuple(msgspec.structs.replace(row[0], sparse=any(each.sparse for each in row)) for row in rows)
    return msgspec.structs.replace(next(iter(proposals.values())), parameters=merged)
