"""The messages between workers and servers. Those for one member travel together: a mailbox message has several in its
header, and the array of one of them as its payload.

Every message carries the epoch of its sender's configuration. Decoding is strict: what no ronde of this version sends
raises ProtocolError.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from types import GenericAlias
from typing import NamedTuple

import msgspec
import numpy as np

from ronde.errors import ProtocolError
from ronde.ps.commit_log.leases import Lease
from ronde.ps.commit_log.log_state import Entry, LogRecord
from ronde.ps.partition import Array, Configuration


class ServerMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """A message of a parameter server."""

    epoch: int


# --- from workers to servers -----------------------------------------------------------------------------------------


class StagePart(ServerMessage, frozen=True):
    """The gradients of a part, for its primary, which passes them on to the backup. They count when they are
    committed."""

    worker: int
    step: int
    part: int


class GetRows(ServerMessage, frozen=True):
    """The worker wants rows of a part of a table, for its primary. The numbers of the rows within the part are its
    payload. It may come ahead of the read that it belongs to, and then waits for it."""

    request: int
    read: int
    """The rows are those that this read of the worker would have got, with the other parameters."""
    part: int


class Submit(ServerMessage, frozen=True):
    """An entry for the log, for the sequencer. A worker submits again what was not answered when the epoch changes."""

    entry: Entry


class SuspectServer(ServerMessage, frozen=True):
    """A worker has waited for a server for too long, and got no answer to a Ping."""

    server: int


class Ping(ServerMessage, frozen=True):
    """Is the server there?"""


# --- from servers to workers -----------------------------------------------------------------------------------------


class PartStaged(ServerMessage, frozen=True):
    """All replicas of the part hold these gradients. From the last of them; not from the only server."""

    step: int
    part: int


class PartValues(ServerMessage, frozen=True):
    """The values of a part, from its primary: all parts with one number of a read are of one version."""

    read: int
    part: int
    version: int


class RowValues(ServerMessage, frozen=True):
    """Rows of a part of a table, in the order in which they were asked for."""

    request: int
    read: int
    part: int
    version: int
    """That of the read, or a newer one if the read is so old that it was dropped."""


class Committed(ServerMessage, frozen=True):
    """The request of the worker is in the log, and in that of the sequencer's backup."""

    request: int
    version: int
    staleness: int


class LeaseGranted(ServerMessage, frozen=True):
    """Samples for the worker."""

    request: int
    lease: Lease


class Rejected(ServerMessage, frozen=True):
    """The request of the worker cannot be done."""

    request: int
    reason: str


class Pong(ServerMessage, frozen=True):
    """The server is there."""


class Finished(ServerMessage, frozen=True):
    """All workers have left or are lost."""


class ServersFailed(ServerMessage, frozen=True):
    """All replicas of some parts are gone; nothing can go on."""

    reason: str


# --- between servers -------------------------------------------------------------------------------------------------


class ReplicatePart(ServerMessage, frozen=True):
    """As StagePart, from the primary to the backup."""

    worker: int
    step: int
    part: int


class PartNorm(ServerMessage, frozen=True):
    """The squared norm of the mean gradient of a clock in one part, from its primary to the sequencer."""

    clock: int
    part: int
    square: float


class Append(ServerMessage, frozen=True):
    """Records of the log, from the sequencer."""

    records: tuple[LogRecord, ...]
    stable: int
    """All servers have the log up to this position, so nobody has to keep it."""


class Appended(ServerMessage, frozen=True):
    """The server has the log up to this position."""

    position: int


class NewConfiguration(ServerMessage, frozen=True):
    """The configuration of a new epoch, from its sequencer, to all members."""

    configuration: Configuration


NO_LOG = -1


class LogTail(ServerMessage, frozen=True):
    """Answer of a server to NewConfiguration: what it has of the log that others may lack."""

    position: int
    """NO_LOG of a server that has been added, and needs a ServerState first."""
    records: tuple[LogRecord, ...]


class ServerState(ServerMessage, frozen=True):
    """What the log says up to a position, from the sequencer to a server that has been added. The payload is a LogState
    that is pickled and signed."""


class RequestCopy(ServerMessage, frozen=True):
    """A new backup asks the primary for its part, as of this position of the log or later."""

    part: int
    position: int


class PartCopy(ServerMessage, frozen=True):
    """A part in one array: the values, then the states of the optimizer. Gradients that are staged went ahead."""

    part: int
    position: int
    applied: dict[int, int]
    """By worker, the last step of it that is in the values."""


FOR_WORKERS = (PartStaged, PartValues, RowValues, Committed, LeaseGranted, Rejected, Pong, Finished, ServersFailed)
"""What workers get. All other messages are for servers, and NewConfiguration is for both."""


class OutgoingMessage(NamedTuple):
    """A message for a member."""

    to: int
    message: ServerMessage
    payload: Array | None = None


NO_OWNER = -1
"""Of messages that travel together, none has an array."""
MAX_BATCH = 256
"""Messages in one header, which may have 256 KB."""

# A header: which of the messages the payload belongs to, or NO_OWNER, and the messages for one member, in their order.
_messages = GenericAlias(list, (functools.reduce(operator.or_, ServerMessage.__subclasses__()),))
_decoder = msgspec.msgpack.Decoder(GenericAlias(tuple, (int, _messages)))
encode = msgspec.msgpack.Encoder().encode


def make_batches(messages: Iterable[OutgoingMessage]) -> Iterator[tuple[int, bytes, Array | None]]:
    """Messages as what mailboxes send: the member, a header, and at most one array. An empty array does not travel."""
    batches: dict[int, list[OutgoingMessage]] = {}
    for each in messages:
        batch = batches.setdefault(each.to, [])
        if len(batch) == MAX_BATCH or (_has_array(each) and any(map(_has_array, batch))):
            yield _encode_batch(batch)
            batch.clear()
        batch.append(each)
    for batch in batches.values():
        yield _encode_batch(batch)


def _has_array(each: OutgoingMessage) -> bool:
    return each.payload is not None and each.payload.size > 0


def _encode_batch(batch: Sequence[OutgoingMessage]) -> tuple[int, bytes, Array | None]:
    owner = next((index for index, each in enumerate(batch) if _has_array(each)), NO_OWNER)
    header = encode((owner, [each.message for each in batch]))
    return batch[0].to, header, None if owner == NO_OWNER else batch[owner].payload


def split_batch(header: bytes, payload: Array | None) -> list[tuple[ServerMessage, Array | None]]:
    """The messages of a header, each with its array. Those that have one and got none get an empty one."""
    try:
        owner, messages = _decoder.decode(header)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"a message of the parameter server that no ronde of this version sends: {error}"
        ) from error
    return [
        (message, payload if index == owner else _EMPTY if isinstance(message, WITH_PART) else None)
        for index, message in enumerate(messages)
    ]


WITH_PART = (StagePart, ReplicatePart, PartValues, PartCopy)
"""Messages with a part, which may be empty: that of a parameter server that has nothing but tables."""
_EMPTY = np.zeros(0, np.float32)
