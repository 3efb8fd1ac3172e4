"""How a round ends: ranks leave, die or hang on, and the coordinator itself may break."""

from __future__ import annotations

import logging
import subprocess
import threading
import time

import pytest

from ronde.comm.joining import connect_to_coordinator
from ronde.coordinator.membership import LeaveReason
from ronde.coordinator.rounds import Round
from ronde.errors import StartFailed
from ronde.net.messages import (
    EndRound,
    JoinRefused,
    LeaveConfirmed,
    LeaveRound,
    OperationRejected,
    RankLost,
    RoundStarted,
)
from ronde.types import Deadline
from tests.unit.comm.scripted_ranks import KEY, PATIENCE_S, Job, allreduce

# --- leaving and dying -----------------------------------------------------------------------------------------------


def test_a_death_is_told_to_all_at_once(job: Job) -> None:
    ranks = job.gather(3)
    ranks[1].die()
    began = time.monotonic()
    assert ranks[0].hear(RankLost) == ranks[2].hear(RankLost) == RankLost(1, "its process is gone")
    assert time.monotonic() - began < 1.0


def test_a_rank_whose_process_is_gone_is_lost_though_its_connection_stays_open(job: Job) -> None:
    """As when a child of the process has inherited the connection."""
    process = subprocess.Popen(["sleep", "1000"])
    job.start(2, stall_s=0.1)
    first, second = job.come(0), job.come(1)
    first.join(2)
    second.join(2, pid=process.pid)
    first.hear(RoundStarted)
    first.say(allreduce("w"))
    process.kill()
    process.wait()
    assert first.hear(RankLost) == RankLost(1, "its process is gone")


def test_the_last_words_of_a_rank_are_told(job: Job) -> None:
    ranks = job.gather(2)
    ranks[1].say(LeaveRound(orderly=False, reason="exited: ValueError: boom"))
    ranks[1].hear(LeaveConfirmed)
    assert ranks[0].hear(RankLost) == RankLost(1, "exited: ValueError: boom")


def test_the_words_of_the_launcher_are_told(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    job.coordinator.rank_exited(1, "killed by signal 9")
    ranks[1].die()
    assert ranks[0].hear(RankLost) == RankLost(1, "killed by signal 9")


def test_a_rank_that_left_in_good_order_is_told_to_the_others_after_a_while(job: Job) -> None:
    ranks = job.gather(2)
    began = time.monotonic()
    ranks[1].leave()
    assert ranks[0].hear(RankLost) == RankLost(1, "it has left the round by shutdown()")
    assert time.monotonic() - began > 0.15  # shutdown_s is 0.2 here


def test_a_rank_whose_script_just_ends_is_missed_but_not_shown_as_lost(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    ranks[1].say(LeaveRound(orderly=True, reason="exited without shutdown"))
    assert ranks[0].hear(RankLost) == RankLost(1, "exited without shutdown")
    shown = job.coordinator.activity().ranks[1]
    assert (shown.state, shown.why) == ("left", "has come to the end of its script")
    lost = job.coordinator.first_lost()
    assert lost is not None and (lost[0], lost[1].reason) == (1, LeaveReason.SCRIPT_ENDED)


def test_what_is_asked_of_a_lost_rank_fails(job: Job) -> None:
    ranks = job.gather(2)
    ranks[1].die()
    ranks[0].hear(RankLost)
    ranks[0].say(allreduce("w"))
    assert ranks[0].hear(OperationRejected).reason == "allreduce 'w': rank 1 is gone: its process is gone"


def test_when_all_have_left_a_coordinator_of_one_round_ends(job: Job) -> None:
    for rank in job.gather(2):
        rank.leave()
    assert job.coordinator.wait(PATIENCE_S)


def test_closing_waits_for_those_who_have_not_left(job: Job) -> None:
    first, second = job.gather(2, shutdown_s=PATIENCE_S)
    first.leave()
    closer = threading.Thread(target=job.coordinator.close)
    closer.start()
    assert not second.has_heard(EndRound)
    second.leave()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()


def test_who_does_not_leave_in_time_hears_that_it_is_over(job: Job) -> None:
    first, second = job.gather(2)
    first.leave()
    job.coordinator.close()
    assert "closed by its host" in second.hear(EndRound).reason


def test_a_launchers_coordinator_serves_round_after_round(job: Job) -> None:
    job.start(2, rounds=None)
    for _ in range(3):
        for rank in job.join(2):
            rank.leave()


def test_who_comes_early_to_the_next_round_waits_for_the_others_to_leave_this_one(job: Job) -> None:
    first, second = job.gather(2, rounds=None, shutdown_s=PATIENCE_S)
    first.leave()
    early = job.come(0)
    early.join(2)
    assert not early.has_heard(RoundStarted)
    second.leave()
    late = job.come(1)
    late.join(2)
    assert early.hear(RoundStarted).round == late.hear(RoundStarted).round == 1


def test_who_comes_early_where_rank_0_hosts_calls_until_the_next_coordinator_is_there(job: Job) -> None:
    first, second = job.gather(2, shutdown_s=PATIENCE_S)
    second.leave()
    with pytest.raises(StartFailed, match=r"rank 1 was not let in within 0\.1 s: the round before is not over"):
        connect_to_coordinator(job.coordinator.address, KEY, 1, round=1, deadline=Deadline(0.1), heartbeat_s=10.0)
    first.leave()


def test_after_a_death_the_survivors_do_not_wait_for_the_dead(job: Job) -> None:
    ranks = job.gather(2, rounds=None)
    ranks[1].die()
    ranks[0].hear(RankLost)
    ranks[0].leave()
    again = job.come(0)
    again.join(2)
    assert again.hear(JoinRefused).reason == "rank 1 ended before the round began (its process is gone)"


def test_a_coordinator_that_breaks_ends_the_round_for_everybody(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = job.gather(2)

    def broken(*_: object) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(Round, "handle", broken)
    with caplog.at_level(logging.CRITICAL, "ronde.coordinator"):
        ranks[0].say(allreduce("w"))
        assert [rank.hear(EndRound).reason for rank in ranks] == [
            "the coordinator broke: RuntimeError('a mistake of ours')"
        ] * 2
    assert ranks[1].line.recv(1) == b""
