"""Local steps and averages, by allreduce and by gossip: the mean of all is never lost, whoever is slow."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ronde.comm.buffers import Array
from ronde.comm.world import World
from ronde.training.model_averaging import ModelAverager, Share, choose_peer
from tests.conformance.ranks import run_threads


@given(st.integers(2, 9), st.integers(0, 2**32), st.integers(0, 200))
def test_push_sum_conserves_the_weighted_mean_in_any_order_and_comes_to_it(size: int, seed: int, steps: int) -> None:
    schedule = random.Random(seed)
    shares = [Share(np.array([float(rank), -3.0 * rank]), 1.0) for rank in range(size)]
    mean = np.mean([share.values for share in shares], axis=0)
    under_way: list[tuple[int, Share]] = []
    numbers = [0] * size
    speeds = [schedule.choice([1, 3]) for _ in range(size)]

    def check() -> None:
        everything = [*shares, *(share for _, share in under_way)]
        weight = sum(share.weight for share in everything)
        assert weight == pytest.approx(size, rel=1e-12)
        total = sum(share.weight * share.values for share in everything)
        assert np.allclose(total / weight, mean, rtol=1e-9, atol=1e-9)

    def send(rank: int) -> None:
        shares[rank], sent = shares[rank].split()
        under_way.append((choose_peer(rank, numbers[rank], size), sent))
        numbers[rank] += 1

    def deliver(index: int) -> None:
        to, share = under_way.pop(index)
        shares[to] = shares[to] + share

    for _ in range(steps):
        if under_way and schedule.random() < 0.5:
            deliver(schedule.randrange(len(under_way)))
        else:
            send(schedule.choices(range(size), speeds)[0])
        check()
    for _ in range(200):  # everybody sends, everything arrives; in the slowest order 20 of them gain a factor of 17
        for rank in range(size):
            send(rank)
        while under_way:
            deliver(schedule.randrange(len(under_way)))
    check()
    assert all(np.allclose(share.values, mean, rtol=0, atol=1e-6) for share in shares)


@given(st.integers(1, 40), st.integers(0, 5))
def test_peers_lead_to_everybody(size: int, begin: int) -> None:
    rounds = max(1, (size - 1).bit_length())
    reached = {0}
    for number in range(begin, begin + rounds):
        reached |= {choose_peer(index, number, size) for index in reached}
    assert reached == set(range(size))


def test_local_steps_are_averaged_every_few_steps_by_allreduce() -> None:
    def body(world: World) -> None:
        arrays: list[Array] = [np.full(3, float(world.rank)), np.zeros((2, 2), np.float32)]
        averager = ModelAverager(arrays, every=3, group=world.group)
        assert (arrays[0] == 0).all()  # the first rank's
        for number in range(1, 8):
            arrays[0] += world.rank
            arrays[1] -= world.rank
            assert averager.step() == (number % 3 == 0)
        assert (arrays[0] == 6 * 1.0 + world.rank).all() and (arrays[1] == -(6 + world.rank)).all()
        averager.finish()
        assert np.allclose(arrays[0], 7.0) and np.allclose(arrays[1], -7.0)
        averager.close()

    run_threads(3, body)


def test_gossip_with_a_slow_rank_loses_nothing_and_waits_for_nobody() -> None:
    """Without steps of their own, ranks come to the mean, and to all of it in the end."""
    num_steps = 60

    def body(world: World) -> float:
        arrays: list[Array] = [np.zeros(4), np.zeros((3, 5), np.float32)]
        averager = ModelAverager(arrays, every=2, method="gossip", group=world.group)
        for array in arrays:
            array[...] = 10.0 * world.rank
        world.group.barrier()
        for _ in range(num_steps if world.rank else num_steps // 4):
            if not world.rank:
                time.sleep(0.002)
            averager.step()
        averager.finish()
        assert averager.weight == 1.0
        for array in arrays:
            assert np.allclose(array, 10.0, rtol=0, atol=1e-5)
        averager.finish()
        averager.close()
        averager.close()
        return float(arrays[0][0])

    results = run_threads(3, body)
    assert results[0] == results[1] == results[2]


def test_mistakes_are_named() -> None:
    def body(world: World) -> None:
        with pytest.raises(ValueError, match="every must be 1 or more, got 0"):
            ModelAverager([np.zeros(2)], every=0, group=world.group)
        with pytest.raises(ValueError, match="averaging must be one of allreduce, gossip, got 'ring'"):
            ModelAverager([np.zeros(2)], method="ring", group=world.group)

    run_threads(1, body)
