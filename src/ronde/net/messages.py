"""What workers and the coordinator say to each other. Used by net/control on both sides.

Every message is a frozen struct; `encode` and `decode` stand side by side. Decoding is strict: a message that is
truncated, too long, of another version or of the wrong shape raises ProtocolError and nothing else.

What the coordinator's door answers to a rank that comes, and how a rank calls until it is let in. Written by the
coordinator, read by the worker.

    4711           the port of the control server: come in
    later: <why>   the round that is on is not yours; the next may be: call again
    never: <why>   it will not work, however often you call
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from ronde.errors import ProtocolError, StartFailed
from ronde.observe.activity import ActivitySample
from ronde.observe.stragglers import ArrivalSample
from ronde.types import Member

if TYPE_CHECKING:
    pass

__all__ = [
    "ActivityReport",
    "AgreedOperation",
    "AnnounceOperations",
    "ArrivalSamples",
    "ChangeGroups",
    "CoordinatorMessage",
    "EndRound",
    "Failure",
    "GroupsChanged",
    "JoinRefused",
    "JoinRound",
    "LEAVE_GRACE_S",
    "LIVENESS",
    "LeaveConfirmed",
    "LeaveRound",
    "MissingRanks",
    "MissingRanksQuery",
    "OperationRejected",
    "OperationRequest",
    "RankHeartbeat",
    "RankHeartbeatReply",
    "RankLost",
    "RoundStarted",
    "RunOperations",
    "SetTracing",
    "StackReply",
    "StackRequest",
    "StallReport",
    "TimelineReply",
    "TimelineRequest",
    "TraceBatch",
    "TraceFlushed",
    "UnknownOperationId",
    "WaitingTooLong",
    "WorkerMessage",
    "decode_from_coordinator",
    "decode_from_worker",
    "encode",
    "encode_admitted",
    "encode_refused",
    "encode_retry",
    "parse_admission",
]

VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
LEAVE_GRACE_S = 1.0
"""Who leaves in good order is missed so much later: others may still be reading the end of what it has finished."""
_VERSION_BYTE = bytes([VERSION])


class ControlMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


class OperationRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named operation as one rank asks for it. Several shapes make a grouped operation that runs as a unit."""

    group: int
    name: str
    kind: int
    dtype: int
    shapes: tuple[tuple[int, ...], ...]
    op: int = 0
    root: int = -1
    """A broadcast's root, as a rank of the world."""
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] | None = None
    """all-to-all: rows for each member; None shares them out evenly."""


# --- from a worker ---------------------------------------------------------------------------------------------


class JoinRound(ControlMessage, frozen=True):
    """I want to be part of the round."""

    version: int
    round: int
    size: int
    member: Member
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups to make at the start, as sorted ranks; equal on all members."""
    pid_namespace: str = ""
    """Where the member's process id means something; "" if that is not known."""


class AnnounceOperations(ControlMessage, frozen=True):
    """I am ready for these named operations: new ones in full, known ones by the id the coordinator gave them."""

    new: tuple[OperationRequest, ...] = ()
    known_ids: tuple[int, ...] = ()


class ChangeGroups(ControlMessage, frozen=True):
    """Make a group of these ranks (id 0), or remove group `id`. Every rank of the world sends it."""

    ranks: tuple[int, ...]
    id: int = 0


class RankHeartbeat(ControlMessage, frozen=True):
    """I am alive; my monotonic clock says so. Answered at once, to find the distance of the clocks."""

    sent_ns: int


class MissingRanksQuery(ControlMessage, frozen=True):
    """My time for this named operation is nearly over: whom does it wait for? Answered by Missing."""

    group: int
    name: str


class WaitingTooLong(ControlMessage, frozen=True):
    """An operation without a name has waited here too long for these ranks."""

    op: str
    group: int
    since_ns: int
    missing: tuple[int, ...]
    call: str = ""
    """Which call of which channel, equal on all members; empty when that is not known."""


class StackReply(ControlMessage, frozen=True):
    """Where my Python threads are right now; line is the innermost line of the user's code in the main thread."""

    query_id: int
    line: str
    stack: str


class TraceBatch(ControlMessage, frozen=True):
    """Encoded trace events (JSON objects, UTF-8) for the timeline, on the coordinator's clock."""

    events: tuple[bytes, ...]
    dropped: int = 0


class TimelineRequest(ControlMessage, frozen=True):
    """Write a timeline of all ranks to this file from now on; without a path, end the one that is being written. The
    path is of the coordinator's host; the rest is observe.timeline.Style. Answered by TraceChanged."""

    path: str
    horovod: bool = False
    batch_markers: bool = False


class TraceFlushed(ControlMessage, frozen=True):
    """The last events of the timeline that was to end are sent."""


class ArrivalSamples(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When a rank came to operations of one channel; times are on the coordinator's clock."""

    channel: str
    group: int
    samples: tuple[ArrivalSample, ...]


class ActivityReport(ControlMessage, frozen=True):
    """How I am; about once per second, when a launcher watches."""

    activity: ActivitySample
    arrivals: tuple[ArrivalSamples, ...] = ()


class Failure(enum.IntEnum):
    """What kind of error ended a rank, where that makes a difference."""

    OTHER = 0
    TIMEOUT = 1
    """An operation ran out of time."""
    MISMATCH = 2
    """The members of an operation asked for different things."""


class LeaveRound(ControlMessage, frozen=True):
    """I am going. orderly: by shutdown(), or at the end of the script. Otherwise `why` says what ended me."""

    orderly: bool
    reason: str = ""
    failure: Failure = Failure.OTHER
    missing: tuple[int, ...] = ()
    """Whom the operation that ran out of time waited for."""
    line: str = ""
    """The line of the user's code where the error was raised."""
    lost_peer: int | None = None
    """If the error is PeerLost: that peer."""


WorkerMessage: TypeAlias = (
    JoinRound
    | AnnounceOperations
    | ChangeGroups
    | RankHeartbeat
    | MissingRanksQuery
    | WaitingTooLong
    | StackReply
    | TraceBatch
    | TimelineRequest
    | TraceFlushed
    | ActivityReport
    | LeaveRound
)


# --- from the coordinator --------------------------------------------------------------------------------------


class RoundStarted(ControlMessage, frozen=True):
    """Everybody is here. Groups from Join got the ids 1, 2, …; group 0 is the world."""

    round: int
    members: tuple[Member, ...]


class JoinRefused(ControlMessage, frozen=True):
    """You cannot take part, and why."""

    reason: str


class AgreedOperation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named operation that every member has announced."""

    id: int
    """Announce it by this from now on."""
    name: str
    request: OperationRequest | None = None
    """In full for a rank that did not announce it because it has joined."""
    row_counts: tuple[int, ...] | None = None
    """allgather: first dimension per member and part (member-major). all-to-all: rows member i gives to member j,
    row-major."""


class RunOperations(ControlMessage, frozen=True):
    """Execute these on the group's negotiated channel, fused into one operation."""

    group: int
    operations: tuple[AgreedOperation, ...]
    stragglers: tuple[tuple[int, int], ...] = ()
    """The members that announced last: (rank, nanoseconds before the last of them). Empty when nobody was late."""


class OperationRejected(ControlMessage, frozen=True):
    """This named operation cannot run: the members disagree. The same words on every member."""

    group: int
    name: str
    reason: str


class UnknownOperationId(ControlMessage, frozen=True):
    """I have forgotten this id: announce the operation in full."""

    id: int


class MissingRanks(ControlMessage, frozen=True):
    """The ranks that have not announced this named operation; none when it is not under way (any more)."""

    group: int
    name: str
    ranks: tuple[int, ...]


class GroupsChanged(ControlMessage, frozen=True):
    """The group of these ranks now has this id; or, with removed, is no more; or, with why, cannot be."""

    ranks: tuple[int, ...]
    id: int
    removed: bool = False
    reason: str = ""


class RankLost(ControlMessage, frozen=True):
    """A rank is gone. Everything it was part of is over."""

    rank: int
    reason: str


class EndRound(ControlMessage, frozen=True):
    """The round is over for everybody."""

    reason: str


class StackRequest(ControlMessage, frozen=True):
    """Where are you right now?"""

    query_id: int


class StallReport(ControlMessage, frozen=True):
    """Somebody waits. The report that was logged, for everybody's event log."""

    op: str
    group: int
    waited_s: float
    missing: tuple[int, ...]
    report: str


class SetTracing(ControlMessage, frozen=True):
    """Record for a new timeline from now on; or send what you have, say TraceOver, and stop."""

    enabled: bool
    horovod: bool = False
    batch_markers: bool = False


class TimelineReply(ControlMessage, frozen=True):
    """What you wanted of the timeline is done; or cannot be, and why."""

    reason: str = ""


class RankHeartbeatReply(ControlMessage, frozen=True):
    """Answer to Beat: your clock then, my clock now."""

    sent_ns: int
    coordinator_ns: int


class LeaveConfirmed(ControlMessage, frozen=True):
    """Your leaving is noted."""

    last: int = -1


CoordinatorMessage: TypeAlias = (
    RoundStarted
    | JoinRefused
    | RunOperations
    | OperationRejected
    | UnknownOperationId
    | MissingRanks
    | GroupsChanged
    | RankLost
    | EndRound
    | StackRequest
    | StallReport
    | SetTracing
    | TimelineReply
    | RankHeartbeatReply
    | LeaveConfirmed
)

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_worker_decoder: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(WorkerMessage)
_coordinator_decoder: msgspec.msgpack.Decoder[CoordinatorMessage] = msgspec.msgpack.Decoder(CoordinatorMessage)


def encode(message: WorkerMessage | CoordinatorMessage) -> bytes:
    """Bytes for the wire: the protocol's version, then the message."""
    data = _VERSION_BYTE + _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:  # here, where it can be told, and not by a connection that the other side cuts
        raise ProtocolError(
            f"{type(message).__name__} message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed; send parts"
        )
    return data


def decode_from_worker(data: bytes) -> WorkerMessage:
    """What a worker said."""
    return _decode(_worker_decoder, data)


def decode_from_coordinator(data: bytes) -> CoordinatorMessage:
    """What the coordinator said."""
    return _decode(_coordinator_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if not data:
        raise ProtocolError("empty message")
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    if data[0] != VERSION:
        raise ProtocolError(f"message of protocol version {data[0]}; this ronde speaks version {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message: {error}") from None


LIVENESS = "life"
"""Purpose of a lifeline: the socket that stays open as long as the rank's process lives."""


def encode_admitted(control_port: int) -> bytes:
    """Come in."""
    return str(control_port).encode()


def encode_retry(reason: str) -> bytes:
    """Call again."""
    return f"later: {reason}".encode()


def encode_refused(reason: str) -> bytes:
    """Do not call again."""
    return f"never: {reason}".encode()


def parse_admission(reply: bytes) -> int | str:
    """The control port, or why to call again. Raises StartFailed when that would not help."""
    text = reply.decode(errors="replace")
    word, _, why = text.partition(": ")
    if word == "later":
        return why
    if word == "never":
        raise StartFailed(why)
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise StartFailed("what answers at the coordinator's address is no coordinator")
    return int(text)
