"""Links between hosts: a rank is connected with those that its operations send to and receive from, and no others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from ronde.settings import Settings
from ronde.types import Deadline
from tests.jobs.kit import LocalRanks, start_ranks
from tests.limits import OPERATION_S, PATIENCE_S, promised_s

NUM_SOCKETS = 3
SETTINGS = Settings(operation_s=OPERATION_S, start_s=OPERATION_S, stall_s=0.0, num_sockets=NUM_SOCKETS)


@contextmanager
def ranks_on_hosts(
    num_ranks: int, num_hosts: int, settings: Settings = SETTINGS, impatient: int = -1
) -> Iterator[LocalRanks]:
    """The impatient rank gives an operation one second."""
    env = {"TEST_NUM_HOSTS": str(num_hosts), "TEST_IMPATIENT": str(impatient)}
    with start_ranks("links", num_ranks, settings=settings, env=env) as job:
        yield job


def start(job: LocalRanks, ranks: Iterable[int], action: str) -> None:
    job.send(ranks, action=action)
    job.receive_all(ranks, "started")


def act(job: LocalRanks, num_ranks: int, action: str) -> list[dict[str, int]]:
    """What each rank reports after the action."""
    start(job, range(num_ranks), action)
    done = job.receive_all(range(num_ranks), "done")
    return [done[rank] for rank in range(num_ranks)]


def leave(job: LocalRanks, num_ranks: int) -> None:
    job.send(range(num_ranks), action="leave")
    job.receive_all(range(num_ranks), "left")
    assert job.wait() == [0] * num_ranks, job.printed()


def test_init_connects_no_ranks_of_different_hosts() -> None:
    with ranks_on_hosts(4, 4) as job:
        joined = job.receive_all(range(4), "joined")
        assert [(each["opened"], each["accepted"]) for each in joined.values()] == [(0, 0)] * 4
        leave(job, 4)


def test_training_with_one_optimizer_connects_neighbours_of_rings_and_trees_only() -> None:
    """Six hosts with two ranks each. A ring has one neighbour to send to, recursive doubling and the match of calls
    log2(hosts) of them; only the first rank of a host matches."""
    with ranks_on_hosts(12, 6) as job:
        job.receive_all(range(12), "joined")
        act(job, 12, "init only")  # one barrier
        for count in act(job, 12, "plan"):
            ring, doubling, matching, agreement = NUM_SOCKETS, 3, 3, NUM_SOCKETS
            assert 0 < count["opened"] <= ring + doubling + matching + agreement
            assert 0 < count["accepted"] <= ring + doubling + matching + agreement
        leave(job, 12)


def test_a_ring_has_as_many_sockets_as_the_settings_say_and_everything_else_one() -> None:
    with ranks_on_hosts(2, 2) as job:
        job.receive_all([0, 1], "joined")
        for count in act(job, 2, "small"):
            assert (count["opened"], count["accepted"]) == (1, 1)
        for count in act(job, 2, "large"):
            assert (count["opened"], count["accepted"]) == (1 + NUM_SOCKETS, 1 + NUM_SOCKETS)
        leave(job, 2)


def test_links_end_with_their_channel_and_nothing_is_left_open() -> None:
    with ranks_on_hosts(3, 3) as job:
        job.receive_all(range(3), "joined")
        act(job, 3, "close plan")  # what is opened once stays
        before = act(job, 3, "close plan")
        for _ in range(3):
            after = act(job, 3, "close plan")
        for rank in range(3):
            # A rank may still close its own end when another one counts.
            assert after[rank]["files"] <= before[rank]["files"] + 2 * NUM_SOCKETS, (before, after)
        leave(job, 3)


def test_all_pairs_open_links_to_each_other_at_once() -> None:
    with ranks_on_hosts(6, 6) as job:
        job.receive_all(range(6), "joined")
        for count in act(job, 6, "all to all"):
            assert count["opened"] >= 5 and count["accepted"] >= 5
        leave(job, 6)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_does_not_answer_is_named_with_its_host_and_address(stopped: int) -> None:
    """The kernel of a stopped rank takes the connection, and nobody proves the key."""
    settings = SETTINGS.replace(operation_s=5.0)  # on a busy machine a connection takes its time
    with ranks_on_hosts(2, 2, settings) as job:
        job.receive_all([0, 1], "joined")
        os.kill(job.pids[stopped], signal.SIGSTOP)
        other = 1 - stopped
        start(job, [other], "small")
        failed = job.receive(other, "failed")
        os.kill(job.pids[stopped], signal.SIGCONT)
        assert failed["error"] == "OperationTimeout" and failed["missing"] == [stopped], failed
        reason = f"rank {other} on host host-{other} cannot reach it on host host-{stopped}: "
        assert reason in failed["text"] and "something listens there but does not answer" in failed["text"], failed
        assert "127.0.0.1:" in failed["text"] or "could not connect to " in failed["text"], failed
        start(job, [stopped], "small")
        # It learns of the abort, or that the other one has left.
        assert job.receive(stopped, "failed")["error"] in ("RoundEnded", "PeerLost")


def test_a_rank_that_runs_out_of_time_ends_the_others_within_a_second() -> None:
    """Ranks 1 and 2 wait for rank 0 until the abort: they have more time than rank 3."""
    with ranks_on_hosts(4, 4, impatient=3) as job:
        job.receive_all(range(4), "joined")
        start(job, [1, 2, 3], "large")
        failed = job.receive(3, "failed")
        assert failed["error"] == "OperationTimeout", failed
        for rank in (1, 2):
            told = job.receive(rank, "failed")
            assert told["error"] == "RoundEnded" and "timed out on another member" in told["text"], told
            assert told["at"] - failed["at"] < promised_s(1.0), (told, failed)


def test_a_death_while_links_are_opened_is_told_at_once() -> None:
    """The stopped rank never answers; its death ends all attempts to connect to it."""
    with ranks_on_hosts(3, 3) as job:
        job.receive_all(range(3), "joined")
        os.kill(job.pids[2], signal.SIGSTOP)
        start(job, [0, 1], "large")
        os.kill(job.pids[2], signal.SIGKILL)
        for rank in (0, 1):
            told = job.receive(rank, "failed")
            assert told["error"] == "PeerLost" and "rank 2" in told["text"], told


@contextmanager
def waiting_for_a_link() -> Iterator[LocalRanks]:
    """Rank 0 waits for its link to rank 1, which is stopped."""
    with ranks_on_hosts(2, 2) as job:
        job.receive_all([0, 1], "joined")
        os.kill(job.pids[1], signal.SIGSTOP)
        start(job, [0], "large")
        is_connecting = psutil.Process(job.pids[0]).net_connections
        deadline = Deadline(PATIENCE_S)
        while not any(each.raddr and each.raddr.port == listening_port(job.pids[1]) for each in is_connecting("tcp")):
            assert not deadline.expired
            time.sleep(0.001)
        yield job


def listening_port(pid: int) -> int:
    """Of the rank's listener, the only TCP port that it listens on."""
    found = psutil.Process(pid).net_connections("tcp")
    return next(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGUSR1, "RoundEnded")])
def test_a_signal_handler_ends_the_wait_for_a_link(number: signal.Signals, error: str) -> None:
    with waiting_for_a_link() as job:
        os.kill(job.pids[0], number)
        sent_at = time.monotonic()
        failed = job.receive(0, "failed")
        assert failed["error"] == error, failed
        assert failed["at"] - sent_at < promised_s(1.0), failed
        os.kill(job.pids[1], signal.SIGCONT)
        start(job, [1], "large")
        told = job.receive(1, "failed")
        assert told["error"] in ("PeerLost", "RoundEnded"), told


def test_a_process_that_is_forked_while_a_link_is_opened_changes_nothing() -> None:
    with waiting_for_a_link() as job:
        os.kill(job.pids[0], signal.SIGUSR2)
        deadline = Deadline(PATIENCE_S)
        while not (children := psutil.Process(job.pids[0]).children()):
            assert not deadline.expired
            time.sleep(0.001)
        os.kill(job.pids[1], signal.SIGCONT)
        start(job, [1], "large")
        job.receive_all([0, 1], "done")
        for _ in range(2):
            act(job, 2, "close plan")
        ports = {listening_port(pid) for pid in job.pids.values()}
        for child in children:
            assert not [each for each in child.net_connections("tcp") if ports & {each.laddr.port, *each.raddr[1:]}]
            child.kill()
        leave(job, 2)
