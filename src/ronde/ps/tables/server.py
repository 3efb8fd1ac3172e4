"""A part of an embedding table on one server: its rows, trained when they are used, and readable at older versions.

A worker asks for rows in the middle of its step, while others push. It has to get them as they were at its read of the
other parameters. So each update keeps what it has replaced, as long as some worker's read is older than the update: a
read takes the rows as they are and goes back from there. The changes kept are those of the steps that are under way,
and no more than HISTORY_BYTES: a worker that was stopped for so long gets newer rows, and is told so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ronde.ps.commit_log.log_state import Update
from ronde.ps.partition import Array, Part, TensorSlice
from ronde.ps.payloads import decode_values, pack_arrays, unpack_arrays
from ronde.ps.replica import PartOptimizer, Replica, clip, compensate_delay
from ronde.ps.tables.embedding_table import EmbeddingTable, TablePart

HISTORY_BYTES = 128 * 1024 * 1024
"""So much of replaced rows is kept for each part of a table."""


KEPT_READ_BYTES = 4 * 1024 * 1024
MAX_KEPT_READS = 8
"""First values of so many reads are kept, if they are not larger."""


class RowChange(NamedTuple):
    """What an update has replaced."""

    version: int
    """Behind the update."""
    rows: Array
    """Of the part, sorted."""
    before: Array

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.before.nbytes


class TableReplica(Replica):
    """The rows of one part. Memory is taken from the system when a row is trained, not before."""

    def __init__(
        self,
        part: TablePart,
        table: EmbeddingTable,
        optimizer: PartOptimizer,
        *,
        clip_norm: float = 0.0,
        delay_compensation: float = 0.0,
        history_bytes: int = HISTORY_BYTES,
    ) -> None:
        """`optimizer` is the one that trains the table."""
        super().__init__()
        self._part = part
        self._table = table
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._delay_compensation = delay_compensation
        self._values = np.zeros((0, part.dim), part.dtype)
        self._states = np.zeros((optimizer.num_states, 0, part.dim), part.dtype)
        self._is_trained = np.zeros(0, bool)
        self._is_loaded = False
        self.version = 0
        """The number of updates in the rows."""
        self._oldest_version = 0
        """That can be read."""
        self._history: deque[RowChange] = deque()
        """Newest last."""
        self._history_bytes = 0
        self._max_history_bytes = history_bytes
        self._first_values_read: deque[tuple[Array, Array]] = deque(maxlen=MAX_KEPT_READS)
        """First values that were needed last, and their rows, sorted."""

    @property
    def is_loaded(self) -> bool:
        return self._is_loaded

    @property
    def num_trained(self) -> int:
        """How many rows were trained, and so take memory."""
        return int(np.count_nonzero(self._is_trained))

    def read(self, version: int, rows: Array) -> tuple[Array, int]:
        """Rows of the part as of a version, and the version that they have: a newer one, if this one was dropped."""
        values = self._current(rows)
        if version < self._oldest_version:
            return values, self.version
        for change in reversed(self._history):
            if change.version <= version:
                break
            at = np.searchsorted(change.rows, rows)
            at[at == len(change.rows)] = 0
            is_changed = change.rows[at] == rows
            values[is_changed] = change.before[at[is_changed]]
        return values, version

    def squared_norm(self, contributions: Sequence[tuple[int, int]]) -> float:
        _, mean = self._mean_gradient(contributions)
        flat = mean.reshape(-1).astype(np.float64, copy=False)
        return float(np.dot(flat, flat))

    def _remember_read(self, worker: int, oldest_version: int) -> None:
        while self._history and self._history[0].version <= oldest_version:
            self._drop_oldest()

    def make_copy(self) -> Array:
        versions = np.array([change.version for change in self._history], np.int64)
        changes = [array for change in self._history for array in (change.rows, change.before)]
        return pack_arrays([*self._state_arrays(), versions, *changes])

    def make_state(self) -> Array:
        return pack_arrays(self._state_arrays())

    def _state_arrays(self) -> list[Array]:
        rows = np.flatnonzero(self._is_trained)
        states = self._states[:, rows].reshape(-1, self._part.dim)
        return [make_header(self.version, self._oldest_version), rows, self._values[rows], states]

    def _load(self, copy: Array) -> None:
        part, num_states = self._part, self._optimizer.num_states
        header, rows, values, states, *history = unpack_arrays(copy)
        self._values = np.empty((part.num_rows, part.dim), part.dtype)
        self._states = np.zeros((num_states, part.num_rows, part.dim), part.dtype)
        self._is_trained = np.zeros(part.num_rows, bool)
        self._is_trained[rows] = True
        self._values[rows] = values
        if len(rows):
            self._states[:, rows] = states.reshape(num_states, len(rows), part.dim)
        self.version, self._oldest_version = int(header[0]), int(header[1])
        self._history.clear()
        if history:
            versions, *changes = history
            pairs = zip(changes[::2], changes[1::2], strict=True)
            self._history.extend(
                RowChange(int(each), *pair) for each, pair in zip(versions.tolist(), pairs, strict=True)
            )
        self._history_bytes = sum(change.num_bytes for change in self._history)
        self._is_loaded = True

    def _apply(self, update: Update) -> None:
        rows, gradient = self._mean_gradient(update.contributions)
        for key in update.contributions:
            self.staged.pop(key, None)
        if len(rows):
            self._train(rows, clip(gradient, update.norm, self._clip_norm), update)
        self.version = update.version

    def _train(self, rows: Array, gradient: Array, update: Update) -> None:
        part, before = self._part, self._current(rows)
        if self._delay_compensation and update.version_read >= 0:
            values_read, _ = self.read(update.version_read, rows)
            gradient = compensate_delay(gradient, self._delay_compensation, before, values_read)
        states = np.take(self._states, rows, axis=1)
        after = np.empty_like(before)
        piece = Part((TensorSlice(0, 0, before.size),), part.dtype, part.group)
        lr = update.lrs[part.group] if update.lrs and self._table.optimizer is None else None
        self._optimizer.update(
            piece,
            before.reshape(-1),
            np.ascontiguousarray(gradient).reshape(-1),
            states.reshape(len(states), before.size),
            after.reshape(-1),
            update.version,
            lr,
        )
        self._values[rows] = after
        self._states[:, rows] = states
        self._is_trained[rows] = True
        change = RowChange(update.version, rows, before)
        self._history.append(change)
        self._history_bytes += change.num_bytes
        while self._history_bytes > self._max_history_bytes:
            self._oldest_version = self._history[0].version
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._history_bytes -= self._history.popleft().num_bytes

    def _current(self, rows: Array) -> Array:
        """The newest values of rows, in new memory."""
        values = self._values[rows]
        is_new = ~self._is_trained[rows]
        if is_new.any():
            values[is_new] = self._first_values(rows[is_new])
        return values

    def _first_values(self, rows: Array) -> Array:
        """Those of rows that were never trained, by their numbers within the part. What was made for a read is kept for
        a moment: a worker trains the rows that it has read."""
        for known, values in self._first_values_read:
            at = np.searchsorted(known, rows)
            at[at == len(known)] = 0
            if (known[at] == rows).all():
                found: Array = values[at]
                return found
        values = self._table.first_values(self._part.number_rows(rows))
        if values.nbytes <= KEPT_READ_BYTES and (np.diff(rows) > 0).all():
            self._first_values_read.append((rows, values))
        return values

    def _mean_gradient(self, contributions: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
        """The rows that were used, sorted, and the mean of their gradients, summed in this order. Who has used none of
        a row counts with zeros."""
        found = [unpack_arrays(self.staged[key]) for key in contributions if key in self.staged]
        pushes = [(rows.astype(np.int64), decode_values(values, self._part.dtype)) for rows, values in found]
        if len(pushes) == 1 and len(contributions) == 1:
            return pushes[0]
        rows = np.unique(np.concatenate([np.zeros(0, np.int64), *(each for each, _ in pushes)]))
        total = np.zeros((len(rows), self._part.dim), self._part.dtype)
        for each, values in pushes:
            total[np.searchsorted(rows, each)] += values  # no row is twice in one push
        total *= np.asarray(1.0 / max(1, len(contributions)), total.dtype)
        return rows, total


def make_header(version: int, oldest_version: int) -> Array:
    """What stands first in the state of a table: the number of updates in it, and the oldest version to be read."""
    return np.array([version, oldest_version], np.int64)
