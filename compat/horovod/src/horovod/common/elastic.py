"""Elastic training as Horovod promises it: State with commit() and restore(), and the loop around a training function.

An internal error brings every process back to its last commit; then all take the state of rank 0. A change of hosts is
noticed in commit(), by all processes in the same one. What ronde's own ronde.elastic promises beyond that (no step is
done twice, every sample is used once) is not promised here.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import ronde
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt, translate_errors
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager
from ronde.comm.world import current_world
from ronde.elastic.training_loop import TerminationSignal, leave_preempted
from ronde.errors import Mismatch

R = TypeVar("R")

notification_manager = WorkerNotificationManager()


class State:
    """What the processes have in common. Subclasses say how it is saved, restored and sent."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        """`bcast_object` gives rank 0's object to all, such as hvd.broadcast_object."""
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._messages: queue.Queue[tuple[float, HostUpdateResult]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], None]] = []

    @property
    def _host_messages(self) -> queue.Queue[tuple[float, HostUpdateResult]]:
        """What on_hosts_updated() was told and check_host_updates() has not seen. Some scripts wait for it."""
        notification_manager.notify_of_round_change()
        return self._messages

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Call these when the processes are others than before, before the state is sent. A usual one changes the
        learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called in the new set of processes, before sync()."""
        self._messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Called when hosts have come or will go."""
        self._messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, for restore(), and check for changes of hosts. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all processes if any of them was told of a change. Collective."""
        update = HostUpdateResult.no_update
        messages = self._host_messages
        while not messages.empty():
            timestamp, new = messages.get()
            if timestamp > self._last_updated_timestamp:
                self._last_updated_timestamp = timestamp
                update |= new
        removed, added = _any_rank([HostUpdateResult.removed in update, HostUpdateResult.added in update])
        if removed or added:
            raise HostsUpdatedInterrupt(skip_sync=not added)

    def save(self) -> None:
        """Keep the state for restore()."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state of the last save()."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new set of processes, before sync()."""


class ObjectState(State):
    """Plain values: each keyword becomes an attribute."""

    if TYPE_CHECKING:  # the attributes are whatever the user names

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._saved_state = kwargs
        self._set_values()
        super().__init__(bcast_object, get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_values()

    def sync(self) -> None:
        """Take what rank 0 has saved."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_values()

    def _set_values(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(func: Callable[..., R], reset: Callable[[], None]) -> Callable[..., R]:
    """Return a function of a State and further arguments that calls `func` until it returns, and goes on when
    processes are lost or hosts change. `reset` joins the new set of processes."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            with TerminationSignal(is_handled=ronde.is_initialized() and _may_join_again()) as termination:
                return _run(functools.partial(func, state, *args, **kwargs), state, reset, termination)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _run(train: Callable[[], R], state: State, reset: Callable[[], None], termination: TerminationSignal) -> R:
    must_join = ronde.is_initialized() and current_world().is_candidate
    skip_sync = False
    while True:
        try:
            with translate_errors():  # a backward pass raises ronde's own
                if must_join:
                    with termination.at_once():
                        reset()
                    state.on_reset()
                if any(_any_rank([not skip_sync])):  # a new process cannot skip it
                    state.sync()
                if ronde.is_initialized():
                    current_world().has_state = True
                result = train()
                if ronde.is_initialized():
                    current_world().finish()
                return result
        except HorovodInternalError as error:
            if not _may_go_on(error):
                raise
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        if termination.has_come:
            leave_preempted()
        must_join = True


def _may_go_on(error: HorovodInternalError) -> bool:
    """Whether another round may mend it: not if the processes disagree, as they would again, and not in a job that is
    not elastic."""
    return _may_join_again() and not isinstance(error.__cause__, Mismatch)


def _may_join_again() -> bool:
    return not ronde.is_initialized() or current_world().can_rejoin or current_world().size == 1


def _any_rank(flags: list[bool]) -> list[bool]:
    """Return for each flag whether it is set on any process. Collective."""
    if not ronde.is_initialized():  # a state of one's own that is tried without a job
        return flags
    with translate_errors():
        agreed = ronde.allreduce(np.array(flags, dtype=np.uint8), op="max")
    return [bool(flag) for flag in agreed]
