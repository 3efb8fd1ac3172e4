"""`ronde run` on several hosts, over real ssh: ranks meet, a host that cannot be used is named with its reason, and
however a job ends, nothing is left on any host.
"""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from ronde.net.addresses import parse_address
from tests.jobs.kit import SshHosts, needs_hosts, script

pytestmark = needs_hosts

NO_RONDE = "/usr/bin/env"
"""Exists, and is no Python with ronde."""


def places(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Where the ranks of a job say that they are."""
    assert done.returncode == 0, done.stderr
    return sorted(line.split("placed ")[1] for line in done.stdout.splitlines())


def test_ranks_on_three_hosts_meet_and_nobody_sees_their_key(hosts: SshHosts) -> None:
    a, b, c = hosts.addresses
    done = hosts.run("-H", f"{a}:1,{b}:2,{c}:1", "-np", "4", *script("ronde_run", "add"))
    assert places(done) == [f"0 0 1 0 {a}", f"1 0 2 1 {a}", f"2 1 2 0 {a}", f"3 0 1 2 {a}"]


def test_tensorflows_workers_have_the_addresses_of_their_hosts(hosts: SshHosts) -> None:
    a, b, _ = hosts.addresses
    done = hosts.run("-H", f"{a}:1,{b}:2", "--no-fold", "printenv", "TF_CONFIG")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    assert [each["task"] for each in found] == [{"type": "worker", "index": rank} for rank in range(3)]
    workers = [parse_address(worker) for worker in found[0]["cluster"]["worker"]]
    assert [host for host, _ in workers] == [a, b, b] and len({*workers}) == 3


def test_the_driver_need_not_be_on_a_host_with_ranks(hosts: SshHosts) -> None:
    _, b, c = hosts.addresses
    done = hosts.run("-H", f"{b},{c}", "-np", "2", *script("ronde_run", "add"))
    assert places(done) == [f"0 0 1 0 {b}", f"1 0 1 1 {b}"]


@pytest.mark.parametrize(
    ("how", "flags", "reason"),
    [
        ({"identity": "other"}, [], "Permission denied"),
        ({"known": "known-otherwise"}, [], "host key is not trusted"),
        ({"port": 9}, [], "Connection refused"),
        ({}, ["--python", "/nowhere/python"], "there is no /nowhere/python"),
        ({}, ["--python", NO_RONDE], "its agent has ended (exited with code"),
    ],
    ids=["wrong key", "host key", "refused", "no python", "wrong python"],
)
def test_a_host_that_cannot_be_used_is_named_with_the_reason(
    hosts: SshHosts, how: dict[str, object], flags: list[str], reason: str
) -> None:
    a, b, c = hosts.addresses
    done = hosts.run("-H", f"{a},{b},{c}", "-np", "3", *flags, "true", **how)
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "2 of 3 hosts cannot be used:"
    for address, line in zip((b, c), lines[1:], strict=True):
        assert line.startswith(f"  {address}: ") and reason in line


def test_an_unknown_name_is_told_from_hosts_that_are_well(hosts: SshHosts) -> None:
    a, b, _ = hosts.addresses
    done = hosts.run("-H", f"{a},{b},nowhere.invalid", "-np", "3", "true")
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("1 of 3 hosts cannot be used:\n  nowhere.invalid: its name is not known")


def test_when_a_host_dies_its_ranks_are_named_and_the_job_ends(hosts: SshHosts) -> None:
    a, b, _ = hosts.addresses
    with hosts.start("-H", f"{a}:1,{b}:2", "-np", "3", "--no-fold", *script("ronde_run", "step")) as job:
        job.read_lines(3)
        hosts.hang_up(1)
        code, _, printed = job.result()
    assert code == 255, printed
    assert f"ranks 1, 2 on host {b} ended when the connection to it was lost" in printed
    assert "1 other rank ended in consequence" in printed


def test_a_cut_network_ends_the_job_on_both_sides(hosts: SshHosts) -> None:
    a, b, _ = hosts.addresses
    words = ("-H", f"{a},{b}", "-np", "2", "--no-fold", "--grace", "0.1", *script("ronde_run", "stay"))
    with hosts.start(*words, heartbeat_s=1.5) as job:
        job.read_lines(2)
        hosts.cut(1)
        try:
            code, _, printed = job.result()
            hosts.await_nothing_left(ignored="sshd:")  # which waits for its network, not for us
        finally:
            hosts.cut(1, "up")
            hosts.hang_up(1)
    assert code == 255, printed
    assert f"rank 1 on host {b} ended when the connection to it was lost" in printed


def test_ctrl_c_ends_every_host_within_seconds(hosts: SshHosts) -> None:
    a, b, c = hosts.addresses
    with hosts.start("-H", f"{a},{b},{c}", "-np", "3", "--no-fold", *script("ronde_run", "stay")) as job:
        job.read_lines(3)
        job.driver.send_signal(signal.SIGINT)
        code, _, printed = job.result()
    assert code == 130, printed
    assert "interrupted by Ctrl-C" in printed


def test_a_killed_driver_takes_everything_with_it(hosts: SshHosts) -> None:
    a, b, c = hosts.addresses
    with hosts.start("-H", f"{a},{b},{c}", "-np", "3", "--no-fold", *script("ronde_run", "stay")) as job:
        job.read_lines(3)
        job.driver.kill()
        job.result()
