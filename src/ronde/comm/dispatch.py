"""Where the operations of one group start on this rank: its channels, and the two ways onto them. Used by the group,
which prepares operations, and by plans, which have channels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ronde.comm.backend import Call
from ronde.comm.engine import Engine
from ronde.comm.lane import Entry, Lane
from ronde.comm.named import Named
from ronde.comm.operations import Join, Operation, RowsCall
from ronde.comm.signature import Form, Forms
from ronde.comm.work import NamedWork, Work
from ronde.errors import RoundEnded

__all__ = ["Dispatch", "Opener"]

JOIN_S = 10 * 365 * 86400.0
"""join() waits for as long as others have data. Losses end it, not the clock."""


class Opener(Protocol):
    """What a group needs of its world."""

    engine: Engine
    limit_s: float
    """How long one operation may take."""

    def open_lane(
        self, group: int, suffix: str, members: tuple[int, ...], *, bucket_bytes: int = 0, direct: bool = False
    ) -> Lane:
        """Open a channel, together with the other members."""

    def close_lane(self, lane: Lane) -> None:
        """Close it. Idempotent."""

    def add_named(self, named: Named) -> None:
        """Let the engine listen for these named operations."""

    def drop_named(self, group: int) -> None:
        """No more of this group."""


class Dispatch:
    """The channels of one group of which this rank is a member."""

    def __init__(self, opener: Opener, group: int, members: tuple[int, ...], me: int) -> None:
        self.me = me
        """My index among the members."""
        self._opener = opener
        self._group = group
        self._members = members
        self.limit_s = opener.limit_s
        """How long one operation may take."""
        self._engine = opener.engine
        self._plans: list[Lane] = []
        self._num_plans = 0
        self._over: Exception | None = None
        self._ordered = opener.open_lane(group, "ordered", members, direct=True)
        try:
            negotiated = opener.open_lane(group, "negotiated", members)
        except BaseException:
            opener.close_lane(self._ordered)
            raise
        self._named = Named(group, negotiated, Forms(), self._engine.board)
        opener.add_named(self._named)

    @property
    def lane(self) -> Lane:
        """The channel of operations in program order."""
        if self._over is not None:
            raise self._over
        return self._ordered

    def start(self, operation: Operation, name: str | None, wait: bool) -> Any:  # result or Work
        """Start an operation: announced when it has a name, else in program order."""
        if name is None:
            return self._start_ordered(operation, wait)
        work = self._announce(operation, name)
        return work.wait() if wait else work

    def join(self, form: Form) -> int:
        """Stand by with zeros, among named operations, those in program order, and plans. The rank that came last."""
        lane = self.lane
        operation = Join(form, self._engine.now_ns())
        work = self._announce(operation, "join")
        call = form.call((), None)
        flights = tuple(each.submit(call, (), limit_s=JOIN_S) for each in (lane, *self._plans))
        Work(flights, _nothing, JOIN_S).wait()
        work.wait(JOIN_S)
        ahead = RowsCall(operation, len(self._members))
        lane.run(ahead.call, form.label, 8)
        return max(zip(ahead.rows(), self._members, strict=True))[1]

    def move(self, call: Call, num_bytes: int, finish: Callable[[], Any], wait: bool) -> Any:
        """A message between two members, which stands outside of the order of the others."""
        label = call.kind.name.lower()
        if wait:
            self.lane.move(call, label, num_bytes)
            return finish()
        return Work((self.lane.submit(call, (Entry(label, "", num_bytes),)),), finish, self.limit_s)

    def open_plan(self, bucket_bytes: int) -> Lane:
        """A channel of its own for a plan; all members open theirs in the same order."""
        self._num_plans += 1
        suffix = f"plan.{self._num_plans}"
        lane = self._opener.open_lane(self._group, suffix, self._members, bucket_bytes=bucket_bytes)
        self._plans.append(lane)
        return lane

    def close_plan(self, lane: Lane) -> None:
        """Close a plan's channel. Idempotent."""
        if lane in self._plans:
            self._plans.remove(lane)
        self._opener.close_lane(lane)

    def close(self, removed: bool) -> None:
        """Nothing starts here any more: the group was removed, or the round is over. Idempotent."""
        if self._over is not None:
            return
        if removed:
            self._over = ValueError(f"group {self._group} was removed; nothing can be done in it any more")
        else:
            self._over = RoundEnded("the round is over: shutdown() was called")
        self._named.end(RoundEnded(str(self._over)))
        self._opener.drop_named(self._group)
        for lane in (*self._plans, self._named.lane, self._ordered):
            self._opener.close_lane(lane)

    def _announce(self, operation: Operation, name: str) -> NamedWork:
        if self._over is not None:
            raise self._over
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a text that is not empty, got {name!r}")
        work = NamedWork(operation, self._group, name, self._engine.board, self.limit_s)
        self._engine.announce(self._named, work)
        return work

    def _start_ordered(self, operation: Operation, wait: bool) -> Any:
        lane, form = self.lane, operation.form
        rows = None
        if operation.rows is not None:
            ahead = RowsCall(operation, len(self._members))
            lane.run(ahead.call, f"{form.label} rows", 8 * len(operation.rows))
            rows = ahead.rows()
        calls = operation.calls(rows, "", False)
        if wait and len(calls) == 1:
            lane.run(calls[0], form.label, form.num_bytes)
            return operation.result()
        entry = Entry(form.label, "", form.num_bytes)
        flights = tuple([lane.submit(call, (entry,) if call is calls[-1] else ()) for call in calls])
        work = Work(flights, operation.result, self.limit_s)
        return work.wait() if wait else work


def _nothing() -> None:
    """The result of a call that only has to end."""
