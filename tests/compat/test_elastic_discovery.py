"""Hosts that come and go, as programs that ask for them see them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from horovod.runner.elastic import discovery
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript, HostManager, HostState
from horovod.runner.elastic.worker import HostUpdateResult

NOTHING, REMOVED, ADDED, MIXED = HostUpdateResult(0), HostUpdateResult(1), HostUpdateResult(2), HostUpdateResult(3)


class FakeClock:
    """Stands for the module `time`: its clock goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(discovery, "time", fake)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    return fake


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_script_prints_hosts_with_and_without_slots(tmp_path: Path) -> None:
    found = HostDiscoveryScript(script(tmp_path, "echo a:2; echo; echo b; echo ' c:1 '"), slots=4)
    assert found.find_available_hosts_and_slots() == {"a": 2, "b": 4, "c": 1}
    assert HostDiscoveryScript("true", slots=1).find_available_hosts_and_slots() == {}


def test_a_script_that_fails_says_how(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"hosts\.sh ended with exit code 3"):
        HostDiscoveryScript(script(tmp_path, "echo a; exit 3"), slots=1).find_available_hosts_and_slots()


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {"a": 1}, ADDED),
        ({"a": 1}, {"a": 1}, NOTHING),
        ({"a": 1}, {"a": 2}, ADDED),
        ({"a": 2}, {"a": 1}, REMOVED),
        ({"a": 1, "b": 1}, {"b": 1}, REMOVED),
        ({"a": 1}, {"b": 1}, MIXED),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}, MIXED),
    ],
)
def test_what_has_changed(before: dict[str, int], now: dict[str, int], expected: HostUpdateResult) -> None:
    hosts = FixedHosts(before)
    manager = HostManager(hosts)
    manager.update_available_hosts()
    hosts.set(now)
    assert manager.update_available_hosts() == expected
    assert manager.current_hosts.host_slots == now
    assert manager.current_hosts.count_available_slots() == sum(now.values())


def test_hosts_that_stay_keep_their_order_and_so_the_low_ranks() -> None:
    hosts = FixedHosts({"a": 1, "b": 1, "c": 1})
    manager = HostManager(hosts)
    manager.update_available_hosts()
    hosts.set({"d": 1, "c": 1, "b": 1})
    manager.update_available_hosts()
    assert manager.current_hosts.host_assignment_order == ["b", "c", "d"]


def test_a_failed_host_is_set_aside_for_good_without_a_range() -> None:
    manager = HostManager(FixedHosts({"a": 2, "b": 2}))
    manager.update_available_hosts()
    seen, event = manager.current_hosts, manager.get_host_event("a")
    manager.blacklist("a")
    assert event.is_set()
    assert not manager.get_host_event("a").is_set()  # for whoever starts processes there later
    assert manager.is_blacklisted("a")
    assert seen.available_hosts == {"a", "b"}, "what was returned before does not change"
    assert manager.current_hosts.available_hosts == {"b"}
    assert manager.current_hosts.count_available_slots() == 2
    assert manager.update_available_hosts() == NOTHING
    assert manager.current_hosts.available_hosts == {"b"}


def test_a_failed_host_comes_back_after_a_pause_that_grows(clock: FakeClock) -> None:
    manager = HostManager(FixedHosts({"a": 1, "b": 1}), cooldown_range=(1, 4))
    manager.update_available_hosts()
    for pause in (3, 4, 4):  # 2 + 1, then 4 + 1 and 8 + 1, which are above the limit
        manager.blacklist("a")
        clock.now += pause - 0.1
        manager.blacklist("a")  # does not prolong it
        assert manager.update_available_hosts() == NOTHING
        assert manager.current_hosts.available_hosts == {"b"}
        clock.now += 0.2
        assert manager.update_available_hosts() == ADDED
        assert manager.current_hosts.host_assignment_order == ["b", "a"]
        assert not manager.is_blacklisted("a")


@pytest.mark.parametrize("limits", [(0, 5), (1, 3601)])
def test_a_pause_is_between_a_second_and_an_hour(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="within 1 and 3600 seconds"):
        HostState(limits)


def test_a_source_of_hosts_has_to_answer() -> None:
    with pytest.raises(NotImplementedError):
        discovery.HostDiscovery().find_available_hosts_and_slots()
