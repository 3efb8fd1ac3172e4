"""Who announced a named operation last is told with it, so that those who waited know for whom."""

from __future__ import annotations

from ronde.coordinator.negotiation import MAX_STRAGGLERS, MIN_STRAGGLER_DELAY_NS
from ronde.net.messages import RunOperations
from tests.unit.comm.test_negotiator import Script, allgather, allreduce, join

MS = 1_000_000


def late_of(script: Script, rank: int = 0) -> tuple[tuple[int, int], ...]:
    run = script.told[rank][-1]
    assert isinstance(run, RunOperations)
    return run.stragglers


def test_who_comes_together_is_not_late() -> None:
    script = Script(3)
    for rank in range(3):
        script.say(rank, allreduce("w"), now_ns=5 * MS + rank * (MIN_STRAGGLER_DELAY_NS // 3))
    script.flush()
    assert late_of(script) == ()


def test_the_late_are_told_with_how_far_they_were_behind() -> None:
    script = Script(3)
    for rank, at in ((1, 10), (0, 12), (2, 30)):
        script.say(rank, allreduce("w"), now_ns=at * MS)
    script.flush()
    for rank in range(3):
        assert late_of(script, rank) == ((2, 0), (0, 18 * MS), (1, 20 * MS))


def test_each_step_is_judged_anew() -> None:
    script = Script(2)
    for late, now in ((1, 10 * MS), (0, 50 * MS)):
        script.say(1 - late, allreduce("w"), now_ns=now)
        script.say(late, allreduce("w"), now_ns=now + 5 * MS)
        script.flush()
        assert late_of(script) == ((late, 0), (1 - late, 5 * MS))
    script.all_say(allreduce("w"))
    assert late_of(script) == ()


def test_of_what_travels_together_the_last_announcement_counts() -> None:
    script = Script(2)
    script.say(0, allreduce("a"), now_ns=10 * MS)
    script.say(1, allreduce("b"), now_ns=11 * MS)
    script.say(0, allreduce("b"), now_ns=12 * MS)
    script.say(1, allreduce("a"), now_ns=20 * MS)
    script.flush()
    assert script.names_run(0) == [["b", "a"]]
    assert late_of(script) == ((1, 0), (0, 8 * MS))


def test_of_many_only_the_last_are_told() -> None:
    script = Script(3 * MAX_STRAGGLERS)
    for rank in range(script.size):
        script.say(rank, allgather("w"), now_ns=rank * MS)
    script.flush()
    assert [rank for rank, _ in late_of(script)] == list(range(script.size - 1, script.size - 1 - MAX_STRAGGLERS, -1))


def test_who_has_joined_is_never_late() -> None:
    script = Script(3)
    script.say(2, join(), now_ns=1 * MS)
    script.say(0, allreduce("w"), now_ns=10 * MS)
    script.say(1, allreduce("w"), now_ns=30 * MS)
    script.flush()
    for rank in range(3):
        assert late_of(script, rank) == ((1, 0), (0, 20 * MS))
