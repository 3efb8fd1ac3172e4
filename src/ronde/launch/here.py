"""Which hosts are this machine, and so need no ssh. Used by crew."""

from __future__ import annotations

import os
import pwd
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psutil

from ronde.errors import StartFailed
from ronde.launch.job import Host
from ronde.net.addresses import resolve
from ronde.types import Deadline

__all__ = ["Machine", "find_here"]

RESOLVE_S = 3.0
"""A name that takes longer is left to ssh."""
ALWAYS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine and its user are called."""

    user: str
    names: frozenset[str]
    """Host names and addresses."""

    @classmethod
    def this(cls) -> Machine:
        """Look."""
        try:
            user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # a container may run as a number that nobody has named
            user = ""
        addresses = {found.address for each in psutil.net_if_addrs().values() for found in each}
        return cls(user, ALWAYS | {os.uname().nodename} | addresses)

    def is_meant(self, host: Host, addresses: Collection[str] = ()) -> bool:
        """Whether this machine, as this user, is that host; `addresses` are what its name stands for."""
        user, _, name = host.name.rpartition("@")
        return user in ("", self.user) and (name in self.names or any(found in self.names for found in addresses))


def find_here(
    hosts: Sequence[Host], machine: Machine, addresses_of: Callable[[str], Sequence[str]] | None = None
) -> tuple[bool, ...]:
    """For each host whether it is this machine. All names are looked up at once, and only if they are not known."""
    addresses_of = addresses_of or _addresses_of
    found: dict[str, Sequence[str]] = {}

    def look_up(name: str) -> None:
        found[name] = addresses_of(name)

    names = {host.name.rpartition("@")[2] for host in hosts if not machine.is_meant(host)}
    # Owned by this call. Each touches its own entry; one that the system's resolver keeps is left to end by itself.
    threads = [threading.Thread(target=look_up, args=[name], name="ronde-resolve", daemon=True) for name in names]
    deadline = Deadline(RESOLVE_S)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left_s)
    return tuple(machine.is_meant(host, found.get(host.name.rpartition("@")[2], ())) for host in hosts)


def _addresses_of(name: str) -> list[str]:
    try:
        return [address for address, _ in resolve(name, 22)]
    except StartFailed:  # perhaps a name that only ssh's configuration knows
        return []
