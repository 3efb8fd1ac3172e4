"""Everything between init() and shutdown(): the world, and the current one of this process.

A World has the groups, the control thread, the recorder and what they need. Tests run many of them side by side; init()
makes the current one, which the module-level functions use, and shutdown() ends it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ronde.comm.control_thread import ControlThread, JoinedRound
from ronde.comm.group import Group
from ronde.comm.joining import Groups, complete_settings, join_round
from ronde.comm.named_operations import OpenChannels
from ronde.errors import Mismatch, NotInitialized, OperationTimeout, PeerLost, RondeError
from ronde.net.addresses import host_name
from ronde.net.messages import ChangeGroups, LeaveReason, LeaveRound, TimelineRequest
from ronde.observe.events import GroupAdded, GroupRemoved, Started, Stopped
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import where_was_raised
from ronde.observe.timeline import TraceStyle
from ronde.text import shorten
from ronde.types import Deadline, check_group_ranks

logger = logging.getLogger("ronde.comm")


class World:
    """One rank in one round: its groups and channels, its control thread and its recorder."""

    def __init__(self, joined_round: JoinedRound, groups: Groups = ()) -> None:
        settings, self.topology = joined_round.settings, joined_round.topology
        self.settings = settings
        self.rank = self.topology.rank
        self.size = self.topology.size
        host = host_name(self.topology.members[self.rank].host)
        self.recorder = Recorder(self.rank)
        self.recorder.set_tracing(bool(settings.timeline), label=host)
        self.joined_round = joined_round
        self._open_channels = OpenChannels(self.rank, self.size, joined_round.backend, self.recorder, settings)
        self._close_lock = threading.Lock()
        self._timeline_lock = threading.Lock()
        self._closed = False
        self.control_thread = ControlThread(joined_round, self._open_channels, self.recorder)
        self._groups: dict[int, Group] = {}
        try:
            self.control_thread.start()
            for id, ranks in enumerate((tuple(range(self.size)), *groups)):
                self._groups[id] = self._make_group(id, ranks)
            self.group = self._groups[0]
            """All ranks."""
        except BaseException as error:
            self.close(orderly=False, why=f"it could not start: {error}")
            raise
        self._open_channels.open_timeout_s = settings.operation_s
        self.recorder.record_event(
            Started(
                at_ns=time.monotonic_ns(),
                rank=self.rank,
                size=self.size,
                host=host,
                pid=os.getpid(),
                backend=joined_round.backend.name,
            )
        )

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def add_group(self, ranks: Iterable[int]) -> Group:
        """A new group of these ranks. Every rank of the world calls it, with the same ranks and in the same order."""
        members = check_group_ranks(ranks, self.size)
        id = self._request_groups(ChangeGroups(members))
        group = self._groups[id] = self._make_group(id, members)
        return group

    def remove_group(self, group: Group) -> None:
        """Remove a group. Every rank of the world calls it, when nothing is under way in the group."""
        if group.id == 0:
            raise ValueError("the world cannot be removed; shutdown() ends it")
        if self._groups.get(group.id) is not group:
            raise ValueError(f"group {group.id} was removed before, or belongs to another round")
        self._request_groups(ChangeGroups(group.ranks, group.id))
        del self._groups[group.id]
        group.close(removed=True)
        self.recorder.record_event(GroupRemoved(at_ns=time.monotonic_ns(), rank=self.rank, group=group.id))

    def start_timeline(self, path: str | os.PathLike[str], style: TraceStyle | None = None) -> None:
        """Write a timeline of all ranks to this file, on the coordinator's host. ValueError when it cannot be done."""
        style = style or TraceStyle()
        self._request_timeline(TimelineRequest(str(Path(path).absolute()), style.horovod, style.batch_markers))

    def stop_timeline(self) -> None:
        """End the timeline and complete its file. It does nothing if no timeline is being written."""
        self._request_timeline(TimelineRequest(""))

    def close(
        self, orderly: bool = True, why: str = "", *, error: BaseException | None = None, at_exit: bool = False
    ) -> None:
        """Leave the round and free everything. Idempotent. `error` is the exception that ended the script; `at_exit`
        means that it ended without shutdown()."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self.recorder.record_event(Stopped(at_ns=time.monotonic_ns(), rank=self.rank, orderly=orderly, why=why))
        try:
            self.control_thread.leave(_make_leave(orderly, why, error, at_exit), Deadline(self.settings.shutdown_s))
            for group in self._groups.values():
                group.close()
        finally:
            self.control_thread.stop()
            self.joined_round.resources.close()

    def _make_group(self, id: int, ranks: tuple[int, ...]) -> Group:
        object_key = self.joined_round.object_key
        group = Group(id, ranks, self.rank, self._open_channels, self.control_thread, object_key=object_key)
        if id:
            self.recorder.record_event(GroupAdded(at_ns=time.monotonic_ns(), rank=self.rank, group=id, ranks=ranks))
        return group

    def _request_groups(self, change: ChangeGroups) -> int:
        reply = self.control_thread.request_groups(change, Deadline(self.settings.operation_s))
        if reply.reason:
            raise self._open_channels.error_for(range(self.size)) or Mismatch(reply.reason)
        return reply.id

    def _request_timeline(self, request: TimelineRequest) -> None:
        with self._timeline_lock:
            reason = self.control_thread.request_timeline(request, Deadline(self.settings.operation_s))
        if reason:
            raise ValueError(reason)


def _make_leave(orderly: bool, why: str, error: BaseException | None, at_exit: bool) -> LeaveRound:
    if orderly:
        return LeaveRound(LeaveReason.SCRIPT_ENDED if at_exit else LeaveReason.SHUTDOWN, why)
    if error is None:
        return LeaveRound(LeaveReason.FAILED, why)
    missing = error.missing if isinstance(error, RondeError) else ()
    reason = LeaveReason.FAILED
    if isinstance(error, Mismatch):
        reason = LeaveReason.MISMATCHED
    elif missing or isinstance(error, OperationTimeout):
        reason = LeaveReason.TIMED_OUT
    lost_peer = error.peer if isinstance(error, PeerLost) else None
    return LeaveRound(reason, why, missing, where_was_raised(error), lost_peer)


class _ProcessState:
    """The current world of this process, and what stays when the world has ended."""

    world: World | None = None
    num_rounds = 0
    hooks_registered = False
    parent_world: World | None = None
    """In a forked child: the parent's world, kept so that nothing of it is ever finalized here."""


_state = _ProcessState()


def init(*, groups: Iterable[Iterable[int]] = (), **settings: Any) -> None:  # see Settings
    """Join the round, together with all other ranks. It does nothing if this rank is already in a round.

    A setting comes from the first of these that has it: an argument, the environment (RONDE_*), the variables of the
    launcher that started this process, the default. `groups` are sets of ranks, the same on all ranks; ronde.groups()
    returns the groups made of them.
    """
    if _state.world is not None:
        return
    loaded = complete_settings(settings)
    sorted_groups = tuple(check_group_ranks(ranks, loaded.size) for ranks in groups)
    joined_round = join_round(loaded, sorted_groups, _state.num_rounds)
    _state.num_rounds += 1
    _state.world = World(joined_round, sorted_groups)
    if not _state.hooks_registered:
        _state.hooks_registered = True
        atexit.register(_leave_at_exit)
        os.register_at_fork(after_in_child=_forget_world_in_child)


def shutdown() -> None:
    """Leave the round. It does nothing if no round is running. Afterwards init() may join another round."""
    world, _state.world = _state.world, None
    if world is not None:
        world.close()


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not."""
    return _state.world is not None


def current_world(what: str = "this call") -> World:
    world = _state.world
    if world is None:
        raise NotInitialized(what)
    return world


def resolve_group(group: Group | None) -> Group:
    """The group, or that of all ranks."""
    return current_world().group if group is None else group


def _leave_at_exit() -> None:
    """Leave the round when the process ends without shutdown(), and give the reason to the others.

    Most scripts just end. That is leaving in good order, unless an exception ended them.
    """
    world, _state.world = _state.world, None
    if world is None:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    try:
        why = "exited without shutdown" if error is None else _describe_error(error)
        world.close(orderly=error is None, why=why, error=error, at_exit=True)
    except Exception:  # the process ends in any case
        logger.exception("leaving the round failed")


def _describe_error(error: BaseException) -> str:
    """The last line of a traceback; the message of an error may be a page long."""
    kind, text = type(error).__name__, str(error).strip()
    return shorten(f"{kind}: {text.splitlines()[0]}" if text else kind)


def _forget_world_in_child() -> None:
    """Make a forked child no member. The liveness connection must not stay open in it, or the coordinator would not
    notice when its parent dies."""
    world, _state.world = _state.world, None
    _state.parent_world = world or _state.parent_world
    if world is not None and world.joined_round.liveness_fd >= 0:
        os.close(world.joined_round.liveness_fd)  # everything else stays as the parent left it
