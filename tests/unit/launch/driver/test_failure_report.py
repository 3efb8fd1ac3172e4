"""Who failed first, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ronde.coordinator.rounds import LostPeer, MembershipEnd
from ronde.exit_codes import LOST_CODE, NOT_STARTED_CODE, describe_exit_code
from ronde.launch.driver.failure_report import MAX_LOSSES_SHOWN, StopRequest, make_elastic_failure, make_job_result
from ronde.launch.protocol import ExitReason, RankExit
from ronde.net.messages import LeaveReason
from ronde.observe.stacks import RankStack
from ronde.observe.stalls import FailureStacks

CTRL_C = StopRequest(130, "interrupted by Ctrl-C")


def end(rank: int, code: int, *reason: Any, host: str = "a", ordered: bool = False) -> RankExit:
    return msgspec.structs.replace(RankExit(rank, code, *reason), host=host, requested=ordered)


def report(exits: Sequence[RankExit], **facts: Any) -> tuple[int, int | None, list[str]]:
    """Exit code, the rank that failed first, and the lines."""
    result = make_job_result(exits, **facts)
    return result.exit_code, result.first_failed_rank, result.summary.splitlines()


def lost(rank: int, detail: str, reason: LeaveReason = LeaveReason.FAILED) -> tuple[int, MembershipEnd]:
    """What the coordinator knows of the rank that it lost first."""
    return rank, MembershipEnd(reason, detail)


LEFT = lost(2, "", LeaveReason.SCRIPT_ENDED)


@pytest.mark.parametrize("first_lost", [None, lost(1, "exited without shutdown")])
def test_a_job_whose_ranks_all_end_well_has_nothing_to_say(first_lost: tuple[int, MembershipEnd] | None) -> None:
    assert report([end(1, 0), end(0, 0)], first_lost=first_lost) == (0, None, [])


def test_without_a_coordinator_the_first_exit_counts() -> None:
    lines = ["rank 1 on host a failed first: exited with code 3", "1 other rank ended in consequence"]
    assert report([end(2, 0), end(1, 3), end(0, 1)]) == (3, 1, lines)


def test_whom_the_coordinator_lost_first_counts_more_than_who_was_gone_first() -> None:
    exits = [end(0, 1), end(2, 1), end(1, 7, host="b")]
    assert report(exits, first_lost=lost(1, "ValueError: no such file")) == (
        7,
        1,
        [
            "rank 1 on host b failed first: exited with code 7 (ValueError: no such file)",
            "2 other ranks ended in consequence",
        ],
    )


@pytest.mark.parametrize(
    ("has_tf_config", "job", "is_advised"),
    [(True, "localhost", True), (False, "localhost", False), (True, "ps", False)],
)
def test_a_session_that_looks_for_devices_of_other_ranks_because_of_tf_config_is_told_what_to_do(
    has_tf_config: bool, job: str, is_advised: bool
) -> None:
    words = f"node was explicitly assigned to /job:worker/task:1 but available devices are [ /job:{job}/task:0 ]"
    _, _, lines = report([end(0, 1), end(1, 1)], tail=lambda rank, code: words, has_tf_config=has_tf_config)
    assert ["--no-tf-config" in line and "MirroredStrategy(['/cpu:0'])" in line for line in lines] == [
        *(False, False),
        *([True] if is_advised else []),
        False,
    ]


def test_what_the_coordinator_knows_from_us_is_not_said_twice() -> None:
    first_lost = lost(0, describe_exit_code(-9), LeaveReason.PROCESS_ENDED)
    lines = ["rank 0 on host a failed first: killed by signal 9 (SIGKILL)"]
    assert report([end(0, -9)], first_lost=first_lost) == (137, 0, lines)


@pytest.mark.parametrize(
    ("error", "first_lost", "how"),
    [
        ("PeerLost: rank 0 lost rank 2 during barrier", LEFT, " (exited without shutdown)"),
        ("StartFailed: ranks 2, 3 ended before the round began (exited with code 0)", None, ""),
    ],
)
def test_a_rank_that_left_too_early_is_to_blame_for_those_that_lost_it(
    error: str, first_lost: tuple[int, MembershipEnd] | None, how: str
) -> None:
    exits = [end(2, 0, host="b"), end(3, 0), end(0, 1), end(1, 1)]
    said = {0: "Traceback …", 2: "no data for me\n"}
    lost_peers = {0: LostPeer(2, error), 1: LostPeer(2, error)}
    found = report(exits, tail=lambda rank, code: said[rank], first_lost=first_lost, lost_peers=lost_peers)
    assert found[:2] == (1, 0), "the exit code and the exception of one that failed"
    assert found[2] == [
        f"rank 2 on host b left too early: exited with code 0{how}",
        "  | no data for me",
        f"rank 0 then exited with code 1: {error}",
        "1 other rank ended in consequence",
    ]


@pytest.mark.parametrize("lost_peers", [{}, {0: LostPeer(1, "PeerLost: …")}])
def test_a_rank_that_left_early_is_only_mentioned_where_the_first_failure_is_not_known_to_come_from_that(
    lost_peers: dict[int, LostPeer],
) -> None:
    found = report([end(2, 0), end(0, 1)], first_lost=LEFT, lost_peers=lost_peers, tail=lambda rank, code: "no")
    assert found[:2] == (1, 0)
    assert found[2] == [
        "rank 0 on host a failed first: exited with code 1",
        "  | no",
        "before that, rank 2 on host a had left the others: exited with code 0 (exited without shutdown)",
    ]


def test_the_last_words_of_the_first_failed_rank_stand_below_its_name() -> None:
    said = {(0, 1): "Traceback:\n  line 3\nValueError: bad\n"}
    lines = ["rank 0 on host a failed first: exited with code 1"]
    lines += ["  | Traceback:", "  |   line 3", "  | ValueError: bad"]
    assert report([end(0, 1)], tail=lambda *of: said[of]) == (1, 0, lines)


@pytest.mark.parametrize(
    ("others", "first_lost", "num_alike", "num_consequences"),
    [
        ([end(1, 2), end(2, 2)], None, 2, 0),
        ([end(1, 2), end(2, 2, ordered=True), end(3, 1)], None, 1, 2),
        ([end(1, 2), end(9, 2)], None, 1, 1),
        ([end(1, 2), end(2, 2)], lost(0, "no"), 0, 2),
    ],
    ids=["the same end", "ended by us, or otherwise", "has lost another rank", "lost by the coordinator"],
)
def test_others_that_failed_in_the_same_way_are_no_consequence(
    others: list[RankExit], first_lost: tuple[int, MembershipEnd] | None, num_alike: int, num_consequences: int
) -> None:
    exits = [end(0, 2), *others]
    lost_peers = {9: LostPeer(0, "StartFailed: …")}
    _, _, (first, *lines) = report(exits, first_lost=first_lost, lost_peers=lost_peers)
    assert first.startswith("rank 0 on host a failed first: exited with code 2")
    counts = ((num_alike, "failed, too: exited with code 2"), (num_consequences, "ended in consequence"))
    assert lines == [f"{num} other rank{'s' * (num > 1)} {what}" for num, what in counts if num]


MISSING = RankStack(rank=1, host="b", pid=47, line="train.py:88 in load: batch = next(loader)")
SILENT = RankStack(rank=2, host="c", pid=48, why="does not answer; its process is stopped")


def test_a_hang_ends_with_who_did_not_come_and_where_it_was() -> None:
    exits = [end(0, 1), end(3, 1), end(1, -15, host="b", ordered=True), end(2, -9, host="c", ordered=True)]
    stacks = FailureStacks(0, missing=(MISSING, SILENT))
    assert report(exits, first_lost=lost(0, "OperationTimeout: barrier"), failure_stacks=stacks) == (
        1,
        0,
        [
            "rank 0 on host a waited in vain for ranks 1, 2: exited with code 1 (OperationTimeout: barrier)",
            "1 other rank ended in consequence",
            "rank 1 on host b, pid 47, did not come: it was at train.py:88 in load: batch = next(loader)",
            "rank 2 on host c, pid 48, did not come: it does not answer; its process is stopped",
        ],
    )


def test_a_disagreement_shows_every_line_with_its_ranks() -> None:
    said = [RankStack(rank=rank, line=line) for rank, line in enumerate(["a.py:1 in f", "a.py:2 in g", "a.py:1 in f"])]
    stacks = FailureStacks(0, disagreeing=tuple(said))
    exits = [end(rank, 1) for rank in range(3)]
    assert report(exits, first_lost=lost(0, "Mismatch: no"), failure_stacks=stacks)[2] == [
        "rank 0 on host a failed first: exited with code 1 (Mismatch: no)",
        "ranks 0, 2 were at a.py:1 in f",
        "rank 1 was at a.py:2 in g",
        "2 other ranks ended in consequence",
    ]


def test_where_ranks_were_is_not_told_of_another_failure() -> None:
    lines = ["rank 2 on host a failed first: exited with code 3"]
    assert report([end(2, 3)], failure_stacks=FailureStacks(0, missing=(MISSING,))) == (3, 2, lines)


def test_ranks_of_a_lost_host_are_one_failure() -> None:
    cut = (LOST_CODE, ExitReason.HOST_LOST, "Timeout, server b not responding.")
    exits = [end(2, *cut, host="b"), end(3, *cut, host="b"), end(0, 1), end(1, 1)]
    code, _, lines = report(exits, first_lost=lost(3, "its host cannot be reached"))
    assert code == LOST_CODE
    assert lines == [
        "ranks 2, 3 on host b ended when the connection to it was lost (Timeout, server b not responding.)",
        "2 other ranks ended in consequence",
    ]


def test_ranks_that_could_not_be_started_are_one_failure_on_all_hosts() -> None:
    failed = (NOT_STARTED_CODE, ExitReason.NOT_STARTED, "there is no command 'trian'")
    lines = ["ranks 0, 1 on hosts a, b could not be started: there is no command 'trian'"]
    assert report([end(0, *failed), end(1, *failed, host="b")]) == (NOT_STARTED_CODE, 0, lines)


@pytest.mark.parametrize(("stop", "lines"), [(CTRL_C, ["interrupted by Ctrl-C"]), (StopRequest(141, ""), [])])
def test_who_stops_a_job_is_told_no_more_than_that(stop: StopRequest, lines: list[str]) -> None:
    exits = [end(0, -2, ordered=True), end(1, 1, ordered=True)]
    assert report(exits, stop_request=stop) == (stop.exit_code, None, lines)


def test_a_failure_before_ctrl_c_is_still_the_failure() -> None:
    code, first, lines = report([end(1, 4), end(0, -2, ordered=True)], first_lost=lost(0, "gone"), stop_request=CTRL_C)
    assert (code, first, lines[-1]) == (4, 1, "interrupted by Ctrl-C")


def test_a_rank_that_was_told_to_end_is_never_the_first_failed_rank() -> None:
    exits = [end(1, 1), end(0, -15, ordered=True), end(2, -9, ordered=True)]
    _, first, lines = report(exits, first_lost=lost(0, "killed by signal 15 (SIGTERM)"))
    assert (first, lines[-1]) == (1, "2 other ranks ended in consequence")


def test_ranks_that_never_ended_are_named() -> None:
    assert report([end(0, 1)], still_running=[1, 2])[2][-1].startswith("ranks 1, 2 did not end")
    assert report([], stop_request=CTRL_C, still_running=[0])[0] == 130


def test_what_else_is_known_of_an_end_is_told() -> None:
    lines = ["rank 0 on host a failed first: killed by signal 9 (SIGKILL) (the host ran out of memory)"]
    assert report([end(0, -9, ExitReason.OOM_KILLED)])[2] == lines


def test_an_elastic_job_that_cannot_go_on_names_whom_it_has_lost_last() -> None:
    losses = [end(3, -9, host="b"), end(4, LOST_CODE, ExitReason.HOST_LOST, "timed out")]
    result = make_elastic_failure("the reset limit", losses, exit_codes={3: -9}, tail=lambda number, code: "boom\n")
    assert (result.exit_code, result.exit_codes) == (1, {3: -9})
    assert result.summary.splitlines() == [
        "the job cannot go on: the reset limit",
        "worker 3 on host b killed by signal 9 (SIGKILL)",
        "worker 4 on host a ended when the connection to it was lost (timed out)",
        "the last output of worker 3:",
        "  | boom",
    ]
    many = make_elastic_failure("why", losses * 5, exit_codes={}, tail=lambda number, code: "")
    assert many.summary.splitlines()[1] == "10 workers were lost, these last:"
    assert len(many.summary.splitlines()) == 2 + MAX_LOSSES_SHOWN
