"""The exception of a wait that took too long."""

from __future__ import annotations


class TimeoutException(Exception):
    """Something did not happen in time."""
