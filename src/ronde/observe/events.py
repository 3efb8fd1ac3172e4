"""Events: what happened to a rank, as typed values. ronde.events() returns them, and the timeline shows them.

`at_ns` is time.monotonic_ns() of the process that recorded the event.
"""

from __future__ import annotations

import msgspec

from ronde.text import escape_surrogates, format_ranks, shorten


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""

    at_ns: int
    rank: int

    def words(self) -> str:
        """Return what happened in a sentence, without the rank and the time."""
        return type(self).__name__


class Started(Event, frozen=True, kw_only=True):
    """The rank is part of a round."""

    size: int
    host: str
    pid: int
    worker: str = ""
    """The identity of the process, which stays the same when its rank changes from round to round."""
    backend: str = ""

    def words(self) -> str:
        through = f", through {shorten(self.backend)}" if self.backend else ""
        return f"started as one of {self.size} on host {shorten(self.host)}, pid {self.pid}{through}"


class Stopped(Event, frozen=True, kw_only=True):
    """The rank left the round: in order, or for the reason in `why`."""

    orderly: bool = True
    why: str = ""

    def words(self) -> str:
        return ("left in order" if self.orderly else "left out of order") + _reason_suffix(self.why)


class RoundChanged(Event, frozen=True, kw_only=True):
    """In an elastic job: the rank takes part in another round, and has the state of training. `at_ns` is when."""

    size: int
    why: str
    """Why the round before has ended."""
    noticed_ns: int
    """When this rank noticed that its round was over."""
    joined_ns: int
    """When it was a member of the new round."""

    def words(self) -> str:
        took_ms = (self.at_ns - self.noticed_ns) / 1e6
        return f"one of {self.size} ranks after {took_ms:.0f} ms{_reason_suffix(self.why)}"


class OperationFailed(Event, frozen=True, kw_only=True):
    """An operation ended in an error on this rank."""

    op: str
    group: int
    why: str

    def words(self) -> str:
        return f"{shorten(self.op)} (group {self.group}) failed{_reason_suffix(self.why)}"


class PeerGone(Event, frozen=True, kw_only=True):
    """Another rank is gone."""

    peer: int
    why: str = ""

    def words(self) -> str:
        return f"lost rank {self.peer}{_reason_suffix(self.why)}"


class StallReported(Event, frozen=True, kw_only=True):
    """An operation waits for ranks; the report says where they are."""

    op: str
    group: int
    waited_s: float
    missing: tuple[int, ...]
    report: str

    def words(self) -> str:
        return escape_surrogates(self.report)


class GroupAdded(Event, frozen=True, kw_only=True):
    """A group was made."""

    group: int
    ranks: tuple[int, ...]

    def words(self) -> str:
        return f"group {self.group} added: {format_ranks(self.ranks)}"


class GroupRemoved(Event, frozen=True, kw_only=True):
    """A group was removed."""

    group: int

    def words(self) -> str:
        return f"group {self.group} removed"


class ChannelOpened(Event, frozen=True, kw_only=True):
    """A channel among these ranks is open."""

    channel: str
    members: tuple[int, ...]

    def words(self) -> str:
        return f"channel {shorten(self.channel)} opened: {format_ranks(self.members)}"


class ChannelClosed(Event, frozen=True, kw_only=True):
    """A channel is closed: in order, or for the reason in `why`."""

    channel: str
    why: str = ""

    def words(self) -> str:
        return f"channel {shorten(self.channel)} closed{_reason_suffix(self.why)}"


def _reason_suffix(why: str) -> str:
    return f": {shorten(why, 1000)}" if why else ""
