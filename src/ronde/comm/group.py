"""A group of ranks and what they can do together. The module-level functions of ronde are one line over this.

Without a name an operation is matched by program order and goes straight to the group's ordered channel. With a name
it may come in any order: the members announce it, and it runs on the negotiated channel when all have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ronde.comm.backend import Call, Part
from ronde.comm.buffers import Array, Source, address, as_source, as_target
from ronde.comm.dispatch import Dispatch
from ronde.comm.lane import Lane
from ronde.comm.operations import Barrier, Broadcast, Exchange, Gather, Reduce, ReduceOne, Scatter
from ronde.comm.signature import Form, Forms, Options, digest
from ronde.comm.wording import ranks_text
from ronde.types import DType, Kind, Op

__all__ = ["Group", "cut"]

MOST_QUICK = 1024


class Group:
    """Some ranks of the world, in order. Made by ronde.init() and ronde.add_group(), which all ranks call alike."""

    def __init__(self, id: int, ranks: tuple[int, ...], rank: int, dispatch: Dispatch | None) -> None:
        self.id = id
        """Its number; 0 is the world."""
        self.ranks = ranks
        """The members, as ranks of the world."""
        self.size = len(ranks)
        """Number of members."""
        self.rank = ranks.index(rank) if rank in ranks else None
        """My index among the members; None when I am not one."""
        self._world_rank = rank
        self._dispatch = dispatch
        self._forms = Forms()
        self._quick: dict[tuple[object, ...], _Quick] = {}

    @property
    def included(self) -> bool:
        """Whether this rank is a member."""
        return self.rank is not None

    def __repr__(self) -> str:
        """For messages and debugging."""
        return f"<Group {self.id}: {ranks_text(self.ranks)}>"

    def allreduce(
        self,
        x: Any,  # an array of any library
        *,
        op: str | Op = "sum",
        out: Any = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wait: bool = True,
    ) -> Any:
        """postscale * op(prescale * x) over all members, in a new array or in `out` (which may be x itself).

        A list or tuple of arrays of one dtype travels as a unit; then the result is a list, and out a list too.
        """
        dispatch = self.dispatch
        if type(x) is np.ndarray and (out is None or out is x):
            quick = self._quick.get((x.shape, x.dtype, op, prescale, postscale))
            flags = x.flags
            if quick is not None and flags.c_contiguous and (out is None or flags.writeable):
                if name is None and wait:
                    return quick.run(x, out)
                return dispatch.start(ReduceOne(quick.form, x, out), name, wait)
        sources, many = self._read(x, "allreduce")
        if out is None:
            outs = [None] * len(sources)
        elif many and (not isinstance(out, list | tuple) or len(out) != len(sources)):
            raise ValueError(f"allreduce: out must be a list of {len(sources)} arrays, as x is")
        else:
            outs = list(out) if many else [out]
        targets = [as_target(given, source, "allreduce") for given, source in zip(outs, sources, strict=True)]
        form = self._form(Kind.ALLREDUCE, sources, Options(op, prescale, postscale))
        if type(x) is np.ndarray:
            if len(self._quick) >= MOST_QUICK:
                self._quick.clear()
            self._quick[x.shape, x.dtype, op, prescale, postscale] = _Quick(form, _quick_run(form, dispatch.lane))
        return dispatch.start(Reduce(form, sources, targets, many), name, wait)

    def allgather(self, x: Any, *, name: str | None = None, wait: bool = True) -> Any:
        """The members' arrays, one after the other along the first dimension, in which they may differ.

        A scalar counts as one row. A list or tuple gives a list. Without a name, wait=False still waits until every
        member has called, for only then is it known how much will come.
        """
        dispatch = self.dispatch
        sources, many = self._read(x, "allgather", scalars_as_rows=True)
        form = self._form(Kind.ALLGATHER, sources, Options())
        return dispatch.start(Gather(form, sources, many), name, wait)

    def broadcast(
        self,
        x: Any,
        *,
        root: int = 0,
        out: Any = None,
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """The root's array for everybody, in a new array or in `out`. root is a rank of the world."""
        dispatch = self.dispatch
        peer = self._index(root, "broadcast: root")
        source = self._read_one(x, "broadcast")
        target = as_target(out, source, "broadcast")
        form = self._form(Kind.BROADCAST, [source], Options(root=root))
        return dispatch.start(Broadcast(form, source, target, peer), name, wait)

    def reduce_scatter(
        self,
        x: Any,
        *,
        op: str | Op = "sum",
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wait: bool = True,
    ) -> Any:
        """My rows of the sum: the first dimension is shared out, the first members get one row more if need be."""
        dispatch = self.dispatch
        source = self._read_one(x, "reduce_scatter")
        if not source.array.shape:
            raise ValueError("reduce_scatter shares out rows: it needs an array of at least 1 dimension, got a scalar")
        form = self._form(Kind.REDUCE_SCATTER, [source], Options(op, prescale, postscale))
        return dispatch.start(Scatter(form, source, dispatch.me, self.size), name, wait)

    def alltoall(
        self,
        x: Any,
        *,
        splits: Any = None,  # a sequence of whole numbers, or an array of them
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Rows from each member to each: splits[i] of mine go to member i (default: equal shares).

        Returns the rows that came, in the order of the members, and how many came from each. As allgather, without a
        name it waits until every member has called.
        """
        dispatch = self.dispatch
        source = self._read_one(x, "alltoall")
        if not source.array.shape:
            raise ValueError("alltoall shares out rows: it needs an array of at least 1 dimension, got a scalar")
        mine = self._splits(splits, source.array.shape[0])
        form = self._form(Kind.ALLTOALL, [source], Options())
        return dispatch.start(Exchange(form, source, mine, dispatch.me), name, wait)

    def barrier(self, *, name: str | None = None, wait: bool = True) -> Any:
        """Return when every member has come here."""
        form = self._forms.find(Kind.BARRIER, DType.UINT8, (), Options())
        return self.dispatch.start(Barrier(form), name, wait)

    def join(self) -> int:
        """Out of data: give zeros to the others' allreduces until every member has joined. The rank that did last."""
        return self.dispatch.join(self._forms.find(Kind.JOIN, DType.UINT8, (), Options()))

    def send(self, x: Any, to: int, *, wait: bool = True) -> Any:
        """Give an array to one member (a rank of the world), which calls receive()."""
        dispatch = self.dispatch
        source = self._read_one(x, "send")
        part = Part(address(source.array), 0, source.array.size)
        call = self._message(Kind.SEND, source, part, to, source)
        return dispatch.move(call, source.array.nbytes, _nothing, wait)

    def receive(self, out: Any, source: int, *, wait: bool = True) -> Any:
        """Fill the array `out` with what one member (a rank of the world) sends, and return it."""
        dispatch = self.dispatch
        given = self._read_one(out, "receive")
        target = as_target(out, given, "receive")
        part = Part(0, address(target.array), target.array.size)
        call = self._message(Kind.RECEIVE, given, part, source, target)
        return dispatch.move(call, target.array.nbytes, target.finish, wait)

    # --- for the world, plans and objects --------------------------------------------------------------------------

    def allgather_each(self, x: Array) -> list[Array]:
        """As allgather of a flat array, but one array per member."""
        sources, _ = self._read(x, "allgather")
        operation = Gather(self._form(Kind.ALLGATHER, sources, Options()), sources, False)
        everything: Array = self.dispatch.start(operation, None, True)
        return cut(everything, operation.counts)

    @property
    def dispatch(self) -> Dispatch:
        """Where operations start. Raises when there is nothing to start here."""
        if self._dispatch is None:
            raise ValueError(f"rank {self._world_rank} is not a member of group {self.id} ({ranks_text(self.ranks)})")
        return self._dispatch

    def close(self, removed: bool = False) -> None:
        """Nothing starts here any more. Idempotent."""
        if self._dispatch is not None:
            self._dispatch.close(removed)
        self._quick.clear()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _read(self, x: object, what: str, scalars_as_rows: bool = False) -> tuple[list[Source], bool]:
        """The arrays of an operation, and whether there may be several."""
        many = isinstance(x, list | tuple)
        sources = [as_source(each, what) for each in (x if isinstance(x, list | tuple) else (x,))]
        if not sources:
            raise ValueError(f"{what}: the list of arrays is empty")
        dtypes = {source.dtype.name.lower() for source in sources}
        if len(dtypes) > 1:
            raise TypeError(f"{what}: the arrays of a list must have one dtype, got {', '.join(sorted(dtypes))}")
        if scalars_as_rows:
            for source in sources:
                source.array = np.atleast_1d(source.array)
        return sources, many

    def _read_one(self, x: object, what: str) -> Source:
        if isinstance(x, list | tuple):
            raise TypeError(f"{what} takes one array, got a {type(x).__name__}; call it once per array")
        return as_source(x, what)

    def _form(self, kind: Kind, sources: Sequence[Source], options: Options) -> Form:
        shapes = tuple([source.array.shape for source in sources])
        return self._forms.find(kind, sources[0].dtype, shapes, options)

    def _index(self, rank: int, what: str) -> int:
        if rank not in self.ranks:
            raise ValueError(f"{what} must be a member of group {self.id} ({ranks_text(self.ranks)}), got {rank!r}")
        return self.ranks.index(rank)

    def _splits(self, splits: object, num_rows: int) -> tuple[int, ...]:
        if splits is None:
            if num_rows % self.size:
                raise ValueError(f"alltoall: {num_rows} rows are no equal shares for {self.size} members; give splits")
            return (num_rows // self.size,) * self.size
        given = np.asarray(splits)
        if given.shape != (self.size,) or given.dtype.kind not in "iu" or given.min() < 0:
            raise ValueError(
                f"alltoall: splits must be {self.size} whole numbers from 0, one per member, got {splits!r}"
            )
        if int(given.sum()) > num_rows:
            raise ValueError(f"alltoall: splits ask for {int(given.sum())} rows of an array with {num_rows}")
        return tuple(given.tolist())

    def _message(self, kind: Kind, data: Source, part: Part, other: int, keep: object) -> Call:
        what, word = ("send: to", "to") if kind is Kind.SEND else ("receive: source", "from")
        peer = self._index(other, what)
        if peer == self.rank:
            raise ValueError(f"{what} is this very rank, {other}; a message needs two")
        amount = f"{data.dtype.name.lower()}{list(data.array.shape)}"
        text = f"{kind.name.lower()} {amount} {word} rank {other}"
        return Call(
            kind=kind,
            dtype=data.dtype,
            parts=(part,),
            peer=peer,
            text=text,
            signature=digest(f"message of {amount}"),
            keep=keep,
        )


class _Quick(NamedTuple):
    """All that is known about an allreduce from the last time it was asked for."""

    form: Form
    run: Callable[[Array, Array | None], Array]
    """Do it now, in program order."""


def _quick_run(form: Form, lane: Lane) -> Callable[[Array, Array | None], Array]:
    """The shortest way for the most frequent call: all that is equal each time is looked up and checked here, once."""
    run, label, num_bytes = lane.run, form.label, form.num_bytes
    kind, dtype, op, text, signature = form.kind, form.dtype, form.op, form.text, form.signature
    prescale, postscale, count = form.prescale, form.postscale, math.prod(form.shapes[0])

    def allreduce(x: Array, out: Array | None) -> Array:
        source = target = address(x)
        if out is None:
            out = np.empty_like(x)
            target = address(out)
        parts = (Part(source, target, count),)
        run(Call(kind, dtype, op, parts, -1, prescale, postscale, None, None, text, signature), label, num_bytes)
        return out

    return allreduce


def _nothing() -> None:
    """The result of a send."""


def cut(data: Array, counts: Sequence[int]) -> list[Array]:
    """A flat array in pieces of these lengths."""
    return [data[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]
