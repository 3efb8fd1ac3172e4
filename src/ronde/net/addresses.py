"""Addresses `host:port`, the addresses of this machine, and the identity of its host."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import re
import socket
from pathlib import Path

from ronde.errors import StartFailed

HOST_LOCAL_INTERFACES = ("docker", "br-", "veth", "virbr", "cni", "podman")
"""Interfaces inside one machine. Their addresses are the same on every host, so another host would reach itself."""


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
    """The host is numeric."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen_error(host: str, port: int, reason: str | None) -> StartFailed:
    return StartFailed(
        f"cannot listen on {format_address(host, port)} ({reason}); "
        "choose another port, or an address that this host has"
    )


def peer_host(sock: socket.socket) -> str:
    """The host is numeric; the socket is one of TCP."""
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


class PortReservation:
    """TCP ports of this machine, for addresses that others must know before there is a listener. Until close() the
    system gives them to nobody who asks for any free port. A server can listen there if it sets SO_REUSEADDR before, as
    those of gRPC do: the sockets here are bound, but do not listen."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def add(self, host: str, num_ports: int) -> tuple[int, ...]:
        """Reserve different ports that nobody uses now, and return them."""
        address = resolve_host(host, 0)[0]
        ports = []
        try:
            for _ in range(num_ports):
                reserved = socket.socket(address_family(address[0]), socket.SOCK_STREAM)
                self._sockets.append(reserved)
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                reserved.bind(address)
                ports.append(int(reserved.getsockname()[1]))
        except OSError as error:
            raise StartFailed(f"there are no {num_ports} free TCP ports at {host} ({error.strerror})") from error
        return tuple(sorted(ports))

    def close(self) -> None:
        """Idempotent."""
        while self._sockets:
            self._sockets.pop().close()


def find_free_ports(host: str, num_ports: int) -> tuple[int, ...]:
    """Return different TCP ports of this machine that nobody uses now. The system does not assign them again soon, but
    does not reserve them either."""
    with contextlib.closing(PortReservation()) as reservation:
        return reservation.add(host, num_ports)


def candidate_addresses(host: str = "") -> tuple[str, ...]:
    """Return addresses where others may reach this machine, best first: the one that connects to `host`, then those of
    the network interfaces that are up. Loopback only if there is nothing else."""
    import psutil  # not at the top: it takes long to load, and ranks of one host do not need it

    first = [local_address_for(host)] if host else []
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    others: list[str] = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name in up and not name.startswith(HOST_LOCAL_INTERFACES):
            found = [each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6)]
            others += [address for address in found if _is_reachable(address)]
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
    facts = [name, "", ""]
    with contextlib.suppress(OSError):  # hidden in some containers
        facts[1] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        facts[2] = str(Path("/proc/self/ns/net").readlink())
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return f"{name}-{digest[:12]}"


def host_name(identity: str) -> str:
    """Return the host's name of an identity, for people. A name that the user gave the host stays as it is."""
    return re.sub(r"-[0-9a-f]{12}\Z", "", identity)
