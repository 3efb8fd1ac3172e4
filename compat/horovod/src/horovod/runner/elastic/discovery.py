"""Where the hosts of an elastic job come from, and which of them are set aside after a failure.

horovodrun gives a discovery script to ronde's driver, which has its own list of hosts. These classes are for programs
that ask for hosts themselves.
"""

from __future__ import annotations

import logging
import random
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from horovod.runner.elastic.worker import HostUpdateResult

DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS = 1
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = 3600
DISCOVERY_TIMEOUT_S = 600.0
"""How long a discovery script may run."""

logger = logging.getLogger("horovod")


class HostDiscovery:
    """A source of hosts. Subclasses ask whoever knows: a scheduler, a cloud, a file."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Return the slots of all hosts there are now, by host name."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """A command that prints a line for each host: `host`, or `host:slots`."""

    def __init__(self, discovery_script: str, slots: int) -> None:
        """`slots` are those of a host without a number."""
        self._discovery_script = discovery_script
        self._default_slots = slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the command. RuntimeError if it fails."""
        host_slots: dict[str, int] = {}
        for line in self._execute_discovery_script().splitlines():
            host, colon, slots = line.strip().partition(":")
            if host:
                host_slots[host] = int(slots) if colon else self._default_slots
        return host_slots

    def _execute_discovery_script(self) -> str:
        done = subprocess.run(
            ["/bin/sh", "-c", self._discovery_script],
            stdout=subprocess.PIPE,
            text=True,
            timeout=DISCOVERY_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the discovery script {self._discovery_script} ended with exit code {done.returncode}")
        return done.stdout


class FixedHosts(HostDiscovery):
    """Hosts that only set() changes."""

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self.set(host_slots)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        return self._host_slots

    def set(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)


class HostState:
    """Whether a host is set aside after a failure, and until when.

    The pause doubles with each failure, between the limits of cooldown_range. Without a range it never ends.
    """

    def __init__(self, cooldown_range: Sequence[int] | None = None) -> None:
        if cooldown_range is not None:
            low, high = cooldown_range
            if low < DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS or high > DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS:
                raise ValueError(
                    f"the cooldown range must be within {DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS} and "
                    f"{DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS} seconds, got {low} to {high}"
                )
        self._cooldown_range = cooldown_range
        self._event = threading.Event()
        self._is_blacklisted = False
        self._num_cooldowns = 0
        self._cooldown_end: float | None = None  # on the monotonic clock

    def get_event(self) -> threading.Event:
        """Return the event that is set when the host fails. After a failure there is a new one."""
        if self._event.is_set():
            self._event = threading.Event()
        return self._event

    def set_event(self) -> None:
        self._event.set()

    def blacklist(self) -> None:
        """Set the host aside. A failure during its pause does not prolong it."""
        self._is_blacklisted = True
        now = time.monotonic()
        if self._cooldown_end is not None and now < self._cooldown_end:
            return
        if self._cooldown_range is not None:
            self._num_cooldowns += 1
            low, high = self._cooldown_range
            delay = low * 2**self._num_cooldowns + random.uniform(0, low)
            self._cooldown_end = now + max(low, min(high, delay))
        self.set_event()

    def whitelist(self) -> None:
        """Let the host take part again."""
        self._is_blacklisted = False
        self._cooldown_end = None

    def is_blacklisted(self) -> bool:
        return self._is_blacklisted

    def is_resurrected(self) -> bool:
        """Whether the host was set aside and its pause is over."""
        return self._cooldown_end is not None and time.monotonic() >= self._cooldown_end


@dataclass(frozen=True)
class DiscoveredHosts:
    """The hosts of one discovery."""

    host_slots: Mapping[str, int] = field(default_factory=dict)
    """All of them."""
    host_assignment_order: Sequence[str] = ()
    """Those that are not set aside, in the order in which ranks are assigned: the oldest host first."""

    @property
    def available_hosts(self) -> set[str]:
        return set(self.host_assignment_order)

    def get_slots(self, host: str) -> int:
        return self.host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        return sum(map(self.get_slots, self.host_assignment_order))

    def update(self, hosts_state: Mapping[str, HostState]) -> DiscoveredHosts:
        """Return the hosts without those that were set aside since."""
        return replace(
            self,
            host_assignment_order=[
                host for host in self.host_assignment_order if not hosts_state[host].is_blacklisted()
            ],
        )


class HostManager:
    """The hosts of a job over time: asks for them, and sets aside those that fail."""

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[int] | None = None) -> None:
        self._discovery = discovery
        self._current_hosts = DiscoveredHosts()
        self._hosts_state: defaultdict[str, HostState] = defaultdict(lambda: HostState(cooldown_range))

    @property
    def current_hosts(self) -> DiscoveredHosts:
        return self._current_hosts.update(self._hosts_state)

    def update_available_hosts(self) -> HostUpdateResult:
        """Ask for the hosts there are now, and return what has changed."""
        before = self.current_hosts
        host_slots = dict(self._discovery.find_available_hosts_and_slots())
        revived = [host for host in host_slots if self._hosts_state[host].is_resurrected()]
        for host in revived:
            self._hosts_state[host].whitelist()
        available = [host for host in host_slots if not self._hosts_state[host].is_blacklisted()]
        order = self.order_available_hosts(available, before.host_assignment_order)
        self._current_hosts = DiscoveredHosts(host_slots, order)
        return _compare(before.host_slots, host_slots, revived)

    def blacklist(self, host: str) -> None:
        """Set a host aside that has failed."""
        if not self.is_blacklisted(host):
            logger.info("host %s has failed and is set aside", host)
        self._hosts_state[host].blacklist()

    def is_blacklisted(self, host: str) -> bool:
        return self._hosts_state[host].is_blacklisted()

    def get_host_event(self, host: str) -> threading.Event:
        """Return the event that is set when the host fails."""
        return self._hosts_state[host].get_event()

    @staticmethod
    def order_available_hosts(available_hosts: Collection[str], prev_host_assignment_order: Sequence[str]) -> list[str]:
        """Hosts that stay keep their order, and new ones come behind them: rank 0 is where training has state."""
        known = [host for host in prev_host_assignment_order if host in available_hosts]
        return known + [host for host in available_hosts if host not in known]


def _compare(before: Mapping[str, int], now: Mapping[str, int], revived: Collection[str]) -> HostUpdateResult:
    result = HostUpdateResult.no_update
    if any(now.get(host, 0) < slots for host, slots in before.items()):
        result |= HostUpdateResult.removed
    if revived or any(before.get(host, 0) < slots for host, slots in now.items()):
        result |= HostUpdateResult.added
    return result
