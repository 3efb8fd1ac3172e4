"""Events: what happened to a rank, as typed values. ronde.events() returns them, and the timeline shows them.

`at_ns` is time.monotonic_ns() of the process that recorded the event.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""

    at_ns: int
    rank: int


class Started(Event, frozen=True, kw_only=True):
    """The rank is part of a round."""

    size: int
    host: str
    pid: int
    backend: str = ""


class Stopped(Event, frozen=True, kw_only=True):
    """The rank left the round: in order, or for the reason in `why`."""

    orderly: bool = True
    why: str = ""


class OperationFailed(Event, frozen=True, kw_only=True):
    """An operation ended in an error on this rank."""

    op: str
    group: int
    why: str


class PeerGone(Event, frozen=True, kw_only=True):
    """Another rank is gone."""

    peer: int
    why: str = ""


class StallReported(Event, frozen=True, kw_only=True):
    """An operation waits for ranks; the report says where they are."""

    op: str
    group: int
    waited_s: float
    missing: tuple[int, ...]
    report: str


class GroupAdded(Event, frozen=True, kw_only=True):
    """A group was made."""

    group: int
    ranks: tuple[int, ...]


class GroupRemoved(Event, frozen=True, kw_only=True):
    """A group was removed."""

    group: int


class ChannelOpened(Event, frozen=True, kw_only=True):
    """A channel among these ranks is open."""

    channel: str
    members: tuple[int, ...]


class ChannelClosed(Event, frozen=True, kw_only=True):
    """A channel is closed: in order, or for the reason in `why`."""

    channel: str
    why: str = ""
