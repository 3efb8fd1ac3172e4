"""Elastic training with real processes: ranks are killed, stopped, told to go and join at chosen points, and every
sample of the epoch is in the weights exactly once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from ronde.coordinator.round_planning import ElasticLimits
from ronde.settings import Settings
from ronde.types import Deadline
from tests.jobs.kit import LocalRanks, hosted_by_rank_0, start_ranks
from tests.jobs.scripts.elastic import NUM_SAMPLES
from tests.limits import OPERATION_S, PATIENCE_S, RANK_S

Fault = tuple[int, str, int, str]
SETTINGS = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, elastic_timeout_s=RANK_S)
KILLED = -signal.SIGKILL


@contextmanager
def training(
    num_ranks: int,
    faults: Sequence[Fault],
    *,
    min_ranks: int = 1,
    max_workers: int = 0,
    settings: Settings = SETTINGS,
    env: Mapping[str, str] | None = None,
) -> Iterator[LocalRanks]:
    """An elastic job of so many ranks, which have all called init()."""
    limits = ElasticLimits(
        start_ranks=num_ranks, min_ranks=min_ranks, timeout_s=settings.elastic_timeout_s, suspend_s=settings.suspend_s
    )
    env = {"TEST_FAULTS": json.dumps(faults), **(env or {})}
    with start_ranks("elastic", num_ranks, settings=settings, env=env, limits=limits, max_workers=max_workers) as ranks:
        for number, facts in ranks.receive_all(range(num_ranks), "initialized").items():
            assert (facts["rank"], facts["size"], facts["is_candidate"]) == (number, num_ranks, False)
        yield ranks


def expect_reached(ranks: LocalRanks, *faults: Fault) -> None:
    for number, point, _, _ in faults:
        assert ranks.receive(number, "reached")["point"] == point


def expect_exactly_once(
    ranks: LocalRanks, survivors: Sequence[int], sizes: Sequence[int] | None = None
) -> dict[int, dict[str, Any]]:
    """All of them finish, and each sample was used once. `sizes` are those of the rounds that they were in."""
    done = ranks.receive_all(survivors, "done")
    for number, facts in done.items():
        assert facts["counts"] == [1.0] * NUM_SAMPLES, (number, facts, ranks.printed())
        assert facts["result"] == "trained"
        assert sizes is None or facts["sizes"] == list(sizes), ranks.printed()
    return done


def wake(ranks: LocalRanks, number: int) -> None:
    """Let a worker go on that stops itself, as soon as it has stopped."""
    process, deadline = psutil.Process(ranks.pids[number]), Deadline(PATIENCE_S)
    while process.status() != psutil.STATUS_STOPPED:
        assert not deadline.expired, f"worker {number} does not stop"
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("point", ["compute", "reducing", "stepped", "ended"])
@pytest.mark.parametrize("victim", [0, 2])
def test_training_goes_on_when_a_rank_is_killed_in_a_step(point: str, victim: int) -> None:
    fault = (victim, point, 24, "kill")
    with training(3, [fault], env={"TEST_PADDING": "500000"} if point == "reducing" else None) as ranks:
        expect_reached(ranks, fault)
        survivors = [number for number in range(3) if number != victim]
        expect_exactly_once(ranks, survivors, sizes=[3, 2])
        assert ranks.wait() == [KILLED if number == victim else 0 for number in range(3)], ranks.printed()


def test_two_ranks_die_at_once() -> None:
    faults = [(0, "reducing", 24, "kill"), (3, "reducing", 24, "kill")]
    with training(4, faults) as ranks:
        expect_reached(ranks, *faults)
        expect_exactly_once(ranks, [1, 2])
        assert ranks.wait() == [KILLED, 0, 0, KILLED], ranks.printed()


def test_if_all_have_stepped_and_none_is_at_the_step_end_all_return_to_the_commit() -> None:
    fault = (1, "stepped", 30, "kill")
    with training(3, [fault], env={"TEST_METRICS": "1"}) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 2], sizes=[3, 2])
        assert ranks.wait() == [0, KILLED, 0], ranks.printed()


@pytest.mark.parametrize("point", ["leaving", "joining", "opening", "reset", "syncing"])
@pytest.mark.parametrize("second", [0, 2])
def test_a_second_rank_dies_while_the_others_change_the_round(point: str, second: int) -> None:
    faults = [(1, "reducing", 24, "kill"), (second, point, 24, "kill")]
    with training(4, faults) as ranks:
        expect_reached(ranks, *faults)
        expect_exactly_once(ranks, [number for number in (0, 2, 3) if number != second])
        assert [code for code in ranks.wait() if code] == [KILLED] * 2, ranks.printed()


def test_a_rank_dies_when_the_first_round_begins() -> None:
    fault = (1, "syncing", 0, "kill")
    with training(3, [fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 2])


def test_a_rank_dies_at_the_end() -> None:
    """Those that are through the last barrier are finished; the others hear of it, or do the rest again."""
    fault = (1, "finishing", 54, "kill")
    with training(3, [fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 2])
        assert ranks.wait() == [0, KILLED, 0], ranks.printed()


def test_who_is_not_through_the_last_barrier_hears_that_the_job_is_finished() -> None:
    fault = (2, "barrier", 54, "lose")
    with training(3, [fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 1, 2], sizes=[3])
        assert ranks.wait() == [0, 0, 0], ranks.printed()


def test_changes_of_the_round_leave_nothing_behind() -> None:
    faults = [(0, "compute", position, "change") for position in range(0, NUM_SAMPLES, 6)]
    with training(2, faults) as ranks:
        expect_reached(ranks, *faults)
        for facts in expect_exactly_once(ranks, [0, 1], sizes=[2] * 11).values():
            assert facts["resources"][-1] <= facts["resources"][1], facts["resources"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_told_to_go_leaves_after_the_step(victim: int) -> None:
    fault = (victim, "compute", 24, "terminate")
    with training(3, [fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [number for number in range(3) if number != victim], sizes=[3, 2])
        assert ranks.wait() == [0, 0, 0], ranks.printed()


def test_a_newcomer_joins_after_a_step() -> None:
    """Rank 1 is in a step until it is ready; nobody loses or repeats a step."""
    fault = (1, "compute", 24, "await change")
    with training(2, [fault], max_workers=3) as ranks:
        expect_reached(ranks, fault)
        assert ranks.start_worker() == 2
        facts = ranks.receive(2, "initialized")
        assert (facts["rank"], facts["size"], facts["is_candidate"]) == (2, 3, True)
        done = expect_exactly_once(ranks, [0, 1, 2])
        assert [done[number]["sizes"] for number in range(3)] == [[2, 3], [2, 3], [3]]
        assert {facts["steps"] for facts in done.values()} == {10}
        assert ranks.wait() == [0, 0, 0], ranks.printed()


def test_a_newcomer_that_comes_too_late_has_nothing_to_do() -> None:
    fault = (2, "joining", 0, "wait")
    with training(2, [(0, "compute", 24, "wait"), fault], max_workers=3) as ranks:
        expect_reached(ranks, (0, "compute", 24, "wait"))
        ranks.start_worker()
        assert ranks.receive(2, "initialized")["is_candidate"]
        expect_reached(ranks, fault)
        ranks.send([0], do="go on")
        expect_exactly_once(ranks, [0, 1], sizes=[2])
        os.waitid(os.P_PID, ranks.pids[0], os.WEXITED | os.WNOWAIT)
        ranks.send([2], do="go on")
        assert ranks.receive(2, "done")["result"] is None
        assert ranks.wait() == [0, 0, 0], ranks.printed()


def test_a_newcomer_and_a_giver_die_while_state_is_given() -> None:
    faults = [(0, "compute", 24, "await change"), (2, "syncing", 0, "kill"), (0, "syncing", 24, "kill")]
    with training(2, faults, max_workers=3) as ranks:
        expect_reached(ranks, faults[0])
        ranks.start_worker()
        assert ranks.receive(2, "initialized")["is_candidate"]
        expect_reached(ranks, faults[1], faults[2])
        expect_exactly_once(ranks, [1])
        assert ranks.wait() == [KILLED, 0, KILLED], ranks.printed()


@pytest.mark.parametrize(("how", "code"), [("kill", KILLED), ("terminate", 0)])
def test_one_rank_goes_and_another_one_comes_in_the_same_round(how: str, code: int) -> None:
    """Both members know of the newcomer when rank 1 is killed, or told to go."""
    faults = [(0, "compute", 24, "await change"), (1, "compute", 24, "await change"), (1, "reducing", 24, how)]
    with training(3, faults, max_workers=4) as ranks:
        expect_reached(ranks, faults[0], faults[1])
        ranks.start_worker()
        assert ranks.receive(3, "initialized")["is_candidate"]
        expect_reached(ranks, faults[2])
        done = expect_exactly_once(ranks, [0, 2, 3])
        assert [done[number]["sizes"] for number in (0, 2, 3)] == [[3, 3], [3, 3], [3]]
        assert ranks.wait() == [0, code, 0, 0], ranks.printed()


def test_below_the_least_number_it_waits_for_another_one() -> None:
    fault = (1, "reducing", 24, "kill")
    with training(2, [fault], min_ranks=2, max_workers=3) as ranks:
        expect_reached(ranks, fault)
        ranks.start_worker()
        ranks.receive(2, "initialized")
        expect_exactly_once(ranks, [0, 2])
        assert ranks.wait() == [0, KILLED, 0], ranks.printed()


def test_a_rank_that_is_stopped_for_a_moment_is_not_lost() -> None:
    fault = (1, "compute", 24, "stop")
    with training(3, [fault]) as ranks:
        expect_reached(ranks, fault)
        wake(ranks, 1)
        expect_exactly_once(ranks, [0, 1, 2], sizes=[3])
        assert ranks.wait() == [0, 0, 0], ranks.printed()


@pytest.mark.parametrize("point", ["compute", "opening"])
def test_a_rank_that_is_stopped_for_long_is_left_behind(point: str) -> None:
    """And when it wakes up, it is refused."""
    faults = [(1, point, 24, "stop"), (2, "reducing", 24, "kill")]
    with training(4, faults, settings=SETTINGS.replace(suspend_s=2.0)) as ranks:
        expect_reached(ranks, *faults)
        expect_exactly_once(ranks, [0, 3])
        wake(ranks, 1)
        codes = ranks.wait()
        assert codes == [0, 1, KILLED, 0], ranks.printed()
        assert "the others have gone on without it" in ranks.output(1)


def test_a_rank_that_hangs_outside_of_ronde_is_left_behind() -> None:
    """The others have waited for it in an operation. When it goes on, it is refused."""
    fault = (1, "compute", 24, "wait")
    with training(3, [fault], settings=SETTINGS.replace(operation_s=4.0, suspend_s=5.0)) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 2])
        ranks.send([1], do="go on")
        assert ranks.wait() == [0, 1, 0], ranks.printed()
        assert "did not come back from a round that was over" in ranks.output(1)


def test_an_error_of_the_user_ends_the_rank_and_not_the_job() -> None:
    fault = (1, "compute", 24, "raise")
    with training(3, [fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 2], sizes=[3, 2])
        assert ranks.wait() == [0, 1, 0] and "ValueError: a mistake of the user" in ranks.output(1)


# --- rank 0 hosts the coordinator ----------------------------------------------------------------------------------


@contextmanager
def training_at_rank_0(faults: Sequence[Fault]) -> Iterator[LocalRanks]:
    """Three ranks without a launcher that could help them."""
    given = {**hosted_by_rank_0(), "operation_s": OPERATION_S, "start_s": OPERATION_S, "heartbeat_s": 2.0}
    env = {"TEST_FAULTS": json.dumps(faults), "TEST_SETTINGS": json.dumps(given)}
    with start_ranks("elastic", 3, env=env) as ranks:
        ranks.receive_all(range(3), "initialized")
        yield ranks


@pytest.mark.parametrize("point", ["compute", "reducing", "finishing"])
def test_without_a_launcher_the_others_go_on(point: str) -> None:
    fault = (1, point, 54, "kill")
    with training_at_rank_0([fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 2])
        assert ranks.wait() == [0, KILLED, 0], ranks.printed()


def test_without_a_launcher_too_who_is_not_through_the_last_barrier_hears_of_the_end() -> None:
    fault = (2, "barrier", 54, "lose")
    with training_at_rank_0([fault]) as ranks:
        expect_reached(ranks, fault)
        expect_exactly_once(ranks, [0, 1, 2], sizes=[3])
        assert ranks.wait() == [0, 0, 0], ranks.printed()


def test_without_a_launcher_a_rank_may_be_told_to_go_and_another_one_lost() -> None:
    faults = [(2, "compute", 12, "terminate"), (1, "compute", 36, "kill")]
    with training_at_rank_0(faults) as ranks:
        expect_reached(ranks, *faults)
        expect_exactly_once(ranks, [0], sizes=[3, 2, 1])
        assert ranks.wait() == [0, KILLED, 143], ranks.printed()


def test_without_a_launcher_the_loss_of_rank_0_is_a_clear_end() -> None:
    fault = (0, "reducing", 24, "kill")
    with training_at_rank_0([fault]) as ranks:
        expect_reached(ranks, fault)
        assert ranks.wait() == [KILLED, 1, 1], ranks.printed()
        for number in (1, 2):
            assert "rank 0 is lost, and it hosted the coordinator of this job" in ranks.output(number)
