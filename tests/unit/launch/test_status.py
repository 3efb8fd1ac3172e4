"""What the ranks tell and what their driver knows, put together."""

from __future__ import annotations

import msgspec
import pytest

from ronde.launch.driver.monitor import JobStatus, RankProcessInfo, RankStatus, make_job_status, make_rank_stacks
from ronde.observe.activity import JobActivity, RankActivity, RankState
from ronde.observe.stacks import RankStack


def rank_of(vitals: RankActivity, facts: RankProcessInfo) -> RankStatus:
    return make_job_status("demo", ["python"], JobActivity(size=1, ranks=(vitals,)), [facts], 2.0).ranks[0]


def test_the_driver_adds_what_it_knows() -> None:
    vitals = RankActivity(rank=0, state="running", host="a-0123", pid=7, steps=5, held_up_s=1.5)
    facts = RankProcessInfo(host="a", local_rank=1, pid=7, cpu=0.9, memory_bytes=100, gpu=0.5, gpu_bytes=200)
    status = make_job_status(
        "demo", ["python", "x.py"], JobActivity(size=1, round=3, slowest=0, ranks=(vitals,)), [facts], 2
    )
    assert (status.name, status.command, status.size, status.round, status.slowest) == (
        "demo",
        ("python", "x.py"),
        1,
        3,
        0,
    )
    assert status.elapsed_s == 2 and status.at > 1e9
    assert status.ranks[0] == RankStatus(
        rank=0,
        state="running",
        host="a",
        pid=7,
        steps=5,
        held_up_s=1.5,
        local_rank=1,
        cpu=0.9,
        memory_bytes=100,
        gpu=0.5,
        gpu_bytes=200,
    )
    assert msgspec.json.decode(msgspec.json.encode(status), type=JobStatus) == status


@pytest.mark.parametrize(
    ("state", "pid", "code", "expected", "why"),
    [
        ("starting", 0, None, "starting", "has not been started yet"),
        ("starting", 7, None, "starting", "told"),
        ("running", 7, None, "running", "told"),
        ("left", 7, 0, "left", "exited with code 0"),
        ("left", 7, 3, "lost", "exited with code 3"),
        ("starting", 7, -9, "lost", "killed by signal 9"),
        ("lost", 7, 1, "lost", "told"),
    ],
)
def test_how_a_process_ended_is_known_to_the_driver_alone(
    state: RankState, pid: int, code: int | None, expected: str, why: str
) -> None:
    found = rank_of(RankActivity(rank=0, state=state, why="told"), RankProcessInfo(pid=pid, exit_code=code))
    assert (found.state, found.why, found.exit_code) == (expected, why, code)


def test_stacks_name_hosts_as_the_user_does() -> None:
    (stack,) = make_rank_stacks([RankStack(rank=0, host="a-0123", line="x.py:1")], [RankProcessInfo(host="a", pid=7)])
    assert (stack.host, stack.pid, stack.line) == ("a", 7, "x.py:1")
