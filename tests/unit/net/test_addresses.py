from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ronde.errors import StartFailed
from ronde.net.addresses import (
    PortReservation,
    candidate_addresses,
    find_free_ports,
    format_address,
    host_identity,
    host_name,
    local_address_for,
    parse_address,
    resolve_host,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node7:29500", "node7", 29500),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
    ],
)
def test_an_address_is_read_and_written_back(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "host:port"),
        ("node7", "host:port"),
        (":29500", "host:port"),
        ("[]:29500", "host:port"),
        ("no de:29500", "host:port"),
        ("::1:29500", "needs brackets"),
        ("node7:", "port must be"),
        ("node7:0", "port must be"),
        ("node7:65536", "port must be"),
        ("node7:-1", "port must be"),
        ("node7:http", "port must be"),
        ("node7:٣", "port must be"),
    ],
)
def test_a_wrong_address_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_address(text)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        host, port = parse_address(text)
    except ValueError:
        return
    assert parse_address(format_address(host, port)) == (host, port)


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(StartFailed, match=r"'no-such-host\.invalid' is unknown on host"):
        resolve_host("no-such-host.invalid", 1)
    with pytest.raises(StartFailed, match="is unknown"):
        resolve_host("x" * 64, 1)


def test_the_candidates_are_addresses_with_the_faced_one_first() -> None:
    assert local_address_for("127.0.0.1") == "127.0.0.1"
    found = candidate_addresses("127.0.0.1")
    assert found[0] == "127.0.0.1"
    assert len(set(found)) == len(found)
    for text in found:
        ipaddress.ip_address(text)
    assert candidate_addresses()


def test_free_ports_are_different() -> None:
    assert len(set(find_free_ports("127.0.0.1", 50))) == 50


def test_reserved_ports_are_given_to_nobody_else_and_servers_can_listen_there() -> None:
    with closing(PortReservation()) as reservation:
        ports = (*reservation.add("127.0.0.1", 20), *reservation.add("127.0.0.1", 30))
        assert len({*ports}) == 50 and not {*ports} & {*find_free_ports("127.0.0.1", 50)}
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[0]))
        for host in ("127.0.0.1", ""):  # both with SO_REUSEADDR
            with socket.create_server((host, ports[0])), socket.create_connection(("127.0.0.1", ports[0])):
                pass
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[1]))


def test_a_host_without_an_address_has_no_ports() -> None:
    with (
        closing(PortReservation()) as reservation,
        pytest.raises(StartFailed, match="there are no 2 free TCP ports"),
    ):
        reservation.add("192.0.2.1", 2)


def test_people_call_a_host_by_its_name_without_what_only_tells_it_apart() -> None:
    assert host_identity() != socket.gethostname() == host_name(host_identity())
    assert [host_name(given) for given in ("a", "node-7", "rack-3-node-7")] == ["a", "node-7", "rack-3-node-7"]


def test_another_network_namespace_is_another_host() -> None:
    say = "from ronde.net.addresses import host_identity; print(host_identity())"
    inside = subprocess.run(["unshare", "-rn", sys.executable, "-c", say], capture_output=True, text=True, timeout=30)
    if inside.returncode != 0:
        pytest.skip(f"no namespaces here: {inside.stderr.strip().splitlines()[-1:]}")
    assert inside.stdout.strip().startswith(socket.gethostname() + "-")
    assert inside.stdout.strip() != host_identity()
