"""Where an elastic job learns which hosts it may use: the HostSource protocol, and the thread that asks a source again
and again.

A list of hosts that never changes is FixedHosts. ronde.elastic.discovery has a script and a watched file. A scheduler's
integration implements the protocol itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ronde.errors import StartFailed
from ronde.launch.placement import Host
from ronde.launch.timeouts import SOURCE_STOP_TIMEOUT_S
from ronde.net.event_loop import EventLoop, start_thread


class HostSource(Protocol):
    """Which hosts a job may use."""

    @property
    def poll_interval_s(self) -> float | None:
        """How long to wait before hosts() is called again; None when the answer never changes."""

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that the job may use now, in the order in which they are to be filled. No host is an
        answer at first; once there were hosts it is taken for an error. StartFailed when the hosts are not known.
        Called in a thread of its own, and may wait."""

    def close(self) -> None:
        """Let a call of hosts() that is under way end soon. Called in another thread; idempotent."""


@dataclass(frozen=True, slots=True)
class FixedHosts:
    """Hosts that never change."""

    fixed: tuple[Host, ...]

    @property
    def poll_interval_s(self) -> None:
        return None

    def hosts(self) -> tuple[Host, ...]:
        return self.fixed

    def close(self) -> None: ...


class HostPoller:
    """Asks a source in a thread, and calls back in the loop: on_hosts with the first answer and with each that differs,
    on_error when there is none, once for each reason in a row. Both may be replaced in the loop's thread."""

    def __init__(
        self,
        loop: EventLoop,
        source: HostSource,
        *,
        on_hosts: Callable[[tuple[Host, ...]], None],
        on_error: Callable[[StartFailed], None],
    ) -> None:
        self._loop = loop
        self._source = source
        self.on_hosts = on_hosts
        self.on_error = on_error
        self._closing = threading.Event()
        # Owned by the poller. Calls the source, and touches nothing else.
        self._thread = threading.Thread(target=self._poll, name="ronde-hosts", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def close(self) -> None:
        """Nothing is called back any more. Idempotent."""
        self._closing.set()
        self._source.close()
        if self._thread.is_alive():
            self._thread.join(SOURCE_STOP_TIMEOUT_S)

    def _poll(self) -> None:
        hosts: tuple[Host, ...] | None = None
        last_error = ""
        while not self._closing.is_set():
            try:
                found = self._source.hosts()
            except Exception as error:  # the thread's edge: a source of somebody else may raise anything
                reason = str(error) if isinstance(error, StartFailed) else f"the hosts are not known: {error!r}"
                if reason != last_error:
                    last_error = reason
                    self._loop.call_soon_threadsafe(partial(self._tell_error, StartFailed(reason)))
            else:
                last_error = ""
                if found != hosts:
                    hosts = found
                    self._loop.call_soon_threadsafe(partial(self._tell_hosts, found))
            interval_s = self._source.poll_interval_s
            if interval_s is None or self._closing.wait(interval_s):
                return

    def _tell_hosts(self, hosts: tuple[Host, ...]) -> None:
        if not self._closing.is_set():
            self.on_hosts(hosts)

    def _tell_error(self, error: StartFailed) -> None:
        if not self._closing.is_set():
            self.on_error(error)
