"""A server: its parts of the parameters, and what it does with each message. Without I/O.

Gradients are staged: the primary of a part keeps them and passes them to the backup. They are applied when the log says
so, on both, in the order of the log, so both come to the same values. Values are never changed in place once they were
sent, so what is on its way to a worker stays as it was at its position of the log.

handle() and member_lost() return what to do: messages to send, and proposals of a new configuration. The owner of the
core proposes it where all servers get the same answer, and gives that to adopt().
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np

from ronde.ps.commit_log import (
    NO_WORKER,
    DropStaged,
    Effect,
    LogState,
    MeasureNorm,
    RecordNorm,
    SendParts,
    Update,
    WorkerAdded,
)
from ronde.ps.partition import NO_BACKUP, Array, Configuration, Part, PartsLost, TensorSpec, change_servers
from ronde.ps.protocol import (
    Append,
    Appended,
    Finished,
    LogTail,
    NewConfiguration,
    OutgoingMessage,
    PartCopy,
    PartNorm,
    PartStaged,
    PartValues,
    Ping,
    Pong,
    ReplicatePart,
    RequestCopy,
    ServerMessage,
    ServersFailed,
    ServerState,
    StagePart,
    Submit,
    SuspectServer,
)
from ronde.ps.sequencer import LogReplica
from ronde.ps.staleness import Mode, StalenessSettings


class PartOptimizer(Protocol):
    """What a server needs of an optimizer (ronde.ps.optimizers)."""

    @property
    def num_states(self) -> int:
        """How many arrays it keeps for each part, each as large as the part."""

    def update(
        self, part: Part, values: Array, gradient: Array, states: Array, out: Array, step: int, lr: float | None
    ) -> None:
        """Write the values after one step to `out`, which may be `values`; change `states`, one row for each, in place.
        The gradient is not changed: it may be on its way to another server. Steps are counted from 1. `lr` is the
        learning rate of the worker, if it has given one."""


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What all servers know of the parameters and how they are trained. Equal on all of them."""

    parts: tuple[Part, ...]
    workers: tuple[int, ...]
    """Their ranks."""
    staleness: StalenessSettings
    optimizer: PartOptimizer
    clip_norm: float = 0.0
    """If not 0, gradients whose global norm is larger are scaled down to it."""
    version: int = 0
    """Of the first values: the number of updates in them."""
    replicate: bool = True
    """Whether parts have a backup."""
    tensors: tuple[TensorSpec, ...] = ()
    """What the parts were cut of."""


class Propose(NamedTuple):
    """The server wants this to be the configuration of its epoch."""

    configuration: Configuration


class SendState(NamedTuple):
    """A server that has been added has to get the state of this one, as a ServerState."""

    to: int
    state: LogState


Action: TypeAlias = OutgoingMessage | Propose | SendState

CLIP_EPSILON = 1e-6
"""As PyTorch's clip_grad_norm_ has it."""


class PartReplica:
    """One part on one server. Without values it waits for a copy; what the log says meanwhile is kept."""

    def __init__(self, setup: ServerSetup, part: Part) -> None:
        self._setup = setup
        self._part = part
        self.values: Array | None = None
        self._states: Array = np.zeros(0)
        """One row for each state of the optimizer."""
        self.position = 0
        """Of the log, up to which updates are in the values."""
        self.applied: dict[int, int] = {}
        """By worker, its last step that is in the values."""
        self.staged: dict[tuple[int, int], Array] = {}
        """By worker and step, the gradients that are not applied."""
        self._is_shared = False
        """Whether the values were sent, so they must not be changed in place."""
        self._pending: deque[tuple[int, Update]] = deque()
        """Updates that wait for the values, with their positions."""

    def stage(self, worker: int, step: int, gradient: Array) -> None:
        """Keep gradients until they are committed. Those that are applied are not needed again."""
        if step > self.applied.get(worker, 0):
            self.staged[worker, step] = gradient

    def drop_staged(self, worker: int, step: int) -> None:
        """Drop the gradients of later steps than this: the worker is gone."""
        for key in [key for key in self.staged if key[0] == worker and key[1] > step]:
            del self.staged[key]

    def update(self, position: int, update: Update) -> None:
        """Apply an update of the log, or keep it until the values are there."""
        if self.values is None:
            self._pending.append((position, update))
            return
        if position <= self.position:  # it is in the copy that another server has sent
            return
        gradient = self._mean_gradient(update.contributions)
        for worker, step in update.contributions:
            del self.staged[worker, step]
            self.applied[worker] = step
        self.position = position
        if self._setup.clip_norm and update.norm > self._setup.clip_norm:
            scale = self._setup.clip_norm / (update.norm + CLIP_EPSILON)
            gradient = gradient * np.asarray(scale, gradient.dtype)
        out = np.empty_like(self.values) if self._is_shared else self.values
        lr = update.lrs[self._part.group] if update.lrs else None
        self._setup.optimizer.update(self._part, self.values, gradient, self._states, out, update.version, lr)
        self.values, self._is_shared = out, False

    def squared_norm(self, contributions: Sequence[tuple[int, int]]) -> float:
        """Of the mean of staged gradients."""
        mean = self._mean_gradient(contributions).astype(np.float64, copy=False)
        return float(np.dot(mean, mean))

    def _mean_gradient(self, contributions: Sequence[tuple[int, int]]) -> Array:
        """The mean of staged gradients, summed in this order."""
        first, *others = [self.staged[key] for key in contributions]
        if not others:
            return first
        total: Array = first + others[0]
        for each in others[1:]:
            total += each
        total *= np.asarray(1.0 / len(contributions), total.dtype)
        return total

    def share(self) -> Array:
        """The values, for a message. They are not changed any more."""
        assert self.values is not None
        self._is_shared = True
        return self.values

    def make_copy(self) -> Array:
        """Values and states of the optimizer in one array, for another server."""
        assert self.values is not None
        return np.concatenate([self.values, self._states.reshape(-1)])

    def load_copy(self, copy: Array, position: int, applied: dict[int, int]) -> None:
        """Take the copy of another server, and apply what the log has behind it."""
        size = self._part.size
        self.values = copy[:size]
        self._states = copy[size:].reshape(self._setup.optimizer.num_states, size)
        self.position, self.applied = position, dict(applied)
        self._is_shared = False
        for key in [key for key in self.staged if key[1] <= self.applied.get(key[0], 0)]:
            del self.staged[key]
        while self._pending:
            self.update(*self._pending.popleft())


class ServerCore:
    """One server. All members make it alike, but for its rank. One that is added later begins without a state, and gets
    that of the others when it has adopted the configuration that it is in."""

    def __init__(self, rank: int, setup: ServerSetup, configuration: Configuration, *, is_added: bool = False) -> None:
        self.rank = rank
        if is_added:  # it has not adopted any yet
            configuration = msgspec.structs.replace(configuration, epoch=0)
        self.configuration = configuration
        self.is_evicted = False
        """Whether the others have gone on without this server: it does nothing any more."""
        self.failure = ""
        """Why nothing can go on: parts are lost."""
        self._setup = setup
        clips = bool(setup.clip_norm) and setup.staleness.mode is Mode.SYNC
        self.state = LogState(setup.staleness, setup.workers, clips=clips, version=setup.version)
        self.has_state = not is_added
        """Whether it knows what the log says: not before it has got it, if it was added."""
        members = () if is_added else sorted({*setup.workers, *configuration.servers})
        self.log = LogReplica(rank, configuration, members, self.state)
        self.replicas: dict[int, PartReplica] = {
            index: PartReplica(setup, part)
            for index, part in enumerate(setup.parts)
            if rank in configuration.replicas_of(index) and not is_added
        }
        self._held_reads: dict[int, list[SendParts]] = {}
        """By part, reads of it that wait for its first values."""
        self._copy_requests: list[tuple[int, RequestCopy]] = []
        """Requests of new backups, with their rank, that wait until this server has come to their position."""
        self._early: list[tuple[int, ServerMessage, Array | None]] = []
        """Messages of an epoch that this server has not heard of yet."""
        self._norms: dict[int, dict[int, float]] = {}
        """Of the sequencer: by clock and part, the squared norms that have come."""
        self._finished_epoch = 0
        """In which this server, as the sequencer, has last told the members that all workers have left."""
        self._lost: set[int] = set()
        """Members that are gone."""
        self._suspected: set[int] = set()
        """Servers that are gone, or that a worker has waited for in vain."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of all workers and servers that are there."""
        return self.log.members

    @property
    def is_ready(self) -> bool:
        """Whether all parts of this server have values."""
        return self.has_state and all(replica.values is not None for replica in self.replicas.values())

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, source: int, message: ServerMessage, payload: Array | None, now_s: float) -> list[Action]:
        """A member has sent a message."""
        if isinstance(message, NewConfiguration):
            return self.adopt(message.configuration, now_s)
        if self.is_evicted or self.failure:
            return []
        if isinstance(message, Ping):
            return [OutgoingMessage(source, Pong(self.configuration.epoch))]
        if message.epoch > self.configuration.epoch:
            self._early.append((source, message, payload))
            return []
        if not self.has_state and not isinstance(message, ServerState) and message.epoch == self.configuration.epoch:
            self._early.append((source, message, payload))  # it comes to its turn behind the state
            return []
        if message.epoch < self.configuration.epoch:
            if source in self.members and source not in self.configuration.servers:
                # A worker that has not heard of the epoch yet, or a server that was left behind
                return [OutgoingMessage(source, NewConfiguration(self.configuration.epoch, self.configuration))]
            return []
        return self._handle_current(source, message, payload, now_s)

    def member_lost(self, rank: int, now_s: float) -> list[Action]:
        """A worker, a server, or a rank that is both, is gone. Called after its last message."""
        if self.is_evicted or self.failure or (self.state.is_finished and self._finished_epoch):
            return []
        actions: list[Action] = []
        if rank in self.state.steps:
            actions += self.log.worker_lost(rank, now_s)
            actions += self._apply_log()
        if rank in self.configuration.servers:
            self._lost.add(rank)
            self._suspected.add(rank)
            actions += self._propose()
        return actions

    def begin_round(self, configuration: Configuration, members: Iterable[int], now_s: float) -> list[Action]:
        """A new epoch begins, for which these members have met. All that was on its way between them is lost, and so
        are the members of before that are not there."""
        self.log.members = tuple(sorted(members))
        self._lost.clear()
        self._suspected.clear()
        actions = self.adopt(configuration, now_s)
        if self.failure:  # others may not have heard of it
            return self._fail(self.failure)
        for worker in [each for each in self.state.clocks.clocks if each not in self.members]:
            actions += self.member_lost(worker, now_s)
        return actions

    def adopt(self, configuration: Configuration, now_s: float) -> list[Action]:
        """The configuration of a new epoch is decided. An older one is ignored."""
        if self.is_evicted or configuration.epoch <= self.configuration.epoch:
            return []
        self.configuration = configuration
        if self.rank not in configuration.servers:
            self.is_evicted = True
            self.replicas.clear()
            self._early.clear()
            return []
        if not self.has_state:
            if configuration.sequencer == self.rank:
                return self._fail("all servers that knew the state of training are gone")
            # What came early stays, until the state is there
            return [*self.log.adopt(configuration, now_s, has_state=False)]
        actions = self._request_copies()
        if self.failure:
            return actions
        self._copy_requests = [each for each in self._copy_requests if each[0] in configuration.servers]
        actions += self.log.adopt(configuration, now_s)
        self._norms.clear()
        for measure in self.state.measuring.values():  # the sequencer may be another one
            actions += self._measure(measure)
        actions += self._apply_log()
        early, self._early = self._early, []
        for source, message, payload in early:
            actions += self.handle(source, message, payload, now_s)
        return [*actions, *self._propose()]

    def _request_copies(self) -> list[Action]:
        """Ask for the parts of this server that it has no values of; what was asked for in another epoch is lost."""
        configuration, actions = self.configuration, list[Action]()
        for index in range(len(self._setup.parts)):
            if self.rank not in configuration.replicas_of(index):
                continue
            replica = self.replicas.get(index)
            if replica is None:
                replica = self.replicas[index] = PartReplica(self._setup, self._setup.parts[index])
            if replica.values is not None:
                continue
            if configuration.primaries[index] == self.rank:
                return self._fail(f"part {index} was lost with its primary before it was copied to rank {self.rank}")
            request = RequestCopy(configuration.epoch, index, self.state.position)
            actions.append(OutgoingMessage(configuration.primaries[index], request))
        return actions

    def wants_state(self, message: ServerState) -> bool:
        """Whether load_state() is to be called with what came with this message."""
        return not self.has_state and message.epoch == self.configuration.epoch

    def load_state(self, state: LogState, now_s: float) -> list[Action]:
        """The sequencer has sent its state to this server, which was added: it takes part from now on."""
        self.state = self.log.state = state
        self.has_state = True
        actions: list[Action] = [*self.log.begin_at(state.position), *self._request_copies()]
        early, self._early = self._early, []
        for source, message, payload in early:
            actions += self.handle(source, message, payload, now_s)
        return actions

    # --- messages of the current epoch -----------------------------------------------------------------------------

    def _handle_current(self, source: int, message: ServerMessage, payload: Array | None, now_s: float) -> list[Action]:
        actions: list[Action] = []
        if isinstance(message, StagePart | ReplicatePart):
            assert payload is not None
            return self._stage(message, payload)
        if isinstance(message, Submit):
            actions += self.log.submit(message.entry, now_s)
        elif isinstance(message, Append):
            actions += self.log.on_append(message)
        elif isinstance(message, Appended):
            actions += self.log.on_appended(source, message.position)
        elif isinstance(message, LogTail):
            actions += self.log.on_log_tail(source, message, now_s)
        elif isinstance(message, PartNorm):
            actions += self._on_norm(message, now_s)
        elif isinstance(message, RequestCopy):
            self._copy_requests.append((source, message))
            return self._send_copies()
        elif isinstance(message, PartCopy):
            assert payload is not None
            self._load_copy(message, payload)
            actions += self._answer_held_reads(message.part)
        elif isinstance(message, SuspectServer):
            if message.server in self.configuration.servers:
                self._suspected.add(message.server)
                return self._propose()
        return [*actions, *self._apply_log()]

    def _stage(self, message: StagePart | ReplicatePart, gradient: Array) -> list[Action]:
        """Keep gradients, and pass them on; the last replica tells the worker."""
        index, worker, step = message.part, message.worker, message.step
        replica = self.replicas.get(index)
        # One that is not known at all is about to be added
        is_gone = worker in self.state.steps and worker not in self.state.clocks.clocks
        if replica is None or (is_gone and step > self.state.steps[worker]):  # dropped when the worker was removed
            return []
        replica.stage(worker, step, gradient)
        epoch, backup = self.configuration.epoch, self.configuration.backups[index]
        if backup not in (NO_BACKUP, self.rank):
            return [OutgoingMessage(backup, ReplicatePart(epoch, worker, step, index), gradient)]
        return [OutgoingMessage(worker, PartStaged(epoch, step, index))]

    def _load_copy(self, message: PartCopy, copy: Array) -> None:
        replica = self.replicas.get(message.part)
        if replica is not None and replica.values is None:
            replica.load_copy(copy, message.position, message.applied)

    def _send_copies(self) -> list[Action]:
        """Send parts to new backups, when this server has come as far in the log as they were."""
        actions: list[Action] = []
        for request in list(self._copy_requests):
            server, message = request
            replica = self.replicas[message.part]
            if self.state.position < message.position or replica.values is None:
                continue
            self._copy_requests.remove(request)
            epoch, part = self.configuration.epoch, message.part
            for (worker, step), gradient in replica.staged.items():  # first: the copy lets updates be applied
                kept = gradient.copy()  # a worker of this rank may change it as soon as it is applied
                actions.append(OutgoingMessage(server, ReplicatePart(epoch, worker, step, part), kept))
            copy = PartCopy(epoch, part, self.state.position, dict(replica.applied))
            actions.append(OutgoingMessage(server, copy, replica.make_copy()))
        return actions

    # --- the log ---------------------------------------------------------------------------------------------------

    def _apply_log(self) -> list[Action]:
        """Apply the records of the log that are there."""
        actions: list[Action] = []
        while self.log.ready:
            record = self.log.ready.popleft()
            for effect in self.state.apply(record):
                if not isinstance(effect, WorkerAdded):
                    actions += self._carry_out(record.position, effect)
                elif effect.worker not in self.members:  # gone since it asked for it
                    actions += self.log.worker_lost(effect.worker, record.time_s)
        for server in self.log.take_newcomers():
            actions += [SendState(server, self.state), *self.log.follow_state(server, self.state.position)]
        return [*actions, *self._send_copies(), *self._finish()]

    def _finish(self) -> list[Action]:
        """Tell all members that all workers have left, once in each epoch: who told them before may be lost."""
        epoch = self.configuration.epoch
        if not self.log.is_sequencer or not self.state.is_finished or self._finished_epoch == epoch:
            return []
        if not self.log.is_everywhere:  # a server must not end before all know, or the others miss it
            return []
        self._finished_epoch = epoch
        return [OutgoingMessage(rank, Finished(epoch)) for rank in self.members]

    def _carry_out(self, position: int, effect: Effect) -> Iterable[Action]:
        if isinstance(effect, Update):
            for replica in self.replicas.values():
                replica.update(position, effect)
        elif isinstance(effect, MeasureNorm):
            return self._measure(effect)
        elif isinstance(effect, DropStaged):
            for replica in self.replicas.values():
                replica.drop_staged(effect.worker, effect.step)
        elif isinstance(effect, SendParts):
            own = [index for index, rank in enumerate(self.configuration.primaries) if rank == self.rank]
            return [action for index in own for action in self._send_part(index, effect)]
        elif self.log.is_sequencer:
            return [self.log.make_reply(effect)]
        return []

    def _measure(self, measure: MeasureNorm) -> list[Action]:
        """Tell the sequencer the norms of the parts whose primary this server is."""
        actions: list[Action] = []
        for index, rank in enumerate(self.configuration.primaries):
            if rank == self.rank:
                square = self.replicas[index].squared_norm(measure.contributions)
                message = PartNorm(self.configuration.epoch, measure.clock, index, square)
                actions.append(OutgoingMessage(self.configuration.sequencer, message))
        return actions

    def _on_norm(self, message: PartNorm, now_s: float) -> list[Action]:
        """When the norms of all parts are there, the whole one is added to the log."""
        squares = self._norms.setdefault(message.clock, {})
        squares[message.part] = message.square
        if len(squares) < len(self._setup.parts):
            return []
        del self._norms[message.clock]
        norm = math.sqrt(sum(squares[part] for part in sorted(squares)))
        return [*self.log.submit(RecordNorm(NO_WORKER, 0, message.clock, norm), now_s)]

    def _send_part(self, index: int, read: SendParts) -> list[Action]:
        replica = self.replicas[index]
        if replica.values is None:
            self._held_reads.setdefault(index, []).append(read)
            return []
        values = replica.make_copy() if read.with_states else replica.share()
        message = PartValues(self.configuration.epoch, read.read, index, read.version)
        return [OutgoingMessage(read.worker, message, values)]

    def _answer_held_reads(self, index: int) -> list[Action]:
        """Reads that came before the first values of a part. No update can be between: its gradients need a read."""
        return [action for read in self._held_reads.pop(index, ()) for action in self._send_part(index, read)]

    # --- lost servers ----------------------------------------------------------------------------------------------

    def _propose(self) -> list[Action]:
        """Propose a configuration without the servers that are lost, if this server is the first of the others."""
        without = self._suspected.intersection(self.configuration.servers)
        living = [rank for rank in self.configuration.servers if rank not in without]
        if not without or not living or living[0] != self.rank:
            return []
        try:
            replicate = self._setup.replicate
            return [Propose(change_servers(self.configuration, self._setup.parts, lost=without, replicate=replicate))]
        except PartsLost as error:
            if without <= self._lost:
                ranks = " and ".join(str(rank) for rank in sorted(without))
                reason = f"{len(error.parts)} parts of the parameters were only on rank {ranks}, which is gone"
                return self._fail(reason)
        # Who only does not answer cannot be spared: it is waited for.
        self._suspected &= self._lost
        return self._propose()

    def _fail(self, reason: str) -> list[Action]:
        self.failure = reason
        message = ServersFailed(self.configuration.epoch, reason)
        return [OutgoingMessage(rank, message) for rank in self.members if rank != self.rank]
