"""The order of a data set: every sample once, whatever the ranks do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.data.order import EpochOrder, assign_streams, choose_part, local_range
from ronde.training.sample_sharding import epoch_order, share_out

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=40)
SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=7).map(tuple)


def make_order(lengths: Sequence[int], *, seed: int = 0, epoch: int = 0, num_streams: int = 6) -> EpochOrder:
    return EpochOrder(np.array(lengths), seed=seed, epoch=epoch, num_streams=num_streams)


def samples_of(order: EpochOrder, start: int, stop: int) -> list[tuple[int, int]]:
    _, blocks, rows = order.locate(start, stop)
    return list(zip(blocks.tolist(), rows.tolist(), strict=True))


@given(LENGTHS, st.integers(0, 2**40), st.integers(0, 5), st.integers(1, 12), st.data())
@settings(deadline=None)
def test_an_epoch_has_every_sample_once_and_can_be_entered_anywhere(
    lengths: list[int], seed: int, epoch: int, num_streams: int, data: st.DataObject
) -> None:
    order = make_order(lengths, seed=seed, epoch=epoch, num_streams=num_streams)
    whole = samples_of(order, 0, order.length)
    assert sorted(whole) == [(block, row) for block, length in enumerate(lengths) for row in range(length)]
    start = data.draw(st.integers(0, order.length))
    stop = data.draw(st.integers(start, order.length))
    again = make_order(lengths, seed=seed, epoch=epoch, num_streams=num_streams)
    assert samples_of(again, start, stop) == whole[start:stop]


@given(LENGTHS, st.integers(1, 12), st.data())
@settings(deadline=None)
def test_blocks_that_have_begun_have_the_rows_that_are_behind_the_position(
    lengths: list[int], num_streams: int, data: st.DataObject
) -> None:
    order = make_order(lengths, num_streams=num_streams)
    position = data.draw(st.integers(0, order.length))
    before = {block for block, _ in samples_of(order, 0, position)}
    left = [(block, row) for block, row in samples_of(order, position, order.length) if block in before]
    begun = order.begun_blocks(position)
    assert len(begun) <= order.num_streams
    assert sorted((block, row) for block, rows in begun.items() for row in rows.tolist()) == sorted(left)
    assert all(len(rows) for rows in begun.values())


@given(LENGTHS, st.lists(st.tuples(st.integers(1, 30), SHARES), min_size=1, max_size=12))
@settings(deadline=None)
def test_ranks_and_shares_may_change_at_every_step_and_every_sample_is_used_once(
    lengths: list[int], steps: list[tuple[int, tuple[int, ...]]]
) -> None:
    order = make_order(lengths)
    used: Counter[tuple[int, int]] = Counter()
    position = 0
    while position < order.length:
        for global_batch, shares in steps:
            stop = min(position + global_batch, order.length)
            streams, blocks, rows = order.locate(position, stop)
            counts = share_out(stop - position, shares)
            owners = assign_streams(order.num_streams, shares)
            for member, count in enumerate(counts):
                part = choose_part(streams, counts, owners, member)
                assert len(part) == max(count, min(1, stop - position))
                if count:
                    used.update(zip(blocks[part].tolist(), rows[part].tolist(), strict=True))
            position = stop
    assert set(used.values()) <= {1}
    assert used.total() == order.length


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_ranks_with_data_of_their_own_use_each_sample_once_and_end_together(
    lengths: list[int], batches: list[int]
) -> None:
    total, start = sum(lengths), 0
    used = [0] * len(lengths)
    while start < total:
        for batch in batches:
            stop = min(start + batch, total)
            for rank, length in enumerate(lengths):
                first, last = local_range(start, stop, length, total)
                assert first == used[rank]
                used[rank] = last
            start = stop
    assert used == lengths


def test_the_order_depends_on_seed_and_epoch_and_stays_as_it_was() -> None:
    lengths = [3, 1, 4, 1, 5]
    first = samples_of(make_order(lengths, num_streams=2), 0, 14)
    assert first == samples_of(make_order(lengths, num_streams=2), 0, 14)
    assert first != samples_of(make_order(lengths, num_streams=2, seed=1), 0, 14)
    assert first != samples_of(make_order(lengths, num_streams=2, epoch=1), 0, 14)
    # A checkpoint in the middle of an epoch means this order, also with later versions.
    assert first == FIRST


FIRST = [(0, 0), (3, 0), (0, 1), (1, 0), (0, 2), (2, 2), (4, 0), (2, 3), (4, 4), (2, 1), (4, 1), (2, 0), (4, 2), (4, 3)]


def test_one_block_has_the_order_of_the_elastic_sampler() -> None:
    _, _, rows = make_order([23], seed=3, epoch=4).locate(0, 23)
    assert rows.tolist() == epoch_order(23, epoch=4, seed=3, shuffle=True).tolist()


def test_without_shuffling_one_stream_is_the_order_of_the_data() -> None:
    order = EpochOrder(np.array([2, 3]), seed=0, epoch=0, shuffle=False, num_streams=1)
    assert samples_of(order, 0, 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_own_whole_streams_where_their_number_divides_that_of_the_streams(size: int) -> None:
    order = make_order([10] * 60, num_streams=30)
    owners, shares = assign_streams(30, (1,) * size), (1,) * size
    for start in range(0, order.length, 30):
        streams, _, _ = order.locate(start, start + 30)
        for member in range(size):
            part = choose_part(streams, share_out(30, shares), owners, member)
            assert set(owners[streams[part]].tolist()) == {member}


def test_a_machine_with_twice_the_share_owns_twice_the_streams() -> None:
    assert Counter(assign_streams(60, (2, 1, 1)).tolist()) == {0: 30, 1: 15, 2: 15}


def test_streams_are_equally_long_up_to_a_block() -> None:
    lengths = [1 + number % 7 for number in range(200)]
    order = make_order(lengths, num_streams=8)
    streams, _, _ = order.locate(0, order.length)
    counts = np.bincount(streams)
    assert counts.max() - counts.min() <= max(lengths)


def test_positions_outside_of_the_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="14 samples has no positions 3 to 15"):
        make_order([14]).locate(3, 15)


def test_data_without_samples_have_an_empty_order() -> None:
    assert samples_of(make_order([0, 0]), 0, 0) == []
