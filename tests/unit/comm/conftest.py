"""What the tests of the engine and of the coordinator share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.unit.comm.scripted_control import Stage
from tests.unit.comm.scripted_ranks import Job


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.engine.stop()


@pytest.fixture
def job() -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack)
