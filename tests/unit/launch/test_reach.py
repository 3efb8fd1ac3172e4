"""Which address of each place is chosen, from what answered."""

from __future__ import annotations

import pytest

from ronde.errors import StartFailed
from ronde.launch.network import ProbeResult, choose_addresses

A = ("10.0.0.1:4001", "192.168.7.1:4002")
B = ("10.0.0.2:4001", "192.168.7.2:4002")
C = ("10.0.0.3:4001", "192.168.7.3:4002")


def place(name: str, doors: tuple[str, ...], *reached: tuple[str, ...], calls: bool = True) -> ProbeResult:
    errors = tuple("" if found else "connection refused" for found in reached)
    return ProbeResult(name, doors, calls, reached, errors)


def test_the_best_address_that_all_others_reach_is_chosen() -> None:
    findings = [place("a", A, A, B[1:]), place("b", B, A, B)]
    assert choose_addresses(findings) == ("10.0.0.1", "192.168.7.2")


def test_one_address_has_to_do_for_all() -> None:
    findings = [place("a", A, A, B, C), place("b", B, A[1:], B, C), place("c", C, A, B[:1], C)]
    assert choose_addresses(findings) == ("192.168.7.1", "10.0.0.2", "10.0.0.3")


def test_whether_a_place_reaches_itself_does_not_matter() -> None:
    assert choose_addresses([place("a", A, (), B), place("b", B, A, ())]) == ("10.0.0.1", "10.0.0.2")


def test_a_driver_without_ranks_is_called_and_calls_nobody() -> None:
    findings = [place("a", A, A, C), place("this machine", C, (), C, calls=False)]
    assert choose_addresses(findings) == ("", "10.0.0.3")


def test_an_ipv6_address_loses_its_brackets() -> None:
    door = ("[fd00::1]:4001",)
    assert choose_addresses([place("a", door, door, B), place("b", B, door, B)])[0] == "fd00::1"


def test_every_pair_that_cannot_talk_is_named_with_what_was_tried() -> None:
    with pytest.raises(StartFailed) as failed:
        choose_addresses([place("a", A, A, ()), place("b", B, (), B)])
    assert str(failed.value).splitlines() == [
        "the hosts of this job cannot all reach each other:",
        "  b cannot reach a (tried 10.0.0.1:4001, 192.168.7.1:4002): connection refused",
        "  a cannot reach b (tried 10.0.0.2:4001, 192.168.7.2:4002): connection refused",
    ]


def test_addresses_that_only_some_reach_are_shown() -> None:
    findings = [place("a", A, A, B, C), place("b", B, A[:1], B, C), place("c", C, A[1:], B, C)]
    with pytest.raises(StartFailed, match=r"a has no address that all others reach: b reaches .*; c reaches 192"):
        choose_addresses(findings)


def test_a_place_without_any_address_is_told_so() -> None:
    with pytest.raises(StartFailed, match="b has no address where others could call it"):
        choose_addresses([place("a", A, A, ()), place("b", (), A, ())])
