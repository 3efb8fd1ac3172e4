"""Fixtures of the tests with several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jobs.kit import SshHosts


@pytest.fixture(scope="module")
def all_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def hosts(all_hosts: SshHosts) -> Iterator[SshHosts]:
    yield all_hosts
    all_hosts.await_nothing_left()
