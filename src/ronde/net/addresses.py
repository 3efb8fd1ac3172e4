"""Addresses `host:port`, the addresses of this machine, and the identity of its host."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
import socket
from pathlib import Path

from ronde.errors import StartFailed

HOST_LOCAL_INTERFACES = ("docker", "br-", "veth", "virbr", "cni", "podman")
"""Interfaces inside one machine. Their addresses are the same on every host, so another host would reach itself."""

_IDENTITY_SUFFIX = re.compile(r"-[0-9a-f]{12}\Z")
"""What follows the host's name in an identity."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`; an IPv6 address is in brackets: `[::1]:29500`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: an IPv6 address needs brackets, as in [::1]:29500")
    if not colon or not host or any(c.isspace() or c in "[]" for c in host):
        raise ValueError(f"address must be host:port, as in 10.0.0.1:29500, got {text!r}")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) <= 65535):
        raise ValueError(f"address {text!r}: the port must be from 1 to 65535, got {port!r}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return the text that parse_address() reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve_host(host: str, port: int) -> list[tuple[str, int]]:
    """Return all numeric addresses of a host, in the system's order of preference. Waits for the system's resolver."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise StartFailed(
            f"the name {host!r} is unknown on host {socket.gethostname()} ({error}); "
            "check its spelling, or give a numeric address"
        ) from None
    return list(dict.fromkeys((str(sockaddr[0]), port) for *_, sockaddr in found))


def address_family(host: str) -> socket.AddressFamily:
    """Return the address family of a numeric host."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def peer_host(sock: socket.socket) -> str:
    """Return the numeric host at the other end of a TCP socket."""
    return str(sock.getpeername()[0])


def local_address_for(host: str) -> str:
    """Return the address from which this machine connects to `host`, and which that host can therefore reach."""
    found, port = resolve_host(host, 9)[0]
    with socket.socket(address_family(found), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((found, port))  # UDP: chooses the route, sends nothing
        except OSError as error:
            raise StartFailed(
                f"host {socket.gethostname()} has no route to {host} ({error.strerror}); check its network"
            ) from None
        return str(probe.getsockname()[0])


def find_free_port(host: str) -> int:
    """Return a TCP port of this machine that nobody uses now, for an address that others must know before there is a
    listener. The system does not assign it again soon, but does not reserve it either."""
    address = resolve_host(host, 0)[0]
    with socket.socket(address_family(address[0]), socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def find_free_ports(host: str, num_ports: int) -> tuple[int, ...]:
    """Return different free TCP ports, see find_free_port()."""
    found: set[int] = set()
    for _ in range(100 * num_ports):  # the system repeats itself only when it has next to none
        if len(found) < num_ports:
            found.add(find_free_port(host))
    if len(found) < num_ports:
        raise StartFailed(f"there are no {num_ports} free TCP ports at {host}")
    return tuple(sorted(found))


def candidate_addresses(host: str = "") -> tuple[str, ...]:
    """Return addresses where others may reach this machine, best first: the one that connects to `host`, then those of
    the network interfaces that are up. Loopback only if there is nothing else."""
    import psutil  # not at the top: it takes long to load, and ranks of one host do not need it

    first = [local_address_for(host)] if host else []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    others: list[str] = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name in up and not name.startswith(HOST_LOCAL_INTERFACES):
            others += [found.address for found in addresses if found.family in (socket.AF_INET, socket.AF_INET6)]
    others = [text for text in others if _is_reachable(text)]
    others.sort(key=lambda text: ":" in text)  # stable: IPv4 first
    return tuple(dict.fromkeys((*first, *others))) or ("127.0.0.1",)


def _is_reachable(text: str) -> bool:
    # A link-local IPv6 address means nothing without the name of the interface on the *other* side.
    address = ipaddress.ip_address(text.partition("%")[0])
    return not (address.is_loopback or address.is_unspecified or (address.version == 6 and address.is_link_local))


@functools.cache
def host_identity() -> str:
    """Return a name that is equal exactly where processes share memory and abstract Unix sockets: one machine since one
    boot, and one network namespace of it. It begins with the host's name."""
    name = socket.gethostname()
    facts = (name, _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/net"))
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return f"{name}-{digest[:12]}"


def host_name(identity: str) -> str:
    """Return the host's name of an identity, for people. A name that the user gave the host stays as it is."""
    return _IDENTITY_SUFFIX.sub("", identity)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # hidden in some containers
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
