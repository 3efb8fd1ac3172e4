"""All checks. For the job that runs them, and the test that looks at how they went."""

from __future__ import annotations

from tests.compat.checks import collectives, rules, training
from tests.compat.checks.registry import CHECKS

__all__ = ["CHECKS", "MODULES"]

MODULES = (collectives, rules, training)
"""Each puts its checks on the list."""
