"""What tests need of the machine beyond Python: MPI libraries, root, network namespaces. A run ends with a table of it.

A test says what it needs, and why it cannot be had here, if it cannot:

    @needs("MPICH", missing="" if PYTHON.exists() else "no environment .venv-mpich; `make build` makes it")

tests/conftest.py skips what is missing, and prints table() of what really ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest

__all__ = ["ServiceResult", "needs", "table"]


class ServiceResult(NamedTuple):
    """How a test that needs a service has ended."""

    service: str
    outcome: str
    """passed, failed or skipped."""
    why: str
    """Of a skipped one."""


def needs(service: str, *, missing: str = "") -> pytest.MarkDecorator:
    """A mark for tests that need this. `missing` is why it is not there; empty when it is, or when only the test itself
    can find out: then it calls pytest.skip()."""
    return pytest.mark.service(service, missing=missing)


def table(results: Iterable[ServiceResult]) -> list[str]:
    """One row per service: its name, whether it was used, by how many tests, and why by some it was not."""
    outcomes: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for service, outcome, why in results:
        outcomes.setdefault(service, Counter())[outcome] += 1
        if outcome == "skipped":
            reasons.setdefault(service, Counter())[why] += 1
    rows = []
    for service in sorted(outcomes, key=str.lower):
        counts = outcomes[service]
        num_ran = counts.total() - counts["skipped"]
        facts = [f"{num_ran} tests" + (f", {counts['failed']} failed" if counts["failed"] else "")] if num_ran else []
        facts += [f"{number} skipped: {why}" for why, number in reasons.get(service, Counter()).most_common()]
        rows.append((service, "ran" if num_ran else "SKIPPED", "; ".join(facts)))
    width = max((len(service) for service, _, _ in rows), default=0)
    return [f"{service:{width}}  {state:7}  {facts}" for service, state, facts in rows]
