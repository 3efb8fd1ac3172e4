"""The named operations of one group that are under way. Filled by the group, worked off by the engine.

A name is free again when its operation is over. What was announced once in full is announced by its id from then on,
as long as it is the same.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ronde.comm.lane import Entry, Flight, Lane
from ronde.comm.operations import Operation, Reduce, stand_in
from ronde.comm.signature import Form, Forms, Options
from ronde.comm.work import Board, Departure, NamedWork
from ronde.errors import RondeError
from ronde.net.messages import Request, RunItem
from ronde.types import DType, Kind, Op

__all__ = ["Named"]

MOST_KNOWN = 65_536
"""Names remembered for announcing by id."""


class _Known(NamedTuple):
    """What an id stands for."""

    id: int
    form: Form
    splits: tuple[int, ...] | None


class Named:
    """Of one group. begin() is for any thread, everything else for the engine's."""

    def __init__(self, group: int, lane: Lane, forms: Forms, board: Board) -> None:
        self.group = group
        self.lane = lane
        self.over: RondeError | None = None
        """Why nothing can be announced any more."""
        self._forms = forms
        self._board = board
        self._works: dict[str, NamedWork] = {}
        self._known: dict[str, _Known] = {}
        self._by_id: dict[int, NamedWork] = {}
        """What was announced by id and has not been answered."""
        self._lock = threading.Lock()

    def begin(self, work: NamedWork) -> None:
        """Take the name for this work."""
        if self._board.tracing:
            work.announced_ns = time.monotonic_ns()
        with self._lock:
            if self.over is not None:
                raise self.over
            before = self._works.get(work.name)
            if before is not None and not before.done():
                raise ValueError(f"{before.title} is still under way on this rank; wait for it, or choose another name")
            self._works[work.name] = work

    def announcement(self, work: NamedWork) -> int | Request:
        """How to announce it: the id if it is what that stands for, else in full."""
        operation = work.operation
        known = self._known.get(work.name)
        if known is not None and known.form is operation.form and known.splits == operation.splits:
            self._by_id[known.id] = work
            return known.id
        return self.request(work)

    def request(self, work: NamedWork) -> Request:
        """The announcement in full."""
        form = work.operation.form
        return Request(
            group=self.group,
            name=work.name,
            kind=form.kind,
            dtype=form.dtype,
            shapes=form.shapes,
            op=form.op,
            root=form.root,
            prescale=form.prescale,
            postscale=form.postscale,
            splits=work.operation.splits,
        )

    def forgotten(self, id: int) -> Request | None:
        """The coordinator has forgotten an id: what was announced by it, in full."""
        work = self._by_id.pop(id, None)
        if work is None:
            return None
        self._known.pop(work.name, None)
        return self.request(work)

    def run(self, items: Sequence[RunItem], late: tuple[tuple[int, int], ...] = ()) -> None:
        """Every member has announced these: off they go, fused into one call. `late` is Run.late."""
        departure = Departure(time.monotonic_ns(), late)
        works: list[NamedWork] = []
        operations: list[Operation] = []
        for item in items:
            if item.request is not None:  # not announced here: this rank has joined
                self._known.pop(item.name, None)
                operations.append(stand_in(self._form_of(item.request)))
            else:
                work = self._works[item.name]
                self._learn(work, item.id)
                works.append(work)
                operations.append(work.operation)
        if self._board.tracing:
            self._board.note_departure(works, departure.at_ns)
        try:
            flights = self._submit(operations, items, works)
        except RondeError as error:
            self._end(works, error)
            return
        with self._board.changed:
            for work in works:
                work.depart(flights, departure)
            self._board.changed.notify_all()
        if not flights:
            self._free(works)

    def note_missing(self, name: str, ranks: tuple[int, ...]) -> None:
        """These have not announced it, to say so when a wait for it ends."""
        work = self._works.get(name)
        if work is not None:
            work.missing = ranks

    def fail(self, name: str, error: Exception) -> None:
        """This operation cannot run."""
        self._known.pop(name, None)
        work = self._works.get(name)
        if work is not None:
            self.lane.note_failure(work.title, error)
            self._end([work], error)

    def end(self, error: RondeError) -> None:
        """Nothing runs here any more. What has taken off ends by its channel."""
        with self._lock:
            self.over = self.over or error
            works = list(self._works.values())
        self._end([work for work in works if not work.departed], error)

    def _submit(
        self, operations: list[Operation], items: Sequence[RunItem], works: list[NamedWork]
    ) -> tuple[Flight, ...]:
        over = functools.partial(self._free, works)
        first = operations[0]
        if isinstance(first, Reduce) and len(operations) > 1:
            parts = tuple([part for each in operations if isinstance(each, Reduce) for part in each.parts])
            text = f"{first.form.label} {items[0].name!r} and {len(items) - 1} more"
            entries = tuple(
                [
                    Entry(each.form.label, item.name, each.form.num_bytes)
                    for each, item in zip(operations, items, strict=True)
                ]
            )
            call = first.form.call(parts, operations, trusted=True, text=text)
            return (self.lane.submit(call, entries, over=over),)
        form = first.form
        calls = first.calls(items[0].rows, f"{items[0].name!r}: {form.text}", True)
        entry = Entry(form.label, items[0].name, form.num_bytes)
        last = len(calls) - 1
        return tuple(
            self.lane.submit(call, (entry,) if index == last else (), over=over if index == last else None)
            for index, call in enumerate(calls)
        )

    def _learn(self, work: NamedWork, id: int) -> None:
        if self._by_id.pop(id, None) is work or not id:
            return  # it was announced by this id
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[work.name] = _Known(id, work.operation.form, work.operation.splits)

    def _form_of(self, request: Request) -> Form:
        options = Options(Op(request.op), request.prescale, request.postscale, request.root)
        return self._forms.find(Kind(request.kind), DType(request.dtype), request.shapes, options)

    def _end(self, works: list[NamedWork], error: Exception) -> None:
        with self._board.changed:
            for work in works:
                work.fail(error)
            self._board.changed.notify_all()
        self._free(works)

    def _free(self, works: Sequence[NamedWork]) -> None:
        """Their names may be used again."""
        with self._lock:
            for work in works:
                if self._works.get(work.name) is work:
                    del self._works[work.name]
