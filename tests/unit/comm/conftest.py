"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.comm.scripted_control import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.engine.stop()
