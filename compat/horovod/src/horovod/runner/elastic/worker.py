"""How the processes of an elastic job learn that hosts have come or will go."""

from __future__ import annotations

import enum
import threading
import time
import weakref
from typing import Protocol

import ronde
from ronde.comm.world import World, current_world


class HostUpdateResult(enum.IntFlag):
    """What has changed in the set of hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostsListener(Protocol):
    """Whoever is told of changes; every State of horovod.common.elastic is one."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None: ...


class WorkerNotificationManager:
    """Tells its listeners, once for each round, that ronde wants the round to change.

    Ronde's control thread receives the wish and notes it in the world. Nothing runs in the background here: a State
    calls notify_of_round_change() when it is asked for news.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[HostsListener] = set()
        self._notified_world: weakref.ref[World] | None = None

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Without effect: there is no service to be started."""

    def register_listener(self, listener: HostsListener) -> None:
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: HostsListener) -> None:
        """KeyError if it was not registered."""
        with self._lock:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tell all listeners."""
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)

    def notify_of_round_change(self) -> None:
        """Tell all listeners if the round is to change and they were not told so in this round."""
        if not ronde.is_initialized():
            return
        world = current_world()
        if not world.change_wanted:
            return
        with self._lock:
            if self._notified_world is not None and self._notified_world() is world:
                return
            self._notified_world = weakref.ref(world)
        self.handle_hosts_updated(time.time(), HostUpdateResult.mixed)  # ronde does not say which
