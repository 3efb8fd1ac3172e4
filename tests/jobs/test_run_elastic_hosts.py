"""`ronde run --min-np` on several hosts: hosts come, go, flap and are cut off, and every sample of the epoch is in the
weights exactly once (the script checks that)."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ronde.types import Deadline
from tests.jobs.kit import RondeRun, SshHosts, needs_hosts, script
from tests.jobs.test_run_elastic import COOLDOWN, FLAGS, Event, environment, finished
from tests.limits import LONG_S, PATIENCE_S

pytestmark = needs_hosts


def start(
    hosts: SshHosts, *words: str, events: Sequence[Event], folder: Path, cooldown: Sequence[str] = COOLDOWN
) -> RondeRun:
    command = hosts.command(*FLAGS, *cooldown, *words, *script("elastic_run"))
    return RondeRun(command=command, env=environment(events, folder))


def test_a_host_that_is_added_joins_and_one_that_is_removed_leaves_in_good_order(
    hosts: SshHosts, tmp_path: Path
) -> None:
    a, b, c = hosts.addresses
    (tmp_path / "hosts").write_text(f"{a}\n{b}\n")
    events = [
        ("rank 0", 12, f"write hosts {a},{b},{c}"),
        ("rank 0", 12, "await"),
        ("rank 0", 36, f"write hosts {a},{c}"),
        ("rank 1", 36, "await"),
    ]
    words = ("-np", "2", "--min-np", "1", "--max-np", "3", "--hostfile", str(tmp_path / "hosts"))
    with start(hosts, *words, events=events, folder=tmp_path) as job:
        done = job.result(LONG_S)
    assert finished(done) == ["rank 0 of [2, 3, 2]", "rank 1 of [3, 2]"], done
    assert f"worker 1 on host {b} left in good order" in done.err


def test_a_host_that_is_lost_comes_back_after_its_cooldown(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, _ = hosts.addresses
    events = [("rank 1", 12, "print ready"), ("rank 1", 12, "await"), ("rank 0", 36, "grow 2")]
    with start(hosts, "-np", "2", "--min-np", "1", "-H", f"{a},{b}", events=events, folder=tmp_path) as job:
        assert job.read_lines(1) == ["[1] ready"]
        hosts.hang_up(1)
        done = job.result(LONG_S)
    assert finished(done) == ["rank 0 of [2, 1, 2]", "rank 1 of [2]"], done
    assert f"worker 1 on host {b} ended when the connection to it was lost" in done.err


def test_a_host_whose_link_is_cut_is_lost_and_the_others_go_on(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, _ = hosts.addresses
    events = [("rank 1", 12, "print ready"), ("rank 1", 12, "await")]
    with start(hosts, "-np", "2", "--min-np", "1", "-H", f"{a},{b}", events=events, folder=tmp_path) as job:
        assert job.read_lines(1) == ["[1] ready"]
        hosts.cut(1)
        try:
            done = job.result(LONG_S)
            hosts.await_nothing_left(ignored="sshd:")  # which waits for its network, not for us
        finally:
            hosts.cut(1, "up")
            hosts.hang_up(1)
    assert finished(done) == ["rank 0 of [2, 1]"], done


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_link_that_is_cut_in_one_direction_costs_the_host_behind_it(
    deaf: int, hosts: SshHosts, tmp_path: Path
) -> None:
    """Host 0, with the driver and the coordinator, hears nothing of host 1, or host 1 nothing of the rest."""
    a, b, _ = hosts.addresses
    events = [("rank 1", 12, "print ready"), ("rank 1", 12, "await")]
    with start(hosts, "-np", "2", "--min-np", "1", "-H", f"{a},{b}", events=events, folder=tmp_path) as job:
        assert job.read_lines(1) == ["[1] ready"]
        with hosts.cut_one_way(deaf):
            done = job.result(LONG_S)
            hosts.await_nothing_left(ignored="sshd:")  # which waits for its network, not for us
        hosts.hang_up(1)
    assert finished(done) == ["rank 0 of [2, 1]"], done


def test_a_cut_between_two_hosts_that_both_reach_the_driver_costs_one_of_them(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, c = hosts.addresses
    events = [("rank 2", 12, "print ready"), ("rank 2", 12, "file go")]
    words = ("-np", "3", "--min-np", "2", "-H", f"{a},{b},{c}")
    # Without one of them for the rest of the job: another worker there would cost a round again.
    with start(hosts, *words, events=events, folder=tmp_path, cooldown=("--cooldown", "1000", "1000")) as job:
        assert job.read_lines(1) == ["[2] ready"]
        hosts.cut_between(1, 2)
        try:
            (tmp_path / "go").touch()
            done = job.result(LONG_S)
        finally:
            hosts.heal_between(1, 2)
    first, second = finished(done)
    assert first.startswith("rank 0 of [3, ") and first.endswith(", 2]"), done
    assert second == first.replace("rank 0", "rank 1"), done
    assert "is the network between the hosts cut?" in done.err, done


def test_a_host_whose_link_is_cut_and_healed_is_refused_and_comes_back_with_a_new_worker(
    hosts: SshHosts, tmp_path: Path
) -> None:
    a, b, _ = hosts.addresses
    events = [("rank 1", 12, "print ready"), ("rank 1", 12, "await"), ("rank 0", 36, "grow 2")]
    with start(hosts, "-np", "2", "--min-np", "1", "-H", f"{a},{b}", events=events, folder=tmp_path) as job:
        assert job.read_lines(1) == ["[1] ready"]
        hosts.cut(1)
        try:
            before = job.read_errors_until("round 1: 1 rank")
        finally:
            hosts.cut(1, "up")
        done = job.result(LONG_S)
        hosts.hang_up(1)
    assert finished(done) == ["rank 0 of [2, 1, 2]", "rank 1 of [2]"], (before, done)
    assert "[1] done" not in done.out


def test_an_agent_that_is_killed_costs_its_host_which_comes_back(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, _ = hosts.addresses
    events = [("rank 1", 12, "print ready"), ("rank 1", 12, "await"), ("rank 0", 36, "grow 2")]
    with start(hosts, "-np", "2", "--min-np", "1", "-H", f"{a},{b}", events=events, folder=tmp_path) as job:
        assert job.read_lines(1) == ["[1] ready"]
        (agent,) = (each for each in hosts.processes(1) if is_agent(each))
        agent.kill()
        done = job.result(LONG_S)
    assert finished(done) == ["rank 0 of [2, 1, 2]", "rank 1 of [2]"], done


def test_one_host_comes_and_another_one_goes_in_the_same_round(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, c = hosts.addresses
    (tmp_path / "hosts").write_text(f"{a}\n{b}\n")
    # Rank 0 hears of the newcomer, and rank 1 was told to go long before that.
    events = [("rank 0", 12, f"write hosts {a},{c}"), ("rank 0", 12, "await"), ("rank 1", 12, "await")]
    words = ("-np", "2", "--min-np", "1", "--max-np", "3", "--hostfile", str(tmp_path / "hosts"))
    with start(hosts, *words, events=events, folder=tmp_path) as job:
        done = job.result(LONG_S)
    assert finished(done) == ["rank 0 of [2, 2]", "rank 1 of [2]"], done
    assert f"worker 1 on host {b} left in good order" in done.err
    assert "[2] done" in done.out, "the one of the new host"


def test_a_host_that_comes_and_goes_costs_the_others_nothing_but_the_changes(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, c = hosts.addresses
    few, all_of_them = f"write hosts {a},{b}", f"write hosts {a},{b},{c}"
    (tmp_path / "hosts").write_text(f"{a}\n{b}\n")
    events = []
    for position in (6, 24, 42):
        events += [("rank 0", position, all_of_them), ("rank 0", position, "await")]
        events += [("rank 0", position + 6, few), ("rank 2", position + 6, "await")]
    words = ("-np", "2", "--min-np", "2", "--max-np", "3", "--hostfile", str(tmp_path / "hosts"))
    with start(hosts, *words, events=events, folder=tmp_path) as job:
        done = job.result(LONG_S)
    sizes = [2, 3, 2, 3, 2, 3, 2]
    assert finished(done) == [f"rank 0 of {sizes}", f"rank 1 of {sizes}"], done
    assert done.err.count("left in good order") >= 3, done


def test_a_host_that_fails_again_and_again_is_left_alone_for_longer_each_time(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, c = hosts.addresses
    events = [("rank 0", 12, "file go"), ("rank 0", 36, "grow 3")]
    words = ("-np", "2", "--min-np", "2", "--max-np", "3", "-H", f"{a},{b},{c}")
    cooldown = ("--cooldown", "0.1", "60")
    with start(hosts, *words, events=events, folder=tmp_path, cooldown=cooldown) as job:
        printed = ""
        for _ in range(4):
            await_agent_with_worker(hosts, 2).kill()
            printed += job.read_errors_until("it is left alone for ")
        (tmp_path / "go").touch()
        done = job.result(LONG_S)
    assert re.findall(rf"host {c}: .* left alone for ([\d.]+) s", printed) == ["0.1", "0.2", "0.4", "0.8"], printed
    first, second, third = finished(done)
    assert first.startswith("rank 0 of [2, ") and first.endswith("3]"), done
    assert second == first.replace("rank 0", "rank 1") and third == "rank 2 of [3]", done


def await_agent_with_worker(hosts: SshHosts, index: int) -> psutil.Process:
    """The agent on a host, as soon as it has started a worker."""
    deadline = Deadline(PATIENCE_S)
    while not deadline.expired:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in filter(is_agent, hosts.processes(index)):
                if any("tests.jobs.scripts.elastic_run" in child.cmdline() for child in process.children()):
                    return process
        time.sleep(0.02)
    raise TimeoutError(f"no worker was started on host {index}")


def test_an_agent_that_is_terminated_lets_its_workers_leave_in_good_order(hosts: SshHosts, tmp_path: Path) -> None:
    a, b, _ = hosts.addresses
    events = [("rank 1", 12, "print ready"), ("rank 1", 12, "await")]
    words = ("-np", "2", "--min-np", "1", "--terminate", str(PATIENCE_S), "-H", f"{a},{b}")
    with start(hosts, *words, events=events, folder=tmp_path) as job:
        assert job.read_lines(1) == ["[1] ready"]
        (agent,) = (each for each in hosts.processes(1) if is_agent(each))
        agent.send_signal(signal.SIGTERM)
        done = job.result(LONG_S)
    assert any(line.startswith("rank 0 of [2, 1") for line in finished(done)), done
    assert f"host {b}: its agent ends its ranks (it got SIGTERM)" in done.err
    assert f"worker 1 on host {b} left in good order" in done.err


def is_agent(process: psutil.Process) -> bool:
    return process.cmdline()[1:] == ["-m", "ronde.launch.agent"]
