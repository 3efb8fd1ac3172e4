"""A server: its parts of the parameters, and what it does with each message. Without I/O.

Gradients are staged: the primary of a part keeps them and passes them to the backup. They are applied when the log says
so, on both, in the order of the log, so both come to the same values. Values are never changed in place once they were
sent, so what is on its way to a worker stays as it was at its position of the log.

handle() and member_lost() return what to do: messages to send, and proposals of a new configuration. The owner of the
core proposes it where all servers get the same answer, and gives that to adopt().
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ronde.ps.commit_log.log_state import (
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
from ronde.ps.commit_log.replication import LogReplica
from ronde.ps.commit_log.staleness import Mode, StalenessSettings
from ronde.ps.partition import (
    NO_BACKUP,
    Array,
    Configuration,
    Part,
    PartsLost,
    TensorSpec,
    change_servers,
    new_array,
)
from ronde.ps.payloads import decode_values, encode_values, pack_arrays, unpack_arrays
from ronde.ps.protocol import (
    Append,
    Appended,
    Finished,
    GetRows,
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
    RowValues,
    ServerMessage,
    ServersFailed,
    ServerState,
    StagePart,
    Submit,
    SuspectServer,
)
from ronde.ps.replica import PartOptimizer, Replica, clip, compensate_delay
from ronde.ps.tables.embedding_table import EmbeddingTable, TablePart
from ronde.ps.tables.server import TableReplica


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
    tables: tuple[EmbeddingTable, ...] = ()
    table_names: tuple[str, ...] = ()
    table_parts: tuple[TablePart, ...] = ()
    """They are numbered behind the other parts."""
    delay_compensation: float = 0.0
    """If not 0, gradients are corrected for what other workers have changed since the worker's read."""
    compression: str = "none"
    """What gradients and values travel as (ronde.ps.payloads)."""
    workers_may_join: bool = False
    """Whether others can come when all workers are lost, so that training is not over then."""

    @property
    def all_parts(self) -> tuple[Part | TablePart, ...]:
        return (*self.parts, *self.table_parts)

    @property
    def compensates_delay(self) -> bool:
        return bool(self.delay_compensation) and self.staleness.mode is not Mode.SYNC  # where there is no delay

    def make_replica(self, index: int) -> Replica:
        """A replica of a part, without values."""
        if index < len(self.parts):
            return PartReplica(self, self.parts[index])
        part = self.table_parts[index - len(self.parts)]
        compensation = self.delay_compensation if self.compensates_delay else 0.0
        return TableReplica(
            part,
            self.tables[part.table],
            self.optimizer_of(part.table),
            clip_norm=self.clip_norm,
            delay_compensation=compensation,
        )

    def optimizer_of(self, table: int) -> PartOptimizer:
        """The one that trains a table."""
        return self.tables[table].optimizer or self.optimizer

    def num_states_of(self, table: int) -> int:
        """How many arrays the optimizer keeps for each row of a table."""
        return self.optimizer_of(table).num_states


class Propose(NamedTuple):
    """The server wants this to be the configuration of its epoch."""

    configuration: Configuration


class SendState(NamedTuple):
    """A server that has been added has to get the state of this one, as a ServerState."""

    to: int
    state: LogState


class SavePart(NamedTuple):
    """A part is to be written to a folder, and the worker told what was written."""

    to: int
    message: PartValues
    directory: str
    state: Array


LOST_PARTS_ADVICE = "start again from a checkpoint, or with more servers and replicate=True"

Action: TypeAlias = OutgoingMessage | Propose | SendState | SavePart


class PartReplica(Replica):
    """One part of tensors on one server."""

    def __init__(self, setup: ServerSetup, part: Part) -> None:
        super().__init__()
        self._setup = setup
        self._part = part
        self.values: Array | None = None
        self._states: Array = np.zeros(0)
        """One row for each state of the optimizer."""
        self._is_shared = False
        """Whether the values were sent, so they must not be changed in place."""
        self._values_read: dict[int, Array] = {}
        """By worker, the values that it has read, if delays are compensated."""

    @property
    def is_loaded(self) -> bool:
        return self.values is not None

    def drop_staged(self, worker: int, step: int) -> None:
        super().drop_staged(worker, step)
        self._values_read.pop(worker, None)

    def _apply(self, update: Update) -> None:
        assert self.values is not None
        gradient = self._mean_gradient(update.contributions)
        for key in update.contributions:
            del self.staged[key]
        gradient = clip(gradient, update.norm, self._setup.clip_norm)
        out = new_array(self.values.size, self.values.dtype) if self._is_shared else self.values
        if self._setup.compensates_delay:
            (worker, _), *_ = update.contributions
            values_read = self._values_read.get(worker, self.values)
            gradient = compensate_delay(gradient, self._setup.delay_compensation, self.values, values_read)
        lr = update.lrs[self._part.group] if update.lrs else None
        if self._part.size:
            self._setup.optimizer.update(self._part, self.values, gradient, self._states, out, update.version, lr)
        self.values, self._is_shared = out, False

    def _remember_read(self, worker: int, oldest_version: int) -> None:
        if self._setup.compensates_delay:
            self._values_read[worker] = self.share()

    def squared_norm(self, contributions: Sequence[tuple[int, int]]) -> float:
        mean = self._mean_gradient(contributions).astype(np.float64, copy=False)
        return float(np.dot(mean, mean))

    def _mean_gradient(self, contributions: Sequence[tuple[int, int]]) -> Array:
        """The mean of staged gradients, summed in this order."""
        first, *others = [decode_values(self.staged[key], self._part.dtype) for key in contributions]
        if not others:
            return first
        total = np.add(first, others[0], out=new_array(first.size, first.dtype))
        for each in others[1:]:
            total += each
        total *= np.asarray(1.0 / len(contributions), total.dtype)
        return total

    def share(self) -> Array:
        """The values, for a message. They are not changed any more."""
        assert self.values is not None
        self._is_shared = True
        return self.values

    def make_state(self) -> Array:
        assert self.values is not None
        return np.concatenate([self.values, self._states.reshape(-1)])

    def make_copy(self) -> Array:
        if not self._values_read:
            return self.make_state()
        workers = np.array(sorted(self._values_read), np.int64)
        return pack_arrays([self.make_state(), workers, *(self._values_read[worker] for worker in workers.tolist())])

    def _load(self, copy: Array) -> None:
        size = self._part.size
        if copy.dtype == np.uint8:
            copy, workers, *values_read = unpack_arrays(copy)
            self._values_read = dict(zip(workers.tolist(), values_read, strict=True))
        # In memory of its own: that of a message is needed for others.
        self.values = new_array(size, copy.dtype)
        self.values[:] = copy[:size]
        self._states = copy[size:].reshape(self._setup.optimizer.num_states, size).copy()
        self._is_shared = False


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
        self.state = LogState(
            setup.staleness,
            setup.workers,
            clips=clips,
            version=setup.version,
            workers_may_join=setup.workers_may_join,
        )
        self.has_state = not is_added
        """Whether it knows what the log says: not before it has got it, if it was added."""
        members = () if is_added else sorted({*setup.workers, *configuration.servers})
        self.log = LogReplica(rank, configuration, members, self.state)
        self.replicas: dict[int, Replica] = {
            index: setup.make_replica(index)
            for index in range(len(setup.all_parts))
            if rank in configuration.replicas_of(index) and not is_added
        }
        self._row_requests: list[tuple[int, GetRows, Array]] = []
        """Rows that workers want, with their rank, that wait for the read that they belong to, or for the part."""
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
        return self.has_state and all(replica.is_loaded for replica in self.replicas.values())

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
        self._row_requests.clear()  # workers ask again
        if self.rank not in configuration.servers:
            self.is_evicted = True
            self.replicas.clear()
            self._early.clear()
            return []
        if not self.has_state:
            if configuration.sequencer == self.rank:
                return self._fail(f"all servers that knew the state of training are gone; {LOST_PARTS_ADVICE}")
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
        for index in range(len(self._setup.all_parts)):
            if self.rank not in configuration.replicas_of(index):
                continue
            replica = self.replicas.get(index)
            if replica is None:
                replica = self.replicas[index] = self._setup.make_replica(index)
            if replica.is_loaded:
                continue
            if configuration.primaries[index] == self.rank:
                lost = f"part {index} was lost with its primary before it was copied to rank {self.rank}"
                return self._fail(f"{lost}; {LOST_PARTS_ADVICE}")
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
        elif isinstance(message, GetRows):
            assert payload is not None
            self._row_requests.append((source, message, payload))
            return self._answer_row_requests()
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
        if len(self.configuration.servers) == 1:  # the worker does not wait for it
            return []
        return [OutgoingMessage(worker, PartStaged(epoch, step, index))]

    def _load_copy(self, message: PartCopy, copy: Array) -> None:
        replica = self.replicas.get(message.part)
        if replica is not None and not replica.is_loaded:
            replica.load_copy(copy, message.position, message.applied)

    def _send_copies(self) -> list[Action]:
        """Send parts to new backups, when this server has come as far in the log as they were."""
        actions: list[Action] = []
        for request in list(self._copy_requests):
            server, message = request
            replica = self.replicas[message.part]
            if self.state.position < message.position or not replica.is_loaded:
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
        return [*actions, *self._answer_row_requests(), *self._send_copies(), *self._finish()]

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
            for replica in () if effect.with_states else self.replicas.values():
                replica.remember_read(position, effect.worker, self.state.oldest_version_read)
            num_parts = len(self._setup.all_parts if effect.with_states else self._setup.parts)
            primaries = self.configuration.primaries[:num_parts]
            own = [index for index, rank in enumerate(primaries) if rank == self.rank]
            return [action for index in own for action in self._send_part(index, effect)]
        elif self.log.is_sequencer and not isinstance(effect, WorkerAdded):
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
        if len(squares) < len(self._setup.all_parts):
            return []
        del self._norms[message.clock]
        norm = math.sqrt(sum(squares[part] for part in sorted(squares)))
        return [*self.log.submit(RecordNorm(NO_WORKER, 0, message.clock, norm), now_s)]

    def _send_part(self, index: int, read: SendParts) -> list[Action]:
        replica = self.replicas[index]
        if not replica.is_loaded:
            self._held_reads.setdefault(index, []).append(read)
            return []
        if read.with_states:
            values = replica.make_state()
        else:
            assert isinstance(replica, PartReplica)
            values = replica.share()
            if self._setup.compression != "none":
                values = encode_values(values, self._setup.compression)
        message = PartValues(self.configuration.epoch, read.read, index, read.version)
        if read.save_to:
            return [SavePart(read.worker, message, read.save_to, values)]
        return [OutgoingMessage(read.worker, message, values)]

    def _answer_held_reads(self, index: int) -> list[Action]:
        """Reads that came before the first values of a part. No update can be between: its gradients need a read."""
        return [action for read in self._held_reads.pop(index, ()) for action in self._send_part(index, read)]

    def _answer_row_requests(self) -> list[Action]:
        """Send the rows whose read has come. Those of a read that its worker has given up are dropped."""
        actions: list[Action] = []
        waiting: list[tuple[int, GetRows, Array]] = []
        for worker, message, rows in self._row_requests:
            replica = self.replicas.get(message.part)
            last_read = self.state.last_reads.get(worker, 0)
            is_gone = worker in self.state.steps and worker not in self.state.clocks.clocks
            if is_gone or message.read < last_read:
                continue
            if message.read > last_read or replica is None or not replica.is_loaded:
                waiting.append((worker, message, rows))
                continue
            assert isinstance(replica, TableReplica)
            values, version = replica.read(self.state.version_read(worker), rows.astype(np.int64))
            answer = RowValues(self.configuration.epoch, message.request, message.read, message.part, version)
            actions.append(OutgoingMessage(worker, answer, encode_values(values, self._setup.compression)))
        self._row_requests = waiting
        return actions

    # --- lost servers ----------------------------------------------------------------------------------------------

    def _propose(self) -> list[Action]:
        """Propose a configuration without the servers that are lost, if this server is the first of the others."""
        without = self._suspected.intersection(self.configuration.servers)
        living = [rank for rank in self.configuration.servers if rank not in without]
        if not without or not living or living[0] != self.rank:
            return []
        try:
            replicate = self._setup.replicate
            return [
                Propose(change_servers(self.configuration, self._setup.all_parts, lost=without, replicate=replicate))
            ]
        except PartsLost as error:
            if without <= self._lost:
                ranks = " and ".join(str(rank) for rank in sorted(without))
                reason = f"{len(error.parts)} parts of the parameters were only on rank {ranks}, which is gone"
                return self._fail(f"{reason}; {LOST_PARTS_ADVICE}")
        # Who only does not answer cannot be spared: it is waited for.
        self._suspected &= self._lost
        return self._propose()

    def _fail(self, reason: str) -> list[Action]:
        self.failure = reason
        message = ServersFailed(self.configuration.epoch, reason)
        return [OutgoingMessage(rank, message) for rank in self.members if rank != self.rank]
