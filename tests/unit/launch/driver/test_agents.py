"""The agents of all hosts: started at once, each that cannot be used with its reason. ssh is a script here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ronde.errors import StartFailed
from ronde.launch.driver.agents import LOCALHOST_NAMES, AgentGroup, LocalMachine, StartCancelled
from ronde.launch.job import Job, SshOptions
from ronde.launch.network import LOOPBACK
from ronde.launch.placement import Host
from ronde.net.event_loop import EventLoop
from ronde.net.keys import new_job_key
from tests.limits import promised_s

SSH = """
while [ "$1" != -- ]; do shift; done
case $2 in
old | newer) exec {python} -c '{hello}' "$2" ;;
silent) exec sleep 1000 ;;
refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
broken) exec {python} -c '{failed}' ;;
*) exec sh -c "$3" ;;
esac
"""
BEGIN = """
import os, sys
from ronde.launch.protocol import PREAMBLE, AgentError, AgentHello, encode_frame
"""
HELLO = f"""{BEGIN}
version, python = ("0.0.1", "3.10.1") if sys.argv[1] == "old" else ("{{version}}", "3.99.0")
os.write(1, PREAMBLE + encode_frame(AgentHello(version, python, "elsewhere", (0,), 1)))
os.read(0, 1)
"""
FAILED = f"""{BEGIN}
os.write(1, PREAMBLE + encode_frame(AgentError("its disk is full")))
os.read(0, 1)
"""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ronde.version import __version__

    hello = HELLO.replace("{version}", __version__)
    path = tmp_path / "ssh"
    path.write_text("#!/bin/sh" + SSH.format(python=sys.executable, hello=hello, failed=FAILED))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@contextmanager
def agents_of(names: Sequence[str], *, start_s: float = 20.0, call: bytes = b"") -> Iterator[AgentGroup]:
    options = SshOptions(start_s=start_s)
    hosts = tuple(Host(name) for name in names)
    job = Job(command=("true",), num_ranks=len(names), hosts=hosts, ssh=options, cwd="/", pickled_call=call)
    with closing(EventLoop()) as loop, closing(AgentGroup(loop, job)) as agents:
        yield agents


def test_this_machine_alone_needs_no_ssh_and_no_probing() -> None:
    with agents_of(["localhost"]) as alone:
        alone.start_agents()
        network = alone.probe_network(new_job_key(), [3])
    assert network.driver_address == LOOPBACK and network.addresses == (LOOPBACK,)
    (facts,) = network.host_facts
    assert (facts.address, len(set(facts.free_ports)), facts.is_local) == ("", 3, True)
    hello = alone.hellos[0]
    assert (facts.cpus, facts.effective_cpu_count) == (hello.cpus, hello.effective_cpu_count)


def test_a_host_behind_ssh_and_the_driver_find_where_they_reach_each_other() -> None:
    # Both are this machine, so the way is never in doubt: what matters is that everybody is asked.
    with agents_of(["other"]) as both:
        both.start_agents()
        network = both.probe_network(new_job_key(), [2])
    assert (both.driver_index, len(both.hellos)) == (1, 2)
    (facts,) = network.host_facts
    assert (facts.address, len(facts.free_ports), facts.is_local) == ("", 2, False)
    assert network.driver_address and network.addresses == (LOOPBACK,)


def test_every_host_that_cannot_be_used_is_listed_with_its_reason() -> None:
    start_s = promised_s(3.0)  # silent is waited for so long; the others have to start Python in it
    with agents_of(["localhost", "refused", "broken", "silent", "other"], start_s=start_s) as some:
        with pytest.raises(StartFailed) as failed:
            some.start_agents()
    lines = str(failed.value).splitlines()
    assert lines[0] == "3 of 5 hosts cannot be used:"
    assert lines[1].startswith("  refused: nobody listens there")
    assert lines[2:] == ["  broken: its disk is full", f"  silent: it did not answer within {start_s:g} s"]


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        ("old", b"", "it has ronde 0.0.1, and this is "),
        ("newer", b"function", "it has Python 3.99.0, and this is "),
        ("other", b"", "it is the same machine as localhost; name it once, with all its slots"),
    ],
    ids=["ronde", "python", "twice"],
)
def test_a_host_that_does_not_suit_is_told_from_one_that_cannot_be_reached(name: str, call: bytes, reason: str) -> None:
    with agents_of(["localhost", name], call=call) as two:
        with pytest.raises(StartFailed) as failed:
            two.start_agents()
    assert f"1 of 2 hosts cannot be used:\n  {name}: {reason}" in str(failed.value)


def test_another_python_is_fine_for_commands() -> None:
    with agents_of(["localhost", "newer"]) as two:
        two.start_agents()


def test_a_missing_ssh_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ssh").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with agents_of(["other"]) as one, pytest.raises(StartFailed, match="install OpenSSH's client"):
        one.start_agents()


def test_who_wants_to_stop_does_not_wait_for_hosts() -> None:
    with agents_of(["silent"]) as one:
        one.cancel_start()
        with pytest.raises(StartCancelled):
            one.start_agents()


# --- which hosts are this machine ---------------------------------------------------------------------------------

MACHINE = LocalMachine("me", LOCALHOST_NAMES | {"node1", "10.0.0.1"})
NAMES = {"node1-ib": ["10.0.0.1"], "node2": ["10.0.0.2"]}


@pytest.mark.parametrize(
    ("name", "is_local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("node1", True),
        ("10.0.0.1", True),
        ("me@node1", True),
        ("somebody@node1", False),
        ("node1-ib", True),
        ("me@node1-ib", True),
        ("node2", False),
        ("nobody-knows", False),
    ],
)
def test_a_host_is_local_by_name_by_address_and_by_what_its_name_stands_for(name: str, is_local: bool) -> None:
    assert MACHINE.find_local_hosts([Host(name)], lambda asked: NAMES.get(asked, [])) == (is_local,)


def test_only_names_that_are_not_known_are_looked_up() -> None:
    asked: list[str] = []
    hosts = [Host("localhost", 2), Host("you@node2"), Host("node1")]
    assert MACHINE.find_local_hosts(hosts, lambda name: asked.append(name) or NAMES[name]) == (True, False, True)  # type: ignore[func-returns-value]
    assert asked == ["node2"]


def test_this_machine_knows_itself() -> None:
    hosts = [Host("localhost"), Host("nobody-here-has-this-name@localhost")]
    assert LocalMachine.detect().find_local_hosts(hosts) == (True, False)
