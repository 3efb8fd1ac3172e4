"""What the tests of net share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ronde.net.control import ControlServer
from ronde.net.keys import JobKey
from ronde.net.listener import Listener
from tests.unit.net.callers import LOCAL


@pytest.fixture
def key() -> JobKey:
    return JobKey("5a" * 32)


@pytest.fixture
def other_key() -> JobKey:
    return JobKey("a5" * 32)


@pytest.fixture
def door(key: JobKey) -> Iterator[Listener]:
    with Listener(key, unix=True, tcp_host=LOCAL) as open_door:
        yield open_door


@pytest.fixture(params=["unix", "tcp"])
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(key: JobKey) -> Iterator[ControlServer]:
    end = ControlServer(LOCAL, key)
    yield end
    end.close()
