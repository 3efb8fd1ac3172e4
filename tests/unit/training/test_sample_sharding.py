"""Every sample goes to exactly one rank, whatever happens on the way through an epoch."""

from __future__ import annotations

from itertools import chain, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.training.global_batches import GlobalBatches, equal_shares
from ronde.training.sample_sharding import (
    TAIL_POLICIES,
    SamplePosition,
    count_steps,
    epoch_order,
    sample_weight,
    shard_indices,
    shard_size,
    share_out,
)

NUMBERS = st.integers(0, 60)
SIZES = st.integers(1, 7)


def shares(length: int, consumed: int, size: int, ends: str) -> list[list[int]]:
    order = epoch_order(length, epoch=3, seed=1, shuffle=True)
    return [shard_indices(order, consumed, rank, size, ends).tolist() for rank in range(size)]


def test_an_order_depends_on_seed_and_epoch_alone_and_stays_what_it_was() -> None:
    assert epoch_order(8, epoch=0, seed=7, shuffle=True).tolist() == FIRST
    assert epoch_order(8, epoch=1, seed=7, shuffle=True).tolist() != FIRST
    assert epoch_order(8, epoch=0, seed=8, shuffle=True).tolist() != FIRST
    assert epoch_order(4, epoch=5, seed=7, shuffle=False).tolist() == [0, 1, 2, 3]


FIRST = [4, 3, 6, 2, 1, 0, 5, 7]
"""If this changes, checkpoints in the middle of an epoch go on with the wrong samples."""


@given(length=NUMBERS, size=SIZES, consumed=NUMBERS)
def test_uneven_gives_every_sample_to_exactly_one_rank(length: int, size: int, consumed: int) -> None:
    consumed = min(consumed, length)
    mine = shares(length, consumed, size, "uneven")
    left = epoch_order(length, epoch=3, seed=1, shuffle=True)[consumed:].tolist()
    assert sorted(chain(*mine)) == sorted(left)
    assert max(map(len, mine)) - min(map(len, mine)) <= 1


@given(length=NUMBERS, size=SIZES, consumed=NUMBERS)
def test_pad_repeats_and_drop_leaves_out_fewer_than_there_are_ranks(length: int, size: int, consumed: int) -> None:
    consumed = min(consumed, length)
    left = epoch_order(length, epoch=3, seed=1, shuffle=True)[consumed:].tolist()
    padded, dropped = shares(length, consumed, size, "pad"), shares(length, consumed, size, "drop")
    assert len(set(map(len, padded))) == len(set(map(len, dropped))) == 1
    assert set(left) <= set(chain(*padded)) and 0 <= sum(map(len, padded)) - len(left) < size
    assert set(chain(*dropped)) <= set(left) and 0 <= len(left) - sum(map(len, dropped)) < size


@given(length=NUMBERS, size=SIZES, consumed=NUMBERS, ends=st.sampled_from(TAIL_POLICIES))
def test_how_many_are_mine_is_known_without_looking(length: int, size: int, consumed: int, ends: str) -> None:
    consumed = min(consumed, length)
    found = [len(mine) for mine in shares(length, consumed, size, ends)]
    assert found == [shard_size(length - consumed, rank, size, ends) for rank in range(size)]


@given(length=NUMBERS, batch=st.integers(1, 5), plan=st.lists(st.tuples(SIZES, st.integers(0, 4)), max_size=4))
def test_restarts_with_any_number_of_ranks_neither_lose_nor_repeat_a_sample(
    length: int, batch: int, plan: list[tuple[int, int]]
) -> None:
    position, used = SamplePosition(epoch=3), list[int]()
    for size, num_batches in [*plan, (2, 60)]:
        for mine in shares(length, position.consumed, size, "uneven"):
            used += mine[: num_batches * batch]
        position = position.after(num_batches * batch, size, length)
    assert sorted(used) == list(range(length))
    assert position.consumed == length


def test_a_global_batch_has_the_same_samples_for_any_number_of_ranks() -> None:
    batches = [sorted(chain(*(mine[: 8 // size] for mine in shares(40, 16, size, "pad")))) for size in (1, 2, 4, 8)]
    assert batches == [batches[0]] * 4


@pytest.mark.parametrize("ends", TAIL_POLICIES)
def test_no_data_is_no_problem(ends: str) -> None:
    assert shares(0, 0, 3, ends) == [[], [], []]


# --- global batches ---------------------------------------------------------------------------------------------------


@given(total=st.integers(0, 300), shares=st.lists(st.integers(1, 4000), min_size=1, max_size=9))
def test_a_batch_is_shared_out_whole_and_nobody_goes_without_if_there_is_enough(total: int, shares: list[int]) -> None:
    counts = share_out(total, tuple(shares))
    assert sum(counts) == total
    assert all(counts) or total < len(shares)
    ideal = [total * share / sum(shares) for share in shares]
    if min(ideal) >= 1:
        assert all(abs(count - wanted) < 1 for count, wanted in zip(counts, ideal, strict=True))


def test_equal_shares_differ_by_one_and_the_first_ranks_have_more() -> None:
    assert share_out(10, (1000,) * 4) == (3, 3, 2, 2)
    assert share_out(2, (1000,) * 4) == (1, 1, 0, 0)
    assert share_out(35, (1143, 1143, 1143, 571)) == (10, 10, 10, 5)
    assert share_out(8, (4000, 125, 125)) == (6, 1, 1)


@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), min_size=1, max_size=6).filter(any))
def test_the_weighted_mean_over_ranks_is_the_mean_over_samples(parts: list[list[float]]) -> None:
    counts = [len(part) for part in parts]
    weighted = [
        sample_weight(counts, member) * (sum(part) / len(part) if part else 7.0) for member, part in enumerate(parts)
    ]
    samples = list(chain(*parts))
    assert sum(weighted) / len(parts) == pytest.approx(sum(samples) / len(samples), abs=1e-9)
    assert sum(sample_weight(counts, member) for member in range(len(counts))) == pytest.approx(len(counts))


@given(
    length=st.integers(0, 90),
    global_batch=st.integers(1, 20),
    rounds=st.lists(st.tuples(SIZES, st.integers(0, 4), st.integers(0, 3)), max_size=12),
)
def test_every_sample_is_in_one_finished_step_whatever_happens_to_the_ranks(
    length: int, global_batch: int, rounds: list[tuple[int, int, int]]
) -> None:
    """Each round has a size, a number of steps that finish in it, and one of steps that were drawn and did not."""
    used: list[int] = []
    position = SamplePosition(3)
    for size, num_finished, num_ahead in [*rounds, (2, 100, 0)]:
        order = epoch_order(length, epoch=position.epoch, seed=1, shuffle=True)
        ranks = [
            GlobalBatches(
                order,
                position,
                global_batch=global_batch,
                drops_last=False,
                member=member,
                shares=equal_shares(size),
            )
            for member in range(size)
        ]
        drawn = [list(islice(batches, num_finished + num_ahead)) for batches in ranks]
        for step in range(min(num_finished, len(drawn[0]))):
            counts = {batches.hand_out() for batches in ranks}
            assert len(counts) == 1
            (mine,) = counts
            for count, parts in zip(mine, drawn, strict=True):
                assert len(parts[step]) == max(count, 1)
                used += parts[step][:count]
            position = position.after_samples(sum(mine))
    assert sorted(used) == list(range(length))
    assert used_in_order(used, length, global_batch)
    assert position == (3, length)


def used_in_order(used: list[int], length: int, global_batch: int) -> bool:
    """Whether the steps were those of an undisturbed run, sample by sample."""
    order = epoch_order(length, epoch=3, seed=1, shuffle=True).tolist()
    starts = range(0, length, global_batch)
    return all(
        sorted(used[start : start + global_batch]) == sorted(order[start : start + global_batch]) for start in starts
    )


def test_an_incomplete_last_batch_can_be_left_out() -> None:
    order = epoch_order(10, epoch=0, seed=0, shuffle=False)
    for drops_last, expected in ((True, [[0, 1], [4, 5]]), (False, [[0, 1], [4, 5], [8]])):
        batches = GlobalBatches(
            order, SamplePosition(), global_batch=4, drops_last=drops_last, member=0, shares=equal_shares(2)
        )
        assert list(batches) == expected
        assert count_steps(10, 4, "drop" if drops_last else "uneven") == len(expected)


def test_a_rank_without_a_sample_computes_one_of_another_rank() -> None:
    order = epoch_order(2, epoch=0, seed=0, shuffle=False)
    parts = [
        list(
            GlobalBatches(
                order, SamplePosition(), global_batch=4, drops_last=False, member=member, shares=equal_shares(4)
            )
        )
        for member in range(4)
    ]
    assert parts == [[[0]], [[1]], [[0]], [[0]]]
