"""Which rank is on which host, which ranks are a group, and which reductions there are."""

from __future__ import annotations

import pytest

from ronde.types import DType, Member, Op, OperationKind, Topology, check_group_ranks, find_reduction_error


@pytest.mark.parametrize(
    ("rank", "local_ranks", "cross_ranks"),
    [
        (0, (0, 3, 5), (0, 1, 4)),
        (1, (1, 2), (0, 1, 4)),
        (2, (1, 2), (2, 3)),
        (3, (0, 3, 5), (2, 3)),
        (5, (0, 3, 5), (5,)),
    ],
)
def test_a_topology_counts_ranks_within_hosts_and_across_them(
    rank: int, local_ranks: tuple[int, ...], cross_ranks: tuple[int, ...]
) -> None:
    hosts = ("a", "b", "b", "a", "c", "a")
    topology = Topology(tuple(Member(each, host, 1, "") for each, host in enumerate(hosts)), rank)
    assert topology.size == 6 and topology.host_indices == (0, 1, 1, 0, 2, 0)
    assert (topology.local_ranks, topology.cross_ranks) == (local_ranks, cross_ranks)
    assert (topology.local_rank, topology.local_size) == (local_ranks.index(rank), len(local_ranks))
    assert (topology.cross_rank, topology.cross_size) == (cross_ranks.index(rank), len(cross_ranks))


def test_the_ranks_of_a_group_are_sorted() -> None:
    assert check_group_ranks([2, 0], 3) == (0, 2)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([], "at least one rank"), ([0, 3, -1], "from 0 to 2, got -1, 3"), ([1, 0, 1], "once, got 1 more than once")],
)
def test_ranks_that_are_no_group_are_refused(ranks: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_group_ranks(ranks, 3)


@pytest.mark.parametrize(
    ("kind", "dtype", "op", "scaled", "is_allowed"),
    [
        (OperationKind.ALLREDUCE, DType.BOOL, Op.MAX, False, True),
        (OperationKind.ALLREDUCE, DType.BOOL, Op.MEAN, False, False),
        (OperationKind.ALLREDUCE, DType.BOOL, Op.SUM, True, False),
        (OperationKind.ALLREDUCE, DType.BFLOAT16, Op.ADASUM, True, True),
        (OperationKind.ALLREDUCE, DType.INT32, Op.ADASUM, False, False),
        (OperationKind.REDUCE_SCATTER, DType.FLOAT32, Op.ADASUM, False, False),
        (OperationKind.REDUCE, DType.UINT8, Op.BIT_AND, False, True),
        (OperationKind.ALLREDUCE, DType.BOOL, Op.BIT_XOR, False, True),
        (OperationKind.ALLREDUCE, DType.BFLOAT16, Op.BIT_OR, False, False),
        (OperationKind.ALLREDUCE, DType.INT8, Op.BIT_OR, True, False),
    ],
)
def test_a_reduction_must_make_sense_for_its_type(
    kind: OperationKind, dtype: DType, op: Op, scaled: bool, is_allowed: bool
) -> None:
    assert (find_reduction_error(kind, dtype, op, scaled=scaled) == "") == is_allowed
