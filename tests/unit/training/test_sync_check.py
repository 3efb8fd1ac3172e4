"""Sums that see every change, and the rank that is named for it."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.world import World
from ronde.errors import OutOfSync
from ronde.training.sync_check import ROW_BYTES, checksum, compare_checksums
from tests.conformance.ranks import run_threads

SIZES = [0, 1, 7, 4096, ROW_BYTES, 2 * ROW_BYTES, 5 * ROW_BYTES + 13]


def some_bytes(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_equal_bytes_have_equal_sums_and_every_bit_counts(size: int) -> None:
    data = some_bytes(size)
    expected = checksum(data)
    assert checksum(data.copy()) == expected
    for place in np.linspace(0, size - 1, 40).astype(int) if size else []:
        changed = data.copy()
        changed[place] ^= 1
        assert checksum(changed) != expected, place


def test_the_order_counts_also_between_rows() -> None:
    data = some_bytes(4 * ROW_BYTES)
    swapped = np.concatenate([data[ROW_BYTES : 2 * ROW_BYTES], data[:ROW_BYTES], data[2 * ROW_BYTES :]])
    assert checksum(swapped) != checksum(data)
    assert checksum(data[::-1].copy()) != checksum(data)


def test_the_first_tensor_is_named_and_the_ranks_that_differ_from_the_majority() -> None:
    def body(world: World) -> str:
        sums = [("a", 5), ("b", 7 + (world.rank == 1)), ("c", world.rank)]
        compare_checksums(world.group, sums[:1])
        with pytest.raises(OutOfSync) as caught:
            compare_checksums(world.group, sums)
        assert (caught.value.tensor, caught.value.ranks) == ("b", (1,))
        with pytest.raises(OutOfSync, match="At position 0, ranks 0, 2: w; rank 1: v"):
            compare_checksums(world.group, [("v" if world.rank == 1 else "w", 5)])
        return str(caught.value)

    words = "'b': rank 1 differs from ranks 0, 2, which agree (2 of 3 tensors differ)"
    assert set(run_threads(3, body)) == {f"the ranks are out of sync. {words}"}
