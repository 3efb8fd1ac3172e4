"""Hosts as people write them, and which rank runs on which host and CPUs. Pure.

`-H a:2,b:4` and hostfiles are written as:

    host            one slot
    host:4          four slots
    user@host:4     as another user
    [fe80::7]:4     an IPv6 address stands in brackets
    host:2+servers  two slots for server processes of parameter servers, and none for ranks
    host slots=4    hostfiles only; there a `#` begins a comment
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ronde.text import format_count

FOR_SERVERS = "+servers"
_WORD = r"[^\s@:\[\],]+"
_HOST = re.compile(rf"(?P<user>{_WORD}@)?(?:\[(?P<v6>[^\s\[\],]+)\]|(?P<name>{_WORD}))(?::(?P<slots>[^:]*))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine and how many ranks it may take."""

    name: str
    """As ssh knows it, `user@` allowed; `localhost` and this machine's own names need no ssh."""
    slots: int = 1
    for_servers: bool = False
    """Whether its slots are for server processes, and not for ranks."""

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("-") or " " in self.name or not self.name.isprintable():
            raise ValueError(
                "a host needs a name without spaces and control characters that does not begin with '-', "
                f"got {self.name!r}"
            )
        if self.slots < 1:
            raise ValueError(f"host {self.name}: slots must be at least 1, got {self.slots}")


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse a comma-separated list. A host that is named again adds its slots to the first mention."""
    items = [item.strip() for item in text.split(",")]
    if not any(items):
        raise ValueError(f"the list of hosts is empty: {text!r}")
    if not all(items):
        raise ValueError(f"there is an empty place between two commas in {text!r}")
    return _merge_hosts(_parse_host(item) for item in items)


def read_hostfile(path: str | Path, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Read a file with one host per line. Errors name the file and the line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read the hostfile {path}: {reason}") from None
    hosts = parse_host_lines(text, str(path), default_slots=default_slots)
    if not hosts:
        raise ValueError(f"{path} names no host")
    return hosts


def parse_host_lines(text: str, source: str, *, default_slots: int = 1) -> tuple[Host, ...]:
    """Parse the lines of a hostfile, or of what a discovery script prints; none may be there. Errors name the source
    and the line. A host without a number of slots has `default_slots`."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            try:
                hosts.append(_parse_hostfile_line(words, default_slots))
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    return _merge_hosts(hosts)


def format_hosts(hosts: Iterable[Host]) -> str:
    """Write hosts as parse_hosts reads them."""
    return ",".join(format_host(host.name, f"{host.slots}{FOR_SERVERS * host.for_servers}") for host in hosts)


def format_host(name: str, slots: str) -> str:
    """Write one host, with the brackets of an IPv6 address."""
    return f"{_bracketed(name)}:{slots}"


def _parse_hostfile_line(words: list[str], default_slots: int) -> Host:
    host, explicit = _parse_host(words[0], default_slots), words[1:]
    if not explicit:
        return host
    key, equals, value = explicit[0].partition("=")
    if key != "slots" or not equals or len(explicit) > 1:
        raise ValueError(f"cannot read {' '.join(explicit)!r} after the host; write `{words[0]} slots=4`")
    if words[0] != _bracketed(host.name):
        raise ValueError(f"slots are given twice: {' '.join(words)!r}")
    return Host(host.name, _parse_slots(host.name, value))


def _parse_host(item: str, default_slots: int = 1) -> Host:
    item, for_servers = item.removesuffix(FOR_SERVERS), item.endswith(FOR_SERVERS)
    found = _HOST.fullmatch(item)
    if found is None:
        if item.count(":") > 1 and "[" not in item:
            raise ValueError(f"{item!r}: an IPv6 address needs brackets, as in [fe80::7]:4")
        raise ValueError(f"cannot read {item!r}; a host is name, name:slots or [address]:slots")
    if found["v6"] is not None and found["v6"].count(":") < 2:
        raise ValueError(f"{item!r}: brackets are for IPv6 addresses")
    name = (found["user"] or "") + (found["v6"] or found["name"])
    slots = default_slots if found["slots"] is None else _parse_slots(name, found["slots"])
    return Host(name, slots, for_servers)


def _parse_slots(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"host {name}: slots must be a whole number, got {text!r}")
    return int(text)  # Host raises for 0


def _merge_hosts(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[tuple[str, bool], int] = {}
    for host in hosts:
        key = (host.name, host.for_servers)
        slots[key] = slots.get(key, 0) + host.slots
    return tuple(Host(name, num, for_servers) for (name, for_servers), num in slots.items())


def _bracketed(name: str) -> str:
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]" if host.count(":") > 1 and not host.startswith("[") else name


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank runs, and its numbers among the other ranks."""

    rank: int
    host: Host
    host_index: int
    """The host's number among the hosts that get ranks."""
    local_rank: int
    """The rank's number among the ranks of its host."""
    local_size: int
    cross_rank: int
    """The rank's number among the ranks that have the same local rank on their hosts."""
    cross_size: int
    num_hosts: int
    """How many hosts get ranks."""


def hosts_or_localhost(hosts: Sequence[Host], num_ranks: int) -> tuple[Host, ...]:
    """Return the hosts of a job; if it names none, this machine with as many slots as needed."""
    return tuple(hosts) or (Host("localhost", num_ranks),)


def place_ranks(hosts: Sequence[Host], num_ranks: int) -> tuple[Placement, ...]:
    """Place every rank: hosts are filled in their order. ValueError says how many slots are missing."""
    if num_ranks < 1:
        raise ValueError(f"a job needs at least 1 rank, got {num_ranks}")
    hosts = hosts_or_localhost([host for host in hosts if not host.for_servers], num_ranks)
    num_slots = sum(host.slots for host in hosts)
    if num_ranks > num_slots:
        raise ValueError(
            f"{num_ranks} ranks, but only {format_count(num_slots, 'slot')} ({format_hosts(hosts)}): "
            f"{format_count(num_ranks - num_slots, 'slot')} short; add hosts or slots, or start fewer ranks"
        )
    local_sizes: list[int] = []
    num_placed = 0
    while num_placed < num_ranks:
        local_sizes.append(min(hosts[len(local_sizes)].slots, num_ranks - num_placed))
        num_placed += local_sizes[-1]
    cross_sizes = Counter(local_rank for local_size in local_sizes for local_rank in range(local_size))
    cross_ranks = Counter[int]()
    placements: list[Placement] = []
    for host_index, local_size in enumerate(local_sizes):
        for local_rank in range(local_size):
            placements.append(
                Placement(
                    rank=len(placements),
                    host=hosts[host_index],
                    host_index=host_index,
                    local_rank=local_rank,
                    local_size=local_size,
                    cross_rank=cross_ranks[local_rank],
                    cross_size=cross_sizes[local_rank],
                    num_hosts=len(local_sizes),
                )
            )
            cross_ranks[local_rank] += 1
    return tuple(placements)


def bind_cpus(cpus: Sequence[int], local_rank: int, local_size: int) -> tuple[int, ...]:
    """Choose the CPUs of one rank, for `--bind core`: neighbours in `cpus` stay together, and no two ranks share one as
    long as there is one for each. With fewer CPUs than ranks, several ranks share a single one."""
    if not cpus:
        return ()
    if len(cpus) < local_size:
        return (cpus[local_rank % len(cpus)],)
    each, more = divmod(len(cpus), local_size)
    # The first `more` ranks get one CPU more.
    first = local_rank * each + min(local_rank, more)
    return tuple(cpus[first : first + each + (local_rank < more)])
