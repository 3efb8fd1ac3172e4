"""Which hosts of a job reach each other, found out by trying, and the addresses that are chosen from that.

Before any rank starts, each agent listens at all addresses of its host and connects to those of all others
(NetworkProber); the driver then chooses for each host an address that all others reach (choose_addresses). Ranks
connect to each other and to the coordinator in the driver, so a driver whose machine has no ranks is probed, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ronde.errors import StartFailed
from ronde.launch.protocol import AgentError, PortCounts, ProbeReply, ProbeRequest
from ronde.launch.timeouts import PROBE_ATTEMPT_TIMEOUT_S, PROBE_TIMEOUT_S
from ronde.net.addresses import PortReservation, candidate_addresses, find_free_ports, format_address, parse_address
from ronde.net.connect import ConnectFailed, Connection, connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.net.open_files import raise_open_files_limit
from ronde.types import Deadline

LOOPBACK = "127.0.0.1"


def find_ports(address: str, counts: PortCounts, reservation: PortReservation) -> tuple[int, ...]:
    """Return as many ports of this machine, the reserved ones last."""
    raise_open_files_limit()
    reserved = reservation.add(address, counts.reserved)
    return (*find_free_ports(address, counts.free), *reserved)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the driver has found out about one host."""

    cpus: tuple[int, ...]
    effective_cpu_count: int
    """See AgentHello."""
    address: str = ""
    """Where ranks of other hosts reach it; empty when there are none."""
    free_ports: tuple[int, ...] = ()
    """The reserved ones are behind the others."""
    is_local: bool = True
    """Whether it is the driver's own machine."""


@dataclass(frozen=True, slots=True)
class JobNetwork:
    """The driver's address that all ranks reach, and the facts of each host, by host index."""

    driver_address: str
    host_facts: Mapping[int, HostFacts]

    @property
    def addresses(self) -> dict[int, str]:
        """The address at which every rank reaches each host, by host index."""
        return {index: facts.address or LOOPBACK for index, facts in self.host_facts.items()}


def choose_addresses(
    names: Sequence[str], listeners: Sequence[Sequence[str]], replies: Sequence[ProbeReply], *, num_hosts: int
) -> tuple[str, ...]:
    """Choose for each agent's machine the best of its listeners that all hosts with ranks (the first `num_hosts`)
    reach; an empty text where there are no others. StartFailed names every pair that cannot connect, and what was
    tried."""
    chosen: list[str] = []
    problems: list[str] = []
    for index, (name, own) in enumerate(zip(names, listeners, strict=True)):
        reached_by = {other: replies[other].reachable[index] for other in range(num_hosts) if other != index}
        common = [address for address in own if all(address in reached for reached in reached_by.values())]
        chosen.append(parse_address(common[0])[0] if reached_by and common else "")
        cut_off = [other for other, reached in reached_by.items() if not reached]
        if common or not reached_by:
            continue
        if not own:
            problems.append(f"  {name} has no address where others could connect; check its network interfaces")
        elif cut_off:
            tried = f"cannot reach {name} (tried {', '.join(own)})"
            problems += [f"  {names[other]} {tried}: {replies[other].errors[index]}" for other in cut_off]
        else:
            found = "; ".join(f"{names[other]} reaches {', '.join(each)}" for other, each in reached_by.items())
            problems.append(f"  {name} has no address that all others reach: {found}")
    if problems:
        raise StartFailed("\n".join(["the hosts of this job cannot all reach each other:", *problems]))
    return tuple(chosen)


class LateHostProbe:
    """Whether a host that is added to a running job, and the machines that are part of it, reach each other. Without
    I/O: the replies of agents in, requests for them out.

    First all listen; then the newcomer connects to all others, and these to the newcomer. The addresses with which the
    job has begun stay: the newcomer has to reach them."""

    def __init__(self, key: str, newcomer: int, known: Mapping[int, str], names: Mapping[int, str]) -> None:
        """`known` has the address of each machine by agent, `names` their names and the newcomer's."""
        self.newcomer = newcomer
        self._key = key
        self._known = dict(known)
        self._names = names
        self._listeners: dict[int, tuple[str, ...]] = {}
        self._replies: dict[int, ProbeReply] = {}
        self._is_connecting = False
        self._probed: tuple[int, ...] = ()
        """The machines to which the newcomer connects, in this order."""

    def start(self) -> dict[int, ProbeRequest]:
        return dict.fromkeys((self.newcomer, *self._known), ProbeRequest(self._key, (), PROBE_TIMEOUT_S))

    def handle_reply(self, agent: int, reply: ProbeReply) -> dict[int, ProbeRequest]:
        """Take a reply; return the requests that are due with it."""
        if agent not in self._known and agent != self.newcomer:
            return {}
        if self._is_connecting:
            self._replies[agent] = reply
            return {}
        self._listeners[agent] = reply.reachable[0]
        return self._connect_if_all_listen()

    def drop(self, agent: int) -> dict[int, ProbeRequest]:
        """A machine is not part of the job any more. Return the requests that are due with that."""
        self._known.pop(agent, None)
        return {} if self._is_connecting else self._connect_if_all_listen()

    def _connect_if_all_listen(self) -> dict[int, ProbeRequest]:
        if not {self.newcomer, *self._known} <= self._listeners.keys():
            return {}
        self._is_connecting = True
        targets = tuple(self._listeners[agent] for agent in self._known)
        to_newcomer = ProbeRequest(self._key, (self._listeners[self.newcomer],), PROBE_TIMEOUT_S)
        requests = dict.fromkeys(self._known, to_newcomer)
        self._probed = tuple(self._known)
        return {**requests, self.newcomer: ProbeRequest(self._key, targets, PROBE_TIMEOUT_S)}

    @property
    def is_complete(self) -> bool:
        return self._is_connecting and {self.newcomer, *self._known} <= self._replies.keys()

    def choose_address(self) -> str:
        """Return the address at which all others reach the newcomer. StartFailed says who does not reach whom."""
        own, found = self._listeners[self.newcomer], self._replies[self.newcomer]
        problems = []
        for agent, reachable, error in zip(self._probed, found.reachable, found.errors, strict=True):
            known = self._known.get(agent)
            if known is not None and known not in [parse_address(address)[0] for address in reachable]:
                problems.append(f"it cannot reach {self._names[agent]} at {known}" + (f" ({error})" if error else ""))
        reached_by = [self._replies[agent].reachable[0] for agent in self._known]
        common = [address for address in own if all(address in reached for reached in reached_by)]
        if not common:
            problems.append(f"none of its addresses ({', '.join(own) or 'it has none'}) is reached by all other hosts")
        if problems:
            raise StartFailed("; ".join(problems))
        return parse_address(common[0])[0]


MAX_PARALLEL_PROBES = 128
PROBE_PURPOSE = "probe"


class NetworkProber:
    """Carries out the probes of one agent, one after the other. They wait for the network, so they run in threads;
    `on_reply` is called there. The caller closes the reservation of ports, when the prober is closed."""

    def __init__(self, on_reply: Callable[[ProbeReply | AgentError], None], reservation: PortReservation) -> None:
        self._on_reply = on_reply
        self._reservation = reservation
        self._listeners: list[Listener] = []
        self._closed = threading.Event()
        # Owned by the prober, made with the first probe. Touches the listeners; close() does so after the pool's end.
        self._pool: ThreadPoolExecutor | None = None

    def probe(self, request: ProbeRequest) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ronde-probe")
        self._pool.submit(self._run, request)

    def close(self) -> None:
        """Close the listeners and abandon probes that run. Idempotent."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._close_listeners()

    def _run(self, request: ProbeRequest) -> None:
        try:
            key = JobKey(request.key)
            found = self._probe_all(request, key) if request.targets else self._open_listeners(request, key)
        except Exception as error:  # the thread's edge: the driver has to learn of it
            self._on_reply(AgentError(f"the network could not be probed: {error}"))
        else:
            if not self._closed.is_set():
                self._on_reply(found)

    def _open_listeners(self, request: ProbeRequest, key: JobKey) -> ProbeReply:
        self._close_listeners()
        opened, failed = [], []
        for address in candidate_addresses():
            try:
                listener = Listener(key, unix=False, tcp_host=address, on_connection=_close_accepted)
            except StartFailed as error:
                failed.append(str(error))
                continue
            self._listeners.append(listener)
            opened.append(format_address(address, listener.tcp_port))
        first = parse_address(opened[0])[0] if opened else LOOPBACK
        ports = find_ports(first, request.num_ports, self._reservation)
        return ProbeReply((tuple(opened),), ("; ".join(failed),), ports)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _probe_all(self, request: ProbeRequest, key: JobKey) -> ProbeReply:
        deadline = Deadline(request.timeout_s)
        addresses = [address for host in request.targets for address in host]
        num_threads = max(1, min(MAX_PARALLEL_PROBES, len(addresses)))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="ronde-probe-address") as pool:
            found = pool.map(partial(self._probe_address, key, deadline), addresses)
            problems = dict(zip(addresses, found, strict=True))
        reached = tuple(tuple(address for address in host if not problems[address]) for host in request.targets)
        errors = tuple(
            "; ".join(f"{address}: {problems[address]}" for address in host if problems[address])
            for host in request.targets
        )
        return ProbeReply(reached, errors)

    def _probe_address(self, key: JobKey, deadline: Deadline, address: str) -> str:
        """Return why it does not answer; an empty text if it does."""
        while not deadline.expired and not self._closed.is_set():
            attempt = Deadline(min(PROBE_ATTEMPT_TIMEOUT_S, deadline.remaining_s))
            try:
                sock, _ = connect_authenticated(
                    address, key, ConnectionRequest(PROBE_PURPOSE, 0), attempt, before_retry=_refuse_retry
                )
            except ConnectFailed as error:
                if not attempt.expired:  # it has answered, if only with a refusal
                    return error.reason
            except ValueError as error:
                return str(error)
            else:
                sock.close()
                return ""
        return f"no answer within {deadline.timeout_s:g} s; is the host up, and does a firewall let the port through?"


def _refuse_retry() -> None:
    # All agents listen before any of them is told to connect: trying again is useless.
    raise StartFailed("the connection was refused or cut; does a firewall reject it?")


def _close_accepted(request: ConnectionRequest, sock: Connection) -> bool:
    # To be accepted was all that the other side wanted to know.
    sock.close()
    return True
