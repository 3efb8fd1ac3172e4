"""Whether ranks still hold the same numbers, and which ranks do not, found out cheaply.

Every tensor gets a 32-bit checksum of its bytes. The members compare one 16-byte fingerprint of all checksums, and only
if those differ the checksums themselves. Equal numbers of different bits (-0.0 and 0.0) count as different: ranks
that get equal gradients compute equal bits.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.errors import OutOfSync
from ronde.text import format_ranks
from ronde.training.agreement import all_equal, fingerprint, first_difference

NUM_COLUMNS = 16384
ROW_BYTES = 4 * NUM_COLUMNS
"""A row has 64 KB, so that the columns stay in the cache."""
ODD_FACTOR = np.uint32(0x9E3779B1)
"""An odd factor: repeated multiplication, modulo 2**32, by an odd number loses no bit of a row."""

TensorChecksums = Sequence[tuple[str, int]]
"""Tensor by tensor: its name, and the checksum of its bytes."""


def checksum(data: Array) -> int:
    """The checksum of a flat array of bytes. It depends on their order.

    Large arrays are first folded to 64 KB, row by row: columns = columns * odd + row, at the speed of memory. The
    checksum is the CRC of the result.
    """
    num_rows = data.size // ROW_BYTES
    if num_rows < 2:
        return zlib.crc32(data.data)
    whole = num_rows * ROW_BYTES
    columns = np.zeros(NUM_COLUMNS, np.uint32)
    for row in data[:whole].view(np.uint32).reshape(num_rows, NUM_COLUMNS):
        np.multiply(columns, ODD_FACTOR, out=columns)
        np.add(columns, row, out=columns)
    return zlib.crc32(data[whole:].data, zlib.crc32(columns.data))


@dataclass(frozen=True, slots=True)
class ChecksumDifference:
    """The first tensor that is not equal on all ranks, and the ranks that have another one."""

    tensor: str
    minority_ranks: tuple[int, ...]
    """The ranks that differ from the majority; empty when there is no majority."""
    ranks: tuple[int, ...]
    num_different: int
    num_tensors: int

    def __str__(self) -> str:
        others = [rank for rank in self.ranks if rank not in self.minority_ranks]
        if self.minority_ranks:
            word = "differs" if len(self.minority_ranks) == 1 else "differ"
            who = f"{format_ranks(self.minority_ranks)} {word} from {format_ranks(others)}, which agree"
            who = who if len(others) > 1 else f"{format_ranks(self.minority_ranks)} {word} from {format_ranks(others)}"
        else:
            who = f"{format_ranks(self.ranks)} differ, with no majority"
        return f"{self.tensor!r}: {who} ({self.num_different} of {self.num_tensors} tensors differ)"


def find_difference(checksums_by_rank: Mapping[int, TensorChecksums]) -> ChecksumDifference | None:
    """The first tensor whose checksums differ between ranks. All ranks have the same tensors."""
    ranks = tuple(checksums_by_rank)
    rows = list(zip(*checksums_by_rank.values(), strict=True))
    different = [row for row in rows if len({value for _, value in row}) > 1]
    if not different:
        return None
    first = different[0]
    values = [value for _, value in first]
    (common, most), *rest = Counter(values).most_common()
    has_majority = all(count < most for _, count in rest)
    minority = tuple(rank for rank, value in zip(ranks, values, strict=True) if value != common) if has_majority else ()
    return ChecksumDifference(first[0][0], minority, ranks, len(different), len(rows))


def compare_checksums(group: Group, checksums: TensorChecksums) -> None:
    """Raise OutOfSync, the same on every member, if the checksums differ between members. Collective."""
    names = "\n".join([name for name, _ in checksums]).encode()
    if all_equal(group, fingerprint(names + np.array([value for _, value in checksums], np.uint32).tobytes())):
        return
    tables = dict(zip(group.ranks, objects.allgather(list(checksums), group=group), strict=True))
    named = {rank: [name for name, _ in table] for rank, table in tables.items()}
    if len({tuple(names) for names in named.values()}) > 1:
        raise OutOfSync(f"the ranks do not have the same tensors. {first_difference(named)}")
    found = find_difference(tables)
    assert found is not None, "fingerprints differ, so a name or a sum does"
    raise OutOfSync(f"the ranks are out of sync. {found}", tensor=found.tensor, ranks=found.minority_ranks)
