from __future__ import annotations

import pytest

from ronde.errors import Mismatch
from ronde.training.adapter import ParameterInfo
from ronde.training.agreement import PlanProposal, merge_proposals

A, B = ParameterInfo("a", (2, 3), "float32", 6), ParameterInfo("b", (4,), "float32", 4)


def account(
    *parameters: ParameterInfo, op: str = "mean", passes: str = "1", ready: tuple[int, ...] = (), overlap: bool = True
) -> PlanProposal:
    return PlanProposal({"op": op, "passes": passes, "codec": "None"}, parameters, ready, overlap)


def test_the_first_rank_says_in_which_order() -> None:
    accord = merge_proposals({2: account(A, B, ready=(1, 0), overlap=False), 5: account(A, B, ready=(0, 1))})
    assert (accord.parameters, accord.ready_order, accord.overlap) == ((A, B), (1, 0), False)


def test_what_is_sparse_on_one_rank_is_sparse_on_all() -> None:
    sparse = ParameterInfo("a", (2, 3), "float32", 6, sparse=True)
    assert merge_proposals({0: account(A, B), 1: account(sparse, B)}).parameters == (sparse, B)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            ParameterInfo("b", (5,), "float32", 5),
            r"parameter 1 .*ranks 0, 1 has 'b' float32\[4\]; rank 2 has 'b' float32\[5\]",
        ),
        (ParameterInfo("c", (4,), "float32", 4), r"rank 2 has 'c' float32\[4\]"),
        (ParameterInfo("b", (4,), "float16", 4), r"rank 2 has 'b' float16\[4\]"),
        (ParameterInfo("b", (4,), "float32", 4, "strides (2,)"), r"rank 2 has 'b' float32\[4\] \(strides \(2,\)\)"),
    ],
)
def test_the_first_parameter_in_which_models_differ_is_named(other: ParameterInfo, words: str) -> None:
    with pytest.raises(Mismatch, match=words):
        merge_proposals({0: account(A, B), 1: account(A, B), 2: account(A, other)})


def test_a_parameter_that_one_rank_froze_is_named() -> None:
    with pytest.raises(Mismatch, match=r"rank 0 has 'b' .*rank 1 has no such parameter.*freeze the same parameters"):
        merge_proposals({0: account(A, B), 1: account(A)})


def test_settings_that_differ_are_told_before_anything_else_and_no_others() -> None:
    with pytest.raises(Mismatch, match=r"optimizers differ: rank 0 has op=mean; rank 1 has op=sum$"):
        merge_proposals({0: account(A), 1: account(B, op="sum")})
    with pytest.raises(Mismatch, match=r"differ: ranks 0, 2 has op=mean, passes=1; rank 1 has op=sum, passes=2$"):
        merge_proposals({0: account(A), 1: account(A, op="sum", passes="2"), 2: account(A)})
