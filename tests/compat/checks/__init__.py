"""What hvd does among processes, check by check; all of them run in one job of two. For test_ranks.py."""

from __future__ import annotations

from tests.compat.checks import collectives, rules, training  # each puts its checks on the list
from tests.compat.checks.registry import CHECKS

__all__ = ["CHECKS", "collectives", "rules", "training"]
