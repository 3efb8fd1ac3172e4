"""Whether all members describe the same things, and the first one in which they differ. Used before parameters are
broadcast, so that an error names a parameter instead of a place in the program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np

from ronde.comm import objects
from ronde.comm.group import Group
from ronde.comm.wording import answers
from ronde.errors import Mismatch

__all__ = ["agree", "first_difference", "fingerprint", "same_everywhere"]

MISSING = "nothing"


def agree(group: Group, what: str, entries: Sequence[str]) -> None:
    """Raise Mismatch, the same on every member, naming the first entry in which the members' lists differ."""
    if same_everywhere(group, fingerprint("\n".join(entries).encode())):
        return
    lists = dict(zip(group.ranks, objects.allgather(list(entries), group=group), strict=True))
    raise Mismatch(f"{what}: the ranks differ. {first_difference(lists)}")


def fingerprint(data: bytes) -> bytes:
    """16 bytes that stand for these."""
    return hashlib.blake2b(data, digest_size=16).digest()


def same_everywhere(group: Group, mine: bytes) -> bool:
    """Whether all members gave the same bytes, of one length."""
    everybody = group.allgather(np.frombuffer(mine, np.uint8).reshape(1, -1))
    return bool((everybody == everybody[0]).all())


def first_difference(lists: Mapping[int, Sequence[str]]) -> str:
    """The first place at which lists differ, and who has what there."""
    for index, row in enumerate(zip_longest(*lists.values(), fillvalue=MISSING)):
        if len(set(row)) > 1:
            return f"At place {index}, {answers(dict(zip(lists, row, strict=True)), ': ')}"
    return "Every entry is equal"
