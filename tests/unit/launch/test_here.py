"""Which hosts are this machine."""

from __future__ import annotations

import pytest

from ronde.launch.driver.hosts import LOCALHOST_NAMES, LocalMachine, find_local_hosts
from ronde.launch.placement import Host

MACHINE = LocalMachine("me", LOCALHOST_NAMES | {"node1", "10.0.0.1"})
NAMES = {"node1-ib": ["10.0.0.1"], "node2": ["10.0.0.2"]}


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("node1", True),
        ("10.0.0.1", True),
        ("me@node1", True),
        ("somebody@node1", False),
        ("node1-ib", True),
        ("me@node1-ib", True),
        ("node2", False),
        ("nobody-knows", False),
    ],
)
def test_a_host_is_here_by_name_by_address_and_by_what_its_name_stands_for(name: str, here: bool) -> None:
    assert find_local_hosts([Host(name)], MACHINE, lambda asked: NAMES.get(asked, [])) == (here,)


def test_only_names_that_are_not_known_are_looked_up() -> None:
    asked: list[str] = []

    def look_up(name: str) -> list[str]:
        asked.append(name)
        return NAMES.get(name, [])

    hosts = [Host("localhost", 2), Host("you@node2"), Host("node1")]
    assert find_local_hosts(hosts, MACHINE, look_up) == (True, False, True)
    assert asked == ["node2"]


def test_this_machine_knows_itself() -> None:
    assert LocalMachine.detect().matches(Host("localhost"))
    assert not LocalMachine.detect().matches(Host("nobody-here-has-this-name@localhost"))
