"""`ronde stack`: where the ranks of a job are. The command itself is in test_top.py, with its job."""

from __future__ import annotations

from ronde.cli.stack import format_stacks
from ronde.observe.stacks import RankStack


def test_a_rank_without_a_stack_has_a_reason() -> None:
    reason = "does not answer; its process is stopped"
    one, two = (RankStack(rank=rank, why=reason) for rank in range(2))
    assert format_stacks((one,)) == f"rank 0: {reason}"
    assert format_stacks((one, two)) == f"ranks 0, 1, each: {reason}"


def test_equal_stacks_are_printed_once() -> None:
    same = [RankStack(rank=rank, line="train.py:5 in step: x()", stack="main thread:\n  here\n") for rank in range(7)]
    other = RankStack(rank=7, host="b", pid=9, line="train.py:9 in load: y()", stack="main thread:\n  there\n")
    silent = RankStack(rank=8, host="b", pid=10, why="does not answer; its process is stopped")
    assert format_stacks((*same, other, silent)) == (
        "ranks 0-6: train.py:5 in step: x()\n  main thread:\n    here\n\n"
        "rank 7 on b, pid 9: train.py:9 in load: y()\n  main thread:\n    there\n\n"
        "rank 8 on b, pid 10: does not answer; its process is stopped"
    )
