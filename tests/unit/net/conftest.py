"""What the tests of net share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ronde.net.keys import JobKey
from ronde.net.listener import Listener
from tests.unit.net.peers import LOCAL
from tests.unit.net.polled import PolledServer


@pytest.fixture
def key() -> JobKey:
    return JobKey("5a" * 32)


@pytest.fixture
def other_key() -> JobKey:
    return JobKey("a5" * 32)


@pytest.fixture
def listener(key: JobKey) -> Iterator[Listener]:
    with Listener(key, unix=True, tcp_host=LOCAL) as made:
        yield made


@pytest.fixture(params=["unix", "tcp"])
def link(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(key: JobKey) -> Iterator[PolledServer]:
    end = PolledServer(LOCAL, key)
    yield end
    end.close()
