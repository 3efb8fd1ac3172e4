"""Lists of hosts, as people write them: `-H a:2,b:4` and hostfiles. Used by launch/config and whoever else
takes hosts from people.

    host            one slot
    host:4          four slots
    user@host:4     as another user
    [fe80::7]:4     an IPv6 address stands in brackets
    host slots=4    hostfiles only; there a `#` begins a comment
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ronde.launch.job import Host

__all__ = ["format_host", "format_hosts", "parse_hostfile", "parse_hosts", "read_hostfile"]

_WORD = r"[^\s@:\[\],]+"
_HOST = re.compile(rf"(?P<user>{_WORD}@)?(?:\[(?P<v6>[^\s\[\],]+)\]|(?P<name>{_WORD}))(?::(?P<slots>[^:]*))?")
_SHAPE = "a host is name, name:slots or [address]:slots"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts of a comma-separated list. A host that is named again adds its slots to the first mention."""
    items = [item.strip() for item in text.split(",")]
    if not any(items):
        raise ValueError(f"the list of hosts is empty: {text!r}")
    if not all(items):
        raise ValueError(f"there is an empty place between two commas in {text!r}")
    return _merge(_parse_host(item) for item in items)


def parse_hostfile(text: str, source: str) -> tuple[Host, ...]:
    """Hosts of a hostfile, one per line. Errors name the source and the line."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            try:
                hosts.append(_parse_line(words))
            except ValueError as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if not hosts:
        raise ValueError(f"{source} names no host")
    return _merge(hosts)


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Hosts of a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"cannot read the hostfile {path}: {reason}") from None
    return parse_hostfile(text, str(path))


def format_hosts(hosts: Iterable[Host]) -> str:
    """The text that parse_hosts reads."""
    return ",".join(format_host(host.name, str(host.slots)) for host in hosts)


def format_host(name: str, slots: str) -> str:
    """One of them. The brackets of an IPv6 address are added where they are missing."""
    return f"{_bracketed(name)}:{slots}"


def _parse_line(words: list[str]) -> Host:
    host, explicit = _parse_host(words[0]), words[1:]
    if not explicit:
        return host
    key, equals, value = explicit[0].partition("=")
    if key != "slots" or not equals or len(explicit) > 1:
        raise ValueError(f"cannot read {' '.join(explicit)!r} after the host; write `{words[0]} slots=4`")
    if words[0] != _bracketed(host.name):
        raise ValueError(f"slots are given twice: {' '.join(words)!r}")
    return Host(host.name, _parse_slots(host.name, value))


def _parse_host(item: str) -> Host:
    found = _HOST.fullmatch(item)
    if found is None:
        if item.count(":") > 1 and "[" not in item:
            raise ValueError(f"{item!r}: an IPv6 address needs brackets, as in [fe80::7]:4")
        raise ValueError(f"cannot read {item!r}; {_SHAPE}")
    if found["v6"] is not None and found["v6"].count(":") < 2:
        raise ValueError(f"{item!r}: brackets are for IPv6 addresses")
    name = (found["user"] or "") + (found["v6"] or found["name"])
    return Host(name, 1 if found["slots"] is None else _parse_slots(name, found["slots"]))


def _parse_slots(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"host {name}: slots must be a whole number, got {text!r}")
    return int(text)  # Host says what is wrong with 0


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, num) for name, num in slots.items())


def _bracketed(name: str) -> str:
    user, at, host = name.rpartition("@")
    return f"{user}{at}[{host}]" if host.count(":") > 1 and not host.startswith("[") else name
