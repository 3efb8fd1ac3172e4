"""What `ronde doctor` has found out; docs/guides/doctor.md describes its JSON. Values only."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from ronde.launch.checkup import Facts
from ronde.launch.speed import Speed

__all__ = ["HostReport", "PairReport", "Problem", "Report", "Severity"]

Severity: TypeAlias = Literal["broken", "warning"]


class HostReport(msgspec.Struct, frozen=True):
    """One host."""

    name: str
    """As the user calls it."""
    facts: Facts | None = None
    """None: nothing could be found out."""
    trouble: str = ""
    """Why not."""


class PairReport(msgspec.Struct, frozen=True):
    """Two hosts; or two ranks of one host, which is then named twice."""

    first: str
    second: str
    speed: Speed | None = None
    """None: it could not be measured."""
    trouble: str = ""
    """Why not."""


class Problem(msgspec.Struct, frozen=True):
    """Something that is not as it should be."""

    severity: Severity
    """Broken: jobs will fail."""
    where: str
    """The host, or several."""
    check: str
    """One word: which row of the table."""
    what: str
    advice: str = ""


class Report(msgspec.Struct, frozen=True):
    """All of it."""

    ronde: str
    """Version of this one."""
    healthy: bool
    """Nothing that jobs need is broken."""
    hosts: tuple[HostReport, ...]
    pairs: tuple[PairReport, ...]
    problems: tuple[Problem, ...]
