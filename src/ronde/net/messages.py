"""The messages of workers and the coordinator (over net/control_connection), and the reply to a rank that connects.

Decoding is strict: data that is truncated, too long, of another version or of the wrong shape raises ProtocolError and
nothing else.
"""

from __future__ import annotations

import enum
import functools
import operator
import zlib
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.msgpack import Decoder

from ronde.errors import ProtocolError
from ronde.observe.activity import ActivitySample
from ronde.observe.stragglers import ArrivalSample
from ronde.types import CPU, Member

VERSION = 11
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_INTERNED_BYTES = 4 * 1024 * 1024
"""Encoded announcements that a WorkerMessageDecoder remembers."""
LEAVE_GRACE_S = 1.0
"""The others learn of an orderly leave this much later: they may still be finishing what it has finished."""
MAX_SHARED_IDS = 16_384
"""Names of a group that its members announce in shared memory: ids from 0 up to this."""
MIN_COMPRESSED_BYTES = 16_384
_VERSION_BYTE = bytes([VERSION])
_ZLIB_BYTE = b"\x78"
"""The first byte of compressed data. Messages are arrays, which begin with another one."""


class OperationRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named operation as one rank requests it. Several shapes are a grouped operation, which runs as a unit."""

    group: int
    name: str
    kind: int
    dtype: int
    shapes: tuple[tuple[int, ...], ...]
    op: int = 0
    root: int = -1
    """Of a broadcast, reduce, gather or scatter, as a rank of the world."""
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] | None = None
    """all-to-all, and the root of a scatter: rows for each member; None splits them evenly."""
    device: str = CPU
    """The kind of the device whose memory is used."""


class WorkerMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message from a worker to the coordinator."""


class CoordinatorMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message from the coordinator to a worker."""


# --- from a worker ---------------------------------------------------------------------------------------------


class JoinRound(WorkerMessage, frozen=True):
    """A rank asks to be a member of the next round."""

    version: int
    size: int
    member: Member
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups that exist from the start, as sorted ranks; equal on all members."""
    must_be_equal: dict[str, str] = {}
    """What else must be equal on all members, by name: settings of the data plane, versions."""
    has_state: bool = True
    """Of an elastic job: whether others can get the state of training from it. False if it would get it from them."""
    progress: int = -1
    """How far a worker that was in the round before has come in training, as a number that grows; -1: it cannot say."""


class AnnounceOperations(WorkerMessage, frozen=True):
    """The rank is ready for these named operations: new ones in full, known ones by the id they got."""

    new: tuple[OperationRequest, ...] = ()
    known_ids: tuple[int, ...] = ()


class CanShareIds(WorkerMessage, frozen=True):
    """The members of this group are on one host: they can announce operations that repeat in their shared memory."""

    group: int


class ChangeGroups(WorkerMessage, frozen=True):
    """Add a group of these ranks (id 0), or remove group `id`. Every rank of the world sends it."""

    ranks: tuple[int, ...]
    id: int = 0


class RankHeartbeat(WorkerMessage, frozen=True):
    """The time of the rank's monotonic clock. Answered at once by RankHeartbeatReply, to measure the clock offset."""

    sent_ns: int


class MissingRanksQuery(WorkerMessage, frozen=True):
    """Which ranks does this named operation wait for? Sent shortly before it times out; answered by MissingRanks."""

    group: int
    name: str


class RefuseOperation(WorkerMessage, frozen=True):
    """This rank cannot say which of its operations of this name is meant: none may run any more in this round. Who has
    announced it, or does later, gets OperationRejected."""

    group: int
    name: str
    reason: str


class ProposeValue(WorkerMessage, frozen=True):
    """The first value that a member proposes for a key is the one of this round. Answered by ValueDecided."""

    key: str
    value: bytes


class WaitingTooLong(WorkerMessage, frozen=True):
    """An operation that the coordinator does not know has waited on this rank for the missing ones, longer than
    stall_s."""

    op: str
    group: int
    since_ns: int
    missing: tuple[int, ...]
    call: str = ""
    """Channel and sequence number, equal on all members; empty if they are not known."""
    present: tuple[int, ...] = ()
    """Ranks that wait in it, too, as far as they are known."""


class StackReply(WorkerMessage, frozen=True):
    """Answer to StackRequest; `line` is the innermost line of the user's code in the main thread."""

    query_id: int
    line: str
    stack: str


class TraceBatch(WorkerMessage, frozen=True):
    """Encoded trace events (JSON objects, UTF-8) for the timeline, on the coordinator's clock."""

    events: tuple[bytes, ...]
    dropped: int = 0


class TimelineRequest(WorkerMessage, frozen=True):
    """Write a timeline of all ranks to this file of the coordinator's host from now on; without a path, end the one
    that is being written. The other fields are those of observe.timeline.TraceStyle. Answered by TimelineReply."""

    path: str
    horovod: bool = False
    batch_markers: bool = False


class TraceFlushed(WorkerMessage, frozen=True):
    """The rank has sent its last events of the timeline that ends."""


class ArrivalSamples(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When a rank reached operations of one channel; times are on the coordinator's clock."""

    channel: str
    group: int
    samples: tuple[ArrivalSample, ...]


class ActivityReport(WorkerMessage, frozen=True):
    """What the rank does; sent about once per second if a launcher hosts the coordinator."""

    activity: ActivitySample
    arrivals: tuple[ArrivalSamples, ...] = ()


class AbortChannel(WorkerMessage, frozen=True):
    """An operation has failed on this rank, and its channel with it: the members on other hosts must not wait for it.
    Its fields are those of ChannelAborted, without the reporter."""

    channel: str
    status: int
    rank: int
    error: int = 0
    reason: str = ""


class TrainingFinished(WorkerMessage, frozen=True):
    """The rank of an elastic job is through the barrier at the end of training. What its script does from now on, such
    as saving the model, no other rank makes up for. It is answered by FinishConfirmed, for which the rank waits."""


class LeaveReason(enum.IntEnum):
    """How a rank's membership in a round ended. A worker sends one of the first five; the rest is found out."""

    SHUTDOWN = 0
    SCRIPT_ENDED = 1  # without shutdown(), as most scripts do
    FAILED = 2  # an exception, or a start that failed
    TIMED_OUT = 3  # an operation
    MISMATCHED = 4  # the members of an operation disagreed
    PROCESS_ENDED = 5  # and the launcher says how
    PROCESS_GONE = 6  # and nobody says why
    UNREACHABLE = 7  # the network to its host is cut
    MESSAGES_LOST = 8  # between it and the coordinator; also sent by a worker, over its liveness connection
    REJOINING = 9  # sent by a worker of an elastic job that will ask to be in the next round
    PREEMPTED = 10  # sent by a worker of an elastic job that was told to go (SIGTERM) and does not come back
    FINISHED = 11  # sent by a worker of an elastic job when all members have finished it
    SUSPENDED = 12  # it was silent for too long while others waited, and was left behind
    ABSENT = 13  # it was heard, but did not come back from a round that was over, and was left behind

    @property
    def is_orderly(self) -> bool:
        return self in (
            LeaveReason.SHUTDOWN,
            LeaveReason.SCRIPT_ENDED,
            LeaveReason.REJOINING,
            LeaveReason.PREEMPTED,
            LeaveReason.FINISHED,
        )


class LeaveRound(WorkerMessage, frozen=True):
    """The rank leaves the round. An orderly one is answered by LeaveConfirmed."""

    reason: LeaveReason
    detail: str = ""
    """What happened, as text for the user."""
    missing: tuple[int, ...] = ()
    """The ranks that the operation waited for when it timed out; also of a rank that is REJOINING because of that."""
    line: str = ""
    """The line of the user's code where the error was raised."""
    lost_peer: int | None = None
    """The rank that was lost, if the error is PeerLost."""


# --- from the coordinator --------------------------------------------------------------------------------------


class RoundStarted(CoordinatorMessage, frozen=True):
    """All ranks have joined. The groups of JoinRound have the ids 1, 2, …; group 0 is the world."""

    round: int
    """Its id, which no other round of the job has."""
    members: tuple[Member, ...]
    timeline: str = ""
    """The file that the settings of the coordinator name for the timeline of all ranks; empty for none."""


class RefusalKind(enum.IntEnum):
    FAILED = 0  # the round cannot start
    FINISHED = 1  # the elastic job is finished: the worker has nothing left to do
    LEFT_BEHIND = 2  # the worker was lost or suspended, and the others have gone on without it
    BEGUN = 3  # the first round of the elastic job has begun without the worker: it connects again, as a candidate
    STATE_LOST = 4  # all ranks with the state of training are lost, and the worker has not begun as one of the first


class JoinRefused(CoordinatorMessage, frozen=True):
    reason: str
    kind: RefusalKind = RefusalKind.FAILED


class RoundChangeWanted(CoordinatorMessage, frozen=True):
    """Newcomers wait: leave the round (REJOINING) after the step under way, all members after the same one, and join
    the next round."""

    reason: str
    """As text for the user."""


class AgreedOperation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named operation that every member has announced."""

    id: int
    """The rank announces the operation by this from now on."""
    name: str
    request: OperationRequest | None = None
    """In full for a rank that has called join() and did not announce it."""
    row_counts: tuple[int, ...] | None = None
    """allgather, gather: first dimension per member and array (member-major). all-to-all: rows that each member sends
    to this one. scatter: rows for each member."""
    shared_id: int = -1
    """From now on the members announce it in shared memory under this id, until RevokeSharedIds; -1: they do not."""


class RunOperations(CoordinatorMessage, frozen=True):
    """Execute these on the group's negotiated channel, fused into one operation."""

    group: int
    operations: tuple[AgreedOperation, ...]
    stragglers: tuple[tuple[int, int], ...] = ()
    """The members that announced last, as (rank, nanoseconds before the last one); empty if all were close together."""


class OperationRejected(CoordinatorMessage, frozen=True):
    """This named operation cannot run. All members that announced it get the same reason."""

    group: int
    name: str
    reason: str
    joined: tuple[int, ...] = ()
    """Ranks in join() that cannot take part in it, if that is the reason."""


class UnknownOperationId(CoordinatorMessage, frozen=True):
    """The coordinator does not know this id any more: announce the operation in full."""

    id: int


class RevokeSharedIds(CoordinatorMessage, frozen=True):
    """Announce these operations through the coordinator, also what was announced in shared memory and has not run."""

    group: int
    ids: tuple[int, ...]


class MissingRanks(CoordinatorMessage, frozen=True):
    """The ranks that have not announced this named operation; empty if it is not pending."""

    group: int
    name: str
    ranks: tuple[int, ...]


class ValueDecided(CoordinatorMessage, frozen=True):
    """Answer to ProposeValue, the same for all members: the value that was proposed first."""

    key: str
    value: bytes


class GroupsChanged(CoordinatorMessage, frozen=True):
    """Answer to ChangeGroups: the group now has this id, was removed, or, with a reason, the change is refused."""

    ranks: tuple[int, ...]
    id: int
    removed: bool = False
    reason: str = ""


class RankLost(CoordinatorMessage, frozen=True):
    """A rank has died or left. Every operation it is part of fails."""

    rank: int
    reason: str


class RanksLost(CoordinatorMessage, frozen=True):
    """The same of several ranks, after the first that was lost."""

    losses: tuple[tuple[int, str], ...]
    """(rank, reason)"""


class ChannelAborted(CoordinatorMessage, frozen=True):
    """A member has aborted a channel: everything that runs on it, or will, fails. Sent once for each channel."""

    channel: str
    """Its id, as in ChannelSpec."""
    status: int
    """How: a status of the native library."""
    rank: int
    """The rank that has caused it; -1 if none has."""
    error: int = 0
    """errno, or 0."""
    reason: str = ""
    """As text for the user; empty if the status says everything."""
    reporter: int = -1
    """The rank that has aborted it."""


class EndRound(CoordinatorMessage, frozen=True):
    reason: str


class StackRequest(CoordinatorMessage, frozen=True):
    query_id: int


class StallReport(CoordinatorMessage, frozen=True):
    """An operation has waited longer than stall_s. The coordinator logs the report, every rank records an event."""

    op: str
    group: int
    waited_s: float
    missing: tuple[int, ...]
    report: str


class SetTracing(CoordinatorMessage, frozen=True):
    """Record for a new timeline from now on; or send what was recorded, then TraceFlushed, and stop."""

    enabled: bool
    horovod: bool = False
    batch_markers: bool = False


class TimelineReply(CoordinatorMessage, frozen=True):
    """Answer to TimelineRequest; the reason says why it cannot be done."""

    reason: str = ""


class RankHeartbeatReply(CoordinatorMessage, frozen=True):
    """Answer to RankHeartbeat: its time, and the time of the coordinator's clock."""

    sent_ns: int
    coordinator_ns: int


class LeaveConfirmed(CoordinatorMessage, frozen=True):
    """Answer to an orderly LeaveRound."""


class FinishConfirmed(CoordinatorMessage, frozen=True):
    """Answer to TrainingFinished."""


# --- the reply to a rank that connects -------------------------------------------------------------------------

LIVENESS = "life"
"""Purpose of a liveness connection: a socket that stays open as long as the rank's process lives. Nothing is sent over
it, but for one LeaveRound of a rank whose control connection is broken, or whose control thread has failed."""


class AdmissionStatus(enum.IntEnum):
    ADMITTED = 0
    RETRY = 1  # the round under way is not this rank's, the next one may be: connect again
    REFUSED = 2  # connecting again would not help
    CANDIDATE = 3  # the elastic job is under way: be a world of one until elastic.run(), then connect again


class Admission(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The coordinator's reply in the handshake of a liveness connection."""

    status: AdmissionStatus
    control_port: int = 0
    """Where the coordinator's control server listens, if the rank is admitted."""
    reason: str = ""
    """Why the rank is not admitted, as text for the user."""
    sender: str = ""
    """The name of its control connection, if the rank is admitted: the identity of the worker and a number. No other
    connection of the job has it."""
    rank: int = 0
    """Of a CANDIDATE: the rank that it would have in a round of its own and the present members. Never 0."""
    size: int = 0
    """Of a CANDIDATE: the number of ranks of that round."""
    refusal_kind: RefusalKind = RefusalKind.FAILED
    """Of a REFUSED one."""


_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: WorkerMessage | CoordinatorMessage | Admission, *, for_many: bool = False) -> bytes:
    """Return the bytes to send: the version of the protocol, then the message. A long one that goes to many ranks is
    compressed: the list of thousands of members, sent to each of them, would be gigabytes."""
    data = _VERSION_BYTE + _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:  # the other side would close the connection
        raise ProtocolError(
            f"{type(message).__name__} message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        )
    if for_many and len(data) >= MIN_COMPRESSED_BYTES:
        return _VERSION_BYTE + zlib.compress(data[1:], 1)
    return data


def _decode(decoder: Decoder[_T], data: bytes) -> _T:
    if not data:
        raise ProtocolError("empty message")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    if data[0] != VERSION:
        raise ProtocolError(f"message of protocol version {data[0]}; this ronde speaks version {VERSION}")
    try:
        is_compressed = data[1:2] == _ZLIB_BYTE
        return decoder.decode(_decompress(data) if is_compressed else memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, zlib.error) as error:
        raise ProtocolError(f"not a message: {error}") from None


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    message = decompressor.decompress(memoryview(data)[1:], MAX_MESSAGE_BYTES)
    if not decompressor.eof or decompressor.unused_data:
        raise ProtocolError(f"compressed message that is cut short, or has more than {MAX_MESSAGE_BYTES} bytes")
    return message


decode_from_worker: Callable[[bytes], WorkerMessage] = functools.partial(
    _decode, Decoder(functools.reduce(operator.or_, WorkerMessage.__subclasses__()))
)


class WorkerMessageDecoder:
    """Decodes as decode_from_worker. Equal announcements, which thousands of ranks send in every step, are decoded once
    and are the same object."""

    def __init__(self) -> None:
        self._announcements: dict[bytes, AnnounceOperations] = {}  # the one that was made last at the end
        self._num_bytes = 0

    def decode(self, data: bytes) -> WorkerMessage:
        known = self._announcements.get(data) if len(data) <= MAX_INTERNED_BYTES else None
        if known is not None:
            return known
        message = decode_from_worker(data)
        if type(message) is AnnounceOperations and len(data) <= MAX_INTERNED_BYTES:
            self._announcements[data] = message
            self._num_bytes += len(data)
            while self._num_bytes > MAX_INTERNED_BYTES:
                oldest = next(iter(self._announcements))
                del self._announcements[oldest]
                self._num_bytes -= len(oldest)
        return message


decode_from_coordinator: Callable[[bytes], CoordinatorMessage] = functools.partial(
    _decode, Decoder(functools.reduce(operator.or_, CoordinatorMessage.__subclasses__()))
)
decode_admission = functools.partial(_decode, Decoder(Admission))
