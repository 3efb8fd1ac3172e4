"""How a rank finds its round: from settings to the other members and the ways to them. Used by the world at its start.

Everything that was opened is in the Place and closed with it; a start that fails leaves nothing behind.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from ronde.comm.backend import Backend
from ronde.comm.coordination.lifelines import Line, has_ended
from ronde.comm.engine import Control
from ronde.comm.mpi.backend import MpiBackend
from ronde.comm.native import NativeBackend
from ronde.comm.rendezvous import find_coordinator, host_coordinator
from ronde.comm.threads.backend import Hub, ThreadsBackend
from ronde.comm.threads.loopback import Loopback
from ronde.errors import StartFailed
from ronde.net.addresses import facing, format_address, host_identity, parse_address
from ronde.net.control import ControlClient
from ronde.net.door import Door
from ronde.net.keys import JobKey
from ronde.net.messages import VERSION, FromCoordinator, Join, Leave, Refused, Welcome
from ronde.observe.stacks import pid_namespace
from ronde.settings import Settings
from ronde.types import Deadline, Member, Topology

__all__ = ["Groups", "Place", "find_place"]

Groups = tuple[tuple[int, ...], ...]

JOIN_AGAIN_S = 0.5


@dataclass
class Place:
    """Where this rank stands in its round."""

    settings: Settings
    topology: Topology
    control: Control
    backend: Backend
    lifeline: int = -1
    """Descriptor whose end means that the coordinator is gone; the control client watches it."""
    coordinator_rank: int = -1
    """The rank that hosts the coordinator; -1 when a launcher does."""
    early: list[FromCoordinator] = field(default_factory=list)
    """What the coordinator said right after the welcome."""
    opened: ExitStack = field(default_factory=ExitStack)
    """Closes all of this."""


class _Joined(NamedTuple):
    """The answer to a Join."""

    members: tuple[Member, ...]
    more: list[FromCoordinator]


def find_place(settings: Settings, groups: Groups, round: int) -> Place:
    """Join the round that the complete settings tell of. `round` counts the rounds of this process, from 0."""
    if settings.size == 1 and not settings.coordinator_hosted:  # a launcher wants to see even a job of one
        return _alone(settings, groups)
    with ExitStack() as opened:
        place = _among_others(settings, groups, round, opened)
        place.opened = opened.pop_all()
        return place


def _alone(settings: Settings, groups: Groups) -> Place:
    """A job of one: no sockets, nobody to wait for."""
    member = Member(0, settings.host or host_identity(), os.getpid(), "")
    control = Loopback((member,), groups, settings).client(0)
    return Place(settings, Topology((member,), 0), control, ThreadsBackend(Hub()))


def _among_others(settings: Settings, groups: Groups, round: int, opened: ExitStack) -> Place:
    _check(settings)
    deadline = Deadline(settings.start_s)
    key = JobKey(settings.key)
    hosts_it = settings.rank == 0 and not settings.coordinator_hosted
    meeting = settings.coordinator
    if hosts_it:
        coordinator = host_coordinator(settings, key)
        opened.callback(coordinator.close)
        meeting = coordinator.address
    line, control_address = find_coordinator(meeting, settings, key, round=round, deadline=deadline)
    opened.callback(line.close)
    control = ControlClient(control_address, key, settings.rank)
    opened.callback(_close_control, control, line)
    control.watch(line.fileno())
    here = settings.address or facing(parse_address(control_address)[0])
    door = Door(key, unix=True, tcp=here, heartbeat_s=settings.heartbeat_s)
    opened.callback(door.close)
    tcp_doors = (format_address(here, door.tcp_port),)
    member = Member(settings.rank, settings.host or host_identity(), os.getpid(), door.unix_name, tcp_doors)
    join = Join(VERSION, round, settings.size, member, groups, pid_namespace())
    joined = _join(control, line.fileno(), join, deadline)
    topology = Topology(joined.members, settings.rank)
    backend = _make_backend(settings, topology, door, key)
    opened.callback(backend.close)
    coordinator_rank = -1 if settings.coordinator_hosted else 0
    return Place(settings, topology, control, backend, line.fileno(), coordinator_rank, joined.more)


def _check(settings: Settings) -> None:
    for name in ("coordinator", "key"):
        if not getattr(settings, name):
            raise ValueError(
                f"a job of {settings.size} ranks needs {name} (RONDE_{name.upper()}); "
                "start the ranks with `ronde run`, or give it to every one of them"
            )


def _close_control(control: ControlClient, line: Line) -> None:
    """Send what was said last; but when the coordinator is gone, do not wait for it to listen."""
    if has_ended(line):
        control.close(0.0)
    else:
        control.close()


def _join(control: ControlClient, line: int, join: Join, deadline: Deadline) -> _Joined:
    """Ask to take part until the answer comes. Asking again is harmless, and a lost question is not."""
    hung_up = False
    while True:
        if not hung_up:
            control.send(join)
        messages = control.poll(min(JOIN_AGAIN_S, deadline.left_s))
        for index, message in enumerate(messages):
            if isinstance(message, Welcome):
                return _Joined(message.members, messages[index + 1 :])
            if isinstance(message, Refused):
                raise StartFailed(message.why)
        if hung_up:
            raise StartFailed("the coordinator hung up before the round began; look at its output")
        if line in control.readable():
            control.unwatch(line)  # why it hung up may still be on its way
            hung_up = True
        elif deadline.passed:
            control.send(Leave(orderly=False, why="it waited too long for the round to begin"))
            raise StartFailed(
                f"rank {join.member.rank} heard nothing from the coordinator within {deadline.seconds:g} s; "
                "look at its output, or give more time with start_s (RONDE_START_S)"
            )


def _make_backend(settings: Settings, topology: Topology, door: Door, key: JobKey) -> Backend:
    if settings.backend == "mpi":
        return MpiBackend(topology, settings)
    return NativeBackend(topology, door, key, settings)
