"""At which address each host is reached, chosen from what answered when everybody tried everybody. Pure. Used by the
driver before any rank starts.

A *place* is a host with ranks, or the driver's machine. Ranks call the driver (the coordinator is there) and each
other; so every place with ranks calls, and every place is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ronde.errors import StartFailed
from ronde.net.addresses import parse_address

__all__ = ["Finding", "choose_addresses"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one place has, and what it found of the others."""

    name: str
    doors: tuple[str, ...]
    """Its own candidates as `address:port`, best first."""
    calls: bool = True
    """Whether it has ranks, which will call the others."""
    reached: tuple[tuple[str, ...], ...] = ()
    """For each place in turn, the candidates that answered."""
    errors: tuple[str, ...] = ()
    """For each place in turn, why the others did not."""


def choose_addresses(findings: Sequence[Finding]) -> tuple[str, ...]:
    """For each place, the best of its addresses that all its callers reach; empty where nobody calls. StartFailed names
    every pair that cannot talk, and what was tried."""
    chosen: list[str] = []
    problems: list[str] = []
    for index, place in enumerate(findings):
        callers = [other for other in findings if other is not place and other.calls]
        common = [door for door in place.doors if all(door in caller.reached[index] for caller in callers)]
        if callers and not common:
            problems += _problems(place, index, callers)
        chosen.append(parse_address(common[0])[0] if callers and common else "")
    if problems:
        raise StartFailed("\n".join(["the hosts of this job cannot all reach each other:", *problems]))
    return tuple(chosen)


def _problems(place: Finding, index: int, callers: Sequence[Finding]) -> list[str]:
    """In words, a line each, why there is no address that all of them reach."""
    if not place.doors:
        return [f"  {place.name} has no address where others could call it; check its network interfaces"]
    cut_off = [caller for caller in callers if not caller.reached[index]]
    if cut_off:
        return [
            f"  {caller.name} cannot reach {place.name} (tried {', '.join(place.doors)})"
            f"{f': {caller.errors[index]}' if index < len(caller.errors) and caller.errors[index] else ''}"
            for caller in cut_off
        ]
    ways = "; ".join(f"{caller.name} reaches {', '.join(caller.reached[index])}" for caller in callers)
    return [f"  {place.name} has no address that all others reach: {ways}"]
