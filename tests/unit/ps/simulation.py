"""Workers and servers without processes: their cores, and a network that delivers in any order that FIFO links allow.

A schedule (a random generator) decides which message is delivered next, and who is killed, stopped or woken when.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ronde.ps.commit_log.log_state import LogState
from ronde.ps.commit_log.staleness import Mode, StalenessSettings
from ronde.ps.partition import Array, Configuration, Part, PartsLost, TensorSlice, change_servers, make_configuration
from ronde.ps.payloads import pack_arrays
from ronde.ps.protocol import (
    FOR_WORKERS,
    NewConfiguration,
    OutgoingMessage,
    PartCopy,
    ServerState,
    SuspectServer,
    make_batches,
    split_batch,
)
from ronde.ps.server import PartReplica, Propose, SendState, ServerCore, ServerSetup
from ronde.ps.tables.embedding_table import EmbeddingTable, TablePart, UniformRows
from ronde.ps.tables.server import TableReplica, make_header
from ronde.ps.worker import WorkerCore


class CountingOptimizer:
    """Adds gradients to the values, so the values count what was applied."""

    num_states = 1

    def update(
        self, part: Part, values: Array, gradient: Array, states: Array, out: Array, step: int, lr: float | None
    ) -> None:
        states[0] += gradient  # must stay equal to the values, on all replicas
        np.add(values, gradient, out=out)


NUM_TABLE_PARTS = 2


def encode(message: OutgoingMessage) -> bytes:
    """The header with which a message would travel alone."""
    ((_, header, _),) = make_batches([message])
    return header


def split_rows(rows: Iterable[int]) -> dict[int, Array]:
    """By part of the table, the rows within it."""
    split = {first: [row // NUM_TABLE_PARTS for row in rows if row % NUM_TABLE_PARTS == first] for first in range(2)}
    return {first: np.array(own, np.uint32) for first, own in split.items() if own}


@dataclass(slots=True)
class Lost:
    """Stands behind the last message of a member that is gone."""

    rank: int


@dataclass(slots=True)
class ScriptedWorker:
    """Trains on leased samples until the epoch is over: the gradient of a sample is 1 at its index, and in its row of a
    table. Before each step it reads the whole table, which has to be equal to the parameters that it has read."""

    core: WorkerCore
    num_samples: int
    num_parts: int
    batch: int
    step: int = 0
    request: int = 0
    lease_number: int = 0
    is_done: bool = False
    used: list[int] = field(default_factory=list)
    """Samples whose push is acknowledged."""
    under_way: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    rows_request: int = 0
    """For the rows of its last read, or of the next one."""
    has_rows: bool = False
    extra: float = 0.0
    """Of the gradients of all samples, those of others as well."""

    is_late: bool = False
    """Whether it comes later than the others."""

    def start(self) -> list[OutgoingMessage]:
        return self.core.join() if self.is_late else self.core.begin_read()

    def advance(self) -> list[OutgoingMessage]:
        """Go on when what it waits for is there."""
        core, read = self.core, self.core.read
        if self.is_late and read is None:
            if core.rejections or core.is_finished:  # it came when training was over
                self.is_done = True
            return core.begin_read() if core.has_joined else []
        if self.under_way and core.committed_step == self.step:
            self.used += self.under_way
            self.under_way = []
        if self.is_done or read is None or read.missing or self.under_way:
            return []
        if read.version >= 0 and (not self.versions or self.versions[-1] != read.version):
            self.versions.append(read.version)
        if not self.has_rows:
            return self.read_rows()
        if not self.request:
            self.request, sends = core.take_lease(0, self.num_samples, self.batch)
            return sends
        if self.request not in core.leases:
            return []
        lease = core.leases.pop(self.request)
        self.request = 0
        if not lease.ranges:
            self.is_done = True
            return core.leave()
        self.under_way = [index for each in lease.ranges for index in range(each.start, each.stop)]
        gradient = np.zeros(self.num_samples)
        gradient[self.under_way] = 1.0
        gradient += self.extra
        self.step += 1
        self.has_rows = False
        sends = [each for part in range(self.num_parts) for each in core.stage(self.step, part, gradient)]
        for first, own in split_rows(np.flatnonzero(gradient)).items():
            values = gradient[first::NUM_TABLE_PARTS][own].reshape(-1, 1)
            sends += core.stage(self.step, self.num_parts + first, pack_arrays([own, values]))
        if self.step % 2:
            sends += self.ask_for_rows(core.next_read)
        return [*sends, *core.commit(self.step, read=True, leases=(lease.number,))]

    def ask_for_rows(self, read: int) -> list[OutgoingMessage]:
        rows = {self.num_parts + first: own for first, own in split_rows(range(self.num_samples)).items()}
        self.rows_request, sends = self.core.get_rows(read, rows)
        return sends

    def read_rows(self) -> list[OutgoingMessage]:
        """Ask for the table, or look at what has come."""
        read = self.core.read
        assert read is not None
        if not self.rows_request:
            return self.ask_for_rows(read.number)
        pending = self.core.row_requests[self.rows_request]
        if pending.missing:
            return []
        assert pending.read == read.number and pending.versions == {read.version}
        for part, values in pending.values.items():
            first = part - self.num_parts
            assert (values[:, 0] == read.values[0][first::NUM_TABLE_PARTS]).all(), "rows of another version"
        del self.core.row_requests[self.rows_request]
        self.rows_request, self.has_rows = 0, True
        return self.advance()


class Simulation:
    """All members of a parameter server, and the messages between them."""

    def __init__(
        self,
        schedule: random.Random,
        *,
        workers: Sequence[int],
        servers: Sequence[int],
        mode: Mode = Mode.ASYNC,
        staleness: int = 0,
        num_samples: int = 12,
        num_parts: int = 3,
        batch: int = 2,
        clip_norm: float = 0.0,
        replicate: bool = True,
        delay_compensation: float = 0.0,
    ) -> None:
        self.schedule = schedule
        self.mode = mode
        self.num_samples = num_samples
        self.parts = tuple(Part((TensorSlice(index, 0, num_samples),), "float64", 0) for index in range(num_parts))
        self.setup = ServerSetup(
            self.parts,
            tuple(workers),
            StalenessSettings(mode, staleness),
            CountingOptimizer(),
            clip_norm,
            tables=(EmbeddingTable(num_rows=num_samples, dim=1, dtype="float64", initializer=UniformRows(0.0)),),
            table_names=("samples",),
            table_parts=tuple(
                TablePart(0, first, NUM_TABLE_PARTS, len(range(first, num_samples, NUM_TABLE_PARTS)), 1, "float64", 0)
                for first in range(NUM_TABLE_PARTS)
            ),
            delay_compensation=delay_compensation,
        )
        configuration = make_configuration(self.setup.all_parts, servers, replicate=replicate)
        self.ranks = sorted({*workers, *servers})
        self.servers = {rank: ServerCore(rank, self.setup, configuration) for rank in servers}
        self.workers = {
            rank: ScriptedWorker(
                WorkerCore(rank, num_parts, configuration, NUM_TABLE_PARTS),
                num_samples,
                num_parts,
                batch,
                extra=0.25 if delay_compensation else 0.0,
            )
            for rank in workers
        }
        self.links: dict[tuple[int, int], deque[tuple[bytes, Array | LogState | None] | Lost]] = {}
        self.dead: set[int] = set()
        self.stopped: set[int] = set()
        self.decided: dict[int, Configuration] = {}
        self.now_s = 0.0
        for rank in servers:
            for index, part in enumerate(self.parts):
                if rank in configuration.replicas_of(index):
                    zeros = np.zeros(2 * part.size)
                    self.send(workers[0], [OutgoingMessage(rank, PartCopy(1, index, 0, {}), zeros)])
            for index in range(num_parts, num_parts + NUM_TABLE_PARTS):
                if rank in configuration.replicas_of(index):
                    nothing = [make_header(0, 0), np.zeros(0, np.int64), np.zeros((0, 1)), np.zeros((0, 1))]
                    self.send(workers[0], [OutgoingMessage(rank, PartCopy(1, index, 0, {}), pack_arrays(nothing))])
        for rank, worker in self.workers.items():
            self.send(rank, worker.start())

    # --- the network -----------------------------------------------------------------------------------------------

    def send(self, source: int, actions: Iterable[object]) -> None:
        for action in actions:
            if isinstance(action, Propose):
                configuration = action.configuration
                decided = self.decided.setdefault(configuration.epoch, configuration)
                self.send(source, self.servers[source].adopt(decided, self.now_s))
                if source in self.workers:
                    message = NewConfiguration(decided.epoch, decided)
                    self.send(source, self.workers[source].core.handle(source, message, None))
            elif isinstance(action, SendState):
                epoch = self.servers[source].configuration.epoch
                link = self.links.setdefault((source, action.to), deque())
                link.append((encode(OutgoingMessage(action.to, ServerState(epoch))), copy.deepcopy(action.state)))
            else:
                assert isinstance(action, OutgoingMessage)
                if action.to not in self.dead:
                    link = self.links.setdefault((source, action.to), deque())
                    link.append((encode(action), action.payload))

    def deliver_one(self) -> bool:
        """Deliver the first message of some link; whether there was one."""
        ready = [key for key, link in self.links.items() if link and key[1] not in self.stopped | self.dead]
        if not ready:
            return False
        source, to = self.schedule.choice(sorted(ready))
        item = self.links[source, to].popleft()
        self.now_s += self.schedule.random()
        if isinstance(item, Lost):
            if to in self.servers:
                self.send(to, self.servers[to].member_lost(item.rank, self.now_s))
            return True
        ((message, _),), payload = split_batch(item[0], None), item[1]
        if isinstance(message, ServerState):
            assert isinstance(payload, LogState)
            if self.servers[to].wants_state(message):
                self.send(to, self.servers[to].load_state(payload, self.now_s))
            return True
        assert not isinstance(payload, LogState)
        payload = None if payload is None else payload.copy()
        is_for_worker = isinstance(message, FOR_WORKERS)
        if to in self.workers and (is_for_worker or isinstance(message, NewConfiguration)):
            self.send(to, self.workers[to].core.handle(source, message, payload))
            self.check_read(self.workers[to].core)
            self.send(to, self.workers[to].advance())
        if to in self.servers and not is_for_worker:
            self.send(to, self.servers[to].handle(source, message, payload, self.now_s))
            self.check_replicas(self.servers[to])
        return True

    def kill(self, rank: int) -> None:
        """The process of a rank is gone. Some of its last messages may be lost with it."""
        self.dead.add(rank)
        for other in self.ranks:
            if other in self.dead:
                self.links.pop((rank, other), None)
                continue
            self.links.pop((other, rank), None)
            link = self.links.setdefault((rank, other), deque())
            for _ in range(self.schedule.randint(0, len(link))):
                link.pop()
            link.append(Lost(rank))

    def begin_round(self, *, servers: Iterable[int] = (), workers: Iterable[int] = ()) -> None:
        """All members that live meet anew, with further servers and workers. What was on its way is lost."""
        self.links.clear()
        living = [rank for rank in self.ranks if rank not in self.dead]
        known = [core.configuration for rank, core in self.servers.items() if rank in living]
        known += [worker.core.configuration for rank, worker in self.workers.items() if rank in living]
        newest = max(known, key=lambda each: each.epoch)
        came = [*servers, *(rank for rank, core in self.servers.items() if core.is_evicted and rank in living)]
        try:
            configuration = change_servers(
                newest, self.setup.all_parts, lost=set(newest.servers) - {*living}, added=came
            )
        except PartsLost:
            return
        for rank in came:
            self.servers[rank] = ServerCore(rank, self.setup, configuration, is_added=True)
        for rank in workers:
            core = WorkerCore(rank, len(self.parts), newest, NUM_TABLE_PARTS)
            self.workers[rank] = ScriptedWorker(core, self.num_samples, len(self.parts), 2, is_late=True)
        self.ranks = sorted({*self.ranks, *servers, *workers})
        members = [rank for rank in self.ranks if rank not in self.dead]
        for rank in members:
            if rank in self.servers:
                self.send(rank, self.servers[rank].begin_round(configuration, members, self.now_s))
            if rank in self.workers:
                message = NewConfiguration(configuration.epoch, configuration)
                self.send(rank, self.workers[rank].core.handle(rank, message, None))
        for rank in workers:
            self.send(rank, self.workers[rank].start())

    def drop_losses(self) -> None:
        """Of a job whose members meet anew when one is lost: nobody hears of a loss before that."""
        for link in self.links.values():
            while link and isinstance(link[-1], Lost):
                link.pop()

    def suspect(self, rank: int) -> None:
        """A worker has waited for a server that is stopped for too long."""
        for worker in self.workers.values():
            core = worker.core
            if core.rank not in self.dead | self.stopped and rank in core.configuration.servers:
                awake = [each for each in core.configuration.servers if each != rank]
                self.send(core.rank, [OutgoingMessage(awake[0], SuspectServer(core.configuration.epoch, rank))])

    def run_until_ready(self) -> None:
        """Deliver until all servers have the first values, as the caller of a parameter server waits for."""
        while not all(server.is_ready for server in self.servers.values()):
            assert self.deliver_one()

    def run(self, max_deliveries: int = 1_000_000) -> None:
        """Deliver until nothing is under way."""
        for _ in range(max_deliveries):
            if not self.deliver_one():
                return
        raise AssertionError("it does not come to an end")

    # --- what has to hold at all times -----------------------------------------------------------------------------

    def check_read(self, core: WorkerCore) -> None:
        """All parts that a worker has got are of one version, and each sample is in it once at most."""
        if core.read is not None and core.read.values:
            first, *others = core.read.values.values()
            assert all((first == other).all() for other in others), "versions are mixed"
            if self.mode is not Mode.SYNC and not self.setup.delay_compensation:
                assert first.max(initial=0) <= 1, "a push was applied twice"

    def check_replicas(self, server: ServerCore) -> None:
        for replica in server.replicas.values():
            if isinstance(replica, PartReplica) and replica.values is not None:
                size = replica.values.size
                copy = replica.make_state()
                assert (copy[:size] == copy[size:]).all()

    @property
    def live_workers(self) -> list[ScriptedWorker]:
        return [worker for rank, worker in self.workers.items() if rank not in self.dead]

    def values(self) -> list[Array]:
        """The values of all parts on all servers that are there, and were not left behind."""
        found: list[Array] = []
        for rank, server in self.servers.items():
            if rank not in self.dead and not server.is_evicted:
                parts = [each for each in server.replicas.values() if isinstance(each, PartReplica)]
                found += [each.values for each in parts if each.values is not None]
        return found

    def check_tables(self) -> None:
        """All replicas of the table are equal to the parameters, which get the same gradients."""
        values = self.values()[0]
        for rank, server in self.servers.items():
            if rank in self.dead or server.is_evicted:
                continue
            for index, replica in server.replicas.items():
                if isinstance(replica, TableReplica) and replica.is_loaded:
                    own = values[index - len(self.parts) :: NUM_TABLE_PARTS]
                    rows, _ = replica.read(replica.version, np.arange(len(own)))
                    assert (rows[:, 0] == own).all()
