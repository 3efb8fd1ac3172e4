"""The commit log: everything that changes parameters, clocks or leases, in one order, and what follows from it.

The sequencer numbers entries, and every server applies them in that order to its own LogState. The same entries give
the same effects on all servers, so nothing but the order has to be agreed on: which pushes are an update, when a read
may be answered, who gets which samples. A worker's death is an entry as well. Without I/O; time comes with the records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import msgspec

from ronde.ps.commit_log.leases import Lease, LeaseTable
from ronde.ps.commit_log.staleness import Clocks, Mode, StalenessSettings


class LogEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What one worker asks for. Its requests are numbered from 1, in the order in which it submits them."""

    worker: int
    request: int


class CommitPush(LogEntry, frozen=True):
    """All parts of the worker's gradients for a step are staged on their servers; from now on they count."""

    step: int
    """From 1, without gaps."""
    read: int = 0
    """If not 0, the worker wants to read the parameters for its next step, under this number."""
    leases: tuple[int, ...] = ()
    """The leases whose samples were used."""
    norm: float = 0.0
    """The global norm of the gradients, if they are clipped."""
    lrs: tuple[float, ...] = ()
    """By group of tensors, the learning rates of the worker; empty if the optimizer has its own."""


class BeginRead(LogEntry, frozen=True):
    """The worker wants to read the parameters. It replaces a read of the worker that waits."""

    read: int
    with_states: bool = False
    """Whether it wants the states of the optimizer, too."""
    save_to: str = ""
    """If not empty, the servers write what it wants to this folder, and tell it what they have written."""


class TakeLease(LogEntry, frozen=True):
    """The worker wants samples to train on."""

    epoch: int
    num_samples: int
    """Of the whole epoch."""
    count: int


class RemoveWorker(LogEntry, frozen=True):
    """The worker has left, or, with request 0, is lost. Its committed pushes count; what else it has staged is
    dropped."""


class AddWorker(LogEntry, frozen=True):
    """A process that has come later trains from now on. No other process ever has its number."""


class RecordNorm(LogEntry, frozen=True):
    """The global norm of the mean gradient of a clock, which all servers together have measured. Of no worker."""

    clock: int
    norm: float


Entry: TypeAlias = CommitPush | BeginRead | TakeLease | AddWorker | RemoveWorker | RecordNorm
NO_WORKER = -1


class LogRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An entry and its position in the log, from 1."""

    position: int
    time_s: float
    """When the sequencer took it, by its own clock."""
    entry: Entry


class Update(NamedTuple):
    """The optimizer takes one step, with the mean of these gradients, summed in this order."""

    version: int
    """Of the parameters behind it: the number of updates."""
    contributions: tuple[tuple[int, int], ...]
    """Worker and step of each."""
    norm: float
    """The global norm, if gradients are clipped."""
    lrs: tuple[float, ...] = ()
    """By group of tensors, the learning rates; empty if the optimizer has its own."""
    version_read: int = -1
    """With which the gradients were computed, if they are those of one worker."""


class MeasureNorm(NamedTuple):
    """The servers measure the norm of the mean of these gradients, of which an update is made when it is known."""

    clock: int
    contributions: tuple[tuple[int, int], ...]
    lrs: tuple[float, ...]


class DropStaged(NamedTuple):
    """The worker is gone; what it has staged for later steps than this is dropped."""

    worker: int
    step: int


class WorkerAdded(NamedTuple):
    """The worker is there from now on. It may be gone already."""

    worker: int


class SendParts(NamedTuple):
    """The parameters as they are now are sent to the worker."""

    worker: int
    read: int
    version: int
    with_states: bool
    save_to: str = ""
    """The folder to which they are written instead."""


class ReplyCommitted(NamedTuple):
    """A push of the worker is committed, or its end is."""

    worker: int
    request: int
    version: int
    staleness: int
    """How many updates there were between its read and its commit."""


class ReplyLease(NamedTuple):
    """The worker has these samples."""

    worker: int
    request: int
    lease: Lease


class ReplyRejected(NamedTuple):
    """What the worker asked for cannot be done, for this reason."""

    worker: int
    request: int
    reason: str


Reply: TypeAlias = ReplyCommitted | ReplyLease | ReplyRejected
Effect: TypeAlias = Update | MeasureNorm | DropStaged | WorkerAdded | SendParts | Reply


STATE_CHANGES = (Update, MeasureNorm, DropStaged)
"""The effects on parts. They come before what is read at the same position."""


class LogState:
    """What the log says so far. apply() is the only thing that changes it."""

    def __init__(
        self,
        settings: StalenessSettings,
        workers: Iterable[int],
        *,
        clips: bool = False,
        version: int = 0,
        workers_may_join: bool = False,
    ) -> None:
        """`clips` says that gradients are clipped, so that the norm of a mean has to be known before its update.
        `version` is that of the first values. If workers may join, training is not over because all are lost."""
        self._clips = clips
        self._workers_may_join = workers_may_join
        self._has_ended = False
        """Whether a worker has left by itself."""
        self.measuring: dict[int, MeasureNorm] = {}
        """SYNC: by clock, the means whose norm is being measured. Reads wait for them."""
        self.clocks = Clocks(settings, workers)
        self.leases = LeaseTable()
        self.position = 0
        self.version = version
        self.last_requests = dict.fromkeys(self.clocks.clocks, 0)
        """By worker, also of those that are gone."""
        self.steps = dict.fromkeys(self.clocks.clocks, 0)
        """By worker, also of those that are gone, the last step that is committed."""
        self.staleness = dict.fromkeys(self.clocks.clocks, 0)
        """By worker, of its last push."""
        self.last_replies: dict[tuple[int, type[LogEntry]], Reply] = {}
        """By worker and kind of entry, so that one can be sent again."""
        self._versions_read = dict.fromkeys(self.clocks.clocks, version)
        self.last_reads = dict.fromkeys(self.clocks.clocks, 0)
        """By worker, the number of its last read that was answered."""
        self._contributions: dict[int, dict[int, CommitPush]] = {}
        """SYNC: by clock and worker, pushes that are not in an update yet."""
        self._ended_epoch = -1
        """The last epoch of samples that is over."""
        self._reads: dict[int, tuple[int, bool, str]] = {}
        """By worker, the read that waits, and whether it is one of states as well, in the order in which they came."""
        self._lease_requests: dict[int, TakeLease] = {}
        """By worker, those that wait until samples come back or the epoch is over."""

    @property
    def is_finished(self) -> bool:
        """Whether training is over: all workers have left or are lost. If others may join, one has to have left: it has
        come to the end of the script."""
        return not self.clocks.clocks and (self._has_ended or not self._workers_may_join)

    @property
    def oldest_version_read(self) -> int:
        """No worker that is there trains with an older version than this one."""
        return min((self._versions_read[worker] for worker in self.clocks.clocks), default=self.version)

    def version_read(self, worker: int) -> int:
        """The version of the worker's last read."""
        return self._versions_read[worker]

    def is_known(self, entry: Entry) -> bool:
        """Whether the entry, or a later one of the worker, is in the log already."""
        if isinstance(entry, RecordNorm):
            return entry.clock not in self.measuring
        if entry.worker not in self.steps:  # an entry of a worker that is added by one that is not applied yet
            return False
        if isinstance(entry, RemoveWorker):
            return entry.worker not in self.clocks.clocks
        return entry.worker not in self.clocks.clocks or entry.request <= self.last_requests[entry.worker]

    def apply(self, record: LogRecord) -> list[Effect]:
        """Return what follows from the next record, in this order: updates, reads of what they made, replies."""
        assert record.position == self.position + 1, (record.position, self.position)
        self.position = record.position
        entry = record.entry
        if self.is_known(entry):
            return []
        effects: list[Effect] = []
        if isinstance(entry, RecordNorm):
            self.version += 1
            measured = self.measuring.pop(entry.clock)
            effects.append(Update(self.version, measured.contributions, entry.norm, measured.lrs))
            return self._answer_reads(effects, record.time_s)
        if isinstance(entry, AddWorker):
            if self.is_finished:
                return [ReplyRejected(entry.worker, entry.request, "all workers have left: training is over")]
            effects += self._add(entry)
        elif entry.worker not in self.steps:
            return []
        self.last_requests[entry.worker] = max(entry.request, self.last_requests[entry.worker])
        if isinstance(entry, CommitPush):
            effects += self._push(entry, record.time_s)
        elif isinstance(entry, BeginRead):
            self._begin_read(entry.worker, entry.read, record.time_s, entry.with_states, entry.save_to)
        elif isinstance(entry, TakeLease):
            self._lease_requests[entry.worker] = entry
        elif isinstance(entry, RemoveWorker):
            effects += self._remove(entry)
        effects += self._end_epoch()
        leases = self._answer_leases()
        kind = type(entry)
        for effect in effects:
            if isinstance(effect, ReplyCommitted | ReplyRejected):
                self.last_replies[effect.worker, kind] = effect
        return [*self._answer_reads(effects, record.time_s), *leases]

    def reply_again(self, entry: Entry) -> Reply | None:
        """The reply to an entry that is known, if it has one and the worker can still want it."""
        reply = self.last_replies.get((entry.worker, type(entry)))
        return reply if reply is not None and reply.request == entry.request else None

    def _push(self, entry: CommitPush, now_s: float) -> list[Effect]:
        worker = entry.worker
        if entry.step != self.steps[worker] + 1:
            reason = f"step {entry.step} was pushed behind step {self.steps[worker]}"
            return [ReplyRejected(worker, entry.request, reason)]
        self.steps[worker] = entry.step
        staleness = self.staleness[worker] = self.version - self._versions_read[worker]
        self.clocks.push(worker, now_s)
        self.leases.acknowledge(worker, entry.leases)
        effects: list[Effect] = []
        if self.clocks.mode is Mode.SYNC:
            clock = self.clocks.clocks[worker]
            self._contributions.setdefault(clock, {})[worker] = entry
            effects += self._complete_steps()
        else:
            self.version += 1
            version_read = self._versions_read[worker]
            effects.append(Update(self.version, ((worker, entry.step),), entry.norm, entry.lrs, version_read))
        if entry.read:
            self._begin_read(worker, entry.read, now_s)
        effects.append(ReplyCommitted(worker, entry.request, self.version, staleness))
        return effects

    def _complete_steps(self) -> list[Effect]:
        """SYNC: the updates of all clocks that every worker has come to."""
        effects: list[Effect] = []
        for clock in sorted(self._contributions):
            if self.clocks.clocks and self.clocks.slowest < clock:
                break
            pushes = self._contributions.pop(clock)
            contributions = tuple((worker, pushes[worker].step) for worker in sorted(pushes))
            lrs = pushes[min(pushes)].lrs
            if self._clips:
                measure = self.measuring[clock] = MeasureNorm(clock, contributions, lrs)
                effects.append(measure)
            else:
                self.version += 1
                effects.append(Update(self.version, contributions, 0.0, lrs))
        return effects

    def _end_epoch(self) -> list[Effect]:
        """When all samples of an epoch are used, all workers have come equally far: nobody waits for one that got fewer
        batches than others."""
        if not self.leases.is_over or self.leases.epoch == self._ended_epoch:
            return []
        self._ended_epoch = self.leases.epoch
        self.clocks.align()
        return self._complete_steps()

    def _begin_read(self, worker: int, read: int, now_s: float, with_states: bool = False, save_to: str = "") -> None:
        self._reads.pop(worker, None)
        self._reads[worker] = (read, with_states, save_to)
        self.clocks.begin_wait(worker, now_s)

    def _answer_reads(self, effects: list[Effect], now_s: float) -> list[Effect]:
        """The effects, with reads that may be answered now behind the updates."""
        answered: list[Effect] = []
        ready = [] if self.measuring else [worker for worker in self._reads if self.clocks.may_begin(worker)]
        for worker in ready:
            read, with_states, save_to = self._reads.pop(worker)
            answered.append(SendParts(worker, read, self.version, with_states, save_to))
            if not with_states:  # which is for a checkpoint, and not what the worker trains with
                self._versions_read[worker] = self.version
                self.last_reads[worker] = read
            self.clocks.end_wait(worker, now_s)
        num_updates = sum(isinstance(effect, STATE_CHANGES) for effect in effects)
        ordered = sorted(effects, key=lambda effect: not isinstance(effect, STATE_CHANGES))
        return [*ordered[:num_updates], *answered, *ordered[num_updates:]]

    def _answer_leases(self) -> list[Effect]:
        effects: list[Effect] = []
        for worker, entry in list(self._lease_requests.items()):
            if entry.epoch > self.leases.epoch and not self.leases.is_over and self._can_end_without(worker):
                continue
            reply: Reply
            try:
                self.leases.open_epoch(entry.epoch, entry.num_samples)
            except ValueError as error:
                reply = ReplyRejected(worker, entry.request, str(error))
            else:
                lease = self.leases.grant(worker, entry.epoch, entry.count)
                if lease is None:
                    continue
                reply = ReplyLease(worker, entry.request, lease)
            del self._lease_requests[worker]
            self.last_replies[worker, TakeLease] = reply
            effects.append(reply)
        return effects

    def _can_end_without(self, worker: int) -> bool:
        """Whether others will use the rest of the samples, while this worker waits for the next epoch. It has used its
        own. Samples that nobody has are left to others only if these do not wait for its next step."""
        if self.leases.leases_of(worker):
            return False
        later = {each for each, entry in self._lease_requests.items() if entry.epoch > self.leases.epoch}
        others = self.clocks.clocks.keys() - later
        return bool(others) and (self.clocks.mode is Mode.ASYNC or not self.leases.has_free)

    def _add(self, entry: AddWorker) -> list[Effect]:
        """The worker has come as far as the slowest of the others, so that it neither waits nor is waited for more than
        they are."""
        worker = entry.worker
        self.clocks.add(worker)
        self.last_requests[worker] = self.steps[worker] = self.staleness[worker] = 0
        self._versions_read[worker] = self.version
        self.last_reads[worker] = 0
        return [WorkerAdded(worker), ReplyCommitted(worker, entry.request, self.version, 0)]

    def _remove(self, entry: RemoveWorker) -> list[Effect]:
        worker = entry.worker
        self._has_ended = self._has_ended or bool(entry.request)
        effects: list[Effect] = [DropStaged(worker, self.steps[worker])]
        self.clocks.remove(worker)
        self.leases.release(worker)
        self._reads.pop(worker, None)
        self._lease_requests.pop(worker, None)
        effects += self._complete_steps()
        effects.append(ReplyCommitted(worker, entry.request, self.version, 0))
        return effects
