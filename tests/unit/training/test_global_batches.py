"""Parts of a batch that follow the speed of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.world import World
from ronde.training.global_batches import (
    MAX_SHARE,
    MIN_SHARE,
    GlobalBatches,
    MeasuredSpeed,
    SpeedShares,
    equal_shares,
    next_shares,
)
from ronde.training.sample_sharding import SamplePosition, epoch_order, share_out
from tests.conformance.ranks import run_threads


def measure(shares: Sequence[int], seconds_per_sample: Sequence[float], fixed_s: float = 0.0) -> list[MeasuredSpeed]:
    """What ranks of these speeds measure in a step of 280 samples."""
    counts = share_out(280, tuple(shares))
    return [
        MeasuredSpeed(count, fixed_s + count * each) for count, each in zip(counts, seconds_per_sample, strict=True)
    ]


@pytest.mark.parametrize("fixed_s", [0.0, 0.02])
def test_one_of_four_at_half_speed_gets_half_as_much_as_the_others(fixed_s: float) -> None:
    shares = equal_shares(4)
    for _ in range(12):
        shares = next_shares(shares, measure(shares, [1e-3, 1e-3, 2e-3, 1e-3], fixed_s))
    seconds = [each.own_s for each in measure(shares, [1e-3, 1e-3, 2e-3, 1e-3], fixed_s)]
    assert max(seconds) / min(seconds) < 1.08  # equal shares: 1.6 and more
    if not fixed_s:
        assert share_out(280, shares) == pytest.approx((80, 80, 40, 80), abs=2)


def test_shares_stay_as_they_are_while_speeds_hardly_differ() -> None:
    shares = equal_shares(3)
    assert next_shares(shares, measure(shares, [1e-3, 1.02e-3, 0.99e-3])) == shares


def test_a_rank_of_which_nothing_is_known_keeps_its_share() -> None:
    measured = [MeasuredSpeed(10, 1.0), MeasuredSpeed(0, 1.0), MeasuredSpeed(10, 3.0), MeasuredSpeed(10, 0.0)]
    first, second, third, fourth = next_shares(equal_shares(4), measured)
    assert (second, fourth) == (1000, 1000)
    assert first + third == pytest.approx(2000, abs=1)
    assert first > 1000 > third


@given(
    st.lists(st.tuples(st.integers(MIN_SHARE, MAX_SHARE), st.integers(0, 100), st.floats(0, 1e6)), min_size=1),
)
def test_shares_have_bounds_whatever_was_measured(ranks: list[tuple[int, int, float]]) -> None:
    shares = [share for share, _, _ in ranks]
    for share in next_shares(shares, [MeasuredSpeed(num, seconds) for _, num, seconds in ranks]):
        assert MIN_SHARE <= share <= MAX_SHARE


def test_all_ranks_change_shares_at_the_same_batch_however_far_they_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is slow, and each rank draws ahead by another number of batches."""
    length, clock = 3000, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def body(world: World) -> list[tuple[list[int], tuple[int, ...]]]:
        batches = GlobalBatches(
            epoch_order(length, epoch=0, seed=0, shuffle=True),
            SamplePosition(),
            global_batch=30,
            drops_last=False,
            member=world.rank,
            shares=equal_shares(3),
        )
        speed, ahead = SpeedShares(world.group, equal_shares(3)), [0, 5, 11][world.rank]
        drawn: list[list[int]] = []
        seen: list[tuple[list[int], tuple[int, ...]]] = []
        waited_s = 0.0  # the clock stands still, so what is not waited is computed
        draw: Callable[[], list[int] | None] = lambda: next(batches, None)  # noqa: E731
        while True:
            while len(drawn) <= len(seen) + ahead and (part := draw()) is not None:
                drawn.append(part)
            if len(seen) == len(drawn):
                return seen
            counts = batches.hand_out()
            seen.append((drawn[len(seen)][: counts[world.rank]], counts))
            waited_s -= counts[world.rank] * (2e-3 if world.rank == 1 else 1e-3)
            speed.batch_done(counts[world.rank], waited_s, batches)

    results = run_threads(3, body)
    counts_by_rank = [[counts for _, counts in seen] for seen in results]
    assert counts_by_rank[0] == counts_by_rank[1] == counts_by_rank[2]
    assert sorted(chain(*(part for seen in results for part, _ in seen))) == list(range(length))
    assert counts_by_rank[0][0] == (10, 10, 10)
    assert counts_by_rank[0][-1] == pytest.approx((12, 6, 12), abs=1)
