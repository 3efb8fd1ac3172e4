"""`ronde stack`: where the ranks of a job are. The command itself is in test_top.py, with its job."""

from __future__ import annotations

import pytest

from ronde.cli.stack import format_stacks
from ronde.observe.stacks import RankStack


@pytest.mark.parametrize(
    ("why", "of_two"),
    [
        ("has not called ronde.init() yet", "have not called ronde.init() yet"),
        ("does not answer; its process is stopped", "do not answer; their processes are stopped"),
        ("is lost: RuntimeError: it is broken", "are lost: RuntimeError: it is broken"),
    ],
)
def test_what_is_known_of_several_ranks_is_said_of_several(why: str, of_two: str) -> None:
    one, two = (RankStack(rank=rank, why=why) for rank in range(2))
    assert format_stacks((one,)) == f"rank 0 {why}"
    assert format_stacks((one, two)) == f"ranks 0, 1 {of_two}"


def test_a_rank_whose_process_has_ended_has_ended() -> None:
    one, two = (RankStack(rank=rank, why="its process has ended: exited with code 0") for rank in range(2))
    assert format_stacks((one,)) == "rank 0 has ended: exited with code 0"
    assert format_stacks((one, two)) == "ranks 0, 1 have ended: exited with code 0"


def test_equal_stacks_are_printed_once() -> None:
    same = [RankStack(rank=rank, line="train.py:5 in step: x()", stack="main thread:\n  here\n") for rank in range(7)]
    other = RankStack(rank=7, host="b", pid=9, line="train.py:9 in load: y()", stack="main thread:\n  there\n")
    silent = RankStack(rank=8, host="b", pid=10, why="does not answer; its process is stopped")
    assert format_stacks((*same, other, silent)) == (
        "ranks 0-6: train.py:5 in step: x()\n  main thread:\n    here\n\n"
        "rank 7 on b, pid 9: train.py:9 in load: y()\n  main thread:\n    there\n\n"
        "rank 8 on b, pid 10 does not answer; its process is stopped"
    )
