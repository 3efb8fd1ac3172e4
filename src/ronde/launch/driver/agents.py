"""The agents of all hosts of a job: started in parallel, checked, probed for the network between them, and stopped.

Agents are numbered by host index. When the driver's own machine is not a host of the job, it has an agent all the same,
DRIVER_INDEX: it has no ranks, but all ranks connect to the coordinator there.

In an elastic job hosts are added and removed while it runs. A host that is added is ready when its agent has answered,
suits, and has been probed against all others; this happens in the background, and the others do not notice.
"""

from __future__ import annotations

import os
import pwd
import threading
from collections import deque
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
from ronde.launch.network import LOOPBACK, HostFacts, JobNetwork, LateHostProbe, choose_addresses, find_ports
from ronde.launch.placement import Host
from ronde.launch.protocol import (
    AgentError,
    AgentHello,
    AgentMessage,
    DriverHeartbeat,
    DriverMessage,
    PortCounts,
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
from ronde.net.addresses import PortReservation, candidate_addresses, parse_address, resolve_host
from ronde.net.event_loop import EventLoop, Timer
from ronde.types import Deadline

DRIVER_INDEX = -1
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
    """The agents of a job. start_agents(), probe_network(), set_handlers() and send(), in an elastic job also
    add_host() and remove_host(); close() at the end."""

    def __init__(self, loop: EventLoop, job: Job, hosts: Sequence[Host]) -> None:
        """`hosts` are those to begin with, by host index."""
        self._loop = loop
        self._job = job
        self._hosts = dict(enumerate(hosts))
        """All that there ever were."""
        self._removed: set[int] = set()
        self._stopping: list[SshAgentConnection] = []
        """Of hosts that were removed a moment ago."""
        self._agents: dict[int, Agent | SshAgentConnection] = {}
        """Those on the driver's own machine run in this process."""
        self._errors: dict[int, HostError] = {}
        self._replies: dict[int, AgentMessage] = {}
        self._started: set[int] = set()
        """Agents that have sent AgentHello."""
        self._on_message: Callable[[int, AgentMessage], None] = self._record_reply
        self._on_lost: Callable[[int, HostError], None] = self._errors.__setitem__
        self._on_host_lost: Callable[[int, HostError], None] = lambda index, error: None
        self._on_ready: Callable[[int], None] = lambda index: None
        self._key = ""
        self._network: JobNetwork | None = None
        self._reservation = PortReservation()
        """On this machine, if it is the only one."""
        self._start_timers: dict[int, Timer] = {}
        """Of hosts that were added and have not answered yet."""
        self._unprobed: deque[int] = deque()
        """Hosts that were added and wait until others have been probed."""
        self._probe: LateHostProbe | None = None
        self._cancelled = False
        self._closed = False
        self._heartbeat = DriverHeartbeat(HEARTBEATS_BEFORE_AGENT_STOPS * job.settings.heartbeat_s)
        self._closing = threading.Event()
        # Owned by the group. Touches nothing but SshAgentConnection.send_heartbeat: agents need heartbeats also while
        # the driver's loop waits for a terminal that takes no output.
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, name="ronde-heartbeat", daemon=True)
        self.hellos: dict[int, AgentHello] = {}
        self.host_facts: dict[int, HostFacts] = {}
        """Of the hosts that can be used, by host index."""
        self.driver_index = DRIVER_INDEX
        """An agent on the driver's own machine."""

    # --- the start of a job ----------------------------------------------------------------------------------------

    def start_agents(self) -> None:
        """Start an agent on every host, all at once. StartFailed lists every host that cannot be used, and why; in an
        elastic job that is raised only when none can be used, and set_handlers() tells of the others."""
        is_local = LocalMachine.detect().find_local_hosts([*self._hosts.values()])
        for index, host in self._hosts.items():
            if is_local[index] and self.driver_index == DRIVER_INDEX:
                self.driver_index = index
            self._connect(index, host, local=is_local[index])
        if self.driver_index == DRIVER_INDEX:
            self._connect(DRIVER_INDEX, Host("localhost"), local=True)
        self.hellos = self._wait_for_replies(AgentHello, self._job.ssh.start_s)
        for index in [index for index in self.hellos if index != self.driver_index]:
            error = self._find_misfit(index)
            if error is not None:
                self._errors[index] = error
        self._raise_errors()
        if not all(map(self._is_local, self._agents)):
            self._start_heartbeats()

    def probe_network(self, key: str, num_ports: Sequence[PortCounts], *, may_grow: bool = False) -> JobNetwork:
        """Find out where all hosts reach each other, and so many ports on each host. `may_grow`: hosts may be added
        later, so that this machine needs an address for them even if it is the only one now."""
        self._key = key
        indices = [index for index in self._agents if index not in self._errors]
        hosts = [index for index in indices if index in self._hosts]
        if all(map(self._is_local, indices)):
            address = candidate_addresses()[0] if may_grow else ""
            ports = {index: find_ports(LOOPBACK, num_ports[index], self._reservation) for index in hosts}
            facts = {index: self._make_facts(index, address, ports[index]) for index in hosts}
            driver_address = address or LOOPBACK
        else:
            requests = {
                index: ProbeRequest(key, (), PROBE_TIMEOUT_S, num_ports[index] if index in hosts else PortCounts())
                for index in indices
            }
            own = self._request_probes(requests)
            order = [index for index in (*hosts, *(each for each in indices if each not in hosts)) if index in own]
            listeners = tuple(own[index].reachable[0] for index in order)
            tried = self._request_probes(dict.fromkeys(order, ProbeRequest(key, listeners, PROBE_TIMEOUT_S)))
            hosts = [index for index in hosts if index in tried]
            chosen = self._choose_addresses([index for index in order if index in tried], order, listeners, tried)
            if may_grow and len(hosts) == 1:  # nobody had to reach it yet
                chosen[hosts[0]] = chosen[hosts[0]] or parse_address(own[hosts[0]].reachable[0][0])[0]
            facts = {index: self._make_facts(index, chosen[index], own[index].free_ports) for index in hosts}
            driver_address = chosen[self.driver_index]
        self.host_facts = facts
        self._network = JobNetwork(driver_address, facts)
        return self._network

    def cancel_start(self) -> None:
        """Do not wait for agents any more: StartCancelled is raised where they are waited for."""
        self._cancelled = True

    # --- while it runs ---------------------------------------------------------------------------------------------

    def set_handlers(
        self,
        on_message: Callable[[int, AgentMessage], None],
        on_lost: Callable[[int, HostError], None],
        on_ready: Callable[[int], None] = lambda index: None,
    ) -> None:
        """From now on call these with the messages of agents, with the hosts that are lost or cannot be used, and with
        those that were added and can be used."""
        self._on_message, self._on_ready = on_message, on_ready
        self._on_lost = self._handle_lost
        self._on_host_lost = on_lost
        errors, self._errors = self._errors, {}
        for index, error in errors.items():  # not usable, or lost since the last request
            self._fail_host(index, error)

    def send(self, messages: Mapping[int, DriverMessage]) -> None:
        """Send each agent its message. An agent in this process comes last: it acts on it at once."""
        for index in sorted(messages, key=self._is_local):
            if index in self._agents:
                self._agents[index].handle(messages[index])

    def host_name(self, index: int) -> str:
        return self._hosts[index].name if index in self._hosts else "this machine"

    def suspend_heartbeat(self, suspended: bool) -> None:
        """Let agents wait without heartbeats while the driver is suspended, or expect heartbeats again."""
        for agent in self._agents.values():
            agent.handle(DriverHeartbeat(UNLIMITED_S) if suspended else self._heartbeat)

    def add_host(self, host: Host) -> int:
        """Start an agent on another host, in the background. Return its index, for which on_ready or on_lost is called
        later."""
        index = len(self._hosts)
        self._hosts[index] = host

        def connect(is_local: bool) -> None:
            if index not in self._removed and not self._closed:
                self._connect_late(index, host, is_local)

        def look_up() -> None:
            (is_local,) = LocalMachine.detect().find_local_hosts([host])
            self._loop.call_soon_threadsafe(lambda: connect(is_local))

        # Owned by itself: it ends after RESOLVE_TIMEOUT_S at the latest, and touches nothing.
        threading.Thread(target=look_up, name="ronde-resolve", daemon=True).start()
        return index

    def remove_host(self, index: int) -> None:
        """Stop the agent of a host. Nothing is called for it any more."""
        self._removed.add(index)
        agent = self._forget_host(index)
        if isinstance(agent, SshAgentConnection) and index in self._started:
            agent.stop_agent()
            self._stopping.append(agent)
            self._loop.call_later(AGENT_STOP_TIMEOUT_S, partial(self._close_stopped, agent))
        elif agent is not None:
            agent.close()

    def _close_stopped(self, agent: SshAgentConnection) -> None:
        if agent in self._stopping:
            self._stopping.remove(agent)
            agent.close()

    def close(self) -> None:
        """Stop all agents and what they started, and wait for that as long as it is useful. Idempotent."""
        agents, self._agents = self._agents, {}
        self._closed = True
        self._reservation.close()
        for timer in self._start_timers.values():
            timer.cancel()
        if not agents:
            return
        self._on_lost = lambda index, error: None
        self._on_message = lambda index, message: None
        self._closing.set()
        stopping, self._stopping = self._stopping, []
        for index, agent in agents.items():
            if isinstance(agent, SshAgentConnection) and index in self._started:
                agent.stop_agent()
                stopping.append(agent)
        for agent in agents.values():
            if isinstance(agent, Agent):
                agent.close()
        timer = self._loop.call_later(AGENT_STOP_TIMEOUT_S, lambda: None)
        self._loop.run_until(lambda: all(connection.closed for connection in stopping) or not timer.pending)
        timer.cancel()
        if self._heartbeat_thread.is_alive():
            self._heartbeat_thread.join()
        for agent in (*agents.values(), *stopping):
            agent.close()

    # --- agents ----------------------------------------------------------------------------------------------------

    def _connect(self, index: int, host: Host, *, local: bool) -> None:
        job = self._job

        def on_report(message: AgentMessage) -> None:
            self._handle_report(index, message)

        if local:
            if not Path(job.cwd).is_dir() and index in self._hosts:
                self._errors[index] = make_missing_directory_error(job.cwd)
            self._agents[index] = Agent(self._loop, on_report)
            return
        try:
            self._agents[index] = SshAgentConnection(
                self._loop, host, job, on_report, lambda error: self._on_lost(index, error)
            )
        except OSError as error:
            raise StartFailed(f"ssh cannot be started here ({error.strerror}); install OpenSSH's client") from None

    def _is_local(self, index: int) -> bool:
        return isinstance(self._agents.get(index), Agent)

    def _make_facts(self, index: int, address: str, free_ports: tuple[int, ...] = ()) -> HostFacts:
        hello = self.hellos[index]
        return HostFacts(hello.cpus, hello.effective_cpu_count, address, free_ports, self._is_local(index))

    def _handle_report(self, index: int, message: AgentMessage) -> None:
        if isinstance(message, AgentHello):
            self._started.add(index)
            if index in self._start_timers:
                return self._handle_late_hello(index, message)
        if self._probe is not None and isinstance(message, ProbeReply):
            return self._advance_probe(self._probe.handle_reply(index, message))
        if isinstance(message, AgentError) and self._probe is not None and index == self._probe.newcomer:
            return self._fail_host(index, HostError(message.reason))
        self._on_message(index, message)

    def _find_misfit(self, index: int) -> HostError | None:
        """A host has to have the driver's versions, and to be another machine than those that come before it. In an
        elastic job this machine may have several names, whose slots come and go apart."""
        own, hello = self.hellos[self.driver_index], self.hellos[index]
        if hello.version != own.version:
            return HostError(
                f"it has ronde {hello.version}, and this is {own.version}; install the same version on all hosts"
            )
        if self._job.pickled_call and hello.python.split(".")[:2] != own.python.split(".")[:2]:
            return HostError(
                f"it has Python {hello.python}, and this is {own.python}; a function needs the same on all hosts"
            )
        for other, known in self.hellos.items():
            is_alias = self._job.limits is not None and self._is_local(index) and self._is_local(other)
            if other < index and other in self._hosts and known.host_identity == hello.host_identity and not is_alias:
                return HostError(
                    f"it is the same machine as {self._hosts[other].name}; name it once, with all its slots"
                )
        return None

    def _record_reply(self, index: int, message: AgentMessage) -> None:
        if isinstance(message, AgentHello | ProbeReply | AgentError):
            self._replies[index] = message

    def _choose_addresses(
        self, kept: list[int], order: list[int], listeners: Sequence[tuple[str, ...]], tried: Mapping[int, ProbeReply]
    ) -> dict[int, str]:
        """Choose the addresses of the agents in `kept`, which are some of those in `order`: an elastic job goes on
        without the others."""
        columns = [order.index(index) for index in kept]
        replies = [
            ProbeReply(
                tuple(tried[index].reachable[column] for column in columns),
                tuple(tried[index].errors[column] for column in columns),
            )
            for index in kept
        ]
        names = [self.host_name(index) for index in kept]
        num_hosts = sum(index in self._hosts for index in kept)
        chosen = choose_addresses(names, [listeners[column] for column in columns], replies, num_hosts=num_hosts)
        return dict(zip(kept, chosen, strict=True))

    def _request_probes(self, requests: Mapping[int, ProbeRequest]) -> dict[int, ProbeReply]:
        self._replies.clear()
        self.send(requests)
        return self._wait_for_replies(ProbeReply, PROBE_REPLY_TIMEOUT_S)

    def _wait_for_replies(self, kind: type[Reply], timeout_s: float) -> dict[int, Reply]:
        """Wait for such a reply of every agent that has no error. StartFailed as in start_agents()."""
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
        replies: dict[int, Reply] = {}
        for index in self._agents:
            reply = self._replies.get(index)
            if isinstance(reply, kind):
                replies[index] = reply
            else:
                late = f"it did not answer within {timeout_s:g} s"
                self._errors.setdefault(index, HostError(reply.reason if isinstance(reply, AgentError) else late))
        self._raise_errors()
        return replies

    def _raise_errors(self) -> None:
        num_hosts = len(self._hosts)
        if not self._errors or (self._job.limits is not None and self._hosts.keys() - self._errors.keys()):
            return
        lines = [f"  {self.host_name(index)}: {error.reason}" for index, error in sorted(self._errors.items())]
        some = f"{len(lines)} of {num_hosts} hosts" if num_hosts > 1 else "the host"
        raise StartFailed("\n".join([f"{some} cannot be used:", *lines]))

    def _start_heartbeats(self) -> None:
        self.suspend_heartbeat(False)
        if self._heartbeat_thread.ident is None:
            self._heartbeat_thread.start()

    def _send_heartbeats(self) -> None:
        while not self._closing.wait(self._job.settings.heartbeat_s):
            for agent in tuple(self._agents.values()):
                if isinstance(agent, SshAgentConnection):
                    agent.send_heartbeat(self._heartbeat)

    # --- hosts that come and go ------------------------------------------------------------------------------------

    def _handle_lost(self, index: int, error: HostError) -> None:
        """The connection to an agent has ended."""
        if index not in self._removed:
            self._fail_host(index, error)

    def _fail_host(self, index: int, error: HostError) -> None:
        """A host cannot be used, or not any more."""
        agent = self._forget_host(index)
        if agent is not None:
            agent.close()
        self._on_host_lost(index, error)

    def _forget_host(self, index: int) -> Agent | SshAgentConnection | None:
        """Remove a host from all that is known about it; return its agent, unless the driver itself needs that."""
        self.host_facts.pop(index, None)
        if index in self._start_timers:
            self._start_timers.pop(index).cancel()
        if index in self._unprobed:
            self._unprobed.remove(index)
        agent = None
        if index != self.driver_index:
            agent = self._agents.pop(index, None)
            self.hellos.pop(index, None)
        if self._probe is not None and index == self._probe.newcomer:
            self._probe = None
            self._probe_next_host()
        elif self._probe is not None:
            self._advance_probe(self._probe.drop(index))
        return agent

    def _connect_late(self, index: int, host: Host, is_local: bool) -> None:
        start_s = self._job.ssh.start_s
        late = HostError(f"it did not answer within {start_s:g} s")
        self._start_timers[index] = self._loop.call_later(start_s, lambda: self._fail_host(index, late))
        try:
            self._connect(index, host, local=is_local)
        except StartFailed as error:
            self._errors[index] = HostError(str(error))
        if index in self._errors:
            self._fail_host(index, self._errors.pop(index))

    def _handle_late_hello(self, index: int, hello: AgentHello) -> None:
        self._start_timers.pop(index).cancel()
        self.hellos[index] = hello
        error = self._find_misfit(index)
        if error is not None:
            return self._fail_host(index, error)
        if not self._is_local(index):
            self._start_heartbeats()
        self._unprobed.append(index)
        if self._probe is None:
            self._probe_next_host()

    def _probe_next_host(self) -> None:
        assert self._network is not None, "hosts are added to a job that runs"
        while self._unprobed and self._probe is None:
            index = self._unprobed.popleft()
            own_address = self._network.driver_address
            if self._is_local(index):  # the driver's own machine, which all others have reached
                self._use_host(index, "" if own_address == LOOPBACK else own_address)
                continue
            known = {each: facts.address for each, facts in self.host_facts.items() if facts.address}
            known = {**known, self.driver_index: own_address}
            names = {each: self.host_name(each) for each in (*known, index)}
            self._probe = LateHostProbe(self._key, index, known, names)
            late = HostError(f"its network could not be probed within {2 * PROBE_REPLY_TIMEOUT_S:g} s")
            self._start_timers[index] = self._loop.call_later(
                2 * PROBE_REPLY_TIMEOUT_S, partial(self._fail_host, index, late)
            )
            self._advance_probe(self._probe.start())

    def _advance_probe(self, requests: Mapping[int, ProbeRequest]) -> None:
        self.send(requests)
        probe = self._probe
        if probe is None or not probe.is_complete:
            return
        try:
            address = probe.choose_address()
        except StartFailed as error:
            return self._fail_host(probe.newcomer, HostError(str(error)))
        self._probe = None
        self._start_timers.pop(probe.newcomer).cancel()
        self._use_host(probe.newcomer, address)
        self._probe_next_host()

    def _use_host(self, index: int, address: str) -> None:
        self.host_facts[index] = self._make_facts(index, address)
        self._on_ready(index)
