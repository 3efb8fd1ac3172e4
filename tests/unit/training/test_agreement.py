"""Lists that should be equal on all ranks, and the first entry in which they are not."""

from __future__ import annotations

import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.agreement import check_equal, first_difference
from tests.conformance.ranks import run_threads


def test_the_first_difference_says_who_has_what() -> None:
    assert first_difference({0: ["a", "b"], 1: ["a", "c"], 2: ["a"]}) == (
        "At position 1, rank 0: b; rank 1: c; rank 2: nothing"
    )


def test_members_that_agree_go_on_and_others_all_get_the_error() -> None:
    def body(world: World) -> None:
        check_equal(world.group, "test", ["a", "b"])
        check_equal(world.group, "test", [])
        with pytest.raises(Mismatch, match=r"test: the ranks differ\. At position 0, rank 0: nothing; rank 1: x"):
            check_equal(world.group, "test", ["x"] * world.rank)

    run_threads(2, body)
