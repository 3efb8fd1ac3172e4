"""What ranks compare, the first difference between them, and the plan that follows from their proposals."""

from __future__ import annotations

import pytest

from ronde.comm.world import World
from ronde.errors import Mismatch
from ronde.training.agreement import PlanProposal, check_equal, first_difference, merge_proposals
from ronde.training.gradients.adapter import ParameterInfo
from tests.conformance.ranks import run_threads

A, B = ParameterInfo("a", (2, 3), "float32", 6), ParameterInfo("b", (4,), "float32", 4)


def proposal(
    *parameters: ParameterInfo, op: str = "mean", passes: str = "1", ready: tuple[int, ...] = (), overlap: bool = True
) -> PlanProposal:
    return PlanProposal({"op": op, "passes": passes, "codec": "None"}, parameters, ready, overlap)


def test_the_first_rank_says_in_which_order() -> None:
    agreed = merge_proposals({2: proposal(A, B, ready=(1, 0), overlap=False), 5: proposal(A, B, ready=(0, 1))})
    assert (agreed.parameters, agreed.ready_order, agreed.overlap) == ((A, B), (1, 0), False)


def test_what_is_sparse_on_one_rank_is_sparse_on_all() -> None:
    sparse = ParameterInfo("a", (2, 3), "float32", 6, sparse=True)
    assert merge_proposals({0: proposal(A, B), 1: proposal(sparse, B)}).parameters == (sparse, B)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([ParameterInfo("b", (5,), "float32", 5)], r"1 .*ranks 0, 1 has 'b' float32\[4\]; rank 2 has 'b' float32\[5\]"),
        ([ParameterInfo("c", (4,), "float32", 4)], r"rank 2 has 'c' float32\[4\]"),
        ([ParameterInfo("b", (4,), "float32", 4, "strides (2,)")], r"rank 2 has 'b' float32\[4\] \(strides \(2,\)\)"),
        ([], "rank 2 has no such parameter.*freeze the same parameters"),
    ],
)
def test_the_first_parameter_in_which_models_differ_is_named(others: list[ParameterInfo], words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        merge_proposals({0: proposal(A, B), 1: proposal(A, B), 2: proposal(A, *others)})


def test_settings_that_differ_are_told_before_anything_else_and_no_others() -> None:
    with pytest.raises(Mismatch, match=r"optimizers differ: rank 0 has op=mean; rank 1 has op=sum$"):
        merge_proposals({0: proposal(A), 1: proposal(B, op="sum")})
    with pytest.raises(Mismatch, match=r"differ: ranks 0, 2 has op=mean, passes=1; rank 1 has op=sum, passes=2$"):
        merge_proposals({0: proposal(A), 1: proposal(A, op="sum", passes="2"), 2: proposal(A)})


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
