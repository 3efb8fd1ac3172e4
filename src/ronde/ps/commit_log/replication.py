"""The commit log of one server, and how all servers come to the same one. Without I/O.

The sequencer gives each entry its position and sends it to its backup, the second server of the configuration. When the
backup has it, it is committed: it can no longer be lost with one server. Then the others get it. The sequencer is lost:
the next server takes over. It first collects what the others have of the log, so an entry that anybody has applied is
in the log of the new sequencer. A sequencer that was stopped and wakes up cannot commit anything, because its backup is
in another epoch and does not answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ronde.ps.commit_log.log_state import Entry, LogRecord, LogState, RemoveWorker, Reply, ReplyCommitted, ReplyLease
from ronde.ps.partition import NO_BACKUP, Configuration
from ronde.ps.protocol import (
    NO_LOG,
    Append,
    Appended,
    Committed,
    LeaseGranted,
    LogTail,
    NewConfiguration,
    OutgoingMessage,
    Rejected,
)


class LogReplica:
    """The log of one server. `ready` has what is to be applied to its LogState, in order; the owner takes it."""

    def __init__(self, rank: int, configuration: Configuration, members: Iterable[int], state: LogState) -> None:
        self._rank = rank
        self._configuration = configuration
        self.members = tuple(members)
        """The ranks of all workers and servers that are there."""
        self.state = state
        self.received = 0
        """The last position that this server has."""
        self.ready: deque[LogRecord] = deque()
        self._records: deque[LogRecord] = deque()
        """Those that others may lack, up to `received`."""
        self._committed = 0
        """The last position that the backup of the sequencer has as well. Used by the sequencer only."""
        self._acknowledged = dict.fromkeys(configuration.servers, 0)
        """Of the sequencer: by server, the position up to which it has the log."""
        self._collecting: set[int] = set()
        """Of a sequencer that takes over: the servers whose part of the log is still to come."""
        self._newcomers: set[int] = set()
        """Of the sequencer: servers that have been added, and have no state yet."""
        self._waiting: deque[Entry] = deque()
        """What was submitted meanwhile."""
        self._submitted: dict[int, int] = {}
        """By worker, the last request that is in the log and may not be applied yet."""
        self._lost_workers: dict[int, None] = {}

    @property
    def is_sequencer(self) -> bool:
        return self._configuration.sequencer == self._rank

    @property
    def is_collecting(self) -> bool:
        """Whether this server is about to be the sequencer, and does not know all of the log yet."""
        return bool(self._collecting)

    @property
    def is_everywhere(self) -> bool:
        """Of the sequencer: whether all servers have all of the log."""
        return not self._collecting and self._stable == self.received

    # --- the sequencer ---------------------------------------------------------------------------------------------

    def submit(self, entry: Entry, now_s: float) -> list[OutgoingMessage]:
        """A worker asks for an entry; what is known already is not added again."""
        if not self.is_sequencer:
            return []
        if self._collecting:
            self._waiting.append(entry)
            return []
        if self.state.is_known(entry):
            reply = self.state.reply_again(entry)
            return [] if reply is None else [self.make_reply(reply)]
        if entry.request and entry.request <= self._submitted.get(entry.worker, 0):
            return []  # it is answered when it is committed
        self._submitted[entry.worker] = max(entry.request, self._submitted.get(entry.worker, 0))
        self.received += 1
        record = LogRecord(self.received, now_s, entry)
        self._records.append(record)
        backup = self._configuration.sequencer_backup
        sends = [] if backup == NO_BACKUP else [self._append(backup, (record,))]
        return [*sends, *self._commit()]

    def worker_lost(self, worker: int, now_s: float) -> list[OutgoingMessage]:
        """A worker is gone. All servers are told so; the sequencer adds it to the log."""
        self._lost_workers[worker] = None
        if not self.is_sequencer or self._collecting:
            return []
        del self._lost_workers[worker]
        return self.submit(RemoveWorker(worker, 0), now_s)

    def on_appended(self, server: int, position: int) -> list[OutgoingMessage]:
        """A server has the log up to this position."""
        if not self.is_sequencer or server not in self._acknowledged:
            return []
        self._acknowledged[server] = max(position, self._acknowledged[server])
        return self._commit()

    def make_reply(self, reply: Reply) -> OutgoingMessage:
        """The message to a worker that asked."""
        epoch, request = self._configuration.epoch, reply.request
        if isinstance(reply, ReplyCommitted):
            return OutgoingMessage(reply.worker, Committed(epoch, request, reply.version, reply.staleness))
        if isinstance(reply, ReplyLease):
            return OutgoingMessage(reply.worker, LeaseGranted(epoch, request, reply.lease))
        return OutgoingMessage(reply.worker, Rejected(epoch, request, reply.reason))

    def _commit(self) -> list[OutgoingMessage]:
        """Hand on what the backup has: to the other servers, and to the owner of this log."""
        backup = self._configuration.sequencer_backup
        until = self.received if backup == NO_BACKUP else min(self.received, self._acknowledged[backup])
        new = tuple(record for record in self._records if self._committed < record.position <= until)
        self._committed = max(until, self._committed)
        self.ready.extend(new)
        others = [rank for rank in self._configuration.servers if rank not in (self._rank, backup)]
        sends = [self._append(rank, new) for rank in others] if new else []
        self._drop_until(self._stable)
        return sends

    @property
    def _stable(self) -> int:
        others = [self._acknowledged[rank] for rank in self._configuration.servers if rank != self._rank]
        return min([self.received, *others])

    def _append(self, to: int, records: tuple[LogRecord, ...]) -> OutgoingMessage:
        return OutgoingMessage(to, Append(self._configuration.epoch, records, self._stable))

    def take_newcomers(self) -> list[int]:
        """Of the sequencer: the servers that have to get the state, all of what is committed, from its owner now."""
        if self._collecting:
            return []
        newcomers, self._newcomers = sorted(self._newcomers), set()
        return newcomers

    def follow_state(self, server: int, position: int) -> list[OutgoingMessage]:
        """A server was sent the state as of this position; return what it needs of the log behind that."""
        self._acknowledged[server] = position
        backup = self._configuration.sequencer_backup
        until = self.received if server == backup else self._committed
        missing = tuple(record for record in self._records if position < record.position <= until)
        return [self._append(server, missing)] if missing else []

    # --- all servers -----------------------------------------------------------------------------------------------

    def on_append(self, message: Append) -> list[OutgoingMessage]:
        """The sequencer has sent records."""
        self._add(message.records)
        self._drop_until(min(message.stable, self.received))
        appended = Appended(self._configuration.epoch, self.received)
        return [OutgoingMessage(self._configuration.sequencer, appended)]

    def begin_at(self, position: int) -> list[OutgoingMessage]:
        """Of a server that has been added: it has the state as of this position."""
        self.received = position
        return [OutgoingMessage(self._configuration.sequencer, Appended(self._configuration.epoch, position))]

    def _add(self, records: Iterable[LogRecord]) -> None:
        """Add what is new, without a gap; records come in order, perhaps more than once."""
        for record in records:
            if record.position == self.received + 1:
                self.received += 1
                self._records.append(record)
                self.ready.append(record)

    def _drop_until(self, position: int) -> None:
        while self._records and self._records[0].position <= position:
            self._records.popleft()

    # --- a new configuration ---------------------------------------------------------------------------------------

    def adopt(self, configuration: Configuration, now_s: float, *, has_state: bool = True) -> list[OutgoingMessage]:
        """The servers have changed. The new sequencer tells all members, and collects the log; so does one that stays
        the sequencer, since its backup may be another one. The others send it what they have."""
        was_sequencer = self.is_sequencer
        self._configuration = configuration
        self._collecting, self._newcomers = set(), set()
        if not self.is_sequencer:
            position = self.received if has_state else NO_LOG
            tail = LogTail(configuration.epoch, position, tuple(self._records))
            return [OutgoingMessage(configuration.sequencer, tail)]
        if not was_sequencer:
            self._committed = self.received  # its sequencer had sent it all of that
            self._submitted = {}
        self._acknowledged = dict.fromkeys(configuration.servers, 0)
        self._collecting = {rank for rank in configuration.servers if rank != self._rank}
        message = NewConfiguration(configuration.epoch, configuration)
        sends = [OutgoingMessage(rank, message) for rank in self.members if rank != self._rank]
        return [*sends, *self._end_collecting(now_s)]

    def on_log_tail(self, server: int, message: LogTail, now_s: float) -> list[OutgoingMessage]:
        """A server tells what it has of the log."""
        if server not in self._collecting:
            return []
        self._collecting.discard(server)
        if message.position == NO_LOG:
            self._newcomers.add(server)
        else:
            self._acknowledged[server] = message.position
        had = self.received
        self._add(message.records)  # committed by the sequencer before
        if self.received > had:
            self._committed = self.received
        return self._end_collecting(now_s)

    def _end_collecting(self, now_s: float) -> list[OutgoingMessage]:
        """When all have answered: send each server what it lacks, and go on with what was submitted meanwhile."""
        if self._collecting:
            return []
        backup = self._configuration.sequencer_backup
        sends: list[OutgoingMessage] = []
        for rank, position in self._acknowledged.items():
            until = self.received if rank == backup else self._committed
            missing = tuple(record for record in self._records if position < record.position <= until)
            if missing and rank != self._rank and rank not in self._newcomers:
                sends.append(self._append(rank, missing))
        for record in self._records:
            entry = record.entry
            self._submitted[entry.worker] = max(entry.request, self._submitted.get(entry.worker, 0))
        sends += self._commit()
        for worker in list(self._lost_workers):
            sends += self.worker_lost(worker, now_s)
        waiting, self._waiting = self._waiting, deque()
        for entry in waiting:
            sends += self.submit(entry, now_s)
        return sends
