"""The agents of all hosts of a job: started in parallel, checked, probed for the network between them, and stopped.

Agents are numbered by host index. When the driver's own machine is not a host of the job, an agent of its own comes
last: it has no ranks, but all ranks connect to the coordinator there.
"""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

from ronde.errors import StartFailed
from ronde.launch.agent.agent import Agent
from ronde.launch.driver.ssh import HostError, SshAgentConnection, make_missing_directory_error
from ronde.launch.job import Job
from ronde.launch.network import LOOPBACK, HostFacts, JobNetwork, choose_addresses
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentError,
    AgentHello,
    AgentMessage,
    DriverHeartbeat,
    DriverMessage,
    ProbeReply,
    ProbeRequest,
)
from ronde.launch.timeouts import (
    AGENT_STOP_TIMEOUT_S,
    HEARTBEATS_BEFORE_AGENT_STOPS,
    PROBE_REPLY_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    RESOLVE_TIMEOUT_S,
    UNLIMITED_S,
)
from ronde.net.addresses import find_free_ports, resolve_host
from ronde.net.event_loop import EventLoop
from ronde.types import Deadline

LOCALHOST_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """The user, and all names and addresses, of this machine."""

    user: str
    names: frozenset[str]

    @classmethod
    def detect(cls) -> LocalMachine:
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # a container may run as a number that has no name
            user = ""
        addresses = {found.address for each in psutil.net_if_addrs().values() for found in each}
        return cls(user, LOCALHOST_NAMES | {os.uname().nodename} | addresses)

    def find_local_hosts(
        self, hosts: Sequence[Host], addresses_of: Callable[[str], Sequence[str]] | None = None
    ) -> tuple[bool, ...]:
        """Return for each host whether it is this machine, as this user. Other names are looked up, all at once."""
        split = [host.name.rpartition("@") for host in hosts]
        found: dict[str, Sequence[str]] = {name: () for _, _, name in split}

        def look_up(name: str) -> None:
            found[name] = (addresses_of or _resolve_addresses)(name)

        # Owned by this call. Each touches its own entry; one that the system's resolver keeps is left to end by itself.
        threads = [
            threading.Thread(target=look_up, args=[name], name="ronde-resolve", daemon=True)
            for name in found.keys() - self.names
        ]
        deadline = Deadline(RESOLVE_TIMEOUT_S)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline.remaining_s)
        return tuple(
            user in ("", self.user) and not self.names.isdisjoint({name, *found[name]}) for user, _, name in split
        )


def _resolve_addresses(name: str) -> list[str]:
    try:
        return [address for address, _ in resolve_host(name, 22)]
    except StartFailed:  # perhaps a name that only ssh's configuration knows
        return []


Reply = TypeVar("Reply", AgentHello, ProbeReply)


class StartCancelled(Exception):
    """The job was stopped before its ranks were started."""


class AgentGroup:
    """The agents of a job. start_agents(), probe_network(), set_handlers() and send(); close() at the end."""

    def __init__(self, loop: EventLoop, job: Job) -> None:
        self._loop = loop
        self._job = job
        self._hosts = job.used_hosts
        self._agents: list[Agent | SshAgentConnection] = []
        """The one on the driver's own machine runs in this process."""
        self._errors: dict[int, HostError] = {}
        self._replies: dict[int, AgentMessage] = {}
        self._started: set[int] = set()
        """Agents that have sent AgentHello."""
        self._on_lost: Callable[[int, HostError], None] = self._errors.__setitem__
        self._cancelled = False
        self._heartbeat = DriverHeartbeat(HEARTBEATS_BEFORE_AGENT_STOPS * job.settings.heartbeat_s)
        self._closing = threading.Event()
        # Owned by the group. Touches nothing but SshAgentConnection.send_heartbeat: agents need heartbeats also while
        # the driver's loop waits for a terminal that takes no output.
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, name="ronde-heartbeat", daemon=True)
        self.hellos: list[AgentHello] = []
        self.driver_index = 0
        """The agent on the driver's own machine."""

    def start_agents(self) -> None:
        """Start an agent on every host, all at once. StartFailed lists every host that cannot be used, and why."""
        is_local = LocalMachine.detect().find_local_hosts(self._hosts)
        self.driver_index = is_local.index(True) if True in is_local else len(self._hosts)
        for index, host in enumerate(self._hosts):
            self._connect(index, host, local=is_local[index])
        if self.driver_index == len(self._hosts):
            self._connect(self.driver_index, Host("localhost"), local=True)
        self.hellos = self._wait_for_replies(AgentHello, self._job.ssh.start_s)
        self._check_hellos()
        if not all(map(self._is_local, range(len(self.hellos)))):
            self.suspend_heartbeat(False)
            self._heartbeat_thread.start()

    def probe_network(self, key: str, num_ports: Sequence[int]) -> JobNetwork:
        """Find out where all hosts reach each other, and so many free ports on each host."""
        if len(self._agents) == 1:
            return JobNetwork(LOOPBACK, (self._host_facts(0, "", find_free_ports(LOOPBACK, num_ports[0])),))
        counts = (*num_ports, 0)
        own = self._probe([ProbeRequest(key, (), PROBE_TIMEOUT_S, counts[index]) for index in range(len(self.hellos))])
        listeners = tuple(reply.reachable[0] for reply in own)
        tried = self._probe([ProbeRequest(key, listeners, PROBE_TIMEOUT_S)] * len(self.hellos))
        names = [*(host.name for host in self._hosts), "this machine"][: len(self.hellos)]
        chosen = choose_addresses(names, listeners, tried, num_hosts=len(self._hosts))
        facts = [self._host_facts(index, chosen[index], own[index].free_ports) for index in range(len(self._hosts))]
        return JobNetwork(chosen[self.driver_index], tuple(facts))

    def set_handlers(
        self, on_message: Callable[[int, AgentMessage], None], on_lost: Callable[[int, HostError], None]
    ) -> None:
        """From now on call these with the messages of agents and with the hosts that are lost."""
        self._on_lost = on_lost
        for index, agent in enumerate(self._agents):
            agent.on_report = partial(on_message, index)
        for index, error in self._errors.items():  # lost since the last request
            on_lost(index, error)

    def send(self, messages: Mapping[int, DriverMessage]) -> None:
        """Send each agent its message. An agent in this process comes last: it acts on it at once."""
        for index in sorted(messages, key=self._is_local):
            self._agents[index].handle(messages[index])

    def suspend_heartbeat(self, suspended: bool) -> None:
        """Let agents wait without heartbeats while the driver is suspended, or expect heartbeats again."""
        for agent in self._agents:
            agent.handle(DriverHeartbeat(UNLIMITED_S) if suspended else self._heartbeat)

    def cancel_start(self) -> None:
        """Do not wait for agents any more: StartCancelled is raised where they are waited for."""
        self._cancelled = True

    def close(self) -> None:
        """Stop all agents and what they started, and wait for that as long as it is useful. Idempotent."""
        agents, self._agents = self._agents, []
        if not agents:
            return
        self._on_lost = lambda index, error: None
        self._closing.set()
        started = [agents[index] for index in self._started]
        stopping = [agent for agent in started if isinstance(agent, SshAgentConnection)]
        for connection in stopping:
            connection.stop_agent()
        for agent in agents:
            agent.on_report = lambda message: None
            if isinstance(agent, Agent):
                agent.close()
        timer = self._loop.call_later(AGENT_STOP_TIMEOUT_S, lambda: None)
        self._loop.run_until(lambda: all(connection.closed for connection in stopping) or not timer.pending)
        timer.cancel()
        if self._heartbeat_thread.is_alive():
            self._heartbeat_thread.join()
        for agent in agents:
            agent.close()

    def _connect(self, index: int, host: Host, *, local: bool) -> None:
        job, on_report = self._job, partial(self._record_reply, index)
        if local:
            if not Path(job.cwd).is_dir() and index < len(self._hosts):
                self._errors[index] = make_missing_directory_error(job.cwd)
            self._agents.append(Agent(self._loop, on_report))
            return
        try:
            self._agents.append(
                SshAgentConnection(self._loop, host, job, on_report, lambda error: self._on_lost(index, error))
            )
        except OSError as error:
            raise StartFailed(f"ssh cannot be started here ({error.strerror}); install OpenSSH's client") from None

    def _is_local(self, index: int) -> bool:
        return isinstance(self._agents[index], Agent)

    def _host_facts(self, index: int, address: str, free_ports: tuple[int, ...]) -> HostFacts:
        hello = self.hellos[index]
        return HostFacts(hello.cpus, hello.effective_cpu_count, address, free_ports, self._is_local(index))

    def _record_reply(self, index: int, message: AgentMessage) -> None:
        if isinstance(message, AgentHello):
            self._started.add(index)
        if isinstance(message, AgentHello | ProbeReply | AgentError):
            self._replies[index] = message

    def _probe(self, requests: Sequence[ProbeRequest]) -> list[ProbeReply]:
        self._replies.clear()
        self.send(dict(enumerate(requests)))
        return self._wait_for_replies(ProbeReply, PROBE_REPLY_TIMEOUT_S)

    def _wait_for_replies(self, kind: type[Reply], timeout_s: float) -> list[Reply]:
        """Wait for such a reply of every agent. StartFailed when one has an error or does not answer."""
        timer = self._loop.call_later(timeout_s, lambda: None)
        num_agents = len(self._agents)
        self._loop.run_until(
            lambda: (
                self._cancelled or not timer.pending or len(self._replies.keys() | self._errors.keys()) == num_agents
            )
        )
        timer.cancel()
        if self._cancelled:
            raise StartCancelled
        replies: list[Reply] = []
        for index in range(num_agents):
            reply = self._replies.get(index)
            if isinstance(reply, kind):
                replies.append(reply)
            else:
                late = f"it did not answer within {timeout_s:g} s"
                self._errors.setdefault(index, HostError(reply.reason if isinstance(reply, AgentError) else late))
        self._raise_errors()
        return replies

    def _check_hellos(self) -> None:
        """Hosts have to have the driver's versions, and to be different machines."""
        own = self.hellos[self.driver_index]
        index_of: dict[str, int] = {}
        for index, hello in enumerate(self.hellos):
            reason = ""
            if hello.version != own.version:
                reason = (
                    f"it has ronde {hello.version}, and this is {own.version}; install the same version on all hosts"
                )
            elif self._job.pickled_call and hello.python.split(".")[:2] != own.python.split(".")[:2]:
                reason = (
                    f"it has Python {hello.python}, and this is {own.python}; a function needs the same on all hosts"
                )
            elif index < len(self._hosts) and index_of.setdefault(hello.host_identity, index) != index:
                first = self._hosts[index_of[hello.host_identity]].name
                reason = f"it is the same machine as {first}; name it once, with all its slots"
            if reason:
                self._errors[index] = HostError(reason)
        self._raise_errors()

    def _raise_errors(self) -> None:
        if self._errors:
            names = [*(host.name for host in self._hosts), "localhost"]
            lines = [f"  {names[index]}: {self._errors[index].reason}" for index in sorted(self._errors)]
            num_hosts = len(self._hosts)
            some = f"{len(lines)} of {num_hosts} hosts" if num_hosts > 1 else "the host"
            raise StartFailed("\n".join([f"{some} cannot be used:", *lines]))

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(self._job.settings.heartbeat_s):
            for agent in tuple(self._agents):
                if isinstance(agent, SshAgentConnection):
                    agent.send_heartbeat(self._heartbeat)
