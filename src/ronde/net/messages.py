"""What workers and the coordinator say to each other. Used by net/control on both sides.

Every message is a frozen struct; `encode` and `decode` stand side by side. Decoding is strict: a message that is
truncated, too long, of another version or of the wrong shape raises ProtocolError and nothing else.
"""

from __future__ import annotations

import enum
from typing import TypeAlias, TypeVar

import msgspec

from ronde.errors import ProtocolError
from ronde.observe.sampling import Note
from ronde.observe.vitals import Reading
from ronde.types import Member

__all__ = [
    "LEAVING_S",
    "Announce",
    "Beat",
    "BeatBack",
    "Bye",
    "Ended",
    "Failed",
    "Failure",
    "FromCoordinator",
    "FromWorker",
    "GroupChanged",
    "GroupWanted",
    "Join",
    "Leave",
    "Lost",
    "Missing",
    "MissingWanted",
    "Refused",
    "Request",
    "Run",
    "RunItem",
    "StackQuery",
    "StackReply",
    "Stalled",
    "Trace",
    "TraceBatch",
    "TraceChanged",
    "TraceOver",
    "TraceWanted",
    "Unknown",
    "Visits",
    "Vitals",
    "Waiting",
    "Welcome",
    "decode_from_coordinator",
    "decode_from_worker",
    "encode",
]

VERSION = 2
LIMIT_BYTES = 64 * 1024 * 1024
LEAVING_S = 1.0
"""Who leaves in good order is missed so much later: others may still be reading the end of what it has finished."""
_VERSION_BYTE = bytes([VERSION])


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


class Join(Message, frozen=True):
    """I want to be part of the round."""

    version: int
    round: int
    size: int
    member: Member
    groups: tuple[tuple[int, ...], ...] = ()
    """Groups to make at the start, as sorted ranks; equal on all members."""
    pid_namespace: str = ""
    """Where the member's process id means something; "" if that is not known."""


class Announce(Message, frozen=True):
    """I am ready for these named operations: new ones in full, known ones by the id the coordinator gave them."""

    new: tuple[Request, ...] = ()
    known: tuple[int, ...] = ()


class GroupWanted(Message, frozen=True):
    """Make a group of these ranks (id 0), or remove group `id`. Every rank of the world sends it."""

    ranks: tuple[int, ...]
    id: int = 0


class Beat(Message, frozen=True):
    """I am alive; my monotonic clock says so. Answered at once, to find the distance of the clocks."""

    sent_ns: int


class MissingWanted(Message, frozen=True):
    """My time for this named operation is nearly over: whom does it wait for? Answered by Missing."""

    group: int
    name: str


class Waiting(Message, frozen=True):
    """An operation without a name has waited here too long for these ranks."""

    op: str
    group: int
    since_ns: int
    missing: tuple[int, ...]
    call: str = ""
    """Which call of which channel, equal on all members; empty when that is not known."""


class StackReply(Message, frozen=True):
    """Where my Python threads are right now; line is the innermost line of the user's code in the main thread."""

    ticket: int
    line: str
    stack: str


class TraceBatch(Message, frozen=True):
    """Encoded trace events (JSON objects, UTF-8) for the timeline, on the coordinator's clock."""

    events: tuple[bytes, ...]
    dropped: int = 0


class TraceWanted(Message, frozen=True):
    """Write a timeline of all ranks to this file from now on; without a path, end the one that is being written. The
    path is of the coordinator's host; the rest is observe.timeline.Style. Answered by TraceChanged."""

    path: str
    horovod: bool = False
    departures: bool = False


class TraceOver(Message, frozen=True):
    """The last events of the timeline that was to end are sent."""


class Visits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When a rank came to operations of one channel; times are on the coordinator's clock."""

    channel: str
    group: int
    notes: tuple[Note, ...]


class Vitals(Message, frozen=True):
    """How I am; about once per second, when a launcher watches."""

    reading: Reading
    visits: tuple[Visits, ...] = ()


class Failure(enum.IntEnum):
    """What kind of error ended a rank, where that makes a difference."""

    OTHER = 0
    TIMEOUT = 1
    """An operation ran out of time."""
    MISMATCH = 2
    """The members of an operation asked for different things."""


class Leave(Message, frozen=True):
    """I am going. orderly: by shutdown(), or at the end of the script. Otherwise `why` says what ended me."""

    orderly: bool
    why: str = ""
    failure: Failure = Failure.OTHER
    missing: tuple[int, ...] = ()
    """Whom the operation that ran out of time waited for."""
    line: str = ""
    """The line of the user's code where the error was raised."""


FromWorker: TypeAlias = (
    Join
    | Announce
    | GroupWanted
    | Beat
    | MissingWanted
    | Waiting
    | StackReply
    | TraceBatch
    | TraceWanted
    | TraceOver
    | Vitals
    | Leave
)


# --- from the coordinator --------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Everybody is here. Groups from Join got the ids 1, 2, …; group 0 is the world."""

    round: int
    members: tuple[Member, ...]


class Refused(Message, frozen=True):
    """You cannot take part, and why."""

    why: str


class RunItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named operation that every member has announced."""

    id: int
    """Announce it by this from now on."""
    name: str
    request: Request | None = None
    """In full for a rank that did not announce it because it has joined."""
    rows: tuple[int, ...] | None = None
    """allgather: first dimension per member and part (member-major). all-to-all: rows member i gives to member j,
    row-major."""


class Run(Message, frozen=True):
    """Execute these on the group's negotiated channel, fused into one operation."""

    group: int
    items: tuple[RunItem, ...]
    late: tuple[tuple[int, int], ...] = ()
    """The members that announced last: (rank, nanoseconds before the last of them). Empty when nobody was late."""


class Failed(Message, frozen=True):
    """This named operation cannot run: the members disagree. The same words on every member."""

    group: int
    name: str
    why: str


class Unknown(Message, frozen=True):
    """I have forgotten this id: announce the operation in full."""

    id: int


class Missing(Message, frozen=True):
    """The ranks that have not announced this named operation; none when it is not under way (any more)."""

    group: int
    name: str
    ranks: tuple[int, ...]


class GroupChanged(Message, frozen=True):
    """The group of these ranks now has this id; or, with removed, is no more; or, with why, cannot be."""

    ranks: tuple[int, ...]
    id: int
    removed: bool = False
    why: str = ""


class Lost(Message, frozen=True):
    """A rank is gone. Everything it was part of is over."""

    rank: int
    why: str


class Ended(Message, frozen=True):
    """The round is over for everybody."""

    why: str


class StackQuery(Message, frozen=True):
    """Where are you right now?"""

    ticket: int


class Stalled(Message, frozen=True):
    """Somebody waits. The report that was logged, for everybody's event log."""

    op: str
    group: int
    waited_s: float
    missing: tuple[int, ...]
    report: str


class Trace(Message, frozen=True):
    """Record for a new timeline from now on; or send what you have, say TraceOver, and stop."""

    on: bool
    horovod: bool = False
    departures: bool = False


class TraceChanged(Message, frozen=True):
    """What you wanted of the timeline is done; or cannot be, and why."""

    why: str = ""


class BeatBack(Message, frozen=True):
    """Answer to Beat: your clock then, my clock now."""

    sent_ns: int
    coordinator_ns: int


class Bye(Message, frozen=True):
    """Your leaving is noted."""

    last: int = -1


FromCoordinator: TypeAlias = (
    Welcome
    | Refused
    | Run
    | Failed
    | Unknown
    | Missing
    | GroupChanged
    | Lost
    | Ended
    | StackQuery
    | Stalled
    | Trace
    | TraceChanged
    | BeatBack
    | Bye
)

_T = TypeVar("_T")

_encoder = msgspec.msgpack.Encoder()
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)


def encode(message: FromWorker | FromCoordinator) -> bytes:
    """Bytes for the wire: the protocol's version, then the message."""
    data = _VERSION_BYTE + _encoder.encode(message)
    if len(data) > LIMIT_BYTES:  # here, where it can be told, and not by a connection that the other side cuts
        raise ProtocolError(
            f"{type(message).__name__} message of {len(data)} bytes; at most {LIMIT_BYTES} are allowed; send parts"
        )
    return data


def decode_from_worker(data: bytes) -> FromWorker:
    """What a worker said."""
    return _decode(_from_worker, data)


def decode_from_coordinator(data: bytes) -> FromCoordinator:
    """What the coordinator said."""
    return _decode(_from_coordinator, data)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    if not data:
        raise ProtocolError("empty message")
    if len(data) > LIMIT_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes; at most {LIMIT_BYTES} are allowed")
    if data[0] != VERSION:
        raise ProtocolError(f"message of protocol version {data[0]}; this ronde speaks version {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message: {error}") from None
