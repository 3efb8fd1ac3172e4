"""At which address each host is reached, chosen from what answered when everybody tried everybody. Pure. Used by the
driver before any rank starts.

A *place* is a host with ranks, or the driver's machine. Ranks call the driver (the coordinator is there) and each
other; so every place with ranks calls, and every place is called.

Which hosts reach each other, by trying: opens doors that only this job's hosts can enter, and knocks at those of
others. Used by launch/agent.

All of it waits for the network, so it happens in threads; answers leave through the `answer` callable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from ronde.errors import StartFailed
from ronde.launch.protocol import (
    ProbeReply,
    ProbeRequest,
    RankStartFailed,
)
from ronde.net.addresses import candidate_addresses, find_free_port, format_address, parse_address
from ronde.net.connect import Connection, connect_authenticated
from ronde.net.keys import JobKey
from ronde.net.listener import ConnectionRequest, Listener
from ronde.types import Deadline

__all__ = [
    "HostFacts",
    "JobNetwork",
    "LOOPBACK",
    "NetworkProber",
    "ProbeResult",
    "choose_addresses",
    "make_probe_reply",
]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one place has, and what it found of the others."""

    name: str
    addresses: tuple[str, ...]
    """Its own candidates as `address:port`, best first."""
    has_ranks: bool = True
    """Whether it has ranks, which will call the others."""
    reachable: tuple[tuple[str, ...], ...] = ()
    """For each place in turn, the candidates that answered."""
    errors: tuple[str, ...] = ()
    """For each place in turn, why the others did not."""


def choose_addresses(results: Sequence[ProbeResult]) -> tuple[str, ...]:
    """For each place, the best of its addresses that all its callers reach; empty where nobody calls. StartFailed names
    every pair that cannot talk, and what was tried."""
    chosen: list[str] = []
    problems: list[str] = []
    for index, place in enumerate(results):
        callers = [other for other in results if other is not place and other.has_ranks]
        common = [door for door in place.addresses if all(door in caller.reachable[index] for caller in callers)]
        if callers and not common:
            problems += _describe_unreachable(place, index, callers)
        chosen.append(parse_address(common[0])[0] if callers and common else "")
    if problems:
        raise StartFailed("\n".join(["the hosts of this job cannot all reach each other:", *problems]))
    return tuple(chosen)


def _describe_unreachable(target: ProbeResult, index: int, clients: Sequence[ProbeResult]) -> list[str]:
    """In words, a line each, why there is no address that all of them reach."""
    if not target.addresses:
        return [f"  {target.name} has no address where others could call it; check its network interfaces"]
    cut_off = [caller for caller in clients if not caller.reachable[index]]
    if cut_off:
        return [
            f"  {caller.name} cannot reach {target.name} (tried {', '.join(target.addresses)})"
            f"{f': {caller.errors[index]}' if index < len(caller.errors) and caller.errors[index] else ''}"
            for caller in cut_off
        ]
    ways = "; ".join(f"{caller.name} reaches {', '.join(caller.reachable[index])}" for caller in clients)
    return [f"  {target.name} has no address that all others reach: {ways}"]


MAX_PARALLEL_PROBES = 128
"""At a time."""
ATTEMPT_TIMEOUT_S = 2.0
"""A silent address is called again after so long, so that close() does not wait longer than this."""
PROBE_PURPOSE = "probe"


class NetworkProber:
    """Carries out the probes of one agent, one after the other. `answer` is called in its thread."""

    def __init__(self, on_reply: Callable[[ProbeReply | RankStartFailed], None]) -> None:
        self._on_reply = on_reply
        self._listeners: list[Listener] = []
        self._closed = threading.Event()
        # Owned by the prober, and made with the first probe. Touches the doors; close() does so after its end.
        self._pool: ThreadPoolExecutor | None = None

    def probe(self, request: ProbeRequest) -> None:
        """Begin; the answer comes when it is done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ronde-probe")
        self._pool.submit(self._run, request)

    def close(self) -> None:
        """Close the doors, and give up what is under way. Idempotent."""
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
            self._on_reply(RankStartFailed(-1, f"the network could not be looked at: {error}"))
        else:
            if not self._closed.is_set():
                self._on_reply(found)

    def _open_listeners(self, request: ProbeRequest, key: JobKey) -> ProbeReply:
        self._close_listeners()
        opened, failed = [], []
        for address in candidate_addresses():
            try:
                door = Listener(key, unix=False, tcp_host=address, on_connection=_close_accepted)
            except StartFailed as error:
                failed.append(str(error))
                continue
            self._listeners.append(door)
            opened.append(format_address(address, door.tcp_port))
        first = parse_address(opened[0])[0] if opened else "127.0.0.1"
        return ProbeReply((tuple(opened),), ("; ".join(failed),), _find_free_ports(first, request.num_ports))

    def _close_listeners(self) -> None:
        for door in self._listeners:
            door.close()
        self._listeners.clear()

    def _probe_all(self, request: ProbeRequest, key: JobKey) -> ProbeReply:
        deadline = Deadline(request.timeout_s)
        everywhere = [address for host in request.targets for address in host]
        with ThreadPoolExecutor(
            max(1, min(MAX_PARALLEL_PROBES, len(everywhere))), thread_name_prefix="ronde-knock"
        ) as pool:
            problems = dict(
                zip(everywhere, pool.map(partial(self._probe_address, key, deadline), everywhere), strict=True)
            )
        return make_probe_reply(request.targets, problems)

    def _probe_address(self, key: JobKey, deadline: Deadline, address: str) -> str:
        """Why it does not answer; nothing if it does."""
        while not deadline.expired and not self._closed.is_set():
            patience = Deadline(min(ATTEMPT_TIMEOUT_S, deadline.remaining_s))
            try:
                sock, _ = connect_authenticated(
                    address, key, ConnectionRequest(PROBE_PURPOSE, 0), patience, before_retry=_refuse_retry
                )
            except (StartFailed, ValueError) as error:
                if not patience.expired:  # it has answered, if not as we wished
                    return str(error).rpartition(f"{PROBE_PURPOSE!r}: ")[2]
            else:
                sock.close()
                return ""
        return f"no answer within {deadline.timeout_s:g} s; is the host up, and does a firewall let the port through?"


def make_probe_reply(targets: Sequence[Sequence[str]], problems: Mapping[str, str]) -> ProbeReply:
    """The answer for these hosts: which addresses have no problem, and the problems of the rest in words."""
    reached = tuple(tuple(address for address in host if not problems[address]) for host in targets)
    errors = tuple(
        "; ".join(f"{address}: {problems[address]}" for address in host if problems[address]) for host in targets
    )
    return ProbeReply(reached, errors)


def _refuse_retry() -> None:
    """Doors were opened before anybody was asked to knock: whoever finds none need not try again."""
    raise StartFailed("the connection was refused or cut; does a firewall reject it?")


def _close_accepted(caller: ConnectionRequest, sock: Connection) -> bool:
    """To have been let in was all that the caller wanted."""
    sock.close()
    return True


def _find_free_ports(host: str, num_ports: int) -> tuple[int, ...]:
    found: set[int] = set()
    for _ in range(100 * num_ports):  # the system repeats itself only when it has next to none
        if len(found) < num_ports:
            found.add(find_free_port(host))
    if len(found) < num_ports:
        raise StartFailed(f"there are no {num_ports} free TCP ports at {host}")
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was found out about one host."""

    cpus: tuple[int, ...]
    """Cores that ranks may use."""
    address: str = ""
    """Where ranks of other hosts reach it; empty when there are none."""
    free_ports: tuple[int, ...] = ()
    """TCP ports that nobody uses there."""
    is_local: bool = True
    """Whether it is the driver's own machine."""


@dataclass(frozen=True, slots=True)
class JobNetwork:
    """What has to be known before ranks start."""

    driver_address: str
    """The driver's address that all ranks reach."""
    host_facts: tuple[HostFacts, ...]
    """By host."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where every rank reaches each host."""
        return tuple(site.address or LOOPBACK for site in self.host_facts)
