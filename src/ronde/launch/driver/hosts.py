"""Which hosts are this machine, and so need no ssh. Used by crew.

The agents of all hosts of a job: called in parallel, checked, and asked where they reach each other. Used by the
driver, and by whoever else wants to know about hosts.

A *place* is a host of the job, by its index; the driver's own machine is the last one, when it is not a host itself:
it has no ranks, but all ranks call the coordinator there.
"""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from ronde.errors import StartFailed
from ronde.launch.agent.agent import Agent
from ronde.launch.driver.ssh import (
    AgentConnection,
    HostError,
    OnAgentLost,
    OnAgentMessage,
    SshAgentConnection,
    SshCommand,
    make_missing_directory_error,
)
from ronde.launch.job import Job
from ronde.launch.network import LOOPBACK, HostFacts, JobNetwork, ProbeResult, choose_addresses
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentHello,
    AgentMessage,
    DriverHeartbeat,
    DriverMessage,
    ProbeReply,
    ProbeRequest,
    RankStartFailed,
)
from ronde.net.addresses import find_free_port, resolve_host
from ronde.net.event_loop import EventLoop
from ronde.types import Deadline

__all__ = ["AgentGroup", "LocalAgentConnection", "LocalMachine", "StartCancelled", "find_local_hosts"]

RESOLVE_TIMEOUT_S = 3.0
"""A name that takes longer is left to ssh."""
LOCALHOST_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """What this machine and its user are called."""

    user: str
    names: frozenset[str]
    """Host names and addresses."""

    @classmethod
    def detect(cls) -> LocalMachine:
        """Look."""
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # a container may run as a number that nobody has named
            user = ""
        addresses = {found.address for each in psutil.net_if_addrs().values() for found in each}
        return cls(user, LOCALHOST_NAMES | {os.uname().nodename} | addresses)

    def matches(self, host: Host, addresses: Collection[str] = ()) -> bool:
        """Whether this machine, as this user, is that host; `addresses` are what its name stands for."""
        user, _, name = host.name.rpartition("@")
        return user in ("", self.user) and (name in self.names or any(found in self.names for found in addresses))


def find_local_hosts(
    hosts: Sequence[Host], machine: LocalMachine, addresses_of: Callable[[str], Sequence[str]] | None = None
) -> tuple[bool, ...]:
    """For each host whether it is this machine. All names are looked up at once, and only if they are not known."""
    addresses_of = addresses_of or _resolve_addresses
    found: dict[str, Sequence[str]] = {}

    def look_up(name: str) -> None:
        found[name] = addresses_of(name)

    names = {host.name.rpartition("@")[2] for host in hosts if not machine.matches(host)}
    # Owned by this call. Each touches its own entry; one that the system's resolver keeps is left to end by itself.
    threads = [threading.Thread(target=look_up, args=[name], name="ronde-resolve", daemon=True) for name in names]
    deadline = Deadline(RESOLVE_TIMEOUT_S)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.remaining_s)
    return tuple(machine.matches(host, found.get(host.name.rpartition("@")[2], ())) for host in hosts)


def _resolve_addresses(name: str) -> list[str]:
    try:
        return [address for address, _ in resolve_host(name, 22)]
    except StartFailed:  # perhaps a name that only ssh's configuration knows
        return []


PROBE_TIMEOUT_S = 5.0
"""How long an address may take to answer."""
REPLY_TIMEOUT_S = 5.0
"""Beyond that, until the answer of an agent is here."""
STOP_TIMEOUT_S = 5.0
"""How long agents may take to end."""
MAX_MISSED_HEARTBEATS = 6
"""An agent that hears nothing for so many beats takes the network for cut, and ends. Generous: its driver may only be
very busy, and ranks that use ronde notice a cut by themselves, and earlier."""
WEEK_S = 7 * 24 * 3600.0


Reply = TypeVar("Reply", AgentHello, ProbeReply)


class StartCancelled(Exception):
    """Somebody wants the job to end before it has begun."""


class AgentGroup:
    """The lines to all places. meet() them, find the ground(), take_over() what they report; close() at the end."""

    def __init__(self, loop: EventLoop, job: Job, hosts: Sequence[Host], python: str) -> None:
        self._loop = loop
        self._job = job
        self._python = python
        self._hosts = tuple(hosts)
        self._connections: list[AgentConnection] = []
        self._errors: dict[int, HostError] = {}
        self._replies: dict[int, AgentMessage] = {}
        self._greeted: set[int] = set()
        self._disconnected: set[int] = set()
        self._on_message: Callable[[int, AgentMessage], None] = self._record_reply
        self._on_lost: Callable[[int, HostError], None] = self._errors.__setitem__
        self._cancelled = False
        self._heartbeat_timeout_s = MAX_MISSED_HEARTBEATS * job.settings.heartbeat_s
        self._closing = threading.Event()
        # Owned by the crew. Touches nothing but AgentLine.beat: agents need a sign of life also while the driver's loop
        # waits for a terminal that does not go on.
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, name="ronde-heart", daemon=True)
        self.hellos: dict[int, AgentHello] = {}
        """What each place said of itself."""
        self.driver_index = 0
        """The place of the driver."""

    def start_agents(self) -> None:
        """Start an agent on every host, all at once. StartFailed says of each host that cannot be used why not."""
        here = find_local_hosts(self._hosts, LocalMachine.detect())
        self.driver_index = here.index(True) if True in here else len(self._hosts)
        hosts = self._hosts if True in here else (*self._hosts, Host("localhost"))
        for index, host in enumerate(hosts):
            self._connect(index, host, local=index == len(self._hosts) or here[index])
        self.hellos = self._wait_for_replies(AgentHello, self._job.ssh.start_s)
        self._check_hellos(self.hellos)
        if not all(map(self._is_local, self.hellos)):
            self.suspend_heartbeat(False)
            self._heartbeat_thread.start()

    def probe_network(self, key: str, num_ports: Sequence[int]) -> JobNetwork:
        """Find out where everybody reaches everybody, and so many free ports on each host."""
        if len(self._connections) == 1:
            return JobNetwork(LOOPBACK, (HostFacts(self.hellos[0].cpus, free_ports=_find_free_ports(num_ports[0])),))
        counts = (*num_ports, 0)
        own = self._query_agents(
            {index: ProbeRequest(key, (), PROBE_TIMEOUT_S, counts[index]) for index in self.hellos}
        )
        doors = tuple(own[index].reachable[0] for index in sorted(own))
        tried = self._query_agents({index: ProbeRequest(key, doors, PROBE_TIMEOUT_S) for index in self.hellos})
        hosts = range(len(self._hosts))
        findings = [
            ProbeResult(
                name=line.host.name if index in hosts else "this machine",
                addresses=doors[index],
                has_ranks=index in hosts,
                reachable=tried[index].reachable,
                errors=tried[index].errors,
            )
            for index, line in enumerate(self._connections)
        ]
        chosen = choose_addresses(findings)
        sites = [
            HostFacts(self.hellos[i].cpus, chosen[i], own[i].free_ports, is_local=self._is_local(i)) for i in hosts
        ]
        return JobNetwork(chosen[self.driver_index], tuple(sites))

    def set_handlers(
        self, on_message: Callable[[int, AgentMessage], None], on_lost: Callable[[int, HostError], None]
    ) -> None:
        """From now on these hear what agents report, and which places are lost."""
        self._on_message, self._on_lost = on_message, on_lost
        for index, trouble in self._errors.items():  # lost since they were last asked
            on_lost(index, trouble)

    def send(self, messages: Mapping[int, DriverMessage]) -> None:
        """To each place its message. Those in this process come last: they carry it out at once."""
        for index in sorted(messages, key=self._is_local):
            self._connections[index].send(messages[index])

    def set_reading_paused(self, paused: bool) -> None:
        """Leave what agents say where it is, or go on."""
        for line in self._connections:
            line.set_reading_paused(paused)

    def suspend_heartbeat(self, suspended: bool) -> None:
        """The driver is about to be stopped by its user, and agents are not to worry; or it goes on."""
        for line in self._connections:
            line.send(DriverHeartbeat(WEEK_S if suspended else self._heartbeat_timeout_s))

    def cancel_start(self) -> None:
        """Do not wait for anybody any more."""
        self._cancelled = True

    def close(self) -> None:
        """End all agents and what they started; wait for that as long as it is worth it. Idempotent."""
        lines, self._connections = self._connections, []
        if not lines:
            return
        self._on_message = lambda index, message: None
        self._on_lost = lambda index, trouble: None
        self._closing.set()
        for index in self._greeted - self._disconnected:  # whoever never said hello has started nothing
            lines[index].stop_agent()
        timer = self._loop.call_later(STOP_TIMEOUT_S, lambda: None)
        self._loop.run_until(lambda: self._greeted <= self._disconnected or not timer.pending)
        timer.cancel()
        if self._heartbeat_thread.is_alive():
            self._heartbeat_thread.join()
        for line in lines:
            line.close()

    def _connect(self, index: int, host: Host, *, local: bool) -> None:
        def hear(_: AgentConnection, message: AgentMessage) -> None:
            self._on_message(index, message)

        def lose(_: AgentConnection, trouble: HostError) -> None:
            self._disconnected.add(index)
            self._on_lost(index, trouble)

        if local:
            if not Path(self._job.cwd).is_dir() and index < len(self._hosts):
                self._errors[index] = make_missing_directory_error(self._job.cwd)
            self._connections.append(LocalAgentConnection(self._loop, host, hear, lose))
            return
        job = self._job
        call = SshCommand(
            host=host, options=job.ssh, python=self._python, cwd=job.cwd, heartbeat_s=job.settings.heartbeat_s
        )
        try:
            self._connections.append(SshAgentConnection(self._loop, call, hear, lose))
        except OSError as error:
            raise StartFailed(f"ssh cannot be started here ({error.strerror}); install OpenSSH's client") from None

    def _is_local(self, index: int) -> bool:
        return isinstance(self._connections[index], LocalAgentConnection)

    def _record_reply(self, index: int, message: AgentMessage) -> None:
        if isinstance(message, AgentHello):
            self._greeted.add(index)
        if isinstance(message, AgentHello | ProbeReply | RankStartFailed):
            self._replies[index] = message

    def _query_agents(self, messages: Mapping[int, DriverMessage]) -> dict[int, ProbeReply]:
        self._replies.clear()
        self.send(messages)
        return self._wait_for_replies(ProbeReply, PROBE_TIMEOUT_S + REPLY_TIMEOUT_S)

    def _wait_for_replies(self, kind: type[Reply], timeout_s: float) -> dict[int, Reply]:
        """Such an answer from every place. StartFailed, when one is in trouble or does not answer."""
        timer = self._loop.call_later(timeout_s, lambda: None)
        everybody = frozenset(range(len(self._connections)))
        self._loop.run_until(
            lambda: self._cancelled or not timer.pending or everybody <= self._replies.keys() | self._errors.keys()
        )
        timer.cancel()
        if self._cancelled:
            raise StartCancelled
        answers: dict[int, Reply] = {}
        for index in sorted(everybody):
            answer = self._replies.get(index)
            if isinstance(answer, kind):
                answers[index] = answer
            elif isinstance(answer, RankStartFailed):
                self._errors.setdefault(index, HostError("agent", answer.reason))
            else:
                self._errors.setdefault(index, HostError("unreachable", f"it did not answer within {timeout_s:g} s"))
        self._raise_errors()
        return answers

    def _check_hellos(self, hellos: Mapping[int, AgentHello]) -> None:
        """Hosts have to be like this one, and different machines."""
        own = hellos[self.driver_index]
        seen: dict[str, int] = {}
        for index, hello in hellos.items():
            if hello.version != own.version:
                why = f"it has ronde {hello.version}, and this is {own.version}; install the same version on all hosts"
                self._errors[index] = HostError("version", why)
            elif self._job.pickled_call and _minor_version(hello.python) != _minor_version(own.python):
                why = f"it has Python {hello.python}, and this is {own.python}; a function needs the same on all hosts"
                self._errors[index] = HostError("python", why)
            elif index < len(self._hosts) and seen.setdefault(hello.host_identity, index) != index:
                first = self._connections[seen[hello.host_identity]].host.name
                why = f"it is the same machine as {first}; name it once, with all its slots"
                self._errors[index] = HostError("twice", why)
        self._raise_errors()

    def _raise_errors(self) -> None:
        if self._errors:
            lines = [
                f"  {self._connections[index].host.name}: {self._errors[index].reason}"
                for index in sorted(self._errors)
            ]
            num_hosts = len(self._hosts)
            some = f"{len(lines)} of {num_hosts} hosts" if num_hosts > 1 else "the host"
            raise StartFailed("\n".join([f"{some} cannot be used:", *lines]))

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(self._job.settings.heartbeat_s):
            for line in tuple(self._connections):
                line.send_heartbeat(DriverHeartbeat(self._heartbeat_timeout_s))


def _find_free_ports(count: int) -> tuple[int, ...]:
    found: set[int] = set()
    while len(found) < count:
        found.add(find_free_port(LOOPBACK))
    return tuple(found)


def _minor_version(version: str) -> list[str]:
    return version.split(".")[:2]


class LocalAgentConnection:
    """To an agent in this process."""

    def __init__(self, loop: EventLoop, host: Host, on_message: OnAgentMessage, on_lost: OnAgentLost) -> None:
        self.host = host
        self._loop = loop
        self._on_lost = on_lost
        self._closed = False
        self._agent = Agent(loop, partial(on_message, self))

    def send(self, message: DriverMessage) -> None:
        """See AgentLine."""
        if not self._closed:
            self._agent.handle(message)

    def send_heartbeat(self, message: DriverHeartbeat) -> None:
        """An agent in this process needs no sign of life."""

    def set_reading_paused(self, paused: bool) -> None:
        """See AgentLine. An agent in this process still tells who has ended."""
        self._agent.set_reading_paused(paused)

    def stop_agent(self) -> None:
        """See AgentLine."""
        self.close()
        self._loop.call_soon_threadsafe(partial(self._on_lost, self, HostError("ended", "")))

    def close(self) -> None:
        """See AgentLine."""
        self._closed = True
        self._agent.close()
