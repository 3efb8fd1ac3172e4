"""A worker: its pushes, reads and leases while they are under way. Without I/O.

A push is staged part by part, and committed when all parts are staged on all their replicas. If there is one server, it
gets the parts ahead of the entry that commits them, so nobody has to wait in between. Whatever is not answered
is sent again when the configuration changes; servers recognize what they have. A read that is under way then begins
anew, because the parts that are missing can no longer be had in its version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ronde.errors import ProtocolError
from ronde.ps.commit_log.leases import Lease
from ronde.ps.commit_log.log_state import AddWorker, BeginRead, CommitPush, Entry, RemoveWorker, TakeLease
from ronde.ps.partition import Array, Configuration
from ronde.ps.protocol import (
    Committed,
    Finished,
    GetRows,
    LeaseGranted,
    NewConfiguration,
    OutgoingMessage,
    PartStaged,
    PartValues,
    Ping,
    Pong,
    Rejected,
    RowValues,
    ServerMessage,
    ServersFailed,
    StagePart,
    Submit,
    SuspectServer,
)


@dataclass(slots=True)
class PendingPush:
    """The gradients of one step, until they are committed."""

    gradients: dict[int, Array] = field(default_factory=dict)
    """By part. They are kept, and must not be changed, until they are committed."""
    unstaged: set[int] = field(default_factory=set)
    """The parts that are not known to be on all their replicas. The only server does not tell."""
    entry: CommitPush | None = None
    """What is to be submitted when all parts are staged."""


@dataclass(slots=True)
class PendingRead:
    """A read until all parts have come."""

    number: int
    missing: set[int]
    with_states: bool = False
    """Whether the values of a part are followed by the states of the optimizer."""
    save_to: str = ""
    """The folder to which servers write the parts; then what has come of each is what they say about it."""
    version: int = -1
    values: dict[int, Array] = field(default_factory=dict)
    """By part, what has come and was not taken."""

    @property
    def untaken(self) -> set[int]:
        """The parts that have not come, and those that nobody has taken."""
        return self.missing | self.values.keys()

    def take(self) -> dict[int, Array]:
        """What has come and was not taken before."""
        values, self.values = self.values, {}
        return values


@dataclass(slots=True)
class PendingRows:
    """Rows of a table that were asked for, until those of all its parts have come."""

    read: int
    """The read that they belong to."""
    rows: dict[int, Array]
    """By part, the numbers of the rows within it."""
    missing: set[int]
    """The parts whose rows have not come."""
    values: dict[int, Array] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)
    """That the values have: one, unless the read is so old that servers have dropped its version."""


class WorkerCore:
    """One worker. Its owner calls stage(), commit() and so on, and gives it the messages; both return what to send."""

    def __init__(self, rank: int, num_parts: int, configuration: Configuration, num_table_parts: int = 0) -> None:
        """Each push and read has all of num_parts; of the parts of tables, which are numbered behind them, some."""
        self.rank = rank
        self.configuration = configuration
        self.failure = ""
        """Why the servers cannot go on."""
        self.is_finished = False
        """Whether all workers have left or are lost."""
        self.committed_step = 0
        """The last step whose push is committed."""
        self.staleness = 0
        """Of that push: how many updates there were between its read and its commit."""
        self.version = 0
        """The newest version that this worker has heard of."""
        self.leases: dict[int, Lease] = {}
        """By request, leases that were granted and not taken by the owner."""
        self.rejections: dict[int, str] = {}
        """By request, why it cannot be done."""
        self.has_joined = False
        """Of a worker that comes later: whether the log knows it."""
        self.has_left = False
        """Whether the log knows that this worker has left."""
        self.read: PendingRead | None = None
        """The newest read; it is complete when nothing is missing."""
        self._num_parts = num_parts
        self._num_table_parts = num_table_parts
        self.row_requests: dict[int, PendingRows] = {}
        """By request, those that the owner has not taken."""
        self._last_row_request = 0
        self._pushes: dict[int, PendingPush] = {}
        """By step, those that are not committed."""
        self._submitted: dict[int, Entry] = {}
        """By request, what is not answered."""
        self._held: deque[int] = deque()
        """Requests among them that are not sent: a push that is staged anew, and what was submitted behind it."""
        self._last_request = 0
        self._last_read = 0
        self._silent: set[int] = set()
        """Servers that were pinged and have not answered."""

    # --- what the owner wants --------------------------------------------------------------------------------------

    def stage(self, step: int, part: int, gradient: Array) -> list[OutgoingMessage]:
        """Send the gradients of a part. They must not be changed until the step is committed."""
        push = self._pushes.setdefault(step, PendingPush())
        push.gradients[part] = gradient
        push.unstaged.add(part)
        return [self._stage_message(step, part, gradient)]

    def commit(
        self,
        step: int,
        *,
        read: bool,
        leases: Sequence[int] = (),
        norm: float = 0.0,
        lrs: Sequence[float] = (),
    ) -> list[OutgoingMessage]:
        """All parts of the step were given to stage(): commit them when they are staged, and read what follows."""
        push = self._pushes[step]
        assert sum(part < self._num_parts for part in push.gradients) == self._num_parts, "a push has all parts"
        number = self._new_read() if read else 0
        push.entry = CommitPush(self.rank, 0, step, number, tuple(leases), norm, tuple(lrs))
        return self._submit_staged()

    def begin_read(self, *, with_states: bool = False, save_to: str = "") -> list[OutgoingMessage]:
        """Read the parameters without a push."""
        number = self._new_read(with_states, save_to)
        return self._submit(BeginRead(self.rank, 0, number, with_states, save_to))

    @property
    def next_read(self) -> int:
        """The number of the read that begins next."""
        return self._last_read + 1

    def get_rows(self, read: int, rows: Mapping[int, Array]) -> tuple[int, list[OutgoingMessage]]:
        """Ask for rows of a table, by part, as of a read: the last one, or the next. Return the number of the request,
        under which `row_requests` gets them."""
        self._last_row_request += 1
        self.row_requests[self._last_row_request] = PendingRows(read, dict(rows), set(rows))
        return self._last_row_request, self._row_messages(self._last_row_request)

    def take_lease(self, epoch: int, num_samples: int, count: int) -> tuple[int, list[OutgoingMessage]]:
        """Ask for samples. Return the number of the request, under which `leases` gets them."""
        sends = self._submit(TakeLease(self.rank, 0, epoch, num_samples, count))
        return self._last_request, sends

    def join(self) -> list[OutgoingMessage]:
        """This worker comes later than the others. Nothing else may be asked for until it has joined."""
        return self._submit(AddWorker(self.rank, 0))

    def leave(self) -> list[OutgoingMessage]:
        """This worker pushes and reads nothing any more."""
        return self._submit(RemoveWorker(self.rank, 0))

    def ping(self) -> list[OutgoingMessage]:
        """Called when an answer takes long: ask all servers whether they are there, and report those that have not
        answered since the last time."""
        epoch, servers = self.configuration.epoch, self.configuration.servers
        silent = self._silent.intersection(servers)
        awake = [rank for rank in servers if rank not in silent]
        sends = [OutgoingMessage(awake[0], SuspectServer(epoch, rank)) for rank in sorted(silent) if awake]
        self._silent = set(servers)
        return [*sends, *(OutgoingMessage(rank, Ping(epoch)) for rank in servers)]

    # --- messages --------------------------------------------------------------------------------------------------

    def handle(self, source: int, message: ServerMessage, payload: Array | None) -> list[OutgoingMessage]:
        """A server has sent a message."""
        self._silent.discard(source)
        if isinstance(message, NewConfiguration):
            return self._adopt(message.configuration)
        if isinstance(message, PartStaged):
            return self._on_staged(message)
        if isinstance(message, PartValues):
            self._on_values(message, payload)
        elif isinstance(message, RowValues):
            self._on_rows(message, payload)
        elif isinstance(message, Committed):
            self._on_committed(message)
        elif isinstance(message, LeaseGranted):
            if self._submitted.pop(message.request, None) is not None:
                self.leases[message.request] = message.lease
        elif isinstance(message, Rejected):
            if self._submitted.pop(message.request, None) is not None:
                self.rejections[message.request] = message.reason
        elif isinstance(message, ServersFailed):
            self.failure = self.failure or message.reason
        elif isinstance(message, Finished):
            self.is_finished = True
        else:
            assert isinstance(message, Pong), message
        return []

    def _on_staged(self, message: PartStaged) -> list[OutgoingMessage]:
        push = self._pushes.get(message.step)
        if push is None or message.epoch != self.configuration.epoch:
            return []  # from an epoch before; it was sent again
        push.unstaged.discard(message.part)
        return self._submit_staged()

    def _on_values(self, message: PartValues, values: Array | None) -> None:
        read = self.read
        if read is None or message.read != read.number or message.part not in read.missing or values is None:
            return
        if read.version >= 0 and message.version != read.version:
            raise ProtocolError(
                f"rank {self.rank} reads version {read.version} of the parameters, and got part {message.part} of "
                f"version {message.version}"
            )
        read.version = message.version
        read.missing.discard(message.part)
        read.values[message.part] = values
        self.version = max(self.version, message.version)
        if not read.missing:
            self._submitted = {
                request: entry
                for request, entry in self._submitted.items()
                if not (isinstance(entry, BeginRead) and entry.read <= read.number)
            }

    def _on_rows(self, message: RowValues, values: Array | None) -> None:
        pending = self.row_requests.get(message.request)
        if pending is None or message.read != pending.read or message.part not in pending.missing or values is None:
            return  # of a read that has begun anew, or a second time
        pending.missing.discard(message.part)
        pending.values[message.part] = values
        pending.versions.add(message.version)

    def _on_committed(self, message: Committed) -> None:
        entry = self._submitted.pop(message.request, None)
        self.version = max(self.version, message.version)
        if isinstance(entry, CommitPush):
            self.committed_step = max(self.committed_step, entry.step)
            self.staleness = message.staleness
            self._pushes.pop(entry.step, None)
        elif isinstance(entry, AddWorker):
            self.has_joined = True
        elif isinstance(entry, RemoveWorker):
            self.has_left = True

    # --- inside ----------------------------------------------------------------------------------------------------

    def _stage_message(self, step: int, part: int, gradient: Array) -> OutgoingMessage:
        message = StagePart(self.configuration.epoch, self.rank, step, part)
        return OutgoingMessage(self.configuration.primaries[part], message, gradient)

    def _row_messages(self, request: int) -> list[OutgoingMessage]:
        epoch, pending = self.configuration.epoch, self.row_requests[request]
        return [
            OutgoingMessage(
                self.configuration.primaries[part], GetRows(epoch, request, pending.read, part), pending.rows[part]
            )
            for part in sorted(pending.missing)
        ]

    def _new_read(self, with_states: bool = False, save_to: str = "") -> int:
        self._last_read += 1
        num_parts = self._num_parts + with_states * self._num_table_parts
        self.read = PendingRead(self._last_read, set(range(num_parts)), with_states, save_to)
        return self._last_read

    def _submit(self, entry: Entry) -> list[OutgoingMessage]:
        """Give an entry its number, and send it, unless others before it are held."""
        self._last_request += 1
        entry = msgspec.structs.replace(entry, request=self._last_request)
        self._submitted[self._last_request] = entry
        if self._held:
            self._held.append(self._last_request)
            return []
        return [self._submit_message(entry)]

    def _submit_message(self, entry: Entry) -> OutgoingMessage:
        return OutgoingMessage(self.configuration.sequencer, Submit(self.configuration.epoch, entry))

    def _may_submit(self, push: PendingPush) -> bool:
        """Whether all parts of a push are on their replicas when the sequencer gets the entry that commits it. The only
        server has no replica, and has them because messages come in their order."""
        return not push.unstaged or len(self.configuration.servers) == 1

    def _is_free(self, entry: Entry | None) -> bool:
        """Whether an entry that was submitted may be sent again."""
        push = self._pushes.get(entry.step) if isinstance(entry, CommitPush) else None
        return push is None or self._may_submit(push)

    def _submit_staged(self) -> list[OutgoingMessage]:
        """Send entries that were held until a push was staged, and submit the pushes that are staged, in the order of
        their steps."""
        sends: list[OutgoingMessage] = []
        while self._held and self._is_free(self._submitted.get(self._held[0])):
            held = self._submitted.get(self._held.popleft())
            sends += [self._submit_message(held)] if held is not None else []
        for step in sorted(self._pushes):
            push = self._pushes[step]
            if push.entry is None or not self._may_submit(push):
                break
            if not push.entry.request:
                sends += self._submit(push.entry)
                push.entry = msgspec.structs.replace(push.entry, request=self._last_request)
        return sends

    def _adopt(self, configuration: Configuration) -> list[OutgoingMessage]:
        """The servers have changed: send again what was not answered, to those who are responsible now."""
        if configuration.epoch <= self.configuration.epoch:
            return []
        self.configuration = configuration
        sends = [
            self._stage_message(step, part, push.gradients[part])
            for step, push in sorted(self._pushes.items())
            for part in sorted(push.unstaged)
        ]
        with_states = self.read is not None and self.read.with_states
        reads_again = self.read is not None and bool(self.read.missing)
        waiting_push = next((push for push in self._pushes.values() if push.entry and not push.entry.request), None)
        submitted, self._submitted = self._submitted, {}
        self._held.clear()
        for request, entry in sorted(submitted.items()):
            if isinstance(entry, BeginRead):
                continue
            if isinstance(entry, CommitPush):
                entry = msgspec.structs.replace(entry, read=0)
            self._submitted[request] = entry
            if self._held or not self._is_free(entry):
                self._held.append(request)  # the sequencer knows entries by the largest number: none may go ahead
            else:
                sends.append(self._submit_message(entry))
        if reads_again and not (waiting_push is not None and waiting_push.entry and waiting_push.entry.read):
            assert self.read is not None
            before = self.read.number
            sends += self.begin_read(with_states=with_states, save_to=self.read.save_to)
            for pending in self.row_requests.values():  # that were asked for ahead of the read
                if pending.read == before:
                    pending.read, pending.missing = self.read.number, set(pending.rows)
                    pending.values.clear()
                    pending.versions.clear()
        for request in self.row_requests:
            sends += self._row_messages(request)
        return [*sends, *self._submit_staged()]
