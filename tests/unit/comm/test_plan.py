"""Buckets and where they lie. What plans compute is in tests/conformance."""

from __future__ import annotations

import numpy as np
import pytest

from ronde.comm.joining import join_round
from ronde.comm.plan import Bucket, Plan
from ronde.comm.world import World
from ronde.errors import RoundEnded
from ronde.settings import Settings


def test_buckets_begin_at_cache_lines_of_one_memory(alone: World) -> None:
    with Plan([Bucket(1), Bucket(17), Bucket(3, "float64")], alone.group) as plan:
        starts = [array.ctypes.data for array in plan.arrays]
        assert [start - starts[0] for start in starts] == [0, 64, 192]


def test_starting_a_bucket_makes_nothing_but_a_work(alone: World) -> None:
    with Plan([Bucket(4)], alone.group) as plan:
        plan.arrays[0][:] = 3.0
        assert plan.start(0).wait() is plan.arrays[0]
        assert plan.run(0) is plan.arrays[0]
        assert plan.arrays[0].tolist() == [3.0] * 4
    sums = alone.recorder.metrics().of(0, "bucket")
    assert (sums.operations, sums.bytes) == (2, 32)


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (lambda: Bucket(0), "count must be a whole number from 1, got 0"),
        (lambda: Bucket(1.5), "count must be a whole number"),  # type: ignore[arg-type]  # the mistake
        (lambda: Bucket(1, "complex64", name="b"), "bucket 'b': dtype must be one of uint8.*got 'complex64'"),
    ],
)
def test_a_bucket_is_checked_where_it_is_made(bucket: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bucket()  # type: ignore[operator]  # a lambda of the table


def test_a_plan_is_checked_where_it_is_made(alone: World) -> None:
    with pytest.raises(ValueError, match="at least one bucket"):
        Plan([], alone.group)
    with pytest.raises(ValueError, match="op must be one of"):
        Plan([Bucket(3, op="average")], alone.group)
    with pytest.raises(ValueError, match="bool has no mean"):
        Plan([Bucket(3, "bool")], alone.group)


def test_a_closed_plan_starts_nothing(alone: World) -> None:
    plan = Plan([Bucket(4)], alone.group)
    plan.close()
    plan.close()
    with pytest.raises(RoundEnded):
        plan.run(0)
    assert alone.group.allreduce(np.ones(1)).tolist() == [1]


def test_the_end_of_the_world_closes_plans() -> None:
    world = World(join_round(Settings(), (), 0))
    plan = Plan([Bucket(4)], world.group)
    world.close()
    with pytest.raises(RoundEnded):
        plan.start(0)
    plan.close()
