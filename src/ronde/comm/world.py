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
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ronde.comm.backends.base import InsideOperation, forked_error
from ronde.comm.control_thread import ControlThread, JoinedRound
from ronde.comm.group import Group
from ronde.comm.joining import Groups, complete_settings, join_round
from ronde.comm.named_operations import OpenChannels
from ronde.comm.work import finish_callbacks
from ronde.errors import Mismatch, NotInitialized, OperationTimeout, PeerLost, RondeError, RoundEnded
from ronde.net.addresses import host_name
from ronde.net.messages import ChangeGroups, LeaveReason, LeaveRound, TimelineRequest
from ronde.observe.events import GroupAdded, GroupRemoved, Started, Stopped
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import where_was_raised
from ronde.observe.timeline import TraceStyle
from ronde.text import shorten
from ronde.types import Deadline, check_group_ranks

MIN_STOP_S = 2.0
"""How long the control thread may take to end, even if leaving the round took all of shutdown_s."""

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
        self._close_lock = threading.RLock()  # reentrant: a signal handler may interrupt its owner
        self._timeline_lock = threading.Lock()
        self._closed = False
        self.pid = os.getpid()
        """The process that is the rank."""
        self.is_in_child = False
        """Whether this is the copy of a forked child, which answers questions about the rank and refuses the rest."""
        self.control_thread = ControlThread(joined_round, self._open_channels, self.recorder)
        self._groups: dict[int, Group] = {}
        _open_worlds.add(self)
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
                worker=self.topology.members[self.rank].worker,
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
        means that it ended without shutdown().

        A signal handler may call it in the middle of an operation, which then ends with RoundEnded when the handler has
        returned. So nothing in here may wait for the interrupted frame, except until a deadline.
        """
        if self.is_in_child:
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        _open_worlds.discard(self)
        self.recorder.record_event(Stopped(at_ns=time.monotonic_ns(), rank=self.rank, orderly=orderly, why=why))
        deadline = Deadline(self.settings.shutdown_s)
        try:
            for group in self.groups:
                group.close_mailboxes()
            if orderly and self._open_channels.closed_error is None:
                self.joined_round.backend.flush(deadline)
            self.control_thread.leave(_make_leave(orderly, why, error, at_exit), deadline)
            self._open_channels.shut(RoundEnded(f"the round is over: {why or 'shutdown() was called'}"))
            self.control_thread.end_requests()
            for group in self.groups:
                group.close()
        finally:
            self.control_thread.stop(Deadline(max(deadline.remaining_s, MIN_STOP_S)))
            if not _open_worlds:  # in tests there may be others, with works that are not over
                finish_callbacks(deadline)

    def refuse_in_child(self) -> None:
        """This process is a forked child of the rank. Let everything but questions about the rank raise an error, and
        let nothing reach the connections, the memory and the threads of the parent: they are as it left them."""
        self.is_in_child = True
        error = forked_error(self.pid)
        self._open_channels.refuse_in_child(error)
        self.control_thread.waits.refuse_in_child(error)
        self.recorder.renew_locks()
        for group in self.groups:
            group.refuse_in_child(error)

    def _make_group(self, id: int, ranks: tuple[int, ...]) -> Group:
        object_key = self.joined_round.object_key
        group = Group(id, ranks, self.rank, self._open_channels, self.control_thread, object_key=object_key)
        if id:
            self.recorder.record_event(GroupAdded(at_ns=time.monotonic_ns(), rank=self.rank, group=id, ranks=ranks))
        return group

    def _request_groups(self, change: ChangeGroups) -> int:
        with InsideOperation("a change of groups"):
            reply = self.control_thread.request_groups(change, Deadline(self.settings.operation_s))
        if reply.reason:
            raise self._open_channels.error_for(range(self.size)) or Mismatch(reply.reason)
        return reply.id

    def _request_timeline(self, request: TimelineRequest) -> None:
        if self._open_channels.closed_error is not None:
            raise self._open_channels.closed_error
        with InsideOperation("a change of the timeline"), self._timeline_lock:
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
    joining_thread = 0
    """The thread that is inside of init(); 0 if none is."""
    joining_ended: RoundEnded | None = None
    """Why init() must not go on: a signal handler has called shutdown() in the middle of it."""
    leaves_at_exit = False
    worlds_of_parent: tuple[World, ...] = ()
    """In a forked child: the worlds that it inherited, kept so that nothing of them is finalized before its end."""


_state = _ProcessState()
_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()
"""For the forked children of this process."""


def init(*, groups: Iterable[Iterable[int]] = (), **settings: Any) -> None:  # see Settings
    """Join the round, together with all other ranks. It does nothing if this rank is already in a round.

    A setting comes from the first of these that has it: an argument, the environment (RONDE_*), the variables of the
    launcher that started this process, the default. `groups` are sets of ranks, the same on all ranks; ronde.groups()
    returns the groups made of them.
    """
    if _state.world is not None:
        if _state.world.is_in_child:
            raise forked_error(_state.world.pid, "init()")
        return
    if _state.joining_thread:
        raise RondeError("init() is under way in this process, and was called again by another thread or a handler")
    try:
        _state.joining_thread = threading.get_ident()
        loaded = complete_settings(settings)
        sorted_groups = tuple(check_group_ranks(ranks, loaded.size) for ranks in groups)
        joined_round = join_round(loaded, sorted_groups, _state.num_rounds)
        _state.num_rounds += 1
        world = World(joined_round, sorted_groups)
        if _state.joining_ended is not None:  # the handler has caught what shutdown() raised
            world.close()
            raise _state.joining_ended
        _state.world = world
    finally:
        _state.joining_thread, _state.joining_ended = 0, None
    if not _state.leaves_at_exit:
        _state.leaves_at_exit = True
        atexit.register(_leave_at_exit)


def shutdown() -> None:
    """Leave the round. It does nothing if no round is running. Afterwards init() may join another round.

    A signal handler may call it at any time. An operation that it has interrupted ends with RoundEnded when the handler
    returns; the other ranks learn that this one has left. An init() that it has interrupted ends at once: RoundEnded is
    raised here and goes through the handler. In a forked child it only forgets the parent's round.
    """
    if _state.joining_thread == threading.get_ident():
        _state.joining_ended = RoundEnded("shutdown() was called while init() was under way, so no round was joined")
        raise _state.joining_ended
    world, _state.world = _state.world, None
    if world is not None:
        world.close()


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not. True in a forked child of a rank, which can ask for rank() and
    size() but takes part in nothing."""
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


def _refuse_in_child() -> None:
    _state.joining_thread, _state.joining_ended = 0, None
    _state.worlds_of_parent += tuple(_open_worlds)
    _open_worlds.clear()
    for world in _state.worlds_of_parent:
        world.refuse_in_child()


os.register_at_fork(after_in_child=_refuse_in_child)
