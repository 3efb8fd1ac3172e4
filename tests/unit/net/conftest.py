"""Keys of two jobs."""

from __future__ import annotations

import pytest

from ronde.net.keys import JobKey


@pytest.fixture
def key() -> JobKey:
    return JobKey("5a" * 32)


@pytest.fixture
def other_key() -> JobKey:
    return JobKey("a5" * 32)
