"""Where rank 0 hosts the coordinator and how the others find it: at one address, or at the first free port of a range.
Used by place.

A range is for those who can agree on a host and a few ports but not keep a port free (ranks that another launcher
started). Rank 0 takes the first port it gets; the others knock at all of them until one proves the job's key.
"""

from __future__ import annotations

import time

from ronde.comm.coordination.coordinator import Coordinator
from ronde.comm.coordination.greeting import call_coordinator, liveness_caller, read_greeting
from ronde.comm.coordination.lifelines import Line
from ronde.errors import StartFailed
from ronde.net.addresses import format_address, parse_address, peer_host, resolve
from ronde.net.door import Caller, knock
from ronde.net.keys import JobKey
from ronde.settings import Settings
from ronde.types import Deadline

__all__ = ["expand_ports", "find_coordinator", "host_coordinator"]

MOST_PORTS = 1000
FIRST_KNOCK_S = 0.2
LONGEST_KNOCK_S = 2.0
"""How long whoever listens at a port of the range may take to answer: longer at every turn, for ours may be busy."""
PAUSE_S = 0.02
"""After all ports were tried."""
NOBODY = "nobody listens there"


def expand_ports(text: str) -> list[str]:
    """`host:port` for every port of `host:port` or `host:first-last`."""
    before, dash, last = text.rpartition("-")
    if not dash or ":" not in before or "]" in last or ":" in last:
        parse_address(text)
        return [text]
    host, first_port = parse_address(before)
    last_port = parse_address(format_address(host, 1)[:-1] + last)[1]
    if not 0 <= last_port - first_port < MOST_PORTS:
        raise ValueError(f"address {text!r}: the range must go up, and by less than {MOST_PORTS} ports")
    return [format_address(host, port) for port in range(first_port, last_port + 1)]


def host_coordinator(settings: Settings, key: JobKey) -> Coordinator:
    """A running coordinator at the setting's address, or the first port of its range that is free."""
    problem: StartFailed | None = None
    for address in expand_ports(settings.coordinator):
        host, port = parse_address(address)
        try:
            coordinator = Coordinator(host, port, settings.size, key, settings=settings)
        except StartFailed as error:
            problem = error
            continue
        coordinator.start()
        return coordinator
    assert problem is not None
    raise problem


def find_coordinator(text: str, settings: Settings, key: JobKey, *, round: int, deadline: Deadline) -> tuple[Line, str]:
    """The lifeline to the coordinator, and `host:port` of its control server."""
    addresses = expand_ports(text)
    if len(addresses) == 1:
        return call_coordinator(
            addresses[0], key, settings.rank, round=round, deadline=deadline, heartbeat_s=settings.heartbeat_s
        )
    resolve(*parse_address(addresses[0]))  # an unknown name will not get known by knocking
    caller = liveness_caller(settings.rank, round)
    problems: dict[str, str] = {}
    knock_s = FIRST_KNOCK_S
    while not deadline.passed:
        for address in addresses:
            found = _knock_once(address, key, caller, Deadline(min(knock_s, deadline.left_s)), settings.heartbeat_s)
            if not isinstance(found, str):
                return found
            if found != NOBODY:  # whoever was there tells more than that it has gone since
                problems[address] = found
        knock_s = min(2 * knock_s, LONGEST_KNOCK_S)
        time.sleep(min(PAUSE_S, deadline.left_s))
    told = set(problems.values()) or {NOBODY}
    raise StartFailed(
        f"rank {settings.rank} did not find the coordinator of rank 0 at {text} within {deadline.seconds:g} s "
        f"({'; '.join(sorted(told))}); is rank 0 running there, and do all ranks have the same RONDE_KEY, or a home "
        "directory in common?"
    )


class _Nobody(Exception):
    """Do not knock here again for now."""


def _knock_once(
    address: str, key: JobKey, caller: Caller, deadline: Deadline, heartbeat_s: float
) -> tuple[Line, str] | str:
    """As call_coordinator, or in words why it is not to be had here now."""

    def leave() -> None:
        raise _Nobody

    try:
        line, greeting = knock(address, key, caller, deadline, heartbeat_s=heartbeat_s, before_retry=leave)
    except _Nobody:
        return NOBODY
    except StartFailed as error:  # a stranger's port, or another job's
        return str(error)
    try:
        answer = read_greeting(greeting)
    except BaseException:
        line.close()
        raise
    if isinstance(answer, str):  # the round before is not over
        line.close()
        return answer
    return line, format_address(peer_host(line), answer)
