"""The agents of all hosts: started at once, each that cannot be used with its reason. ssh is a script here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from ronde.coordinator.round_planning import ElasticLimits
from ronde.errors import StartFailed
from ronde.launch.driver.agents import DRIVER_INDEX, LOCALHOST_NAMES, AgentGroup, LocalMachine, StartCancelled
from ronde.launch.job import Job, SshOptions
from ronde.launch.network import LOOPBACK
from ronde.launch.placement import Host
from ronde.launch.protocol import AgentMessage, PortCounts, RankExit, RankOrder, StartRanks
from ronde.net.event_loop import EventLoop
from ronde.net.keys import new_job_key
from tests.limits import PATIENCE_S, promised_s

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
    with closing(EventLoop()) as loop, closing(AgentGroup(loop, job, job.used_hosts)) as agents:
        yield agents


def test_this_machine_alone_needs_no_ssh_and_no_probing() -> None:
    with agents_of(["localhost"]) as alone:
        alone.start_agents()
        network = alone.probe_network(new_job_key(), [PortCounts(2, 1)])
    assert network.driver_address == LOOPBACK and network.addresses == {0: LOOPBACK}
    (facts,) = network.host_facts.values()
    assert (facts.address, len(set(facts.free_ports)), facts.is_local) == ("", 3, True)
    hello = alone.hellos[0]
    assert (facts.cpus, facts.effective_cpu_count) == (hello.cpus, hello.effective_cpu_count)


def test_a_host_behind_ssh_and_the_driver_find_where_they_reach_each_other() -> None:
    # Both are this machine, so the way is never in doubt: what matters is that everybody is asked.
    with agents_of(["other"]) as both:
        both.start_agents()
        network = both.probe_network(new_job_key(), [PortCounts(1, 1)])
    assert (both.driver_index, len(both.hellos)) == (DRIVER_INDEX, 2)
    (facts,) = network.host_facts.values()
    assert (facts.address, len(facts.free_ports), facts.is_local) == ("", 2, False)
    assert network.driver_address and network.addresses == {0: LOOPBACK}


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


# --- hosts that come and go ---------------------------------------------------------------------------------------


class ElasticAgents:
    """The agents of an elastic job that begins with these hosts, and what is told about them."""

    def __init__(self, loop: EventLoop, names: Sequence[str], start_s: float = PATIENCE_S) -> None:
        limits = ElasticLimits(start_ranks=1)
        job = Job(command=("true",), num_ranks=1, limits=limits, ssh=SshOptions(start_s=start_s), cwd="/")
        self.loop = loop
        self.group = AgentGroup(loop, job, [Host(name) for name in names])
        self.ready: list[int] = []
        self.lost: dict[int, str] = {}
        self.reports: list[tuple[int, AgentMessage]] = []

    def begin(self) -> None:
        self.group.start_agents()
        self.group.probe_network(new_job_key(), [PortCounts()] * 10, may_grow=True)
        self.group.set_handlers(
            lambda index, message: self.reports.append((index, message)),
            lambda index, error: self.lost.__setitem__(index, error.reason),
            self.ready.append,
        )

    def add(self, name: str) -> int:
        """Add a host, and wait until it is ready or lost."""
        index = self.group.add_host(Host(name))
        self.loop.run_until(lambda: index in self.ready or index in self.lost)
        return index


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    with closing(EventLoop()) as made:
        yield made


def test_a_host_is_added_while_the_job_runs_and_removed_again(loop: EventLoop) -> None:
    agents = ElasticAgents(loop, [])
    with closing(agents.group):
        agents.begin()
        index = agents.add("other")
        assert (agents.ready, agents.group.host_name(index)) == ([index], "other")
        facts = agents.group.host_facts[index]
        assert facts.address and not facts.is_local
        agents.group.send({index: StartRanks((RankOrder(7, ("true",), {"PATH": "/bin:/usr/bin"}, "/"),))})
        loop.run_until(lambda: any(isinstance(message, RankExit) for _, message in agents.reports))
        agents.group.remove_host(index)
        assert index not in agents.group.host_facts
        again = agents.add("other")
        assert again != index and again in agents.ready and not agents.lost


def test_a_host_that_is_added_and_cannot_be_used_is_lost_with_the_reason(loop: EventLoop) -> None:
    agents = ElasticAgents(loop, [], start_s=promised_s(3.0))
    with closing(agents.group):
        agents.begin()
        assert "nobody listens there" in agents.lost[agents.add("refused")]
        assert "it has ronde 0.0.1" in agents.lost[agents.add("old")]
        assert "it did not answer within" in agents.lost[agents.add("silent")]
        assert not agents.ready


def test_this_machine_is_added_under_several_names(loop: EventLoop) -> None:
    agents = ElasticAgents(loop, ["localhost"])
    with closing(agents.group):
        agents.begin()
        first, second = agents.group.host_facts[0], agents.group.host_facts[agents.add("127.0.0.1")]
        assert first.is_local and second.is_local and first.address == second.address != ""


def test_an_elastic_job_begins_without_the_hosts_that_cannot_be_used(loop: EventLoop) -> None:
    agents = ElasticAgents(loop, ["refused", "localhost"])
    with closing(agents.group):
        agents.begin()
        assert [*agents.group.host_facts] == [1] and "nobody listens there" in agents.lost[0]
    with closing(ElasticAgents(loop, ["refused"]).group) as none:
        with pytest.raises(StartFailed, match="the host cannot be used"):
            none.start_agents()


def test_the_agent_of_a_host_that_was_removed_just_now_is_gone_at_the_end(loop: EventLoop) -> None:
    agents = ElasticAgents(loop, [])
    with closing(agents.group):
        agents.begin()
        others = psutil.Process().children(recursive=True)
        index = agents.add("other")
        children = [each for each in psutil.Process().children(recursive=True) if each not in others]
        assert children
        agents.group.remove_host(index)
    _, left = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not left
