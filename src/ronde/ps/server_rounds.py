"""The rounds of servers: where the server processes of a job and its workers meet, apart from the rounds of training.

`ronde run` hosts a second coordinator for them, if the job has server processes or is elastic. A process joins with its
first parameter server, and a server process when it is started. Whenever one of them is lost, or another one waits to
join, all leave the round and meet in the next one: in a thread of ServerRounds, while programs go on. Members are known
by their numbers, which no other process of the job ever has: a worker's rank or number, and those of server processes.

A parameter server outlasts these rounds. At the beginning of each, the members tell each other which ones they take
part in, and which configuration of it they know. The newest is changed by who has gone and who has come, which begins
a new epoch: so everything that was on its way in the round before is sent again, as after the loss of a server.

A parameter server is made in a round by one process, its creator: it gives each server its setup and the first values,
again in the next round if this one ends, until all servers have them. From then on it is established.
"""

from __future__ import annotations

import atexit
import enum
import hashlib
import hmac
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from ronde.comm import objects
from ronde.comm.joining import join_round
from ronde.comm.mailbox import Mailbox, MailboxMessage
from ronde.comm.world import World, current_world
from ronde.errors import OperationTimeout, PeerLost, ProtocolError, RondeError, RoundEnded
from ronde.net.event_loop import start_thread
from ronde.net.messages import LeaveReason
from ronde.ps.participant import WAIT_CHECK_S, Participant
from ronde.ps.partition import Array, Configuration, PartsLost, change_servers, make_configuration
from ronde.ps.protocol import OutgoingMessage, make_batches
from ronde.ps.server import LOST_PARTS_ADVICE, ServerCore, ServerSetup
from ronde.settings import FIRST_SERVER, Settings
from ronde.types import Deadline

THREAD_NAME = "ronde-servers"
STOP_TIMEOUT_S = 5.0
REJOIN_INTERVAL_S = 1.0
"""How often a process that has come later asks for a parameter server that is not established yet."""
RETRY_S = 0.02
"""The pause after a round that has not begun, because one was lost meanwhile."""
TAG_BYTES = 16
FOREVER_S = 1_000_000.0

HEADER = struct.Struct("<BII")
"""Ahead of a message: its kind, the number of the parameter server, and of the attempt to make it."""

logger = logging.getLogger("ronde.ps")


class RoundMessageKind(enum.IntEnum):
    MESSAGE = 0
    """A message of the parameter server (ronde.ps.protocol)."""
    CREATE = 1
    """The setup and configuration of a new one, for a server."""
    READY = 2
    """A server has the first values of its parts."""
    ESTABLISH = 3
    """All servers have."""
    MEET_AGAIN = 4
    """The sender needs what is told when a round begins: all leave this one."""


class InstanceView(NamedTuple):
    """What a process says of a parameter server when a round begins."""

    configuration: Configuration | None
    """The newest that it knows; None if it wants to join."""
    serves: bool
    """Whether it may be a server of it."""
    trains: bool


class Greeting(NamedTuple):
    """What a process says of itself when a round begins."""

    number: int
    is_server_process: bool
    instances: dict[int, InstanceView]
    """By number, the parameter servers that it takes part in and that are established, or that it wants to join."""
    finished: frozenset[int] = frozenset()
    """Those whose training is over, as far as it knows."""


class InstanceStart(NamedTuple):
    """How a parameter server goes on in a round. From a process that knows it, to all."""

    setup: ServerSetup | None
    """If some process needs it."""
    configuration: Configuration | None
    failure: str = ""


@dataclass(slots=True)
class _Creation:
    """A parameter server that this process makes."""

    attempt: int = 0
    ready: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Round:
    """The round that this process is in."""

    index: int
    """Counts those of this process."""
    world: World
    mailbox: Mailbox
    ranks: dict[int, int]
    """By number."""
    servers: tuple[int, ...]
    """The numbers of server processes."""


class RoundMessenger:
    """The messages of one parameter server in the rounds of servers."""

    def __init__(self, rounds: ServerRounds, instance: int) -> None:
        self._rounds = rounds
        self._instance = instance

    @property
    def members(self) -> tuple[int, ...]:
        return self._rounds.members

    @property
    def closed_error(self) -> RondeError | None:
        return self._rounds.error

    def post(self, to: int, header: bytes, payload: Array | None) -> None:
        self._rounds.post(to, RoundMessageKind.MESSAGE, self._instance, header, payload)

    def describe(self, number: int) -> str:
        return describe_member(number)

    def decide(self, key: str, value: bytes) -> bytes | None:
        return self._rounds.decide(f"servers {self._instance} {key}", value)

    def pack(self, value: object) -> Array:
        return self._rounds.pack(value)

    def unpack(self, data: Array) -> Any:
        return self._rounds.unpack(data)


class ServerRounds:
    """This process in the rounds of servers. Its thread joins one round after the other."""

    def __init__(self, settings: Settings, number: int, *, is_server_process: bool = False) -> None:
        self.number = number
        self.num_servers = settings.servers
        """How many server processes the job has; 0 if servers are in ranks."""
        self.error: RondeError | None = None
        """Why there will be no further round."""
        self.participants: dict[int, Participant] = {}
        """By number of the parameter server."""
        self._settings = settings.replace(
            coordinator=settings.server_coordinator,
            coordinator_hosted=True,
            elastic=True,
            worker=number,
            backend="native",
            timeline="",
            stall_s=0.0,
            elastic_timeout_s=FOREVER_S,
        )
        self._is_server_process = is_server_process
        self._num_made = 0
        self._established: set[int] = set()
        self._newest: dict[int, Configuration] = {}
        """By parameter server, the configuration with which it has gone on in this round."""
        self._wanted: set[int] = set()
        """Parameter servers that this process wants to join."""
        self._finished: set[int] = set()
        """Those whose training is over."""
        self._trained: set[int] = set()
        """Those that others had made and trained when this round began."""
        self._creations: dict[int, _Creation] = {}
        self._round: _Round | None = None
        self._changed = threading.Condition()
        """Guards all of this but the participants' own state."""
        self._must_leave = threading.Event()
        """The round is to be left: for the next one, or for good."""
        self._is_stopping = False
        # Owned by this object. It joins rounds and leaves them; it touches participants only while no mailbox is open.
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._has_started = False

    # --- for the threads of the program ----------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the members of this round; only this process between two rounds."""
        round = self._round
        return tuple(sorted(round.ranks)) if round is not None else (self.number,)

    def start(self) -> None:
        """Begin to join rounds. Idempotent."""
        with self._changed:
            if self._has_started:
                return
            self._has_started = True
        start_thread(self._thread)

    def new_instance(self) -> int:
        """The number of the next parameter server: all workers make theirs in the same order."""
        self._num_made += 1
        return self._num_made - 1

    def use_instance(self, instance: int) -> None:
        """The next parameter server is the one behind this, which all workers of a group have agreed on."""
        self._num_made = instance + 1

    def stop(self) -> None:
        """Leave the round, for good. Parameter servers that are not closed are lost."""
        self._is_stopping = True
        self._must_leave.set()
        if self._has_started and self._thread is not threading.current_thread():
            # Outside of a round there is nobody to tell, and the thread may wait for others for long
            self._thread.join(STOP_TIMEOUT_S if self._round is not None else WAIT_CHECK_S)

    def release(self, instance: int) -> None:
        """A parameter server is closed. Without any, a worker leaves the rounds."""
        with self._changed:
            self._forget(instance)
            is_last = not self.participants and not self._is_server_process
        if is_last:
            self.stop()

    def _forget(self, instance: int) -> None:
        """A parameter server is not needed any more. It is remembered whether its training is over: for a process that
        comes later and would make it again. Called with the lock."""
        participant = self.participants.pop(instance, None)
        if participant is not None and participant.is_finished:
            self._finished.add(instance)
        self._established.discard(instance)

    def create(
        self,
        instance: int,
        setup: ServerSetup,
        choose_servers: Callable[[tuple[int, ...]], Configuration],
        load: Callable[[Configuration], Iterable[OutgoingMessage]],
        deadline: Deadline,
    ) -> Configuration:
        """Make a parameter server, as its creator: give its servers the setup, and the first values, which load()
        returns as messages. choose_servers() gets the numbers of the server processes. Return its configuration,
        when all servers have them."""
        self.start()
        creation = self._creations[instance] = _Creation()
        while True:
            round = self._wait_for_round({*setup.workers}, deadline)
            creation.attempt, creation.ready = creation.attempt + 1, set()
            configuration = choose_servers(round.servers)
            packed = self.pack((sys.path, cloudpickle.dumps((setup, configuration))))
            for to in configuration.servers:
                self.post(to, RoundMessageKind.CREATE, instance, b"", packed, attempt=creation.attempt)
            messenger = RoundMessenger(self, instance)
            for each in load(configuration):
                for batch in make_batches((each,)):
                    messenger.post(*batch)
            with self._changed:
                while self._round is round and creation.ready != {*configuration.servers}:
                    self._check(deadline, "the servers did not get the first values")
                    self._changed.wait(WAIT_CHECK_S)
                if self._round is not round:
                    continue  # what was sent may be lost
                self.add(instance, setup, configuration)
                del self._creations[instance]
            for to in configuration.servers:
                self.post(to, RoundMessageKind.ESTABLISH, instance, b"", None, attempt=creation.attempt)
            return configuration

    def want(self, instance: int) -> None:
        """Take part in a parameter server from the next round on, if others have made it."""
        with self._changed:
            self._wanted.add(instance)
        self.start()

    def is_made(self, instance: int, workers: set[int], deadline: Deadline) -> bool:
        """Whether others have made the parameter server, and train it or have done so. Waits until these workers are in
        a round."""
        self._wait_for_round(workers, deadline)
        with self._changed:
            return instance in self._trained or instance in self._finished

    def add(self, instance: int, setup: ServerSetup, configuration: Configuration) -> Participant:
        """Take part in a parameter server that is established. If this process is a server of it, it does already."""
        with self._changed:
            participant = self.participants.get(instance)
            if participant is None:
                newest = max(configuration, self._newest.get(instance, configuration), key=lambda each: each.epoch)
                participant = self.participants[instance] = Participant(self.number, setup, newest)
                participant.messenger = RoundMessenger(self, instance)
            self._established.add(instance)
            self._wanted.discard(instance)
        self.start()
        return participant

    def join(self, instance: int, deadline: Deadline) -> Participant | None:
        """Take part in a parameter server that others have made, or are about to make. None if its training is over."""
        self.want(instance)
        asked_s = time.monotonic()
        with self._changed:
            while instance not in self.participants:
                if instance in self._finished:
                    self._wanted.discard(instance)
                    return None
                self._check(deadline, f"nobody has made parameter server {instance}")
                self._changed.wait(WAIT_CHECK_S)
                if self._round is not None and time.monotonic() - asked_s > REJOIN_INTERVAL_S:
                    asked_s = time.monotonic()
                    self._meet_again()  # others tell what they know when a round begins
            return self.participants[instance]

    def make_finished(self, instance: int, setup: ServerSetup) -> Participant:
        """A part in a parameter server whose training is over, for a process that has come too late. Nobody hears of
        it."""
        configuration = make_configuration(setup.all_parts, (self.number,))
        participant = Participant(self.number, setup, configuration)
        participant.messenger = RoundMessenger(self, instance)
        participant.worker.is_finished = participant.worker.has_left = True
        return participant

    def _wait_for_round(self, workers: set[int], deadline: Deadline) -> _Round:
        """Wait until these workers and all server processes are in a round."""
        with self._changed:
            while True:
                round = self._round
                if round is not None and workers <= round.ranks.keys() and len(round.servers) >= self.num_servers:
                    return round
                self._check(deadline, "not all workers and servers have met")
                self._changed.wait(WAIT_CHECK_S)

    def _check(self, deadline: Deadline, late: str) -> None:
        if self.error is not None:
            raise self.error
        if deadline.expired:
            raise OperationTimeout(f"{late} within {deadline.timeout_s:g} s")

    def _meet_again(self) -> None:
        """Let all members leave the round at once. Without a word, they would wait for this process for a while."""
        for number in self.members:
            self.post(number, RoundMessageKind.MEET_AGAIN, 0, b"", None)

    # --- for messengers --------------------------------------------------------------------------------------------

    def post(
        self, to: int, kind: RoundMessageKind, instance: int, header: bytes, payload: Array | None, *, attempt: int = 0
    ) -> None:
        """Send without waiting. Between rounds, and to who is not there, nothing is sent: a new epoch makes up for
        it."""
        round = self._round
        if round is None or to not in round.ranks:
            return
        try:
            full = HEADER.pack(kind, instance, attempt) + header
            round.mailbox.post(round.ranks[to], full, payload, wait=False)
        except (PeerLost, RoundEnded):
            pass

    def decide(self, key: str, value: bytes) -> bytes | None:
        round = self._round
        try:
            return None if round is None else round.world.group.decide(key, value)
        except RondeError:  # the round is over: the next one begins a new epoch
            return None

    def pack(self, value: object) -> Array:
        pickled: bytes = cloudpickle.dumps(value)
        return np.frombuffer(pickled + self._make_tag(pickled), np.uint8)

    def unpack(self, data: Array) -> Any:
        pickled = data[:-TAG_BYTES].tobytes()
        if not hmac.compare_digest(data[-TAG_BYTES:].tobytes(), self._make_tag(pickled)):
            raise ProtocolError("an object for a server was changed on its way, or is of another round")
        return cloudpickle.loads(pickled)

    def _make_tag(self, pickled: bytes) -> bytes:
        round = self._round
        if round is None:
            return b"\0" * TAG_BYTES  # it is sent to nobody
        return hmac.new(round.world.joined_round.object_key, b"servers\n" + pickled, hashlib.sha256).digest()[
            :TAG_BYTES
        ]

    # --- in the thread of a mailbox --------------------------------------------------------------------------------

    def _on_message(self, may_handle: threading.Event, numbers: dict[int, int], message: MailboxMessage) -> None:
        may_handle.wait()
        kind, instance, attempt = HEADER.unpack_from(message.header)
        source, header = numbers[message.source], message.header[HEADER.size :]
        if kind == RoundMessageKind.MESSAGE:
            participant = self.participants.get(instance)
            if participant is None:
                return
            was_ready = participant.is_served.is_set()
            participant.handle(source, header, message.payload)
            if participant.server is not None and participant.server.is_evicted:
                self._meet_again()  # it was stopped, and the others went on: in the next round it is a new server
            if participant.is_served.is_set() and not was_ready:
                self._report_ready(instance)
        elif kind == RoundMessageKind.CREATE:
            try:
                setup, configuration = self._unpack_setup(message.payload)
            except Exception as error:  # of a user's optimizer, which may need what this process does not find
                self._end(RondeError(f"the optimizer of a parameter server cannot be loaded: {error!r}"))
                raise
            participant = Participant(self.number, setup, configuration, ServerCore(self.number, setup, configuration))
            participant.messenger = RoundMessenger(self, instance)
            participant.creator = (source, attempt)
            with self._changed:
                self.participants[instance] = participant
            if participant.server is not None and participant.server.is_ready:  # it has no parts
                self._report_ready(instance)
        elif kind == RoundMessageKind.READY:
            with self._changed:
                creation = self._creations.get(instance)
                if creation is not None and creation.attempt == attempt:
                    creation.ready.add(source)
                    self._changed.notify_all()
        elif kind == RoundMessageKind.ESTABLISH:
            with self._changed:
                self._established.add(instance)
        elif kind == RoundMessageKind.MEET_AGAIN:
            self._must_leave.set()

    def _unpack_setup(self, payload: Array) -> tuple[ServerSetup, Configuration]:
        """A user's optimizer may be of a module that only the creator's search path finds."""
        search_path, pickled = self.unpack(payload)
        if self._is_server_process:
            sys.path += [each for each in search_path if each not in sys.path]
        setup, configuration = cloudpickle.loads(pickled)
        return setup, configuration

    def _report_ready(self, instance: int) -> None:
        creator, attempt = self.participants[instance].creator
        if creator >= 0:
            self.post(creator, RoundMessageKind.READY, instance, b"", None, attempt=attempt)

    def _on_lost(self, rank: int, why: str) -> None:
        self._must_leave.set()

    # --- in the thread of this object ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            index = 0
            while not self._is_stopping:
                index += 1
                self._take_round(index)
        except RondeError as error:
            self._end(error)
        except BaseException as error:
            logger.exception("the rounds of servers have ended")
            self._end(RondeError(f"the rounds of servers have ended: {error!r}"))

    def _end(self, error: RondeError) -> None:
        with self._changed:
            self._round, self.error = None, error
            self._changed.notify_all()
            participants = list(self.participants.values())
        for participant in participants:
            participant.fail(error)

    def _take_round(self, index: int) -> None:
        """Join a round, and leave it when it is over."""
        joined = join_round(self._settings, (), index, ready=True)
        try:
            world = World(joined, rejoins=True)
        except RoundEnded:
            return  # one was lost when it began
        world.on_change_wanted = self._must_leave.set
        self._must_leave.clear()
        if world.change_wanted or self._is_stopping:
            self._must_leave.set()
        may_handle, numbers = threading.Event(), dict[int, int]()
        is_begun = False
        try:
            mailbox = world.group.open_mailbox(
                lambda message: self._on_message(may_handle, numbers, message), on_lost=self._on_lost, in_place=True
            )
            greetings: list[Greeting] = objects.allgather(self._make_greeting(), group=world.group)
            numbers.update(enumerate(greeting.number for greeting in greetings))
            ranks = {number: rank for rank, number in numbers.items()}
            servers = tuple(sorted(each.number for each in greetings if each.is_server_process))
            starts = self._exchange_starts(world, greetings)
            with self._changed:
                self._round = _Round(index, world, mailbox, ranks, servers)
            logger.info("%s: round %d of %s", describe_member(self.number), index, self.members)
            self._begin(greetings, starts)
            is_begun = True
            with self._changed:
                self._changed.notify_all()
        except RondeError as error:
            logger.info("%d: a round of servers has not begun: %s", self.number, error)
            time.sleep(RETRY_S)
        may_handle.set()
        if is_begun:
            self._must_leave.wait()
        with self._changed:
            self._round = None
            self._changed.notify_all()
        if not self._is_stopping:
            world.close(LeaveReason.REJOINING)
        elif self.participants and not self._is_server_process:
            world.close(LeaveReason.FAILED, "its program has ended without close()")
        else:
            world.close()

    def _make_greeting(self) -> Greeting:
        serves = self._is_server_process or not self.num_servers
        with self._changed:
            instances = {
                instance: InstanceView(participant.worker.configuration, serves, not self._is_server_process)
                for instance, participant in self.participants.items()
                if instance in self._established
            }
            for instance in self._wanted - instances.keys():
                instances[instance] = InstanceView(None, serves, True)
            finished = frozenset(self._finished)
        return Greeting(self.number, self._is_server_process, instances, finished)

    def _exchange_starts(self, world: World, greetings: list[Greeting]) -> dict[int, InstanceStart]:
        """How each parameter server goes on. The first process that knows one tells all others. Collective."""
        starts: dict[int, InstanceStart] = {}
        for instance in sorted({instance for greeting in greetings for instance in greeting.instances}):
            knowing = [
                rank
                for rank, greeting in enumerate(greetings)
                if instance in greeting.instances and greeting.instances[instance].configuration is not None
            ]
            if not knowing:
                continue
            packed = b""
            if knowing[0] == world.topology.rank:
                start = plan_start(instance, self.participants[instance].setup, greetings)
                packed = cloudpickle.dumps(start)
            search_path, packed = objects.broadcast((sys.path, packed), root=knowing[0], group=world.group)
            if self._is_server_process:
                sys.path += [each for each in search_path if each not in sys.path]
            starts[instance] = cloudpickle.loads(packed)
        return starts

    def _begin(self, greetings: list[Greeting], starts: dict[int, InstanceStart]) -> None:
        """Begin a new epoch of each parameter server; no message of the round has been handled yet."""
        with self._changed:
            self._finished.update(*(greeting.finished for greeting in greetings))
            self._trained = {
                instance
                for greeting in greetings
                for instance, view in greeting.instances.items()
                if view.trains and view.configuration is not None
            }
            for instance in [
                each for each in self.participants if each not in starts and each not in self._established
            ]:
                del self.participants[instance]  # its creator will make it again
        for instance, start in starts.items():
            is_trained = any(
                view.trains for greeting in greetings if (view := greeting.instances.get(instance)) is not None
            )
            with self._changed:
                participant = self.participants.get(instance)
                if self._is_server_process and not is_trained:
                    self._forget(instance)  # all workers have closed it, or are lost
                    continue
                if start.configuration is not None:
                    self._newest[instance] = start.configuration
                if participant is not None:
                    self._established.add(instance)
                is_wanted = self._is_server_process or instance in self._wanted
                if participant is None and is_wanted and start.setup is not None and start.configuration is not None:
                    participant = self.participants[instance] = Participant(
                        self.number, start.setup, start.configuration
                    )
                    participant.messenger = RoundMessenger(self, instance)
                    self._established.add(instance)
                    self._wanted.discard(instance)
            if participant is None:
                continue
            if start.failure:
                with participant.changed:
                    participant.worker.failure = participant.worker.failure or start.failure
                    participant.changed.notify_all()
            elif start.configuration is not None:
                participant.begin_round(start.configuration)


def plan_start(instance: int, setup: ServerSetup, greetings: list[Greeting]) -> InstanceStart:
    """Decide how a parameter server goes on with those who have met. Server processes that are new hold parts from now
    on, and so do workers that have come, if servers are in ranks."""
    views = {greeting.number: greeting.instances.get(instance) for greeting in greetings}
    known = [view.configuration for view in views.values() if view is not None and view.configuration is not None]
    newest = max(known, key=lambda configuration: configuration.epoch)
    serving = [
        greeting.number
        for greeting in greetings
        if greeting.is_server_process or ((view := views[greeting.number]) is not None and view.serves)
    ]
    needs_setup = any(
        (greeting.is_server_process and views[greeting.number] is None)
        or ((view := views[greeting.number]) is not None and view.configuration is None)
        for greeting in greetings
    )
    sent = setup if needs_setup else None
    lost = [number for number in newest.servers if number not in serving]
    try:
        configuration = change_servers(newest, setup.all_parts, lost=lost, added=serving, replicate=setup.replicate)
    except PartsLost as error:
        names = ", ".join(describe_member(number) for number in error.servers)
        reason = f"{len(error.parts)} parts of the parameters were only on {names}, gone; {LOST_PARTS_ADVICE}"
        return InstanceStart(sent, None, reason)
    return InstanceStart(sent, configuration)


def describe_member(number: int) -> str:
    """A member of the rounds of servers as users know it."""
    return f"server {number - FIRST_SERVER}" if number >= FIRST_SERVER else f"worker {number}"


# --- the rounds of this process --------------------------------------------------------------------------------------


class _RoundsOfProcess:
    rounds: ServerRounds | None = None


_state = _RoundsOfProcess()


def server_rounds_of_job() -> ServerRounds | None:
    """The rounds of servers of this job, for this process, which is a worker of it; None if the job has none."""
    settings = Settings.load({})
    if not settings.server_coordinator:
        if settings.servers:
            raise ValueError(
                f"RONDE_SERVERS={settings.servers}: only `ronde run --servers {settings.servers}` starts server "
                "processes; under mpirun, torchrun and srun servers are in ranks"
            )
        return None
    rounds = _state.rounds
    if rounds is None or rounds.error is not None or rounds._is_stopping:
        number = settings.worker if settings.elastic and settings.worker >= 0 else current_world().rank
        before, rounds = rounds, ServerRounds(settings, number)
        if before is not None:
            rounds._num_made, rounds._finished = before._num_made, before._finished
        _state.rounds = rounds
        atexit.register(rounds.stop)
    return rounds


def _forget_in_child() -> None:
    _state.rounds = None


os.register_at_fork(after_in_child=_forget_in_child)
