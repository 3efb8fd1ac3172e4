"""One class per collective: what it asks of a channel, and what it gives back. Used by groups and the engine.

An operation is made from the caller's arrays. Where members may give different numbers of rows (allgather, alltoall),
`rows` are mine; somebody finds out everybody's, and calls() takes those: from the coordinator for a named operation,
from a small call ahead for one in program order. Memory for results is made only then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ronde.comm.backend import Call, Part
from ronde.comm.buffers import Array, Source, Target, address, new_target
from ronde.comm.signature import Form
from ronde.types import DType, Kind, Op

__all__ = [
    "Barrier",
    "Broadcast",
    "Exchange",
    "Gather",
    "Join",
    "Operation",
    "Reduce",
    "ReduceOne",
    "RowsCall",
    "Scatter",
    "share_out",
    "stand_in",
]


class Operation:
    """What all collectives have in common."""

    __slots__ = ("form",)

    rows: tuple[int, ...] | None = None
    """Mine, when members may differ in them."""
    splits: tuple[int, ...] | None = None
    """alltoall: as the caller gave them."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """What to run, in this order; rows are everybody's, member by member."""
        raise NotImplementedError

    def result(self) -> Any:  # what the caller gets
        """After the calls: what the caller gets."""
        return None


class Barrier(Operation):
    """Everybody has come this far."""

    __slots__ = ()

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """One call without memory."""
        return (self.form.call((), None, trusted=trusted, text=text),)


class Join(Operation):
    """Out of data. Among named operations there is nothing to run; the coordinator says when everybody has joined."""

    __slots__ = ("rows",)

    def __init__(self, form: Form, at_ns: int) -> None:
        super().__init__(form)
        self.rows = (at_ns,)
        """When this rank joined, on the coordinator's clock: who was last is found by comparing."""

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """Nothing."""
        return ()


class Reduce(Operation):
    """allreduce of one array or of several as a unit."""

    __slots__ = ("_many", "_sources", "_targets", "parts")

    def __init__(self, form: Form, sources: Sequence[Source], targets: Sequence[Target], many: bool) -> None:
        super().__init__(form)
        self._sources = sources
        self._targets = targets
        self._many = many
        self.parts = tuple(
            Part(address(source.array), address(target.array), source.array.size)
            for source, target in zip(sources, targets, strict=True)
        )

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """All arrays in one call; Adasum looks at each array as a whole, so there each is a call."""
        lots = [(part,) for part in self.parts] if self.form.op is Op.ADASUM else [self.parts]
        return tuple([self.form.call(lot, self, trusted=trusted, text=text) for lot in lots])

    def result(self) -> Any:  # one array, or a list of them
        """The sums."""
        results = [target.finish() for target in self._targets]
        return results if self._many else results[0]


class ReduceOne(Reduce):
    """allreduce of one contiguous NumPy array, in place or into a new one: the most frequent case, made cheaply."""

    __slots__ = ("_out", "_x")

    def __init__(self, form: Form, x: Array, out: Array | None) -> None:
        self.form = form
        self._x = x
        source = target = address(x)
        if out is None:
            out = np.empty_like(x)
            target = address(out)
        self._out = out
        self.parts = (Part(source, target, x.size),)

    def result(self) -> Array:
        """The sum."""
        return self._out


def stand_in(form: Form) -> Reduce:
    """The part in others' allreduce of a rank that has joined: zeros."""
    zeros = [np.zeros(shape, form.dtype.numpy) for shape in form.shapes]
    sources = [Source(array, form.dtype, False) for array in zeros]
    return Reduce(form, sources, [Target(array, array, None) for array in zeros], True)


class Broadcast(Operation):
    """The root's array to everybody."""

    __slots__ = ("_peer", "_source", "_target")

    def __init__(self, form: Form, source: Source, target: Target, peer: int) -> None:
        super().__init__(form)
        self._source = source
        self._target = target
        self._peer = peer

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """One call."""
        array = self._source.array
        part = Part(address(array), address(self._target.array), array.size)
        return (self.form.call((part,), self, peer=self._peer, trusted=trusted, text=text),)

    def result(self) -> object:
        """What the root gave."""
        return self._target.finish()


class Gather(Operation):
    """allgather of one array or of several."""

    __slots__ = ("_many", "_sources", "_targets", "counts", "rows")

    def __init__(self, form: Form, sources: Sequence[Source], many: bool) -> None:
        super().__init__(form)
        self.rows = tuple(shape[0] for shape in form.shapes)
        self.counts: tuple[int, ...] = ()
        """After calls(): elements of the (last) array per member."""
        self._sources = sources
        self._targets: list[Target] = []
        self._many = many

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """One call per array."""
        assert rows is not None
        made = []
        for index, source in enumerate(self._sources):
            mine = rows[index :: len(self._sources)]
            row_shape = source.array.shape[1:]
            target = new_target(source, (sum(mine), *row_shape))
            self._targets.append(target)
            self.counts = tuple(num_rows * math.prod(row_shape) for num_rows in mine)
            part = Part(address(source.array), address(target.array), source.array.size)
            made.append(self.form.call((part,), self, counts=self.counts, trusted=trusted, text=text))
        return tuple(made)

    def result(self) -> Any:  # one array, or a list of them
        """Everybody's rows, in the order of the members."""
        results = [target.finish() for target in self._targets]
        return results if self._many else results[0]


class Scatter(Operation):
    """reduce_scatter: everybody gets its rows of the sum."""

    __slots__ = ("_counts", "_source", "_target")

    def __init__(self, form: Form, source: Source, me: int, num_members: int) -> None:
        super().__init__(form)
        shares = share_out(source.array.shape[0], num_members)
        row_shape = source.array.shape[1:]
        self._source = source
        self._target = new_target(source, (shares[me], *row_shape))
        self._counts = tuple(share * math.prod(row_shape) for share in shares)

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """One call."""
        array = self._source.array
        part = Part(address(array), address(self._target.array), array.size)
        return (self.form.call((part,), self, counts=self._counts, trusted=trusted, text=text),)

    def result(self) -> object:
        """My rows of the sum."""
        return self._target.finish()


class Exchange(Operation):
    """alltoall: each member gives rows to each."""

    __slots__ = ("_me", "_received", "_source", "_target", "rows", "splits")

    def __init__(self, form: Form, source: Source, splits: tuple[int, ...], me: int) -> None:
        super().__init__(form)
        self.rows = self.splits = splits
        self._source = source
        self._me = me
        self._received: tuple[int, ...] = ()
        self._target: Target | None = None

    def calls(self, rows: tuple[int, ...] | None, text: str, trusted: bool) -> tuple[Call, ...]:
        """One call. Of everybody's rows, those that are for me come in."""
        assert rows is not None and self.splits is not None
        num_members = len(self.splits)
        self._received = rows[self._me :: num_members]
        array = self._source.array
        row_shape = array.shape[1:]
        width = math.prod(row_shape)
        self._target = new_target(self._source, (sum(self._received), *row_shape))
        part = Part(address(array), address(self._target.array), sum(self.splits) * width)
        counts = tuple(num_rows * width for num_rows in self._received)
        splits = tuple(num_rows * width for num_rows in self.splits)
        return (self.form.call((part,), self, counts=counts, splits=splits, trusted=trusted, text=text),)

    def result(self) -> tuple[object, Array]:
        """The rows that came, and how many from whom."""
        assert self._target is not None
        return self._target.finish(), np.array(self._received, np.int64)


class RowsCall:
    """The small call ahead in which members tell each other their numbers of rows.

    It has the signature of the operation it belongs to, so members that ask for different things differ here already.
    """

    __slots__ = ("_all", "call")

    def __init__(self, operation: Operation, num_members: int) -> None:
        assert operation.rows is not None
        mine = np.array(operation.rows, np.int64)
        self._all = np.empty(num_members * mine.size, np.int64)
        form = operation.form
        self.call = Call(
            kind=Kind.ALLGATHER,
            dtype=DType.INT64,
            parts=(Part(address(mine), address(self._all), mine.size),),
            counts=(mine.size,) * num_members,
            text=form.text,
            # Another number than the second call's, or the two could be taken for each other.
            signature=form.signature ^ form.kind ^ 1 << 63,
            keep=(mine, self._all),
        )

    def rows(self) -> tuple[int, ...]:
        """Everybody's, member by member."""
        return tuple(self._all.tolist())


def share_out(num_rows: int, num_members: int) -> tuple[int, ...]:
    """As even as possible: the first members get one row more."""
    least, more = divmod(num_rows, num_members)
    return tuple(least + (index < more) for index in range(num_members))
