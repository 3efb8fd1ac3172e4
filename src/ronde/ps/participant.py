"""The part of one process in one parameter server: its ServerCore, its WorkerCore, and the messages of both.

A process that is a server has a ServerCore. All have a WorkerCore; that of a process that does not train takes what is
told to all members. Messages are handled one at a time, in the thread of a mailbox; the WorkerCore is shared with the
threads of the program, under a lock. Nothing in here waits for another process, but for the one answer of the
coordinator when a server does not answer.

What a process sends to itself does not go through the mailbox: it is handed over by reference, so nothing is copied. A
thread of the program wakes that of the mailbox with an empty message.

How messages get to others is a Messenger: MailboxMessenger for the ranks of a group, and that of server_rounds where
processes meet again and again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
import numpy as np

from ronde.comm.group import Group
from ronde.comm.mailbox import MailboxMessage
from ronde.errors import PeerLost, RondeError, RoundEnded
from ronde.net.event_loop import start_thread
from ronde.net.open_files import explain_open_files
from ronde.ps.checkpoints import SavedFile, write_part
from ronde.ps.commit_log.log_state import LogState
from ronde.ps.partition import Array, Configuration
from ronde.ps.protocol import (
    FOR_WORKERS,
    NewConfiguration,
    OutgoingMessage,
    ServerMessage,
    ServersFailed,
    ServerState,
    encode,
    make_batches,
    split_batch,
)
from ronde.ps.server import Action, Propose, SavePart, SendState, ServerCore, ServerSetup
from ronde.ps.worker import WorkerCore

WAIT_CHECK_S = 0.1
"""How often a wait of the program looks whether the round is over, and lets Python run signal handlers."""
WAKE_UP = b""
"""The header of a message that only wakes the thread that handles messages."""

SAVE_THREAD_NAME = "ronde-save-parts"

logger = logging.getLogger("ronde.ps")


class Messenger(Protocol):
    """How messages get to the other members of a parameter server."""

    @property
    def members(self) -> Iterable[int]:
        """All members that are there, this process among them."""

    @property
    def closed_error(self) -> RondeError | None:
        """Why nothing can be sent any more, if that is so."""

    def post(self, to: int, header: bytes, payload: Array | None) -> None:
        """Send without waiting. What is for a member that is gone is dropped; RoundEnded when nothing can be sent."""

    def describe(self, number: int) -> str:
        """A member, as users know it."""

    def decide(self, key: str, value: bytes) -> bytes | None:
        """The value that the first member has proposed for this key. None if there is no answer any more."""

    def pack(self, value: object) -> Array:
        """Pickle something for another member, and sign it."""

    def unpack(self, data: Array) -> Any:  # any object
        """What another member has packed."""


class Participant:
    """One process in one parameter server. Members are known by their numbers: ranks, or those of server_rounds."""

    def __init__(
        self, number: int, setup: ServerSetup, configuration: Configuration, server: ServerCore | None = None
    ) -> None:
        self.number = number
        self.setup = setup
        self.server = server
        self.worker = WorkerCore(number, len(setup.parts), configuration, len(setup.table_parts))
        self.changed = threading.Condition()
        """Guards the WorkerCore, and tells that it has changed. Held until what the WorkerCore returns is sent: servers
        get it in the order in which it was made."""
        self.awaited: list[Callable[[], bool]] = []
        """What threads of the program wait for: they are not woken for anything else."""
        self.error: RondeError | None = None
        """Why this process cannot take part any more."""
        self.is_served = threading.Event()
        """Set when all parts of this server have values."""
        self.creator = (-1, 0)
        """Who is to hear that this server has the first values of its parts, and in which attempt to make it."""
        self._messenger: Messenger | None = None
        self._has_messenger = threading.Event()
        self._handling = threading.RLock()
        """Held while a message is handled: threads of two mailboxes may come, one after the other."""
        self._handling_thread = 0
        """The number of the thread that handles a message, or 0: it also takes what this process sends to itself."""
        self._to_self: deque[tuple[ServerMessage, Array | None]] = deque()
        """What this process has sent to itself."""

    @property
    def messenger(self) -> Messenger:
        assert self._messenger is not None, "it is given before anything is sent"
        return self._messenger

    @messenger.setter
    def messenger(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._has_messenger.set()

    @property
    def is_finished(self) -> bool:
        """Whether all workers have left or are lost."""
        return self.worker.is_finished

    def check(self) -> None:
        """Raise what has ended training."""
        if self.worker.failure:
            raise RondeError(f"the parameter server cannot go on: {self.worker.failure}")
        error = self.error or self.messenger.closed_error
        if error is not None:
            raise error

    def send(self, messages: Iterable[OutgoingMessage]) -> None:
        """Send without waiting. What is lost with a member is sent again to another one, when the servers have
        changed."""
        wakes = False
        to_others: list[OutgoingMessage] = []
        for each in messages:
            if each.to == self.number:
                self._to_self.append((each.message, each.payload))
                wakes = True
            else:
                to_others.append(each)
        for batch in make_batches(to_others):
            self._post(*batch)
        if wakes and threading.get_ident() != self._handling_thread:
            self._post(self.number, WAKE_UP, None)

    def _post(self, to: int, header: bytes, payload: Array | None) -> None:
        try:
            self.messenger.post(to, header, payload)
        except RoundEnded:
            if not self.worker.is_finished:
                raise

    # --- in the thread that handles messages -----------------------------------------------------------------------

    def handle(self, source: int, header: bytes, payload: Array | None) -> None:
        """A member has sent messages."""
        self._has_messenger.wait()

        def handle() -> None:
            for each in split_batch(header, payload) if header != WAKE_UP else ():
                self._handle(source, *each)

        self._run(handle)

    def member_lost(self, number: int, why: str) -> None:
        """A member is gone. Called after its last message."""
        self._has_messenger.wait()
        logger.info("%d: %d is gone (%s)", self.number, number, why)

        def lose() -> None:
            if self.server is not None:
                self._carry_out(self.server.member_lost(number, time.time()))

        self._run(lose)

    def begin_round(self, configuration: Configuration) -> None:
        """The members have met again, and what was on its way before is lost: a new epoch begins. Those that are not
        there any more are lost; a server that is new among them gets the state of the others."""
        members = tuple(self.messenger.members)

        def begin() -> None:
            logger.info(
                "%s: epoch %d, servers %s",
                self.messenger.describe(self.number),
                configuration.epoch,
                configuration.servers,
            )
            serves = self.number in configuration.servers
            if serves and (self.server is None or self.server.is_evicted):
                self.server = ServerCore(self.number, self.setup, configuration, is_added=True)
            if self.server is not None:
                self._carry_out(self.server.begin_round(configuration, members, time.time()))
            self._tell_worker(configuration)

        self._run(begin)

    def fail(self, error: RondeError, *, reason: str = "") -> None:
        """This process cannot take part any more: its program learns why, and if there is a `reason`, so do the
        others."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()
        if reason:
            failed = ServersFailed(self.worker.configuration.epoch, reason)
            self.send(OutgoingMessage(to, failed) for to in self.messenger.members if to != self.number)

    def _run(self, function: Callable[[], None]) -> None:
        with self._handling:
            self._handling_thread = threading.get_ident()
            try:
                function()
                while self._to_self:
                    self._handle(self.number, *self._to_self.popleft())
            except BaseException as error:
                who = self.messenger.describe(self.number)
                reason = f"the server of {who} has failed: {error!r}; the output of {who} says where"
                own = RondeError(f"the parameter server cannot go on: {reason}")
                self.fail(own, reason="" if isinstance(error, RoundEnded) else reason)
                raise
            finally:
                self._handling_thread = 0

    def _handle(self, source: int, message: ServerMessage, payload: Array | None) -> None:
        is_for_workers = isinstance(message, FOR_WORKERS)
        if is_for_workers or isinstance(message, NewConfiguration):
            with self.changed:
                self.send(self.worker.handle(source, message, payload))
                self._notify()
        if self.server is None or is_for_workers:
            return
        if isinstance(message, ServerState):
            if payload is not None and self.server.wants_state(message):
                state = self.messenger.unpack(payload)
                assert isinstance(state, LogState)
                logger.info("%s: has the state as of position %d", self.messenger.describe(self.number), state.position)
                self._carry_out(self.server.load_state(state, time.time()))
            return
        self._carry_out(self.server.handle(source, message, payload, time.time()))

    def _notify(self) -> None:
        """Wake threads of the program if what they wait for is there. Called with the lock."""
        worker = self.worker
        is_over = worker.failure or worker.is_finished or self.error is not None
        if is_over or any(is_done() for is_done in self.awaited):
            self.changed.notify_all()

    def _tell_worker(self, configuration: Configuration) -> None:
        with self.changed:
            message = NewConfiguration(configuration.epoch, configuration)
            self.send(self.worker.handle(self.number, message, None))
            self._notify()

    def _carry_out(self, actions: Iterable[Action]) -> None:
        assert self.server is not None
        messages: list[OutgoingMessage] = []
        saves: list[SavePart] = []
        for action in actions:
            if isinstance(action, OutgoingMessage):
                messages.append(action)
                continue
            self.send(messages)  # ahead of what comes next
            messages = []
            if isinstance(action, Propose):
                self._decide(action.configuration)
            elif isinstance(action, SendState):
                message = ServerState(self.server.configuration.epoch)
                self.send((OutgoingMessage(action.to, message, self.messenger.pack(action.state)),))
            else:
                saves.append(action)
        self.send(messages)
        if saves:  # this thread goes on, or others would wait for the disk, and miss this server
            # Owned by nobody: it ends when the files are written. It touches nothing but what it was given.
            start_thread(threading.Thread(target=self._save, args=(saves,), name=SAVE_THREAD_NAME, daemon=True))
        if not self.is_served.is_set() and self.server.is_ready:
            self.is_served.set()
        if self.server.failure and not self.worker.failure:
            with self.changed:
                self.worker.failure = self.server.failure
                self.changed.notify_all()

    def _save(self, actions: Iterable[SavePart]) -> None:
        """Write parts to files, and tell the worker what was written, or why not."""
        for to, message, directory, state in actions:
            try:
                saved = write_part(directory, message.version, message.part, state)
            except Exception as error:  # such as a lack of memory: the worker must not wait for this file
                saved = SavedFile(error=f"part {message.part}: {error!r}")
            told = np.frombuffer(msgspec.json.encode(saved), np.uint8)
            with contextlib.suppress(RoundEnded):  # the worker knows, too
                self.send((OutgoingMessage(to, message, told),))

    def _decide(self, configuration: Configuration) -> None:
        """The servers may disagree on who is lost: what the coordinator has heard first holds for all."""
        assert self.server is not None
        answer = self.messenger.decide(f"epoch {configuration.epoch}", encode(configuration))
        if answer is None:
            return
        decided = msgspec.msgpack.decode(answer, type=Configuration)
        logger.info("%d: servers %s from epoch %d on", self.number, decided.servers, decided.epoch)
        self._carry_out(self.server.adopt(decided, time.time()))
        self._tell_worker(decided)


class MailboxMessenger:
    """The messages of a parameter server whose members are the ranks of a group, for as long as their round lasts."""

    def __init__(self, participant: Participant, group: Group) -> None:
        self._group = group
        with explain_open_files(f"{group!r} cannot open a mailbox for a parameter server"):
            self._mailbox = group.open_mailbox(
                lambda message: self._on_message(participant, message), on_lost=participant.member_lost, in_place=True
            )
        participant.messenger = self

    @staticmethod
    def _on_message(participant: Participant, message: MailboxMessage) -> None:
        participant.handle(message.source, message.header, message.payload)

    @property
    def members(self) -> tuple[int, ...]:
        return self._group.ranks

    @property
    def closed_error(self) -> RondeError | None:
        return self._mailbox.closed_error

    def post(self, to: int, header: bytes, payload: Array | None) -> None:
        try:
            self._mailbox.post(to, header, payload, wait=False)
        except PeerLost:
            pass

    def describe(self, number: int) -> str:
        return f"rank {number}"

    def decide(self, key: str, value: bytes) -> bytes | None:
        return self._group.decide(f"{self._mailbox.name} {key}", value)

    def pack(self, value: object) -> Array:
        raise AssertionError("nobody can join the members of a round")

    def unpack(self, data: Array) -> Any:
        raise AssertionError("nobody can join the members of a round")

    def close(self) -> None:
        self._mailbox.close()
