"""Everything between init() and shutdown(): the world, and the current one of this process.

A World has the groups, the control thread, the recorder and what they need. Tests run many of them side by side; init()
makes the current one, which the module-level functions use, and shutdown() ends it. In an elastic job rejoin() replaces
it by that of the next round.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from ronde.comm.control_thread import ControlThread, JoinedRound
from ronde.comm.fork_and_signal_safety import InsideOperation, forked_error, this_thread
from ronde.comm.group import Group
from ronde.comm.joining import Groups, complete_settings, join_round
from ronde.comm.open_channels import OpenChannels
from ronde.comm.telemetry import ChannelStallInspector
from ronde.comm.work import finish_callbacks
from ronde.errors import (
    JobFinished,
    Mismatch,
    NotInitialized,
    OperationTimeout,
    PeerLost,
    RondeError,
    RoundEnded,
    StartFailed,
)
from ronde.net.addresses import host_name
from ronde.net.connect import ConnectFailed
from ronde.net.messages import ChangeGroups, LeaveReason, LeaveRound, TimelineRequest
from ronde.observe.events import GroupAdded, GroupRemoved, Started, Stopped
from ronde.observe.recorder import Recorder
from ronde.observe.stacks import where_was_raised
from ronde.observe.timeline import TraceStyle
from ronde.text import shorten
from ronde.types import Deadline, check_group_ranks

MIN_STOP_S = 2.0
"""How long the control thread may take to end, even if leaving the round took all of shutdown_s."""
LOSS_NOTICE_S = 5.0
"""How long the coordinator may take to report the loss of a rank that has closed its connections."""
LOSS_CHECK_S = 0.01

logger = logging.getLogger("ronde.comm")


class World:
    """One rank in one round: its groups and channels, its control thread and its recorder."""

    def __init__(self, joined_round: JoinedRound, groups: Groups = (), *, rejoins: bool = False) -> None:
        """If a rank is lost before the groups are made, it raises RoundEnded; with `rejoins` it has left the round then
        to be in the next one."""
        settings, topology = joined_round.settings, joined_round.topology
        self.settings = settings
        """In an elastic job rank and size are those that the launcher gave to the process."""
        self.topology = topology
        self.rank, self.size = joined_round.candidate or (topology.rank, topology.size)
        self.is_candidate = joined_round.candidate is not None
        """Whether this process is in a round of its own until it can be in one of the elastic job that it has come to.
        Then rank and size are those that it would have there, and it cannot train."""
        self.local_rank = max(settings.slot, 0) if self.is_candidate else topology.local_rank
        self.change_wanted = False
        """Whether this rank knows that ranks want to join or that itself has to leave. Set by the control thread, or by
        the handler of a signal."""
        self.on_change_wanted: Callable[[], None] = lambda: None
        """Called by the control thread when ranks want to join."""
        self.change_agreed = False
        """Whether, at the end of this step, all members leave the round to join the next one. Set by the reducer of
        gradients, on all members alike, when the change_wanted of one of them was set."""
        self.change_checked = False
        """Whether the members have exchanged change_wanted in this step."""
        host = host_name(topology.members[topology.rank].host)
        self.recorder = Recorder(self.rank)
        self.recorder.set_tracing(bool(settings.timeline), label=host)
        self.joined_round = joined_round
        self._open_channels = OpenChannels(topology.rank, topology.size, joined_round.backend, self.recorder, settings)
        self._close_lock = threading.RLock()  # reentrant: a signal handler may interrupt its owner
        self._timeline_lock = threading.Lock()
        self._closed = False
        self._close_functions: list[Callable[[], None]] = []
        self.pid = os.getpid()
        """The process that is the rank."""
        self.is_in_child = False
        """Whether this is the copy of a forked child, which answers questions about the rank and refuses the rest."""
        self.control_thread = ControlThread(joined_round, self._open_channels, self.recorder, self._want_change)
        if joined_round.is_elastic:  # a rank that is suspended meanwhile is declared lost before that
            self._open_channels.open_timeout_s = settings.elastic_timeout_s
        self._groups: dict[int, Group] = {}
        _open_worlds.add(self)
        try:
            self.control_thread.start()
            for id, ranks in enumerate((tuple(range(topology.size)), *groups)):
                self._groups[id] = self._make_group(id, ranks)
            self.group = self._groups[0]
            """All ranks."""
        except BaseException as error:
            if rejoins and isinstance(error, RondeError) and self._await_loss():
                self.close(LeaveReason.REJOINING)
                raise RoundEnded("a rank was lost when the round began") from error
            self.close(LeaveReason.FAILED, f"it could not start: {error}")
            raise
        self.control_thread.opening_since_ns = None
        self._open_channels.open_timeout_s = settings.operation_s
        self.recorder.record_event(
            Started(
                at_ns=time.monotonic_ns(),
                rank=self.rank,
                size=self.size,
                host=host,
                pid=os.getpid(),
                worker=topology.members[topology.rank].worker,
                backend=joined_round.backend.name,
            )
        )

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    def add_group(self, ranks: Iterable[int]) -> Group:
        """A new group of these ranks. Every rank of the world calls it, with the same ranks and in the same order."""
        if self.is_candidate:
            raise refused_to_candidate("add_group()")
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

    @property
    def can_rejoin(self) -> bool:
        """Whether the job may go on when this round is over: an elastic one, or one whose coordinator is in rank 0."""
        if self.is_candidate:
            return True
        settings, has_coordinator = self.settings, self.joined_round.liveness_fd >= 0
        return has_coordinator and settings.backend != "mpi" and (settings.elastic or not settings.coordinator_hosted)

    @property
    def is_over(self) -> bool:
        """Whether a rank is lost, or the round has ended."""
        return self._open_channels.error_for(range(self.topology.size)) is not None

    @property
    def has_lost_peer(self) -> bool:
        """Whether an operation of this round has ended because of a lost rank, also if the coordinator has not reported
        the loss: the connection may be broken only between two ranks."""
        return any(channel.has_lost_peer for channel in self._open_channels.channels)

    @property
    def has_state(self) -> bool:
        """Whether others can get the state of training from this process: not before it has got it, if it has come to
        an elastic job under way."""
        return _state.has_state

    @has_state.setter
    def has_state(self, has_state: bool) -> None:
        _state.has_state = has_state

    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that operations of this rank wait for now; all others if that is not known."""
        open_channels = self._open_channels
        named = tuple(open_channels.named_operations.values())
        waiting = ChannelStallInspector(0.0).overdue(open_channels.channels, time.monotonic_ns(), 0, named)
        missing = {rank for each in waiting for rank in each.missing}
        return tuple(sorted(missing or {*range(self.topology.size)} - {self.topology.rank}))

    def finish(self) -> None:
        """Wait until all ranks of an elastic job have done their work. Collective. When this rank leaves, the others
        learn that the job is finished; until then, operations go on to work."""
        self.group.barrier()
        self.control_thread.finish(Deadline(self.settings.shutdown_s))
        if self.is_over:  # a rank was lost in the barrier, and others may not be through
            self.control_thread.leave(LeaveRound(LeaveReason.FINISHED), Deadline(self.settings.shutdown_s))

    def finish_operations(self, what: str) -> None:
        """Call what was given to add_operations_wait(), unless the round is over, or a signal handler has interrupted
        an operation, which would be waited for, too. `what` is the call that needs it."""
        if self.is_in_child or this_thread.operation or self.is_over:
            return
        with InsideOperation(what):
            for wait in _state.operation_waits:
                wait()

    def call_at_close(self, function: Callable[[], None]) -> None:
        """Call this when the round is left, before anything is freed; at once if that is past. It must neither wait nor
        raise."""
        with self._close_lock:
            if not self._closed:
                self._close_functions.append(function)
                return
        function()

    def close(
        self,
        reason: LeaveReason = LeaveReason.SHUTDOWN,
        why: str = "",
        *,
        error: BaseException | None = None,
        missing: tuple[int, ...] = (),
    ) -> None:
        """Leave the round and free everything. Idempotent. `error` is the exception that ended the script, if one has;
        then the reason is FAILED. A rank that is REJOINING keeps the coordinator that it hosts; `missing` are the ranks
        that did not come to an operation in time, if it does so because of that.

        A signal handler may call it in the middle of an operation, which then ends with RoundEnded when the handler has
        returned. So nothing in here may wait for the interrupted frame, except until a deadline.
        """
        if self.is_in_child:
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        for function in self._close_functions:
            function()
        _open_worlds.discard(self)
        if self.control_thread.is_finished and reason in (LeaveReason.SHUTDOWN, LeaveReason.SCRIPT_ENDED):
            reason = LeaveReason.FINISHED
        if reason is LeaveReason.REJOINING:
            self.joined_round.hosting = self.joined_round.hosting.pop_all()
        stopped = Stopped(at_ns=time.monotonic_ns(), rank=self.rank, orderly=reason.is_orderly, why=why)
        self.recorder.record_event(stopped)
        deadline = Deadline(self.settings.shutdown_s)
        try:
            # Nobody waits for what is left of a round when all go to the next one.
            is_last = reason.is_orderly and reason is not LeaveReason.REJOINING
            sends_rest = is_last and self._open_channels.closed_error is None
            # Half of the time is for handlers and posts, the rest for what else is to be sent.
            handlers_deadline = Deadline(deadline.remaining_s / 2 if sends_rest else 0.0)
            for group in self.groups:
                group.leave_mailboxes(handlers_deadline)
            if sends_rest:
                self.joined_round.backend.flush(deadline)
            leave = _make_leave(reason, why, error) if error is not None else LeaveRound(reason, why, missing)
            self.control_thread.leave(leave, deadline)
            ending = "this rank goes on to the next one" if reason is LeaveReason.REJOINING else "shutdown() was called"
            self._open_channels.stop_opening(RoundEnded(f"the round is over: {why or ending}"))
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

    def _want_change(self) -> None:
        self.change_wanted = True
        self.on_change_wanted()

    def _await_loss(self) -> bool:
        """Wait until the coordinator has reported the loss of a rank, and return whether it has. What a rank that dies
        leaves half done is noticed earlier than its death."""
        deadline = Deadline(LOSS_NOTICE_S)
        while not self.is_over and not deadline.expired:
            time.sleep(LOSS_CHECK_S)
        return self.is_over and not self.control_thread.coordinator_is_gone

    def _make_group(self, id: int, ranks: tuple[int, ...]) -> Group:
        object_key, rank = self.joined_round.object_key, self.topology.rank
        group = Group(id, ranks, rank, self._open_channels, self.control_thread, object_key=object_key)
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


def _make_leave(reason: LeaveReason, why: str, error: BaseException) -> LeaveRound:
    missing = error.missing if isinstance(error, RondeError) else ()
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
    has_state = True
    """As World.has_state."""
    operation_waits: tuple[Callable[[], None], ...] = ()
    """What shutdown() calls first."""
    worlds_of_parent: tuple[World, ...] = ()
    """In a forked child: the worlds that it inherited, kept so that nothing of them is finalized before its end."""


_state = _ProcessState()
_open_worlds: weakref.WeakSet[World] = weakref.WeakSet()
"""For the forked children of this process."""


def init(*, groups: Iterable[Iterable[int]] = (), **settings: Any) -> None:  # see Settings
    """Join the round, together with all other ranks. It does nothing if this rank is already in a round.

    A setting comes from the first of these that has it: an argument, the environment (RONDE_*), the variables of the
    launcher that started this process, the default. Settings that the coordinator uses, such as `timeline`, have to be
    given to `ronde run` if that has started the ranks. `groups` are sets of ranks, the same on all ranks;
    ronde.groups() returns the groups made of them.
    """
    if _state.world is not None:
        if _state.world.is_in_child:
            raise forked_error(_state.world.pid, "init()")
        return
    if _state.joining_thread:
        raise RondeError("init() is under way in this process, and was called again by another thread or a handler")
    with _joining():
        loaded = complete_settings(settings)
        sorted_groups = tuple(check_group_ranks(ranks, loaded.size) for ranks in groups)
        joined_round = join_round(loaded, sorted_groups, _state.num_rounds)
        if joined_round.candidate is not None:
            sorted_groups = ()  # the others are not there
        _state.has_state = joined_round.candidate is None
        _begin_round(joined_round, sorted_groups, rejoins=loaded.elastic)
    if not _state.leaves_at_exit:
        _state.leaves_at_exit = True
        atexit.register(_leave_at_exit)
        sys.excepthook = functools.partial(_leave_after_error, sys.excepthook)


def rejoin(*, progress: int = -1, timeout: RondeError | None = None) -> World:
    """Leave the round, or what is left of it after a loss, to be in the next one of the elastic job, and return its
    world when it has begun. The groups of the round are gone. `progress` is a number that grows with training, if the
    caller knows one: an error of the script that comes again and again without progress ends the job. `timeout` is the
    error of an operation that some ranks did not come to in time: the next round does not wait long for them.

    It raises JobFinished if nobody needs this process any more, LeftBehind if the others have gone on without it,
    StateLost if all that could have given it the state are lost, and StartFailed if there will be no further round.
    """
    world, _state.world = current_world("rejoin()"), None
    with _joining():
        try:
            reason = LeaveReason.SHUTDOWN if world.is_candidate else LeaveReason.REJOINING
            world.close(reason, str(timeout or ""), missing=timeout.missing if timeout is not None else ())
            if world.control_thread.coordinator_is_gone:
                raise StartFailed(_describe_lost_coordinator(world.joined_round.coordinator_rank))
        except BaseException:
            world.joined_round.hosting.close()
            raise
        try:
            return _begin_round(_join_next(world.joined_round, progress), rejoins=True)
        except JobFinished:
            _state.world = world  # it is closed; only rank() and size() still answer
            raise


@contextmanager
def _joining() -> Iterator[None]:
    """While this thread joins a round, so that a signal handler that calls shutdown() can end that."""
    try:
        _state.joining_thread = threading.get_ident()
        yield
    finally:
        _state.joining_thread, _state.joining_ended = 0, None


def _join_next(joined_round: JoinedRound, progress: int = -1) -> JoinedRound:
    """Join the round after the one that this process has left, at the same coordinator."""
    try:
        return join_round(
            *(joined_round.settings, (), _state.num_rounds),
            ready=True,
            has_state=_state.has_state,
            address=joined_round.coordinator_address,
            hosting=joined_round.hosting,
            progress=progress,
        )
    except ConnectFailed as error:
        raise StartFailed(_describe_lost_coordinator(joined_round.coordinator_rank)) from error


def _begin_round(joined_round: JoinedRound, groups: Groups = (), *, rejoins: bool) -> World:
    """Make the world of the round that was joined, and let it be that of the process. With `rejoins`, if a rank is lost
    meanwhile, it is that of the next round, without groups."""
    while True:
        _state.num_rounds += 1
        try:
            world = World(joined_round, groups, rejoins=rejoins)
        except RoundEnded:
            if not rejoins or _state.joining_ended is not None:
                raise
            joined_round, groups = _join_next(joined_round), ()
            continue
        if _state.joining_ended is not None:  # the handler has caught what shutdown() raised
            world.close()
            raise _state.joining_ended
        _state.world = world
        return world


def _describe_lost_coordinator(rank: int) -> str:
    if rank >= 0:
        return (
            f"rank {rank} is lost, and it hosted the coordinator of this job: the others cannot find each other. Start "
            "the job again, from a checkpoint; jobs of `ronde run` survive the loss of any rank"
        )
    return "the launcher, which hosted the coordinator of this job, is gone; start the job again"


def leave(reason: LeaveReason, why: str) -> None:
    """As shutdown(), for another reason."""
    world, _state.world = current_world("leave()"), None
    world.close(reason, why)


def shutdown() -> None:
    """Leave the round. It does nothing if no round is running. Afterwards init() may join another round. Operations in
    MXNet's engine are waited for; other works that are under way end with RoundEnded.

    A signal handler may call it at any time. An operation that it has interrupted ends with RoundEnded when the handler
    returns; the other ranks learn that this one has left. An init() that it has interrupted ends at once: RoundEnded is
    raised here and goes through the handler. In a forked child it only forgets the parent's round.
    """
    if _state.joining_thread == threading.get_ident():
        _state.joining_ended = RoundEnded("shutdown() was called while init() was under way, so no round was joined")
        raise _state.joining_ended
    if _state.world is not None and sys.exc_info()[1] is None:
        _state.world.finish_operations("shutdown()")
    world, _state.world = _state.world, None
    if world is not None:
        world.close()


def add_operations_wait(wait: Callable[[], None]) -> None:
    """Let shutdown() and join() call this first, in this round and later ones; shutdown() not while an error is
    handled. It waits for operations that a framework starts by itself when it comes to them, later than the script has
    called them, and raises nothing. Adding it again changes nothing."""
    if wait not in _state.operation_waits:
        _state.operation_waits = (*_state.operation_waits, wait)


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() was not. True in a forked child of a rank, which can ask for rank() and
    size() but takes part in nothing."""
    return _state.world is not None


def current_world(what: str = "this call") -> World:
    world = _state.world
    if world is None:
        raise NotInitialized(what)
    return world


def refused_to_candidate(what: str) -> RondeError:
    """What a process that waits to be in a round of an elastic job gets for a call that needs the other ranks."""
    return RondeError(
        f"{what}: this process has come to an elastic job that is under way, and is in none of its rounds yet; train "
        "inside of ronde.elastic.run(), which joins the next one"
    )


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
    if error is None:
        _close_at_end(world, LeaveReason.SCRIPT_ENDED, "exited without shutdown")
    else:
        _close_at_end(world, LeaveReason.FAILED, _describe_error(error), error)


def _leave_after_error(
    former_hook: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
) -> None:
    """In place of sys.excepthook: leave the round when an exception has ended the script, because the process may live
    on until its last thread ends, and the others would wait for it. rank() and size() still answer."""
    former_hook(kind, error, traceback)
    is_interactive = hasattr(sys, "ps1")  # then nothing has ended
    if _state.world is not None and not is_interactive:
        _close_at_end(_state.world, LeaveReason.FAILED, _describe_error(error), error)


def _close_at_end(world: World, reason: LeaveReason, why: str, error: BaseException | None = None) -> None:
    try:
        world.close(reason, why, error=error)
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
