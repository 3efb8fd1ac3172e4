"""Whether ranks hold the same numbers, and which ranks do not, found out cheaply. Used by a framework's sync check, and
by the first step of an optimizer.

Every tensor gets a 32-bit checksum of its bytes. The members compare one 16-byte fingerprint of all checksums, and only
if those differ the checksums themselves. Equal numbers of different bits (-0.0 and 0.0) count as different: ranks
that get equal gradients compute equal bits.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ronde.comm import objects
from ronde.comm.buffers import Array
from ronde.comm.group import Group
from ronde.errors import OutOfSync
from ronde.text import format_ranks
from ronde.training.agreement import all_equal, first_difference

ROW_BYTES = 1 << 16
"""A row has 64 KB, so that the columns stay in the cache."""
ODD_FACTOR = np.uint32(0x9E3779B1)
"""Repeated multiplication, modulo 2**32, by an odd number loses no bit of a row."""


def checksum(data: Array) -> int:
    """The checksum of a flat array of bytes. It depends on their order.

    Large arrays are first folded to 64 KB, row by row: columns = columns * odd + row, at the speed of memory. The
    checksum is the CRC of the result.
    """
    num_rows = data.size // ROW_BYTES
    if num_rows < 2:
        return zlib.crc32(data.data)
    whole = num_rows * ROW_BYTES
    columns = np.zeros(ROW_BYTES // 4, np.uint32)
    for row in data[:whole].view(np.uint32).reshape(num_rows, -1):
        np.multiply(columns, ODD_FACTOR, out=columns)
        np.add(columns, row, out=columns)
    return zlib.crc32(data[whole:].data, zlib.crc32(columns.data))


def checksum_bytes(checksums: Sequence[tuple[str, int]]) -> bytes:
    """The checksums of tensors, and their names, as bytes."""
    names = "\n".join([name for name, _ in checksums]).encode()
    return names + np.array([value for _, value in checksums], np.uint32).tobytes()


def compare_checksums(group: Group, checksums: Sequence[tuple[str, int]], *, advice: str = "") -> None:
    """Raise OutOfSync, the same on every member, if the checksums of tensors differ between members. Collective.

    It names the first tensor that differs, and the ranks that differ from the majority, if there is one. `advice` is
    added to the message.
    """
    if all_equal(group, checksum_bytes(checksums)):
        return
    tables = objects.allgather(list(checksums), group=group)
    named = {rank: [name for name, _ in table] for rank, table in zip(group.ranks, tables, strict=True)}
    if len({tuple(names) for names in named.values()}) > 1:
        raise OutOfSync(f"the ranks do not have the same tensors. {first_difference(named)}{advice}")
    rows = list(zip(*tables, strict=True))
    different = [row for row in rows if len({value for _, value in row}) > 1]
    tensor, values = different[0][0][0], [value for _, value in different[0]]
    (common, most), *rest = Counter(values).most_common()
    by_rank = dict(zip(group.ranks, values, strict=True))
    odd: tuple[int, ...] = ()
    if all(count < most for _, count in rest):
        odd = tuple(rank for rank, value in by_rank.items() if value != common)
        others = [rank for rank in group.ranks if rank not in odd]
        who = f"{format_ranks(odd)} {'differs' if len(odd) == 1 else 'differ'} from {format_ranks(others)}"
        who += ", which agree" if len(others) > 1 else ""
    else:
        who = f"{format_ranks(group.ranks)} differ, with no majority"
    raise OutOfSync(
        f"the ranks are out of sync. {tensor!r}: {who} ({len(different)} of {len(rows)} tensors differ){advice}",
        tensor=tensor,
        ranks=odd,
    )
