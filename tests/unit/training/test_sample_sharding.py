"""Every sample goes to exactly one rank, whatever happens on the way through an epoch."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.training.sample_sharding import TAIL_POLICIES, SamplePosition, epoch_order, shard_indices, shard_size

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
